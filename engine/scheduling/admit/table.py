"""Batch-or-wait admission by a precomputed table (`engine.scheduling.batch_or_wait.table`).

Asked whenever nothing runs: it says wait, and for how long, or how many of the head of the line the next
batch takes; that batch then runs to completion. With nothing running no request waits longer than the table's
own `longest_wait_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS, BatchGate, RunToCompletion
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.batch_or_wait.arrival_rate import ArrivalRate
from engine.scheduling.batch_or_wait.wait_table import WaitTable
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence


@dataclass(slots=True)
class BatchOrWait(RunToCompletion):
    """One object an engine; the table may be shared. `size` 0: as many as there are places."""

    table: WaitTable
    size: int = 0
    memory: PredictedReserve = field(default_factory=PredictedReserve)
    name: str = "table"
    claims: frozenset[str] = SAFE | {NO_STARVATION}
    _gate: BatchGate = field(default_factory=BatchGate)
    _arrivals: ArrivalRate = field(default_factory=ArrivalRate)

    @property
    def longest_wait_s(self) -> float:
        return self.table.longest_wait_s

    def arrived(self, now_s: float) -> None:
        """The table goes by the arrival rate."""
        self._arrivals.note(now_s)

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        """Into an empty batch when the table says so, or into one that is just being filled."""
        if self._gate.lets_in(candidate, batch):
            return None
        if batch.running:
            return RUNS
        # All that wait are looked at, but only once a batch, or while less than a batch waits.
        oldest_s, remaining_tokens, longest = candidate.submitted_s, 0, 0
        for entry in batch.waiting():
            oldest_s = min(oldest_s, entry.arrived_s)
            remaining_tokens += entry.remaining_tokens
            longest = max(longest, entry.remaining_tokens)
        decision = self.table.decide(
            rate_per_s=self._arrivals.per_s,
            num_waiting=batch.num_waiting,
            oldest_wait_s=max(0.0, batch.now_s - oldest_s),
            has_long=longest >= self.table.long_tokens,
            remaining_tokens=remaining_tokens,
            kv_pressure=1 - batch.free_blocks / batch.num_blocks,
        )
        places = min(self.size or batch.max_sequences, batch.max_sequences, batch.num_waiting)
        if not decision.batch and batch.num_waiting < (self.size or batch.max_sequences):
            until_s = min(batch.now_s + decision.wait_s, oldest_s + self.table.longest_wait_s)
            # Not by `wait_s > 0`: a wait too short to move the clock would be asked for again and again.
            if until_s > batch.now_s:
                return Defer("the table says wait", until_s)
        self._gate.open(min(places, decision.batch or places))
        return None
