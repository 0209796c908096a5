"""Log of scheduling decisions, with the tokens that each displaced.

A paused sequence misses at least one token a step: counted from the pause to the return for both sequences;
for the one that took the place, at most until it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from engine.messages import Decision
from engine.sequence import Sequence

KEPT = 256
KEPT_BY_SEQUENCE = 16
"""Decisions kept for a sequence's outcome: the first half and the last half."""


DISPLACED = frozenset({"pause", "suspend"})
PLACED = frozenset({"admit", "resume", "restore"})


@dataclass(slots=True)
class _Displacement:
    of: Sequence
    by: Sequence | None
    """None: it has ended, and its displacement is counted."""
    since_step: int


class DecisionLog:
    def __init__(self, kept: int = KEPT) -> None:
        self._last: deque[Decision] = deque(maxlen=kept)
        self.step = 0
        self._displaced: dict[str, _Displacement] = {}

    def note(
        self,
        now_s: float,
        kind: str,
        sequence: Sequence,
        rule: str,
        rank: Iterable[float] = (),
        others: Iterable[Sequence] = (),
    ) -> None:
        """`others`: the sequences that `sequence` displaced, or was displaced for."""
        others = list(others)
        if kind in PLACED and (displacement := self._displaced.pop(sequence.sequence_id, None)):
            self._count(displacement, self.step - displacement.since_step)
        elif kind in DISPLACED and others:
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
        """Counts what `sequence` displaced, or was displaced for; call before its outcome is made."""
        for displacement in [entry for entry in self._displaced.values() if sequence in (entry.of, entry.by)]:
            # The step that is over was missed, too.
            steps = self.step - displacement.since_step + 1
            if displacement.of is sequence:
                del self._displaced[sequence.sequence_id]
                self._count(displacement, steps)
            elif displacement.by is not None:
                _add(displacement.by, PLACED, displacement.of.sequence_id, steps)
                displacement.by = None

    def _count(self, displacement: _Displacement, steps: int) -> None:
        of, by = displacement.of, displacement.by
        _add(of, DISPLACED, None, steps)
        if by is not None:
            _add(by, PLACED, of.sequence_id, steps)

    def last(self) -> list[Decision]:
        return list(self._last)


def _add(sequence: Sequence, kinds: frozenset[str], other_id: str | None, steps: int) -> None:
    """Adds to a sequence's newest decision of these kinds about `other_id`, if it is still kept."""
    for index in range(len(sequence.decisions) - 1, -1, -1):
        decision = sequence.decisions[index]
        if decision.kind in kinds and (other_id is None or other_id in decision.others):
            sequence.decisions[index] = replace(decision, displaced_tokens=decision.displaced_tokens + steps)
            return
