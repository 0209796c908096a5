"""Rank of tenants inside one band (a tier, or a lane of it) over shared service counters.

A band ranks a tenant by *shared counter + its lift in this band*: a tenant that used idle capacity in the
batch tier must be lifted there, and must not carry that into the interactive tier. A returning tenant may
stand below the others by its `Lag`, where the owner of the queue knows that it was not idle, or that the
others were charged for what they have not had.

A tenant whose entry is moved up for its wait (`move`, `aged`) starts in the band above at the lowest who
wait. What it got there since counts: its entries that come up again and again have one share of the band
(start tags as in Goyal et al., "Start-time fair queueing", SIGCOMM 1996).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from engine.scheduling.counters import MAX_TENANTS, LoweredLog, forget_smallest
from engine.scheduling.order.base import ServiceCountersLike

Lag = Callable[[str, str], int]
"""(tenant, the one that it is lifted to) -> how far below that one it may enter an empty line, scaled."""


def no_lag(tenant_id: str, other_id: str) -> int:
    """Every tenant without a waiting entry was idle, and what is charged was had."""
    return 0


class BandCounters:
    """The shared counters as one band sees them: plus what the band lifted each tenant by."""

    def __init__(
        self, shared: ServiceCountersLike, *, max_tenants: int = MAX_TENANTS, lag: Lag = no_lag
    ) -> None:
        self._shared = shared
        self._lag = lag
        self._lifts: dict[str, int] = {}
        self._floor: int | None = None
        self._max_tenants = max_tenants
        self._lowered = LoweredLog()
        self._finishes: dict[str, int] = {}
        """Of tenants that were once rebased: where they stood after their last turn here."""
        self.lifts = True
        """Whether `lift` acts; not while entries that waited already are only moved."""
        self.left_last: str | None = None

    @property
    def served_cost(self) -> int:
        return self._shared.served_cost

    def value(self, tenant_id: str) -> int:
        value = self._shared.value(tenant_id) + self._lifts.get(tenant_id, 0)
        return value if self._floor is None else max(value, self._floor)

    def charge(self, tenant_id: str, weight: float, cost: int) -> None:
        self._shared.charge(tenant_id, weight, cost)

    def lift(self, tenant_id: str, to: int, other_id: str = "") -> None:
        """Raises the tenant in this band only, to `to` less its lag; `other_id` stands there."""
        if self.lifts and to > self.value(tenant_id):
            self.raise_to(tenant_id, to - self._lag(tenant_id, other_id))

    def raise_to(self, tenant_id: str, to: int) -> None:
        """Raises the tenant in this band only; never lowers it."""
        if to <= self.value(tenant_id):
            return
        self._lifts[tenant_id] = to - self._shared.value(tenant_id)
        if len(self._lifts) > self._max_tenants:
            ranked = {lifted: self.value(lifted) for lifted in self._lifts}
            kept, self._floor = forget_smallest(ranked, self._floor or 0)
            self._lifts = {lifted: lift for lifted, lift in self._lifts.items() if lifted in kept}

    def rebase(self, tenant_id: str, to: int) -> None:
        """Lowers a tenant in this band only: to `to`, but not below where its last turn left it."""
        to = max(to, self._finishes.get(tenant_id, to))
        if to >= self.value(tenant_id):
            return
        self._lifts[tenant_id] = to - self._shared.value(tenant_id)
        self._lowered.note(tenant_id)
        self._finishes[tenant_id] = to
        while len(self._finishes) > self._max_tenants:
            del self._finishes[next(iter(self._finishes))]

    def had_turn(self, tenant_id: str) -> None:
        """The tenant's turn in this band is charged."""
        if tenant_id in self._finishes:
            self._finishes[tenant_id] = self.value(tenant_id)

    def unlift(self, tenant_id: str) -> None:
        if self._lifts.pop(tenant_id, 0):
            self._lowered.note(tenant_id)

    def lowered_reader(self) -> Callable[[], Collection[str] | None]:
        """Returns a reader: the tenants whose number here fell since its last call; None: look at all."""
        return partial(_read_both, self._shared.lowered_reader(), self._lowered.reader())

    def clone(self, shared: ServiceCountersLike, lag: Lag | None = None) -> BandCounters:
        """An independent copy over other shared counters; its readers start anew. `lag`: None: this one's."""
        copy = BandCounters(shared, max_tenants=self._max_tenants, lag=lag or self._lag)
        copy._lifts = dict(self._lifts)
        copy._floor = self._floor
        copy._finishes = dict(self._finishes)
        copy.left_last = self.left_last
        return copy


def _read_both(
    read_shared: Callable[[], Collection[str] | None], read_lifts: Callable[[], Collection[str] | None]
) -> Collection[str] | None:
    shared, lifts = read_shared(), read_lifts()
    if shared is None or lifts is None:
        return None
    return (*shared, *lifts) if lifts else shared
