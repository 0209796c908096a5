"""Batch-or-wait admission by a precomputed table (`engine.scheduling.batch_or_wait.table`).

Whenever nothing runs, the table says how long to wait, or how many of the head of the line the next batch
takes; that batch then runs to completion. With nothing running no request waits longer than the table's own
`longest_wait_s`, whatever it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS, RunToCompletion
from engine.scheduling.batch_or_wait.wait_table import WaitTable
from engine.sequence import Sequence

MEMORY_ARRIVALS = 32
"""Arrivals over which the rate is averaged, about."""
SHORTEST_GAP_S = 1e-9


class ArrivalRate:
    """Recent requests a second; the mean gap decays exponentially, and is the plain mean at first."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._gap_s = 0.0
        self._gaps = 0

    def note(self, now_s: float) -> None:
        """A request arrived. Clocks that go back do no harm."""
        if self._last_s is not None:
            gap_s = max(0.0, now_s - self._last_s)
            self._gaps += 1
            self._gap_s += max(1 / MEMORY_ARRIVALS, 1 / self._gaps) * (gap_s - self._gap_s)
        self._last_s = now_s

    @property
    def per_s(self) -> float:
        """Arrivals a second; 0 before there are two."""
        return 1 / max(self._gap_s, SHORTEST_GAP_S) if self._gaps else 0.0


@dataclass(slots=True)
class BatchOrWait(RunToCompletion):
    """One object an engine; the table may be shared. `size` 0: as many as there are places."""

    table: WaitTable
    size: int = 0
    name: str = "table"
    _arrivals: ArrivalRate = field(default_factory=ArrivalRate)

    @property
    def longest_wait_s(self) -> float:
        return self.table.longest_wait_s

    def arrived(self, now_s: float) -> None:
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
