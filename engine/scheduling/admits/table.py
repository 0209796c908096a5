"""Run what waits now, or wait for more: what does the table say?

A table solved beforehand for the load and the machine (see `engine.scheduling.batch_or_wait`) names the wait
in each situation; a batch then runs to completion. Whatever the table says, nobody waits longer than
`longest_wait_s` with nothing running.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.scheduling.admit import Batch, Hold
from engine.scheduling.admits.gate import RUNS, BatchGate
from engine.scheduling.admits.reserve import PredictedReserve
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence


class WaitTable(Protocol):
    """What this choice asks a table."""

    def wait_s(
        self,
        *,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> float:
        """Seconds to wait for more; 0: run now. `has_long` and `remaining_tokens` (prompt and predicted
        output) are the head's of the line, who alone is known here; `kv_pressure`: share of the KV cache that
        is taken, 0 to 1."""
        ...


@dataclass(slots=True)
class BatchOrWait:
    """One object an engine. `size` 0: as many as there are places."""

    table: WaitTable
    size: int = 0
    long_tokens: int = 1024
    """A prompt of more tokens is long."""
    longest_wait_s: float = 1.0
    memory: PredictedReserve = field(default_factory=PredictedReserve)
    name: str = "table"
    claims: frozenset[str] = SAFE | {NO_STARVATION}
    _gate: BatchGate = field(default_factory=BatchGate)

    def joins(self, candidate: Sequence, batch: Batch) -> Hold | None:
        """Into an empty batch when the table says so, or into one that is just being filled."""
        if self._gate.lets_in(candidate, batch):
            return None
        since_s = self._gate.waits_since(candidate, batch.now_s)
        if batch.running:
            return RUNS
        size = min(self.size or batch.max_sequences, batch.max_sequences)
        due_s = since_s + self.longest_wait_s
        if batch.num_waiting < size:
            wait_s = self.table.wait_s(
                num_waiting=batch.num_waiting,
                oldest_wait_s=batch.now_s - since_s,
                has_long=candidate.prompt_tokens > self.long_tokens,
                remaining_tokens=candidate.prompt_tokens + candidate.predicted_output_tokens,
                kv_pressure=1 - batch.free_blocks / batch.num_blocks,
            )
            until_s = min(batch.now_s + wait_s, due_s)
            # Not by `wait_s > 0`: a wait too short to move the clock would be asked for again and again.
            if until_s > batch.now_s:
                return Hold("the table says wait", until_s)
        self._gate.open(min(size, batch.num_waiting))
        return None

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """As `memory` says."""
        return self.memory.blocks_wanted(candidate, batch)

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        """Nobody."""
        return []

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        """The wait for the next batch begins with whoever is left or comes."""
        self._gate.admitted(candidate, batch)
        self.memory.admitted(candidate, batch)

    def preempted(self) -> None:
        """The batch is what it is."""

    def stepped(self) -> None:
        """Filling ends when it stands still."""
        self._gate.stepped()
