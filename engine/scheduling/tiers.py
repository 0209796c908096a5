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

from collections.abc import Collection, Iterator

from engine.scheduling.counters import MAX_TENANTS, forget_smallest
from engine.scheduling.order import Entry, Order, ServiceCountersLike
from engine.scheduling.policy import make_order


class BandCounters:
    """The shared counters as one band sees them: plus what the band lifted each tenant by."""

    def __init__(self, shared: ServiceCountersLike, *, max_tenants: int = MAX_TENANTS) -> None:
        self._shared = shared
        self._lifts: dict[str, int] = {}
        self._floor: int | None = None
        self._max_tenants = max_tenants

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
        if behind <= 0:
            return
        self._lifts[tenant_id] = to - self._shared.value(tenant_id)
        if len(self._lifts) > self._max_tenants:
            ranked = {lifted: self.value(lifted) for lifted in self._lifts}
            kept, self._floor = forget_smallest(ranked, self._floor or 0)
            self._lifts = {lifted: lift for lifted, lift in self._lifts.items() if lifted in kept}

    def unlift(self, tenant_id: str) -> None:
        """Forgets the tenant's lift in this band."""
        self._lifts.pop(tenant_id, None)

    def clone(self, shared: ServiceCountersLike) -> BandCounters:
        """An independent copy over other shared counters."""
        copy = BandCounters(shared, max_tenants=self._max_tenants)
        copy._lifts = dict(self._lifts)
        copy._floor = self._floor
        return copy


class TieredQueue:
    """Implements `Order`; `peek` and `pop` can be kept to some tiers."""

    def __init__(self, order_name: str, counters: ServiceCountersLike) -> None:
        """Raises `UnknownPolicy` for an order that does not exist."""
        make_order(order_name, counters)
        self.order_name = order_name
        self._counters = counters
        self._bands: dict[int, Order] = {}
        self._band_counters: dict[int, BandCounters] = {}
        self._tiers: dict[str, int] = {}
        """Entry id -> tier."""

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
        """Changes the order of every band; entries keep their arrival order. Raises `UnknownPolicy`."""
        make_order(order_name, self._counters)
        waiting = sorted(self.entries(), key=lambda entry: entry.arrived_s, reverse=True)
        self.order_name = order_name
        self._bands = {
            tier: make_order(order_name, counters) for tier, counters in self._band_counters.items()
        }
        for entry in waiting:
            # To the head, the latest first: nobody has been idle, so nobody may be lifted.
            self._bands[entry.tier].add(entry, front=True)

    def __len__(self) -> int:
        return len(self._tiers)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._tiers

    def _band(self, tier: int) -> Order:
        if tier not in self._bands:
            self._band_counters[tier] = BandCounters(self._counters)
            self._bands[tier] = make_order(self.order_name, self._band_counters[tier])
            self._bands = dict(sorted(self._bands.items()))
        return self._bands[tier]
