"""Conditions of alerts about limits, from their counters. Pure; instants are microseconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from tenants.instants import from_us
from tenants.outbox import kinds
from tenants.outbox.transitions import Condition
from tenants.quota.pressure import Level, LimitPressure
from tenants.quota.projection import ObservedUse, projected_exhaustion
from tenants.quota.rules import is_platforms, window_bounds_us
from tenants.quota.store import LimitState
from tenants.types import Limit, LimitMode, Window

DAY_S = 86_400
SOFT_SHOWN_US = 15 * 60 * 1_000_000
"""A soft limit without a window, or of a minute, fires for so long after it was last noticed."""
EXHAUSTED_WITHIN_S = 7.0 * DAY_S
LEAST_USED = 0.5
"""Of a limit, before its exhaustion is predicted: early in a window its use says little."""
LONG_WINDOWS = frozenset({Window.DAY, Window.MONTH, Window.LIFETIME})
COUNTED_WINDOWS = LONG_WINDOWS | {Window.HOUR}


class SoftEvent(NamedTuple):
    limit_id: str
    level: int
    last_us: int


def soft_limits(states: Iterable[LimitState], events: Iterable[SoftEvent], now_us: int) -> list[Condition]:
    """Thresholds reached: of windows of an hour or longer by `states` (soft limits), of others by events."""
    lately = {(event.limit_id, event.level) for event in events if now_us - event.last_us < SOFT_SHOWN_US}
    conditions = []
    for state in states:
        limit = state.limit
        if limit.mode is not LimitMode.SOFT:
            continue
        for level in limit.thresholds:
            if limit.window in COUNTED_WINDOWS:
                is_reached = (state.used + state.held) * 100 >= level * limit.amount
            else:
                is_reached = (limit.limit_id, level) in lately
            if is_reached:
                conditions.append(
                    Condition(
                        kinds.SOFT_LIMIT,
                        f"{limit.limit_id}:{level}",
                        f"the soft limit {_described(limit)} has reached {level} % of {limit.amount}",
                        _owner(limit),
                        _limit_page(limit),
                        {"limit": limit.limit_id, "level": level, "used": state.used, "amount": limit.amount},
                    )
                )
    return conditions


def exhaustions(pressures: Iterable[LimitPressure], now_us: int) -> list[Condition]:
    """Hard limits of a day or longer that are used up, or will be before their windows end."""
    conditions = []
    for pressure in pressures:
        state, limit = pressure.state, pressure.limit
        if limit.mode is not LimitMode.HARD or limit.window not in LONG_WINDOWS or not limit.amount:
            continue
        taken = state.used + state.held
        if taken < LEAST_USED * limit.amount:
            continue
        start_us, _ = window_bounds_us(limit.window, limit.time_zone, now_us)
        since_us = max(start_us, limit.created_us)
        seen = [ObservedUse("this window so far", state.used, (now_us - since_us) / 1e6)] if since_us else []
        projected = projected_exhaustion(limit.amount - taken, seen, state.reset_s)
        if pressure.level is Level.EXHAUSTED or projected.p50_s == 0:
            when = _used_up(pressure)
        elif projected.p50_s is None or projected.p50_s > EXHAUSTED_WITHIN_S:
            continue
        else:
            when = f"will be used up in about {_told(projected.p50_s)}"
        conditions.append(
            Condition(
                kinds.EXHAUSTION,
                limit.limit_id,
                f"the limit {_described(limit)} {when}",
                _owner(limit),
                _limit_page(limit),
                {
                    "limit": limit.limit_id,
                    "used": state.used,
                    "held": state.held,
                    "amount": limit.amount,
                    "refused": pressure.refused,
                    "basis": projected.basis,
                },
            )
        )
    return conditions


def limits_to_look_at(limits: Iterable[Limit], most: int) -> Sequence[Limit]:
    """The limits whose counters alerts need, at most `most`."""
    wanted = [
        limit
        for limit in limits
        if not limit.is_default
        and (limit.mode is LimitMode.SOFT or (limit.mode is LimitMode.HARD and limit.window in LONG_WINDOWS))
    ]
    return sorted(wanted, key=lambda limit: limit.limit_id)[:most]


def _described(limit: Limit) -> str:
    shape = (
        f"per {limit.window.value}" if limit.window is not None else "rate" if limit.is_bucket else "at once"
    )
    return f"{limit.meter.value} {shape} of this {limit.kind.value.replace('_', ' ')}"


def _owner(limit: Limit) -> str:
    return "" if is_platforms(limit) else limit.tenant_id


def _limit_page(limit: Limit) -> str:
    if is_platforms(limit):
        return "/console/overview"
    return f"/console/tenants/{quote(limit.tenant_id)}/limits/{quote(limit.limit_id)}"


def _used_up(pressure: LimitPressure) -> str:
    since_us, refused = pressure.since_us, pressure.refused
    since = "" if since_us is None else f" since {from_us(since_us):%Y-%m-%d %H:%M} UTC"
    return f"is used up{since}, {refused:,} requests refused today" if refused else f"is used up{since}"


def _told(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes} min"
