"""The waiting requests, by band and lane.

A request waits in the band of its effective tier (`ageing.py`) and in the lane of its size (`lanes.py`); the
order of each lane is the policy's. One writer: the flow controller.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.scheduling.bands import Lag, no_lag
from engine.scheduling.claims import FAIRNESS_BOUND
from engine.scheduling.counters import ServiceCounters, scaled
from engine.scheduling.tiers import MAX_LANES, TieredQueue
from gateway.flow.ageing import Ageing, effective_tier
from gateway.flow.dispatch_log import MAX_BACKLOG_TENANTS, Waiting
from gateway.flow.knobs import QueueSettings
from gateway.flow.lanes import ORDINARY
from gateway.flow.tenant_stats import TenantLine
from gateway.flow.types import Deadlines, Ticket
from gateway.flow.window import MAX_SHARING, NUM_RANKS

Line = dict[str, float]
NO_LINE = (0, 1.0)


class RequestQueue:
    def __init__(
        self,
        order_name: str,
        counters: ServiceCounters,
        settings: QueueSettings,
        *,
        lag: Lag = no_lag,
    ) -> None:
        """`lag`: of tenants that return to an empty line. Raises `ValueError`."""
        self.tiers = TieredQueue(order_name, counters, lag=lag)
        self.lane_rule = settings.lanes
        self._ageing = Ageing(settings.ageing_s)
        self._was_slowed = False
        """Ageing has slowed down: some may stand higher than their wait now allows."""
        self._queue_ttl_s = settings.queue_ttl_s
        self._tickets: dict[str, Ticket] = {}
        self._places: dict[str, tuple[int, int]] = {}
        """Entry id -> band and lane."""
        self._began: dict[int, int] = {}
        """Band -> counter of the tenant that last had its turn by order in the ordinary lane."""
        self._lines: dict[tuple[int, int], dict[str, Line]] = {
            (tier, lane): {} for tier in range(NUM_RANKS) for lane in range(MAX_LANES)
        }
        self._costs: dict[tuple[int, int], dict[str, tuple[int, float]]] = {
            place: {} for place in self._lines
        }
        """Band and lane -> tenant -> predicted cost of its line, and its weight."""

    # ------------------------------------------------------------ changes

    def add(self, ticket: Ticket, now_s: float, *, front: bool = False) -> None:
        """`front`: at the head of its tenant's line, as one that has been there (`Order.add`)."""
        entry = ticket.entry
        tier, lane = self._band(entry, now_s), self.lane_rule.lane(entry)
        self._tickets[entry.entry_id] = ticket
        self.tiers.add(entry if tier == entry.tier else replace(entry, tier=tier), front=front, lane=lane)
        self._stand(entry, tier, lane)

    def remove(self, entry_id: str) -> Ticket | None:
        """None if it does not wait."""
        ticket = self._tickets.pop(entry_id, None)
        if ticket is not None:
            self.tiers.remove(entry_id)
            self._ageing.remove(entry_id)
            self._leave_line(ticket.entry)
        return ticket

    def move(
        self, entry_id: str, tier: int, now_s: float, deadlines_s: Deadlines | None = None
    ) -> Ticket | None:
        """Changes a request's own tier and deadlines (None: unchanged). None if it does not wait."""
        ticket = self._tickets.get(entry_id)
        if ticket is None:
            return None
        entry = replace(ticket.entry, tier=tier)
        if deadlines_s is not None:
            entry = replace(entry, deadline_s=deadlines_s[0], own_deadline_s=deadlines_s[1])
        ticket = self._tickets[entry_id] = replace(ticket, entry=entry)
        band, lane = self._band(entry, now_s), self.lane_rule.lane(entry)
        self._leave_line(entry)
        self.tiers.move([entry_id], band, lane, lines=self._lines[band, lane], deadlines_s=deadlines_s)
        self._stand(entry, band, lane)
        return ticket

    def age(self, now_s: float) -> int:
        """Moves up requests that have waited long enough, by arrival; returns how many."""
        due = self._ageing.due(now_s)
        self._restand([self._tickets[entry_id].entry for entry_id in due], now_s, aged=True)
        return len(due)

    def take_back(self, tiers: Collection[int], now_s: float) -> None:
        """After `set_ageing`: moves back, by arrival, requests of these tiers that stand too high."""
        above = [
            ticket.entry
            for entry_id, ticket in self._tickets.items()
            if ticket.entry.tier in tiers and self._places[entry_id][0] < self._band(ticket.entry, now_s)
        ]
        self._restand(above, now_s, aged=False)

    def set_ageing(self, ageing_s: Sequence[float]) -> None:
        """Also for what waits: who is due moves up at the next `age`; none down. Raises `ValueError`."""
        if tuple(ageing_s) == self._ageing.ageing_s:
            return
        before, self._ageing = self._ageing, Ageing(ageing_s)
        self._was_slowed |= any(
            now_s > then_s for now_s, then_s in zip(self._ageing.ageing_s, before.ageing_s, strict=True)
        )
        for entry_id, ticket in self._tickets.items():
            entry, (band, _) = ticket.entry, self._places[entry_id]
            self._ageing.add(entry_id, entry.tier, band, entry.arrived_s)

    # ------------------------------------------------------------ heads

    def heads(self, tier: int, now_s: float) -> list[tuple[int, Ticket]]:
        """The first of each lane of a band, in order of dispatch: (lane, ticket)."""
        return [(lane, self._tickets[head.entry_id]) for lane, head in self.tiers.heads(tier, now_s)]

    def is_long_at_head(self, now_s: float) -> bool:
        """Whether in some tier the request whose turn is next is a long one; looks at the heads only."""
        heads = (self.heads(tier, now_s) for tier in range(NUM_RANKS))
        return any(
            entry.input_tokens + entry.predicted_output_tokens > self.lane_rule.long_tokens
            for entry in (line[0][1].entry for line in heads if line)
        )

    def firsts_of(
        self, tenant_id: str, now_s: float, asked_for: int | None = None
    ) -> Iterator[tuple[int, Ticket]]:
        """A tenant's first (lane, ticket) of each band and lane, from the top; of tier `asked_for` only."""
        for tier in range(NUM_RANKS):
            firsts: list[tuple[float, int, str]] = []
            for lane in range(MAX_LANES):
                line = self._lines[tier, lane].get(tenant_id, {})
                own = [
                    waiting_id
                    for waiting_id in line
                    if asked_for in (None, self._tickets[waiting_id].entry.tier)
                ]
                if own:
                    first = min(
                        own,
                        key=lambda each: (self.tiers.front(each), *self._rank(each, tier, now_s)),
                    )
                    firsts.append((line[first], lane, first))
            for _, lane, first in sorted(firsts):
                yield lane, self._tickets[first]

    def is_owed(self, entry: QueueEntry, band: int) -> bool:
        """Whether the first of a band's ordinary lane is of a tenant below its share: with this request paid
        it would stand no higher than the last tenant with a turn by order did before it (its finish tag is
        not above the virtual time: Goyal et al., SIGCOMM 1996). For orders by service counters."""
        began = self._began.get(band)
        if began is None or FAIRNESS_BOUND not in self.tiers.claims:
            return False
        stands = self.tiers.counter(entry.tenant_id, band, ORDINARY)
        return stands + scaled(entry.predicted_cost, entry.weight) <= began

    def waiting_in(self, band: int) -> Iterator[str]:
        """The tenants that wait in a band, at most `MAX_SHARING` of each lane; one may come twice."""
        for lane in range(MAX_LANES):
            yield from islice(self._lines[band, lane], MAX_SHARING)

    def raise_by(self, tenant_id: str, band: int, amount: int) -> None:
        """An engine lifted a tenant in this band by `amount` (scaled): it saves nothing up while all that it
        asks for is served. Not where it waits, and not above the first of those that wait."""
        for lane in range(MAX_LANES):
            if tenant_id not in self._lines[band, lane]:
                self.tiers.raise_by(tenant_id, band, lane, amount)

    def had_turn_by_order(self, entry_id: str) -> None:
        """A waiting request has its turn, and not because its tenant is owed it or has reserved it."""
        band, lane = self._places[entry_id]
        if lane == ORDINARY:
            tenant_id = self._tickets[entry_id].entry.tenant_id
            self._began[band] = self.tiers.counter(tenant_id, band, lane)

    def place(self, entry_id: str) -> tuple[int, int]:
        """The band and the lane of a waiting request. Raises KeyError when it does not wait."""
        return self._places[entry_id]

    # ------------------------------------------------------------ views

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._tickets

    def ticket(self, entry_id: str) -> Ticket | None:
        return self._tickets.get(entry_id)

    def tickets(self) -> Iterator[Ticket]:
        """In no particular order."""
        return iter(self._tickets.values())

    def expired(self, now_s: float) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if now_s >= self.expires_s(ticket)]

    def expires_s(self, ticket: Ticket) -> float:
        if ticket.expires_s is not None:
            return ticket.expires_s
        return ticket.entry.arrived_s + self._queue_ttl_s[ticket.entry.tier]

    def queued_up_to(self, band: int) -> int:
        if not self._tickets:
            return 0
        return sum(
            len(line) for (tier, _), lines in self._lines.items() if tier <= band for line in lines.values()
        )

    def queued_by_tier(self) -> list[int]:
        """By the rank of the requested tier."""
        queued = [0] * NUM_RANKS
        for ticket in self._tickets.values():
            queued[ticket.entry.tier] += 1
        return queued

    def waiting_costs(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Predicted cost of each tenant's line, by tenant and band; one with two lanes comes twice."""
        for (band, _), costs in self._costs.items():
            for tenant_id, (cost, _) in costs.items():
                yield (tenant_id, band), cost

    def beside(self, entry_id: str) -> list[Waiting]:
        """The tenants that wait in the same lane, those with the smallest counters."""
        tier, lane = self._places[entry_id]
        lines = self._lines[tier, lane]
        # The lane's own view: the shared counter plus what the lane lifted the tenant by.
        ranked = [(self.tiers.counter(tenant_id, tier, lane), tenant_id) for tenant_id in lines]
        if len(ranked) > MAX_BACKLOG_TENANTS:
            ranked = heapq.nsmallest(MAX_BACKLOG_TENANTS, ranked)
        return [
            Waiting(tenant_id, counter, min(lines[tenant_id].values()), len(lines[tenant_id]))
            for counter, tenant_id in ranked
        ]

    def lines_ahead(self, entry_id: str, now_s: float) -> list[TenantLine]:
        """What waits in the band of a request and above, itself left out; in orders that go neither by tenant
        nor by arrival only what ranks before it. Raises KeyError when it does not wait."""
        entry, (band, _) = self._tickets[entry_id].entry, self._places[entry_id]
        found: list[TenantLine] = []
        for (tier, lane), costs in self._costs.items():
            if tier > band or not costs:
                continue
            if tier == band and not self.tiers.is_by_tenant and self.tiers.order_name != "fcfs":
                costs = self._costs_before(entry_id, (tier, lane), now_s)
            for tenant_id, (cost, weight) in costs.items():
                if tenant_id == entry.tenant_id and (tier, lane) == self._places[entry_id]:
                    cost -= entry.predicted_cost
                counter = self.tiers.counter(tenant_id, tier, lane)
                requests = len(self._lines[tier, lane][tenant_id])
                found.append(TenantLine(tenant_id, tier, requests, cost, counter, weight))
        return found

    def _costs_before(
        self, entry_id: str, place: tuple[int, int], now_s: float
    ) -> dict[str, tuple[int, float]]:
        """By tenant, what ranks before a request in a band and lane, or like it: of these it came last."""
        mine = self._rank(entry_id, place[0], now_s)
        costs: dict[str, tuple[int, float]] = {}
        for tenant_id, line in self._lines[place].items():
            for waiting_id in line:
                if waiting_id == entry_id or self._rank(waiting_id, place[0], now_s) <= mine:
                    entry = self._tickets[waiting_id].entry
                    cost, _ = costs.get(tenant_id, (0, 0.0))
                    costs[tenant_id] = cost + entry.predicted_cost, entry.weight
        return costs

    def lowest_counter(self, band: int, now_s: float) -> float:
        """Of the tenants whose turn is next in a band; infinite where none waits."""
        return min(
            (
                self.tiers.counter(ticket.entry.tenant_id, band, lane)
                for lane, ticket in self.heads(band, now_s)
            ),
            default=math.inf,
        )

    def check(self, now_s: float | None = None) -> None:
        """Raises `AssertionError` if inconsistent or, with `now_s`, a due request has not moved up."""
        assert len(self.tiers) == len(self._tickets) == len(self._places), "queue and tickets disagree"
        standing: dict[str, tuple[int, int]] = {}
        for place, lines in self._lines.items():
            for line in lines.values():
                assert line, "an empty line was kept"
                standing.update(dict.fromkeys(line, place))
            for tenant_id, line in lines.items():
                cost = sum(self._tickets[entry_id].entry.predicted_cost for entry_id in line)
                assert self._costs[place][tenant_id][0] == cost, "lines and costs disagree"
            assert lines.keys() == self._costs[place].keys(), "a cost without a line was kept"
        assert standing == self._places, "lines and places disagree"
        for entry in self.tiers.entries():
            assert entry.tier == self._places[entry.entry_id][0], "it waits in another band"
        for ticket in self._tickets.values() if now_s is not None else ():
            assert now_s is not None
            entry = ticket.entry
            due = self._band(entry, now_s)
            band = self._places[entry.entry_id][0]
            assert band == due or (self._was_slowed and band < due), "ageing was forgotten"

    # ------------------------------------------------------------ inside

    def _band(self, entry: QueueEntry, now_s: float) -> int:
        return effective_tier(entry.tier, entry.arrived_s, now_s, self._ageing.ageing_s)

    def _restand(self, entries: Sequence[QueueEntry], now_s: float, *, aged: bool) -> None:
        """Moves waiting requests into the band of their effective tier."""
        moves: dict[tuple[int, int], list[QueueEntry]] = {}
        for entry in entries:
            place = self._band(entry, now_s), self._places[entry.entry_id][1]
            moves.setdefault(place, []).append(entry)
        for (tier, lane), moved in sorted(moves.items()):
            moved.sort(key=lambda entry: entry.arrived_s)
            ids = [entry.entry_id for entry in moved]
            self.tiers.move(ids, tier, lane, aged=aged, lines=self._lines[tier, lane])
            for entry in moved:
                self._leave_line(entry)
                self._stand(entry, tier, lane)

    def _rank(self, entry_id: str, tier: int, now_s: float) -> tuple[float, ...]:
        entry = self._tickets[entry_id].entry
        return self.tiers.rank(entry if entry.tier == tier else replace(entry, tier=tier), now_s)

    def _stand(self, entry: QueueEntry, tier: int, lane: int) -> None:
        self._places[entry.entry_id] = (tier, lane)
        self._lines[tier, lane].setdefault(entry.tenant_id, {})[entry.entry_id] = entry.arrived_s
        costs = self._costs[tier, lane]
        cost, _ = costs.get(entry.tenant_id, NO_LINE)
        costs[entry.tenant_id] = cost + entry.predicted_cost, entry.weight
        self._ageing.add(entry.entry_id, entry.tier, tier, entry.arrived_s)

    def _leave_line(self, entry: QueueEntry) -> None:
        place = self._places.pop(entry.entry_id)
        lines, costs = self._lines[place], self._costs[place]
        line = lines[entry.tenant_id]
        del line[entry.entry_id]
        cost, weight = costs[entry.tenant_id]
        costs[entry.tenant_id] = cost - entry.predicted_cost, weight
        if not line:
            del lines[entry.tenant_id], costs[entry.tenant_id]
