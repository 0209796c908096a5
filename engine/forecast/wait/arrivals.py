"""Recent arrivals, and what may come next, for replays.

A request that waits is overtaken by higher tiers and by tenants further below their share; a replay lets the
likely ones arrive. Each tier is a compound process: bursts (requests of one tenant within `BURST_S`) come at
the rate lately, and each is like one of those that came. In the expected future they come evenly; in a
sampled one rate, times and bursts are drawn. How long a load goes on is not known: the expected future has
another `NEW_LOAD_S` of it, in a sampled one it may last the longer, the older it is. Pure.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from engine.entry import QueueEntry

MAX_RECENT = 512
"""Arrivals of one tier that are remembered."""
RECENT_S = 60.0
"""Older ones do not count."""
BURST_S = 0.1
OPENING_S = 0.4
"""What comes so soon after a silence is the crowd that ends it, and no rate."""
SHORTEST_WATCH_S = 0.5
"""A rate is never taken over less time than this."""
SILENCE_S = 30.0
"""After which a load begins anew."""
NEW_LOAD_S = 25.0
"""A load that has just begun lasts so long by the median."""
LONGEST_LOAD_S = 600.0
GOLDEN = 0.6180339887498949
"""Multiples of it fill (0, 1) evenly."""
ARRIVAL = "\0arrival"
"""How the ids of requests begin that arrive during a replay."""


@dataclass(frozen=True, slots=True)
class Future:
    """Requests to come, in the order of their arrival, and what they bring to a queue."""

    entries: Iterator[QueueEntry]
    cost_per_s: Mapping[int, float]
    """Cost tokens, by tier."""
    lasts_s: float


@dataclass(frozen=True, slots=True)
class _TierArrivals:
    bursts: Sequence[Sequence[QueueEntry]]
    rate_per_s: float
    """Of bursts."""
    watched_s: float


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """What arrived lately, by tier, for how long the load has gone on."""

    tiers: Mapping[int, _TierArrivals]
    age_s: float

    @property
    def requests_per_s(self) -> float:
        return sum(
            tier.rate_per_s * sum(map(len, tier.bursts)) / len(tier.bursts) for tier in self.tiers.values()
        )

    def future(self, start_s: float, random: Random | None = None) -> Future:
        """What may come after `start_s`; None: what is expected."""
        lasts_s = NEW_LOAD_S
        if random is not None:
            lasts_s = (self.age_s + 4 * NEW_LOAD_S) * (max(random.random(), 1e-3) ** (-1 / 3) - 1)
        lasts_s = min(lasts_s, LONGEST_LOAD_S)
        rates, costs = {}, {}
        for rank, tier in self.tiers.items():
            rate = tier.rate_per_s
            if random is not None:
                # What is known of a rate after n arrivals of a Poisson process (Jeffreys' prior).
                rate = random.gammavariate(rate * tier.watched_s + 0.5, 1 / tier.watched_s)
            if rate > 0:
                rates[rank] = rate
                cost = sum(entry.predicted_cost for burst in tier.bursts for entry in burst)
                costs[rank] = rate * cost / len(tier.bursts)
        return Future(self._entries(start_s, start_s + lasts_s, rates, random), costs, lasts_s)

    def _entries(
        self, start_s: float, until_s: float, rates: Mapping[int, float], random: Random | None
    ) -> Iterator[QueueEntry]:
        coming = [
            (start_s + (random.expovariate(rate) if random else GOLDEN * (index + 1) % 1 / rate), rank)
            for index, (rank, rate) in enumerate(rates.items())
        ]
        heapq.heapify(coming)
        number = chosen = 0
        while coming and coming[0][0] <= until_s:
            at_s, rank = coming[0]
            rate, bursts = rates[rank], self.tiers[rank].bursts
            chosen += 1
            part = random.random() if random else GOLDEN * chosen % 1
            heapq.heapreplace(coming, (at_s + (random.expovariate(rate) if random else 1 / rate), rank))
            for entry in bursts[int(part * len(bursts))]:
                number += 1
                yield replace(entry, entry_id=f"{ARRIVAL} {number}", arrived_s=at_s)


NOTHING_CAME = ArrivalPattern({}, 0.0)


class RecentArrivals:
    """One writer: the code that enqueues requests."""

    def __init__(self) -> None:
        self._by_tier: dict[int, deque[QueueEntry]] = {}
        self._began_s = self._last_s = float("-inf")

    def observe(self, entry: QueueEntry) -> None:
        """A request arrived."""
        if entry.arrived_s - self._last_s > SILENCE_S:
            self._began_s = entry.arrived_s
        self._last_s = max(self._last_s, entry.arrived_s)
        self._by_tier.setdefault(entry.tier, deque(maxlen=MAX_RECENT)).append(entry)

    def pattern(self, now_s: float) -> ArrivalPattern:
        tiers = {}
        for rank, arrivals in self._by_tier.items():
            forgotten_s = arrivals[0].arrived_s if len(arrivals) == MAX_RECENT else self._began_s
            since_s = max(now_s - RECENT_S, self._began_s + OPENING_S, forgotten_s)
            recent = [entry for entry in arrivals if entry.arrived_s >= since_s]
            bursts = _bursts(recent)
            watched_s = max(now_s - since_s, SHORTEST_WATCH_S)
            # One that began the watch says nothing of a rate.
            count = len(bursts) - (bool(recent) and recent[0].arrived_s <= since_s)
            if count > 0:
                tiers[rank] = _TierArrivals(bursts, count / watched_s, watched_s)
        return ArrivalPattern(tiers, max(0.0, now_s - self._began_s))


def _bursts(entries: Sequence[QueueEntry]) -> list[list[QueueEntry]]:
    """One tenant's that came within `BURST_S` of the first."""
    latest: dict[str, list[QueueEntry]] = {}
    bursts: list[list[QueueEntry]] = []
    for entry in entries:
        burst = latest.get(entry.tenant_id)
        if burst is None or entry.arrived_s > burst[0].arrived_s + BURST_S:
            burst = latest[entry.tenant_id] = []
            bursts.append(burst)
        burst.append(entry)
    return bursts
