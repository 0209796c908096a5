"""Static batching: a batch is filled once and runs to completion. The honest baseline.

Places of members that have finished stay empty; with `padded`, steps are padded to the longest member as
well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS, BatchGate, RunToCompletion
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.batch_or_wait.padding import PaddingWaste, batch_waste
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence


@dataclass(slots=True)
class StaticBatch(RunToCompletion):
    """One object an engine. `size` 0: as many as there are places."""

    size: int = 0
    padded: bool = False
    memory: PredictedReserve = field(default_factory=PredictedReserve)
    name: str = "static"
    claims: frozenset[str] = SAFE | {NO_STARVATION}
    longest_wait_s: float = 0.0
    _gate: BatchGate = field(default_factory=BatchGate)
    _closed: PaddingWaste = field(default_factory=PaddingWaste)

    @property
    def waste(self) -> PaddingWaste:
        """What padding costs, of all batches so far; the one that runs with what it has emitted by now."""
        return self._closed + self._waste_now()

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        """Into an empty batch, or one that is just being filled."""
        if not batch.running:
            self._gate.open(min(self.size or batch.max_sequences, batch.num_waiting))
            return None
        return None if self._gate.lets_in(candidate, batch) else RUNS

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        """The first of a new batch closes the account of the one before."""
        before = self._waste_now()
        if self._gate.admitted(candidate, batch):
            self._closed += before
        self.memory.admitted(candidate, batch)

    def _waste_now(self) -> PaddingWaste:
        return batch_waste((member.prompt_tokens, member.emitted_tokens) for member in self._gate.members)


def padded_static(size: int = 0, memory: PredictedReserve | None = None) -> StaticBatch:
    return StaticBatch(size=size, padded=True, memory=memory or PredictedReserve(), name="static-padded")
