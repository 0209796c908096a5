"""Dynamic batching: a batch starts when `size` wait, or the first of them has waited `window_s`.

Then it runs like a static batch. At low load the window only adds delay.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS, RunToCompletion
from engine.sequence import Sequence


@dataclass(slots=True)
class DynamicWindow(RunToCompletion):
    """One object an engine. `size` 0: as many as there are places."""

    size: int = 0
    window_s: float = 0.05
    name: str = "dynamic"

    @property
    def longest_wait_s(self) -> float:
        return self.window_s

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        """Into an empty batch when it is time, or into one that is just being filled."""
        if self._gate.lets_in(candidate, batch):
            return None
        since_s = self._gate.waits_since(candidate, batch.now_s)
        if batch.running:
            return RUNS
        size = min(self.size or batch.max_sequences, batch.max_sequences)
        due_s = since_s + self.window_s
        if batch.num_waiting < size and batch.now_s < due_s:
            return Defer("the window is open", due_s)
        self._gate.open(min(size, batch.num_waiting))
        return None
