"""Who was let in, who had to give way, by which rule, and whom did it concern?

Every admission, pause, eviction and return is noted once, where it is decided. The last ones are kept for
operators; each sequence keeps its own for its account.

Who takes a place displaces tokens: a sequence that stands back misses one step after the other, and in each
of them at least one token. They are counted from the pause to the return, on both sides: for whoever took the
place at most until it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from engine.messages import Decision
from engine.sequence import Sequence

KEPT = 256
"""Decisions of an engine that can be asked for."""
KEPT_BY_SEQUENCE = 16
"""Decisions that a sequence's outcome carries: the first half and the last half of them."""


STANDS_BACK = frozenset({"pause", "suspend"})
GOES_ON = frozenset({"admit", "resume", "restore"})


@dataclass(slots=True)
class _Displacement:
    """One sequence that stands back for another."""

    of: Sequence
    by: Sequence | None
    """None: it has ended, and its part is counted."""
    since_step: int


class DecisionLog:
    """The last decisions of one scheduler."""

    def __init__(self, kept: int = KEPT) -> None:
        self._last: deque[Decision] = deque(maxlen=kept)
        self.step = 0
        """Number of the step that is being put together."""
        self._displaced: dict[str, _Displacement] = {}
        """By the sequence that stands back."""

    def note(
        self,
        now_s: float,
        kind: str,
        sequence: Sequence,
        rule: str,
        rank: Iterable[float] = (),
        others: Iterable[Sequence] = (),
    ) -> None:
        """`others`: whom it displaced, or for whom it gave way."""
        others = list(others)
        if kind in GOES_ON and (displacement := self._displaced.pop(sequence.sequence_id, None)):
            self._count(displacement, self.step - displacement.since_step)
        elif kind in STANDS_BACK and others:
            self._displaced[sequence.sequence_id] = _Displacement(sequence, others[0], self.step)
        decision = Decision(
            step=self.step,
            at_s=now_s,
            kind=kind,
            sequence_id=sequence.sequence_id,
            rule=rule,
            rank=[float(number) for number in rank],
            others=[other.sequence_id for other in others],
        )
        self._last.append(decision)
        if len(sequence.decisions) == KEPT_BY_SEQUENCE:
            del sequence.decisions[KEPT_BY_SEQUENCE // 2]
        sequence.decisions.append(decision)

    def leaves(self, sequence: Sequence) -> None:
        """To be called before a sequence's last word: counts what it displaced, or stood back for, by now."""
        for displacement in [each for each in self._displaced.values() if sequence in (each.of, each.by)]:
            # The step that is over was sat out, too.
            steps = self.step - displacement.since_step + 1
            if displacement.of is sequence:
                del self._displaced[sequence.sequence_id]
                self._count(displacement, steps)
            elif displacement.by is not None:
                _add(displacement.by, GOES_ON, displacement.of.sequence_id, steps)
                displacement.by = None

    def _count(self, displacement: _Displacement, steps: int) -> None:
        of, by = displacement.of, displacement.by
        _add(of, STANDS_BACK, None, steps)
        if by is not None:
            _add(by, GOES_ON, of.sequence_id, steps)

    def last(self) -> list[Decision]:
        """Oldest first."""
        return list(self._last)


def _add(sequence: Sequence, kinds: frozenset[str], other_id: str | None, steps: int) -> None:
    """To a sequence's newest decision of that kind about `other_id`, if it is still kept."""
    for index in range(len(sequence.decisions) - 1, -1, -1):
        decision = sequence.decisions[index]
        if decision.kind in kinds and (other_id is None or other_id in decision.others):
            sequence.decisions[index] = replace(decision, displaced_tokens=decision.displaced_tokens + steps)
            return
