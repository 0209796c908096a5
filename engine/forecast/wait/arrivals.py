"""Recent arrival rates by tenant and tier, for replays.

A request that waits is overtaken by higher tiers and by tenants further below their share; a replay lets the
likely ones arrive. A burst is not a rate: a stream that does not arrive all the time is as frequent as the
cells of time in which something of it arrived. Pure. Bounded: the streams seen longest ago are forgotten
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log1p

from engine.entry import QueueEntry

MEMORY_S = 10.0
"""Time constant of the rates: what is older than a few of these no longer counts."""
MAX_STREAMS = 2048
SHORTEST_WATCH_S = 2.0
"""A rate is never taken over less time than this: a burst is not a rate."""
CELL_S = 0.1
"""Requests that arrive within this time may be a burst."""
STEADY = 0.9
"""A stream is steady where something of it arrives in this share of cells."""
BURSTY = 1.5
"""So many times as often as its cells say a stream may come: chance does as much."""
SILENCES = 3.0
"""Silence, in `memory_s`, after which a stream begins anew."""
SMOOTHING = 0.2
"""Weight of the newest request in a stream's typical size."""
NEGLIGIBLE = 0.1
"""A stream from which fewer requests than this are to be expected has ended."""


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """Requests like this one keep arriving, `rate_per_s` of them, for another `lasts_s`."""

    tenant_id: str
    tier: int
    weight: float
    rate_per_s: float
    lasts_s: float
    input_tokens: int
    predicted_output_tokens: int


@dataclass(slots=True)
class _TenantArrivals:
    first_s: float
    last_s: float
    count: float
    cells: float
    """In which something arrived; decayed as well."""
    weight: float
    input_tokens: float
    predicted_output_tokens: float


class ArrivalRates:
    """One writer: the code that enqueues requests."""

    def __init__(self, *, memory_s: float = MEMORY_S, max_streams: int = MAX_STREAMS) -> None:
        if not memory_s > 0 or max_streams < 1:
            raise ValueError("memory_s must be positive and max_streams at least 1")
        self._memory_s = memory_s
        self._max_streams = max_streams
        self._seen: dict[tuple[str, int], _TenantArrivals] = {}

    def observe(self, entry: QueueEntry, now_s: float) -> None:
        """A request arrived."""
        key = (entry.tenant_id, entry.tier)
        # Taken out and put back: the dictionary's order is that of the last arrivals.
        seen = self._seen.pop(key, None)
        if seen is None or now_s - seen.last_s > SILENCES * self._memory_s:
            seen = _TenantArrivals(
                now_s, now_s, 0.0, 0.0, entry.weight, entry.input_tokens, entry.predicted_output_tokens
            )
            if len(self._seen) >= self._max_streams:
                del self._seen[next(iter(self._seen))]
        if seen.count == 0.0 or now_s // CELL_S > seen.last_s // CELL_S:
            seen.cells += 1.0
        if now_s > seen.last_s:
            kept = exp((seen.last_s - now_s) / self._memory_s)
            seen.count *= kept
            seen.cells *= kept
            seen.last_s = now_s
        seen.count += 1.0
        seen.weight = entry.weight
        seen.input_tokens += SMOOTHING * (entry.input_tokens - seen.input_tokens)
        seen.predicted_output_tokens += SMOOTHING * (
            entry.predicted_output_tokens - seen.predicted_output_tokens
        )
        self._seen[key] = seen

    def streams(self, now_s: float) -> list[ArrivalStream]:
        """The streams that are alive, each with its mean rate lately. What has gone on for a minute will
        likely go on for another, what began a second ago may have been a burst: a stream is taken to last as
        long again as it has lasted."""
        alive = []
        for (tenant_id, tier), seen in self._seen.items():
            kept = exp(-max(0.0, now_s - seen.last_s) / self._memory_s)
            watched_s = max(now_s - seen.first_s, SHORTEST_WATCH_S)
            watched_s = self._memory_s * (1 - exp(-watched_s / self._memory_s))
            rate_per_s = seen.count * kept / watched_s
            share = seen.cells * kept * CELL_S / watched_s
            if share < STEADY:
                # What a Poisson stream has that arrives in so many cells.
                by_cells_per_s = -log1p(-share) / CELL_S
                if rate_per_s > BURSTY * by_cells_per_s:
                    rate_per_s = by_cells_per_s
            lasts_s = seen.last_s - seen.first_s
            if rate_per_s * lasts_s < NEGLIGIBLE:
                continue
            alive.append(
                ArrivalStream(
                    tenant_id=tenant_id,
                    tier=tier,
                    weight=seen.weight,
                    rate_per_s=rate_per_s,
                    lasts_s=lasts_s,
                    input_tokens=max(1, round(seen.input_tokens)),
                    predicted_output_tokens=max(1, round(seen.predicted_output_tokens)),
                )
            )
        return alive
