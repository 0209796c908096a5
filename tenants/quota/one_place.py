"""What requests hold in one place in Redis: a tenant's keys, or in a Cluster those of the platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tenants.quota import rules, wire
from tenants.quota.redis_calls import RedisCalls
from tenants.quota.spare import as_text
from tenants.quota.store import Denied, Granted, Hold, LimitState, Overrun, TooManyEndUsers
from tenants.types import Amounts, Limit


class OnePlace(RedisCalls):
    def __init__(
        self,
        url: str,
        prefix: str,
        timeout_s: float,
        virtual_clock: Callable[[], float] | None,
        max_end_users: int,
    ) -> None:
        super().__init__(url, prefix, timeout_s, virtual_clock)
        self._max_end_users = max_end_users

    async def _reserve(
        self, place: str, request_id: str, limits: Sequence[Limit], hold: Hold, lease_ttl_s: float
    ) -> Granted | Denied:
        wishes = [rules.wish(limit, hold) for limit in limits]
        ages = self.spare.ages()
        head = [
            as_text(ages),
            request_id,
            wire.lease_us(lease_ttl_s),
            wire.pack(limits),
            rules.end_user_of(limits),
            self._max_end_users,
            *wire.by_meter(hold.ahead),
        ]
        reply = await self._with_windows(
            self._run,
            "reserve",
            place,
            lambda now_us: [*head, *wire.columns(wire.reserve_columns, limits, wishes, now_us)],
        )
        if reply[0] == b"users":
            raise self._too_many_end_users(reply)
        if reply[0] == b"denied":
            return wire.denied_reserve(limits, wishes, reply, ages)
        return wire.granted(reply, ages)

    async def _top_up(
        self, place: str, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        ages = self.spare.ages()
        numbers = [*wire.by_meter(used), *wire.by_meter(first), *wire.by_meter(ahead)]
        reply = await self._run("top_up", place, [as_text(ages), request_id, *numbers])
        if reply[0] == b"gone":
            raise KeyError(request_id)
        _check(reply)
        if reply[0] == b"denied":
            return wire.denied_top_up(first, ahead, reply, ages)
        return wire.granted(reply, ages)

    async def _rebind(
        self,
        place: str,
        request_id: str,
        limits: Sequence[Limit],
        hold: Hold,
        used: Amounts,
        must_fit: bool,
    ) -> Granted | Denied:
        parts = [rules.part_again(limit, hold, used) for limit in limits]
        ages, user = self.spare.ages(), rules.end_user_of(limits)
        head = [as_text(ages), request_id, int(must_fit), wire.pack(limits), user, self._max_end_users]
        reply = await self._with_windows(
            self._run,
            "rebind",
            place,
            lambda now_us: [*head, *wire.columns(wire.restore_columns, limits, parts, now_us)],
        )
        if reply[0] == b"gone":
            raise KeyError(request_id)
        if reply[0] == b"users":
            raise self._too_many_end_users(reply)
        if reply[0] == b"denied":
            return wire.denied_rebind(limits, reply, ages)
        return wire.granted(reply, ages)

    async def _settle(self, place: str, request_id: str, actual: Amounts) -> bool:
        spare = as_text(self.spare.ages())
        reply = await self._run("settle", place, [spare, request_id, *wire.by_meter(actual)])
        _check(reply)
        return bool(reply[0] == b"settled")

    async def _restore(
        self,
        place: str,
        request_id: str,
        charged: Sequence[tuple[Limit, int]],
        hold: Hold,
        used: Amounts,
        lease_ttl_s: float,
    ) -> None:
        columns = [
            value
            for limit, start_us in charged
            for value in wire.restore_columns(limit, rules.part_again(limit, hold, used), start_us)
        ]
        text, ahead = wire.pack([limit for limit, _ in charged]), wire.by_meter(hold.ahead)
        await self._rebuilding(
            "restore", place, [request_id, wire.lease_us(lease_ttl_s), text, *ahead, *columns]
        )

    async def _states(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        by_place: dict[str, list[Limit]] = {}
        for limit in limits:
            by_place.setdefault(limit.tenant_id, []).append(limit)
        by_identity: dict[str, LimitState] = {}
        for place, mine in by_place.items():
            ages = self.spare.ages()
            _, now, raws = await self._run("states", place, wire.names(mine))
            spare = wire.spare_at(ages, int(now))
            for limit, raw in zip(mine, raws, strict=True):
                counter = wire.advanced(limit, raw, int(now), spare)
                by_identity[limit.identity] = rules.view(limit, counter, int(now), spare)
        return tuple(by_identity[limit.identity] for limit in limits)

    def _too_many_end_users(self, reply: list[Any]) -> TooManyEndUsers:
        rest_us = int(reply[2])
        until_rest_s = rules.until_rest_s(None if rest_us < 0 else rest_us, int(reply[1]))
        return TooManyEndUsers(self._max_end_users, until_rest_s)


def _check(reply: list[Any]) -> None:
    if reply[0] == b"overrun":
        raise Overrun(reply[1].decode(), int(reply[2]), int(reply[3]))
