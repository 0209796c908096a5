"""Step counters: what each tenant *had*, which decides the composition of steps and the choice of victims.

One service counter a tenant, owned by the gateway, in two views. The queue goes by what is charged, the step
by what was had: a tenant does not sit out for tokens that it was charged ahead and has not got. Each `Submit`
carries `had`, and in `heard` the last *serial* of this engine that is contained in it:

    serial = all service of the tenant here, in every tier, + its lifts in this tier
    step counter = had - heard + serial now

so that no token counts twice and none is lost between. Without a gateway the step counter is the serial.
`heard` 0: the gateway began after the engine, and has counted nothing from before its first `Submit`.

Nothing is saved up. A tenant whose sequences got all that they could take while others of its tier were held
back is raised to the lowest of those (`settle`). In the first step of a contest the tenants that were served
whole start level (`contend`): those that took part in the last contest as they stood at its end, whatever
they had since, and the others no lower than these. Every raise is a *lift*: a part of the serial, reported to
the owner of the counters. Integers only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.messages import TIER_RANKS
from engine.scheduling.counters import MAX_TENANTS, forget_smallest

TIERS = tuple(TIER_RANKS.values())

TierTenant = tuple[int, str]


class Standings(Protocol):
    """Step counters of tenants; the lower, the less they had."""

    def value(self, tenant_id: str) -> int: ...


@dataclass(frozen=True, slots=True)
class TierStandings:
    """The step counters of one tier."""

    counters: StepCounters
    tier: int

    def value(self, tenant_id: str) -> int:
        return self.counters.value(self.tier, tenant_id)


class StepCounters:
    """The step counters of an engine; one owner, its sequence table."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._service: dict[str, int] = {}
        """By tenant: all that was computed for it here, scaled per weight."""
        self._in_flight: dict[str, int] = {}
        """Of that, what steps in flight compute: it counts here, and is reported once they are over."""
        self._floor = 0
        """Service of a tenant that is not kept by name."""
        self._lifts: dict[TierTenant, int] = {}
        self._offsets: dict[TierTenant, int] = {}
        """`had` - `heard` of the last `Submit`."""
        self._unheard: dict[TierTenant, int] = {}
        """The serial at the first `Submit` since `heard` was last above 0."""
        self._raised: dict[TierTenant, int] = {}
        self._contested: dict[int, int] = {}
        """By tier: the last step in which tenants contended."""
        self._anchors: dict[int, dict[str, int]] = {}
        """By tier: where those that contended stood at the end of that step."""
        self._max_tenants = max_tenants

    def value(self, tier: int, tenant_id: str) -> int:
        return self._offsets.get((tier, tenant_id), 0) + self.serial(tier, tenant_id)

    def lowest(self, keys: Iterable[TierTenant]) -> int:
        """The lowest step counter of these; 0 where there are none."""
        # Many at a time, so without calls.
        offsets, service, lifts, floor = self._offsets, self._service, self._lifts, self._floor
        values = [offsets.get(key, 0) + service.get(key[1], floor) + lifts.get(key, 0) for key in keys]
        return min(values, default=0)

    def of_tier(self, tier: int) -> TierStandings:
        return TierStandings(self, tier)

    def serial(self, tier: int, tenant_id: str) -> int:
        return self.service(tenant_id) + self._lifts.get((tier, tenant_id), 0)

    def service(self, tenant_id: str) -> int:
        return self._service.get(tenant_id, self._floor)

    def serials(self, tenant_id: str) -> dict[int, int]:
        """The tenant's serials, of every tier: a gateway may be about to speak of any."""
        service, lifts = self.service(tenant_id) - self._in_flight.get(tenant_id, 0), self._lifts
        return {tier: service + lifts.get((tier, tenant_id), 0) for tier in TIERS}

    def knows(self, tier: int, tenant_id: str) -> bool:
        """Whether a gateway has reported the tenant's counter in this tier."""
        return (tier, tenant_id) in self._offsets

    def hear(self, tier: int, tenant_id: str, had: int, heard: int) -> None:
        """Takes a gateway's `had` and `heard` (0: no serial). A serial beyond the tenant's own is of an
        earlier engine: of this one `had` can contain nothing past the own serial."""
        key = (tier, tenant_id)
        if heard:
            self._unheard.pop(key, None)
            heard = min(heard, self.serial(tier, tenant_id))
        else:
            reported = self.serial(tier, tenant_id) - self._in_flight.get(tenant_id, 0)
            heard = self._unheard.setdefault(key, reported)
        self._offsets[key] = had - heard
        # Where it stood before says nothing beside where it stands now.
        self._anchors.get(tier, {}).pop(tenant_id, None)
        self._forget()

    def begin_words(self) -> None:
        """A gateway begins anew: it has counted no service that was not reported to it."""
        self._unheard.clear()

    def serve(self, tenant_id: str, amount: int) -> None:
        """Adds service (scaled, per weight)."""
        self._service[tenant_id] = self._service.get(tenant_id, self._floor) + amount
        self._forget()

    def serve_all(self, amounts: dict[str, int]) -> None:
        service, floor = self._service, self._floor
        for tenant_id, amount in amounts.items():
            service[tenant_id] = service.get(tenant_id, floor) + amount
        self._forget()

    def launched(self, amounts: dict[str, int]) -> None:
        """Of the service added, `amounts` come from a step in flight."""
        for tenant_id, amount in amounts.items():
            self._in_flight[tenant_id] = self._in_flight.get(tenant_id, 0) + amount

    def landed(self, amounts: dict[str, int]) -> None:
        """The step is over: they are reported from now on."""
        for tenant_id, amount in amounts.items():
            left = self._in_flight.pop(tenant_id, 0) - amount
            if left:
                self._in_flight[tenant_id] = left

    def take_back(self, tenant_id: str, amount: int) -> None:
        """Takes service of a step in flight back: it comes to nothing."""
        self._service[tenant_id] = self._service.get(tenant_id, self._floor) - amount
        self.landed({tenant_id: amount})

    def lift(self, tier: int, tenant_id: str, to: int) -> None:
        """Raises a tenant in one tier; never lowers it."""
        amount = to - self.value(tier, tenant_id)
        if amount > 0:
            key = (tier, tenant_id)
            self._lifts[key] = self._lifts.get(key, 0) + amount
            self._raised[key] = self._raised.get(key, 0) + amount

    def contend(self, tier: int, tenants: Collection[str], step: int) -> None:
        """Notes that `tenants`, all of which ran before, contend in this step. In the first step of a contest
        those that were served whole until now start level."""
        last = self._contested.get(tier)
        self._contested[tier] = step
        if last is not None and step - last <= 1:
            return
        anchors = self._anchors.get(tier, {})
        values = {tenant_id: self.value(tier, tenant_id) for tenant_id in tenants}
        gains = [value - anchors[tenant_id] for tenant_id, value in values.items() if tenant_id in anchors]
        if not gains:
            level = max(values.values(), default=0)
            anchored: dict[str, int] = {}
        else:
            anchored = {
                tenant_id: anchors[tenant_id] + max(gains) for tenant_id in tenants if tenant_id in anchors
            }
            level = min(anchored.values())
        for tenant_id in tenants:
            self.lift(tier, tenant_id, anchored.get(tenant_id, level))

    def settle(self, tier: int, whole: Iterable[str], held_back: Collection[str]) -> None:
        """Raises tenants served `whole` in a contest to the lowest `held_back`; notes where all stand."""
        whole = list(whole)
        lowest = min(self.value(tier, tenant_id) for tenant_id in held_back)
        for tenant_id in whole:
            self.lift(tier, tenant_id, lowest)
        self._anchors[tier] = {tenant_id: self.value(tier, tenant_id) for tenant_id in (*whole, *held_back)}

    def take_raised(self) -> dict[TierTenant, int]:
        raised, self._raised = self._raised, {}
        return raised

    def values(self) -> dict[TierTenant, int]:
        """The step counters kept by name, for comparisons: by tier and tenant."""
        keys = self._lifts.keys() | self._offsets.keys() | {(1, tenant_id) for tenant_id in self._service}
        return {key: self.value(*key) for key in sorted(keys)}

    def _forget(self) -> None:
        """Forgetting can cost a tenant credit, until its next `Submit`, and never gives it any."""
        if len(self._service) > self._max_tenants:
            self._service, self._floor = forget_smallest(self._service, self._floor)
        most = len(TIERS) * self._max_tenants
        if len(self._offsets) > most or len(self._lifts) > most:
            # A tenant that has never been served here has no service to go by.
            self._offsets = {key: value for key, value in self._offsets.items() if key[1] in self._service}
            self._lifts = {key: value for key, value in self._lifts.items() if key[1] in self._service}
            self._unheard = {key: value for key, value in self._unheard.items() if key in self._offsets}
