"""Queue with strict tiers over one shared set of service counters.

Strict bands by `QueueEntry.tier`: what a tenant gets in one tier counts in every tier. A band may have
several lanes, each with an order and lifts of its own (a lane that is held back stands low, and who comes
into the other one must not be lifted to that alone). Of the lanes' heads the one whose tenant stands lower
goes first, then the one that arrived earlier. An engine uses one lane. How a band ranks a tenant: `bands.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.scheduling.bands import BandCounters, Lag, no_lag
from engine.scheduling.claims import FAIRNESS_BOUND
from engine.scheduling.order.base import Order, ServiceCountersLike, SizeKey
from engine.scheduling.policy import make_order

__all__ = ["MAX_LANES", "BandCounters", "TieredQueue"]

MAX_LANES = 2
KEEP_ARRIVALS = frozenset({"fcfs", "vtc"})
"""Orders whose lines go by arrival: moved entries keep theirs; in other orders they join as newcomers."""
BY_TENANT = frozenset({"vtc", "hybrid", "drr", "dlpm"})
Lines = dict[str, dict[str, float]]
"""Tenant id -> entry id -> arrival."""


class TieredQueue:
    """Implements `Order`; `peek` and `pop` can be kept to some tiers."""

    name = "tiers"
    claims: frozenset[str]
    """Those of its order: each is a promise inside one tier. Across tiers a low one may starve."""
    interrupts = True

    def __init__(self, order_name: str, counters: ServiceCountersLike, *, lag: Lag = no_lag) -> None:
        """`lag`: of those that come into an empty line. Raises `UnknownPolicy` for an unknown order."""
        self._describe(make_order(order_name, counters))
        self.order_name = order_name
        self._counters = counters
        self._lag = lag
        self._bands: dict[int, Order] = {}
        """By tier x MAX_LANES + lane."""
        self._band_counters: dict[int, BandCounters] = {}
        self._where: dict[str, tuple[int, int]] = {}
        self._added = 0

    @property
    def operations(self) -> int:
        return sum(band.operations for band in self._bands.values())

    def add(self, entry: QueueEntry, *, front: bool = False, lane: int = 0) -> None:
        if entry.entry_id in self._where:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        number = entry.tier * MAX_LANES + lane
        band = self._band(number)
        if not front:
            self._lift_to_other_lanes(number, entry.tenant_id)
        band.add(entry, front=front)
        self._added += 1
        self._where[entry.entry_id] = (number, -self._added if front else self._added)

    def front(self, entry_id: str) -> int:
        """0, or less of a waiting entry that was added with `front`: the later, the less."""
        return min(0, self._where[entry_id][1])

    def peek(self, now_s: float, tiers: Collection[int] | None = None) -> QueueEntry | None:
        """The next entry of the first band that has one; `tiers` names the bands to look at."""
        number = self._first(now_s, tiers)
        return None if number is None else self._bands[number].peek(now_s)

    def pop(self, now_s: float, tiers: Collection[int] | None = None) -> QueueEntry:
        """Takes what `peek` names. Raises IndexError when that tier is empty."""
        number = self._first(now_s, tiers)
        if number is None:
            raise IndexError("pop from an empty queue")
        entry = self._bands[number].pop(now_s)
        del self._where[entry.entry_id]
        return entry

    def heads(self, tier: int, now_s: float) -> list[tuple[int, QueueEntry]]:
        """The heads of a tier's lanes, the next one first: (lane, entry)."""
        heads: list[tuple[int, float, int, QueueEntry]] = []
        for lane in range(MAX_LANES):
            band = self._bands.get(tier * MAX_LANES + lane)
            head = band.peek(now_s) if band is not None else None
            if head is not None:
                stands = self.counter(head.tenant_id, tier, lane) if FAIRNESS_BOUND in self.claims else 0
                heads.append((stands, head.arrived_s, lane, head))
        return [(lane, head) for _, _, lane, head in sorted(heads, key=lambda place: place[:3])]

    def remove(self, entry_id: str) -> QueueEntry | None:
        where = self._where.pop(entry_id, None)
        return None if where is None else self._bands[where[0]].remove(entry_id)

    def move(
        self,
        entry_ids: Sequence[str],
        tier: int,
        lane: int,
        *,
        aged: bool = False,
        lines: Lines | None = None,
        deadlines_s: tuple[float | None, float | None] | None = None,
    ) -> None:
        """Moves waiting entries to another band, in the order given, keeping their arrival; `aged`: they
        waited long. `lines`: who waits there, where known; `deadlines_s`: their deadline there, and their
        own. Raises KeyError for one that does not wait."""
        number = tier * MAX_LANES + lane
        band, counters = self._band(number), self._band_counters[number]
        if lines is None:
            lines = {}
            for entry in band.entries():
                lines.setdefault(entry.tenant_id, {})[entry.entry_id] = entry.arrived_s
        joined: Lines = {}
        for entry_id in entry_ids:
            before, place = self._where[entry_id]
            if before == number:
                continue
            moved = self._bands[before].remove(entry_id)
            assert moved is not None, "the books disagree"
            entry = replace(moved, tier=tier)
            if deadlines_s is not None:
                entry = replace(entry, deadline_s=deadlines_s[0], own_deadline_s=deadlines_s[1])
            if entry.tenant_id not in lines and entry.tenant_id not in joined:
                self._lift_to_other_lanes(number, entry.tenant_id)
                lowest = self._lowest(number) or self._lowest_of_other_lanes(number)
                band.add(entry)
                if aged and lowest is not None:
                    counters.rebase(entry.tenant_id, lowest[0])
            else:
                band.add(entry)
            self._where[entry_id] = (number, place)
            joined.setdefault(entry.tenant_id, {})[entry_id] = entry.arrived_s
        if self.order_name == "fcfs":
            self._sort_line(number, _ids(lines), _ids(joined))
        elif self.order_name in KEEP_ARRIVALS:
            for tenant_id, ids in joined.items():
                self._sort_line(number, lines.get(tenant_id, {}), ids)

    def had_turn(self, tenant_id: str, tier: int, lane: int = 0) -> None:
        counters = self._band_counters.get(tier * MAX_LANES + lane)
        if counters is not None:
            counters.had_turn(tenant_id)

    def raise_by(self, tenant_id: str, tier: int, lane: int, amount: int) -> None:
        """Raises a tenant not waiting in a lane by `amount`, but not above the next of those that wait."""
        number = tier * MAX_LANES + lane
        self._band(number)
        to, first = self.counter(tenant_id, tier, lane) + amount, self._lowest(number)
        self._band_counters[number].raise_to(tenant_id, to if first is None else min(to, first[0]))

    @property
    def is_by_tenant(self) -> bool:
        return self.order_name in BY_TENANT

    def entries(self) -> Iterator[QueueEntry]:
        for band in self._bands.values():
            yield from band.entries()

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """Its tier, then its rank in its lane's own order."""
        where = self._where.get(entry.entry_id)
        number = entry.tier * MAX_LANES if where is None else where[0]
        return (number // MAX_LANES, *self._band(number).rank(entry, now_s))

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        if waiting.tier != running.tier:
            return waiting.tier < running.tier
        return self._band(waiting.tier * MAX_LANES).outranks(waiting, running, now_s)

    def clone(self, counters: ServiceCountersLike, lag: Lag | None = None) -> TieredQueue:
        """`lag`: None: that of the original."""
        copy = TieredQueue(self.order_name, counters, lag=lag or self._lag)
        for number, band in self._bands.items():
            copy._band_counters[number] = self._band_counters[number].clone(counters, lag)
            copy._bands[number] = band.clone(copy._band_counters[number])
        copy._where = dict(self._where)
        copy._added = self._added
        return copy

    def counter(self, tenant_id: str, tier: int, lane: int = 0) -> int:
        """The number by which a lane of `tier` ranks the tenant."""
        band = self._band_counters.get(tier * MAX_LANES + lane)
        return self._counters.value(tenant_id) if band is None else band.value(tenant_id)

    def unlift(self, tenant_id: str) -> None:
        """Forgets the tenant's lifts: its shared counter was replaced by one that contains them."""
        for band in self._band_counters.values():
            band.unlift(tenant_id)

    def waiting_tiers(self) -> list[int]:
        return sorted({number // MAX_LANES for number, band in self._bands.items() if len(band)})

    def set_order(self, order_name: str) -> None:
        """Changes every band's order, keeping arrivals; counted waits begin anew. Raises `UnknownPolicy`."""
        if order_name == self.order_name:
            return
        self._describe(make_order(order_name, self._counters))
        waiting = sorted(self.entries(), key=lambda entry: (self.front(entry.entry_id), entry.arrived_s))
        self.order_name = order_name
        self._bands = {
            number: make_order(order_name, counters) for number, counters in self._band_counters.items()
        }
        # No tenant has been idle, so none may be lifted.
        for counters in self._band_counters.values():
            counters.lifts = False
        for entry in waiting:
            self._bands[self._where[entry.entry_id][0]].add(entry)
        for counters in self._band_counters.values():
            counters.lifts = True

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._where

    def _describe(self, order: Order) -> None:
        self.claims = order.claims
        self.order_interrupts = order.interrupts
        """Whether one tier's own order can interrupt."""
        self.size_key: SizeKey = order.size_key

    def _first(self, now_s: float, tiers: Collection[int] | None) -> int | None:
        """The band whose head goes first."""
        for number, band in self._bands.items():
            if not len(band) or (tiers is not None and number // MAX_LANES not in tiers):
                continue
            sibling = self._bands.get(number + 1) if number % MAX_LANES == 0 else None
            if sibling is None or not len(sibling):
                return number
            return number + self.heads(number // MAX_LANES, now_s)[0][0]
        return None

    def _lift_to_other_lanes(self, number: int, tenant_id: str) -> None:
        """Lifts a tenant that enters an empty lane to the other lane's: idle time earns no credit."""
        if FAIRNESS_BOUND in self.claims and not len(self._bands[number]):
            lowest = self._lowest_of_other_lanes(number)
            if lowest is not None:
                self._band_counters[number].lift(tenant_id, *lowest)

    def _lowest(self, number: int) -> tuple[int, str] | None:
        """The tenant that is next in a band, after where it stands; None: the band is empty."""
        band = self._bands.get(number)
        head = band.peek(0.0) if band is not None else None
        return None if head is None else (self._band_counters[number].value(head.tenant_id), head.tenant_id)

    def _lowest_of_other_lanes(self, number: int) -> tuple[int, str] | None:
        first = number - number % MAX_LANES
        others = [self._lowest(lane) for lane in range(first, first + MAX_LANES) if lane != number]
        return min((standing for standing in others if standing is not None), default=None)

    def _sort_line(self, number: int, there: dict[str, float], joined: dict[str, float]) -> None:
        """Puts a line (entry ids -> arrivals) back in order of arrival, what was added with `front` first:
        entries behind the first of `joined` leave and join again. The line never runs empty, so that no
        tenant counts as idle."""
        if not joined:
            return
        stands = sorted(
            (self.front(entry_id), arrived_s, self._where[entry_id][1], entry_id)
            for entry_id, arrived_s in (there | joined).items()
        )
        first = min(place for place, stand in enumerate(stands) if stand[-1] in joined)
        if [stand[-1] for stand in stands[first:]] == list(joined):
            return  # They joined at the end, in the right order.
        band = self._bands[number]
        for *_, entry_id in stands[first + 1 :]:
            entry = band.remove(entry_id)
            assert entry is not None, "the books disagree"
            band.add(entry)

    def _band(self, number: int) -> Order:
        if number not in self._bands:
            self._band_counters[number] = BandCounters(self._counters, lag=self._lag)
            self._bands[number] = make_order(self.order_name, self._band_counters[number])
            self._bands = dict(sorted(self._bands.items()))
        return self._bands[number]


def _ids(lines: Lines) -> dict[str, float]:
    return {entry_id: arrived_s for line in lines.values() for entry_id, arrived_s in line.items()}
