"""Who was let in, who had to give way, by which rule, and whom did it concern?

Every admission, pause, eviction and return is noted once, where it is decided. The last ones are kept for
operators; each sequence keeps its own for its account.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.messages import Decision
from engine.sequence import Sequence

KEPT = 256
"""Decisions of an engine that can be asked for."""
KEPT_BY_SEQUENCE = 16
"""Decisions that a sequence's outcome carries: the first half and the last half of them."""


class DecisionLog:
    """The last decisions of one scheduler."""

    def __init__(self, kept: int = KEPT) -> None:
        self._last: deque[Decision] = deque(maxlen=kept)
        self.step = 0
        """Number of the step that is being put together."""

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

    def last(self) -> list[Decision]:
        """Oldest first."""
        return list(self._last)
