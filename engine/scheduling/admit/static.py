"""Static batching: a batch is filled once and runs to completion. The honest baseline.

Places of members that have finished stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS, RunToCompletion
from engine.sequence import Sequence


@dataclass(slots=True)
class StaticBatch(RunToCompletion):
    """One object an engine. `size` 0: as many as there are places."""

    size: int = 0
    name: str = "static"
    longest_wait_s: float = 0.0

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        if not batch.running:
            self._gate.open(min(self.size or batch.max_sequences, batch.num_waiting))
            return None
        return None if self._gate.lets_in(candidate, batch) else RUNS
