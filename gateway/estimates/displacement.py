"""Estimates what a request's tier costs other tenants: tokens passed in the queue, tokens paused. Pure.

Soft preemption gives a higher tier a lower one's place at the next step; that one then sits out a token a
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.flow.types import InFlight, Ticket

MAX_PASSED = 10


@dataclass(frozen=True, slots=True)
class Displacement:
    """In tokens of others, all of lower tiers."""

    passes_cost: int
    """Cost tokens (input + 2 x output) that wait and that it would go before."""
    pauses_tokens: int
    """Output tokens that running ones would sit out while it runs; 0 where a place is free."""
    passed: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, int]:
        return {"passes": self.passes_cost, "pauses": self.pauses_tokens}

    def passed_as_json(self) -> list[dict[str, Any]]:
        """For operators: the passed tenants, most tokens first."""
        most = Counter(self.passed).most_common(MAX_PASSED)
        return [{"tenant_id": tenant_id, "passes": cost} for tenant_id, cost in most]


def displacement(
    tenant_id: str,
    rank: int,
    sequences: int,
    output_tokens: int,
    waiting: Iterable[Ticket],
    in_flight: Iterable[InFlight],
    places: int,
) -> Displacement:
    """Of a request of `tenant_id` in tier `rank` that emits `output_tokens` in all, where engines have
    `places` places."""
    passed: Counter[str] = Counter()
    for ticket in waiting:
        if ticket.entry.tier > rank and ticket.entry.tenant_id != tenant_id:
            passed[ticket.entry.tenant_id] += ticket.entry.predicted_cost
    running = lower = 0
    for flight in in_flight:
        running += flight.live_sequences
        lower += flight.live_sequences if flight.tier > rank else 0
    # Only as many are paused as find no free place, and as there are of lower tiers.
    paused = min(lower, max(0, running + sequences - places), sequences)
    return Displacement(passed.total(), paused * output_tokens // max(1, sequences), passed)
