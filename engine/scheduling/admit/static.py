"""Static batching: a batch is filled once and runs to completion.

The oldest way to batch, kept as the honest baseline: the requests that wait when nothing runs go together, up
to a size, and all others wait until the last member has finished. Places of members that have finished stay
empty; with `padded`, the runner pads its steps to the longest member as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS, BatchGate
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence


@dataclass(slots=True)
class StaticBatch:
    """One object an engine. `size` 0: as many as there are places."""

    size: int = 0
    padded: bool = False
    memory: PredictedReserve = field(default_factory=PredictedReserve)
    name: str = "static"
    claims: frozenset[str] = SAFE | {NO_STARVATION}
    longest_wait_s: float = 0.0
    _gate: BatchGate = field(default_factory=BatchGate)

    def arrived(self, now_s: float) -> None:
        """No effect: the queue at the batch's end counts."""

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        """Into an empty batch, or one that is just being filled."""
        if not batch.running:
            self._gate.open(min(self.size or batch.max_sequences, batch.num_waiting))
            return None
        return None if self._gate.lets_in(candidate, batch) else RUNS

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """As `memory` says."""
        return self.memory.blocks_wanted(candidate, batch)

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        """None."""
        return []

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        """A member of the batch."""
        self._gate.admitted(candidate, batch)
        self.memory.admitted(candidate, batch)

    def preempted(self) -> None:
        """The batch is what it is."""

    def stepped(self) -> None:
        """Filling ends when it stands still."""
        self._gate.stepped()


def padded_static(size: int = 0, memory: PredictedReserve | None = None) -> StaticBatch:
    """With padded shapes."""
    return StaticBatch(size=size, padded=True, memory=memory or PredictedReserve(), name="static-padded")
