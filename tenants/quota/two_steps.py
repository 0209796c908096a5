"""Holds a request's limits in one step or, where the platform's lie in another slot of a Cluster, in two.

The tenant's are held first, then the platform's. Where the second is refused or fails, the first is undone
(if that fails too, its lease ends it). So neither is ever exceeded, and a refused request takes room from
others for one call. A request without platform limits makes no second call, and with one server the
platform's counters are in the first: there the second step is always empty."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace
from redis.exceptions import RedisError

from tenants.quota import rules
from tenants.quota.one_place import OnePlace
from tenants.quota.store import Denied, Granted, Hold, QuotaStoreUnavailable
from tenants.types import NOTHING, PLATFORM, Amounts, Limit

Places = tuple[str, ...]
"""Where a request holds: at its tenant and, by a second step, at the platform."""

MAX_REMEMBERED = 200_000
FIRST_LEASE_S = 60.0
"""Of a running request's first hold on the platform; the next renewal sets it like the other."""


class TwoSteps(OnePlace):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places: OrderedDict[str, Places] = OrderedDict()

    def _split(self, limits: Sequence[Limit]) -> tuple[list[Limit], list[Limit]]:
        """The limits of the first step, and of the second."""
        if not self._in_cluster:
            return list(limits), []
        shared = [limit for limit in limits if rules.is_platforms(limit)]
        return [limit for limit in limits if not rules.is_platforms(limit)], shared

    async def _reserve_all(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        hold: Hold,
        lease_ttl_s: float,
    ) -> Granted | Denied:
        own, shared = self._split(limits)
        first = await self._reserve(tenant_id, request_id, own, hold, lease_ttl_s)
        if isinstance(first, Denied):
            return _in_order(first, await self._states(shared), limits) if shared else first
        self._note(request_id, (tenant_id, PLATFORM) if shared else (tenant_id,))
        if not shared:
            return first
        try:
            second = await self._reserve(PLATFORM, request_id, shared, hold, lease_ttl_s)
        except Exception:
            await self._undo(tenant_id, request_id)
            raise
        if isinstance(second, Granted):
            return _together(first, second, limits)
        await self._undo(tenant_id, request_id)
        return _in_order(second, await self._states(own), limits)

    async def _top_up_all(
        self, places: Places, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        """The platform's last: what it refuses stays held by the tenant alone, until the request settles."""
        answer: Granted | Denied | None = None
        for place in places:
            # Where the first refused, what was used is charged to the other all the same.
            wanted = (NOTHING, NOTHING) if isinstance(answer, Denied) else (first, ahead)
            try:
                also = await self._top_up(place, request_id, used, *wanted)
            except KeyError:
                if answer is None:
                    raise
                # A rebuild found no limit of the platform any more. (If it has ended, the ledger says so.)
                self._note(request_id, places[:1])
                continue
            if answer is None:
                answer = also
            elif isinstance(answer, Denied):
                answer = _in_order(answer, also.states)
            elif isinstance(also, Denied):
                answer = _in_order(also, answer.states)
            else:
                answer = _together(answer, also)
        assert answer is not None
        return answer

    async def _rebind_all(
        self,
        places: Places,
        request_id: str,
        limits: Sequence[Limit],
        hold: Hold,
        used: Amounts,
        must_fit: bool,
    ) -> Granted | Denied:
        """The platform's first: what it refuses has changed nothing at the tenant."""
        own, shared = self._split(limits)
        if not shared:
            return await self._rebind(places[0], request_id, own, hold, used, must_fit)
        if not await self._redis.hexists(self._holds_of(places[0]), request_id):
            raise KeyError(request_id)
        is_new, is_kept = PLATFORM not in places, False
        self._note(request_id, (places[0], PLATFORM))
        try:
            await self._reserve(PLATFORM, request_id, (), hold, FIRST_LEASE_S)
            second = await self._rebind(PLATFORM, request_id, shared, hold, used, must_fit)
            if isinstance(second, Denied):
                return _in_order(second, await self._states(own), limits)
            first = await self._rebind(places[0], request_id, own, hold, used, must_fit)
            if isinstance(first, Denied):
                return _in_order(first, second.states, limits)
            is_kept = True
            return _together(first, second, limits)
        finally:
            if is_new and not is_kept:
                await self._undo(PLATFORM, request_id)

    async def _settle_all(self, places: Places, request_id: str, actual: Amounts) -> bool:
        """The tenant's last: until it is settled, the request is found there and settled again."""
        is_settled = False
        for place in reversed(places):
            is_settled = await self._settle(place, request_id, actual)
        return is_settled

    async def _undo(self, place: str, request_id: str) -> None:
        with contextlib.suppress(QuotaStoreUnavailable, RedisError, OSError, TimeoutError):
            await self._settle(place, request_id, NOTHING)

    # ------------------------------------------------------------ where a request holds

    def remember(self, request_id: str, tenant_id: str) -> None:
        """Caches the request's tenant, so that it need not be searched for."""
        self._note(request_id, (tenant_id, PLATFORM) if self._in_cluster else (tenant_id,))

    def _note(self, request_id: str, places: Places) -> None:
        self._places[request_id] = places
        if len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)

    async def _live_places(self, request_id: str) -> Places:
        """Raises `KeyError` where it holds nothing at its tenant."""
        places = await self._find_places(request_id)
        if not places or places[0] == PLATFORM:
            raise KeyError(request_id)
        return places

    async def _find_places(self, request_id: str) -> Places:
        """Cached or, after a restart, searched for among all tenants; empty: it holds nowhere."""
        if request_id in self._places:
            return self._places[request_id]
        _, tenants = await self._registry.read()
        tenants.sort(key=lambda tenant_id: tenant_id == PLATFORM)
        pipeline = self._redis.pipeline(transaction=False)
        for tenant_id in tenants:
            pipeline.hexists(self._holds_of(tenant_id), request_id)
        found = zip(tenants, await pipeline.execute(), strict=True)
        if places := tuple(tenant_id for tenant_id, exists in found if exists):
            self._note(request_id, places)
        return places

    def _holds_of(self, place: str) -> str:
        return f"{self._prefix}:{{{place}}}:holds"


def _in_order(denied: Denied, other_states: Sequence[Any], limits: Sequence[Limit] = ()) -> Denied:
    """A refusal by one of two places, with the states of both."""
    at = _place_in(limits)
    return replace(
        denied, states=tuple(sorted((*denied.states, *other_states), key=lambda state: at(state.limit)))
    )


def _together(one: Granted, other: Granted, limits: Sequence[Limit] = ()) -> Granted:
    """The grant of both places, in the order of `limits`."""
    at = _place_in(limits)
    charged = zip((*one.states, *other.states), (*one.charged_to, *other.charged_to), strict=True)
    pairs = sorted(charged, key=lambda pair: at(pair[0].limit))
    least = (min(getattr(one.covered, name), getattr(other.covered, name)) for name in rules.FIELDS)
    return Granted(
        states=tuple(state for state, _ in pairs),
        exceeded=tuple(sorted((*one.exceeded, *other.exceeded), key=at)),
        charged_to=tuple(name for _, name in pairs),
        covered=Amounts(*least),
        would_deny=tuple(sorted((*one.would_deny, *other.would_deny), key=at)),
    )


def _place_in(limits: Sequence[Limit]) -> Callable[[Limit], int]:
    order = {limit.identity: index for index, limit in enumerate(limits)}
    return lambda limit: order.get(limit.identity, len(order))
