"""Who is next when some tiers go before others?

Strict bands by `Entry.tier` (the smaller the rank, the earlier), one order a band, all over one shared set of
service counters: what a tenant gets in one tier counts in every tier.

The lift is each band's own. Batch work may have used idle capacity all night and stand a billion tokens
above the interactive tenants; a tenant that sends one batch request must be lifted to those, or it would
have the batch tier to itself, but must not carry that into the interactive tier, where it would starve. So a
band ranks a tenant by *shared counter + its lift in this band*. `counters_by_tenant` names exactly the
numbers a band ranks by: use it, not the shared counters, to log a dispatch or to audit one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from engine.scheduling.counters import MAX_TENANTS, LoweredLog, forget_smallest
from engine.scheduling.order import Entry, Order, ServiceCountersLike
from engine.scheduling.policy import make_order


class BandCounters:
    """The shared counters as one band sees them: plus what the band lifted each tenant by."""

    def __init__(self, shared: ServiceCountersLike, *, max_tenants: int = MAX_TENANTS) -> None:
        self._shared = shared
        self._lifts: dict[str, int] = {}
        self._floor: int | None = None
        self._max_tenants = max_tenants
        self._lowered = LoweredLog()
        self.lifts = True
        """Whether `lift` acts; not while entries that waited already are only moved."""

    @property
    def served_cost(self) -> int:
        """Of all tenants and tiers."""
        return self._shared.served_cost

    def value(self, tenant_id: str) -> int:
        """Shared counter + lift."""
        value = self._shared.value(tenant_id) + self._lifts.get(tenant_id, 0)
        return value if self._floor is None else max(value, self._floor)

    def charge(self, tenant_id: str, weight: float, cost: int) -> None:
        """Charges the shared counter."""
        self._shared.charge(tenant_id, weight, cost)

    def lift(self, tenant_id: str, to: int) -> None:
        """Raises the tenant in this band only."""
        behind = to - self.value(tenant_id)
        if behind <= 0 or not self.lifts:
            return
        self._lifts[tenant_id] = to - self._shared.value(tenant_id)
        if len(self._lifts) > self._max_tenants:
            ranked = {lifted: self.value(lifted) for lifted in self._lifts}
            kept, self._floor = forget_smallest(ranked, self._floor or 0)
            self._lifts = {lifted: lift for lifted, lift in self._lifts.items() if lifted in kept}

    def unlift(self, tenant_id: str) -> None:
        """Forgets the tenant's lift in this band."""
        if self._lifts.pop(tenant_id, 0):
            self._lowered.note(tenant_id)

    def lowered_reader(self) -> Callable[[], Collection[str] | None]:
        """Tells at each call whose number here fell since the last: the shared counter, or the lift."""
        read_shared, read_lifts = self._shared.lowered_reader(), self._lowered.reader()

        def read() -> Collection[str] | None:
            shared, lifts = read_shared(), read_lifts()
            if shared is None or lifts is None:
                return None
            return (*shared, *lifts) if lifts else shared

        return read

    def clone(self, shared: ServiceCountersLike) -> BandCounters:
        """An independent copy over other shared counters; its readers start anew."""
        copy = BandCounters(shared, max_tenants=self._max_tenants)
        copy._lifts = dict(self._lifts)
        copy._floor = self._floor
        return copy


class TieredQueue:
    """Implements `Order`; `peek` and `pop` can be kept to some tiers."""

    name = "tiers"
    claims: frozenset[str]
    """Those of its order: each is a promise inside one tier. Across tiers a low one may starve."""
    interrupts = True
    """By tier, always."""

    def __init__(self, order_name: str, counters: ServiceCountersLike) -> None:
        """Raises `UnknownPolicy` for an order that does not exist."""
        self._describe(make_order(order_name, counters))
        self.order_name = order_name
        self._counters = counters
        self._bands: dict[int, Order] = {}
        self._band_counters: dict[int, BandCounters] = {}
        self._tiers: dict[str, int] = {}
        """Entry id -> tier."""

    @property
    def operations(self) -> int:
        """Of all bands."""
        return sum(band.operations for band in self._bands.values())

    def add(self, entry: Entry, *, front: bool = False) -> None:
        """Joins its band. Raises ValueError if it waits already."""
        if entry.entry_id in self._tiers:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        self._band(entry.tier).add(entry, front=front)
        self._tiers[entry.entry_id] = entry.tier

    def peek(self, now_s: float, tiers: Collection[int] | None = None) -> Entry | None:
        """The next entry of the first band that has one; `tiers` names the bands to look at."""
        for tier, band in self._bands.items():
            if len(band) and (tiers is None or tier in tiers):
                return band.peek(now_s)
        return None

    def pop(self, now_s: float, tiers: Collection[int] | None = None) -> Entry:
        """Takes what `peek` names. Raises IndexError when nobody waits there."""
        for tier, band in self._bands.items():
            if len(band) and (tiers is None or tier in tiers):
                entry = band.pop(now_s)
                del self._tiers[entry.entry_id]
                return entry
        raise IndexError("pop from an empty queue")

    def remove(self, entry_id: str) -> Entry | None:
        """Takes an entry out wherever it stands; None when it does not wait."""
        tier = self._tiers.pop(entry_id, None)
        return None if tier is None else self._bands[tier].remove(entry_id)

    def entries(self) -> Iterator[Entry]:
        """All waiting entries, band by band."""
        for band in self._bands.values():
            yield from band.entries()

    def rank(self, entry: Entry, now_s: float) -> tuple[float, ...]:
        """Its tier, then its rank in the tier's own order."""
        return (entry.tier, *self._band(entry.tier).rank(entry, now_s))

    def outranks(self, waiting: Entry, running: Entry, now_s: float) -> bool:
        """By tier; in one tier as its order says."""
        if waiting.tier != running.tier:
            return waiting.tier < running.tier
        return self._band(waiting.tier).outranks(waiting, running, now_s)

    def clone(self, counters: ServiceCountersLike) -> TieredQueue:
        """An independent copy over `counters` (a clone of the original's)."""
        copy = TieredQueue(self.order_name, counters)
        for tier, band in self._bands.items():
            copy._band_counters[tier] = self._band_counters[tier].clone(counters)
            copy._bands[tier] = band.clone(copy._band_counters[tier])
        copy._tiers = dict(self._tiers)
        return copy

    def counter(self, tenant_id: str, tier: int) -> int:
        """The number by which `tier` ranks the tenant."""
        band = self._band_counters.get(tier)
        return self._counters.value(tenant_id) if band is None else band.value(tenant_id)

    def counters_by_tenant(self, tier: int) -> dict[str, int]:
        """The numbers by which `tier` ranks the tenants that wait in it."""
        band = self._bands.get(tier)
        waiting = {entry.tenant_id for entry in band.entries()} if band is not None else set()
        return {tenant_id: self.counter(tenant_id, tier) for tenant_id in sorted(waiting)}

    def unlift(self, tenant_id: str) -> None:
        """Forgets the tenant's lifts: its shared counter was replaced by one that contains them."""
        for band in self._band_counters.values():
            band.unlift(tenant_id)

    def waiting_tiers(self) -> list[int]:
        """Ranks of the bands in which somebody waits, first served first."""
        return [tier for tier, band in self._bands.items() if len(band)]

    def set_order(self, order_name: str) -> None:
        """Changes the order of every band; entries keep their arrival order. Raises `UnknownPolicy`.

        An order that counts how long entries have waited counts from here, for all alike.
        """
        if order_name == self.order_name:
            return
        self._describe(make_order(order_name, self._counters))
        waiting = sorted(self.entries(), key=lambda entry: entry.arrived_s)
        self.order_name = order_name
        self._bands = {
            tier: make_order(order_name, counters) for tier, counters in self._band_counters.items()
        }
        # Nobody has been idle, so nobody may be lifted.
        for counters in self._band_counters.values():
            counters.lifts = False
        for entry in waiting:
            self._bands[entry.tier].add(entry)
        for counters in self._band_counters.values():
            counters.lifts = True

    def __len__(self) -> int:
        return len(self._tiers)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._tiers

    def _describe(self, order: Order) -> None:
        self.claims = order.claims
        self.order_interrupts = order.interrupts
        """Whether one tier's own order can interrupt."""

    def _band(self, tier: int) -> Order:
        if tier not in self._bands:
            self._band_counters[tier] = BandCounters(self._counters)
            self._bands[tier] = make_order(self.order_name, self._band_counters[tier])
            self._bands = dict(sorted(self._bands.items()))
        return self._bands[tier]
