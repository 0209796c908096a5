"""Codec of limits, holds and counters of `rules.py`: arguments of `lua/*.lua`, and their replies. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from msgspec.structs import replace

from tenants.quota import rules
from tenants.quota.rules import BucketCounter, ConcurrencyCounter, Counter, LimitHold, WindowCounter, Wish
from tenants.quota.spare import ALL_MODELS, History, Spare, by_ages
from tenants.quota.store import Denied, Granted, LimitState
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Tier, Window

T = TypeVar("T")
Ages = Mapping[str, History]
"""The spare capacity passed to a script (`SpareShares.ages`)."""

_METERS = tuple(Meter)
_MODES = {LimitMode.SOFT: 0, LimitMode.HARD: 1, LimitMode.SHADOW: 2}


# ---------------------------------------------------------------- arguments


def lease_us(lease_ttl_s: float) -> int:
    return round(lease_ttl_s * 1e6)


def by_meter(amounts: Amounts) -> list[int]:
    """One number for each meter, in the order of `Meter`."""
    return [amounts.of(meter) for meter in _METERS]


def columns(
    of: Callable[[Limit, T, int], list[Any]], limits: Sequence[Limit], values: Sequence[T], now_us: int
) -> Iterator[Any]:
    """Arguments of all limits, each by `of` from its value."""
    return chain.from_iterable(of(limit, value, now_us) for limit, value in zip(limits, values, strict=True))


def reserve_columns(limit: Limit, wish: Wish, now_us: int) -> list[Any]:
    return _columns(limit, (wish.first, wish.ahead, wish.most), _bounds(limit, now_us))


def restore_columns(limit: Limit, part: LimitHold, start_us: int) -> list[Any]:
    """Arguments of one limit for a restored hold, in the window that began at `start_us`."""
    return _columns(limit, (part.held, part.charged, part.most), _bounds(limit, start_us))


def names(limits: Sequence[Limit]) -> list[str]:
    """Arguments for reading the counters: of each its home and its name."""
    return [part for limit in limits for part in (home(limit), limit.identity)]


def rebuild_columns(limit: Limit, used: int, now_us: int) -> list[Any]:
    start_us, end_us = _bounds(limit, now_us)
    return [
        limit.identity,
        _shape(limit),
        home(limit),
        used,
        limit.amount,
        start_us,
        end_us,
        limit.scale,
        rules.rate_per_ms(limit) if limit.is_bucket else 0,
    ]


def _columns(limit: Limit, numbers: tuple[int, int, int], bounds: tuple[int, int]) -> list[Any]:
    return [
        limit.identity,
        _shape(limit),
        _MODES[limit.mode],
        _METERS.index(limit.meter) + 1,
        int(rules.is_exact(limit)),
        *numbers,
        limit.amount,
        *bounds,
        limit.scale,
        rules.rate_per_ms(limit) if limit.is_bucket else 0,
        rules.lowest_level(limit),
        home(limit),
        rules.ceiling_per_ms(limit) if limit.is_bucket else 0,
        limit.model or ALL_MODELS,
    ]


def home(limit: Limit) -> str:
    """Whose counter it is: `p` the platform's, an end user's id, or empty: the tenant's."""
    match limit.kind:
        case SubjectKind.PLATFORM:
            return "p"
        case SubjectKind.END_USER:
            return limit.subject_id
    return ""


def _shape(limit: Limit) -> str:
    if limit.window is not None:
        return "w"
    return "b" if limit.is_bucket else "c"


def _bounds(limit: Limit, at_us: int) -> tuple[int, int]:
    if limit.window is None:
        return 0, 0
    return rules.window_bounds_us(limit.window, limit.time_zone, at_us)


# ---------------------------------------------------------------- replies


def granted(reply: list[Any], ages: Ages) -> Granted:
    """Decodes the reply of a script that held. `ages`: as passed to it."""
    now_us, limits = int(reply[1]), unpack(reply[2])
    spare = spare_at(ages, now_us)
    counters = [advanced(limit, raw, now_us, spare) for limit, raw in zip(limits, reply[3], strict=True)]
    pairs = list(zip(limits, counters, strict=True))
    return Granted(
        states=_views(limits, counters, now_us, spare),
        exceeded=tuple(
            limit
            for limit, counter in pairs
            if limit.mode is not LimitMode.HARD and rules.is_exceeded(limit, counter)
        ),
        charged_to=tuple(map(rules.charge_name_at, limits, reply[5])),
        covered=rules.covered(limits, [LimitHold(*part) for part in reply[4]], _amounts(reply[6])),
        would_deny=tuple(limits[index - 1] for index in reply[7]),
    )


def denied_reserve(limits: Sequence[Limit], wishes: Sequence[Wish], reply: list[Any], ages: Ages) -> Denied:
    now_us = int(reply[1])
    spare = spare_at(ages, now_us)
    counters = [advanced(limit, raw, now_us, spare) for limit, raw in zip(limits, reply[2], strict=True)]
    return _denied(limits, counters, counters, [LimitHold()] * len(limits), wishes, now_us, spare)


def denied_rebind(limits: Sequence[Limit], reply: list[Any], ages: Ages) -> Denied:
    """Decodes a refusal of `rebind`: of the limits that have to fit, the counters beside this request and
    what it would hold; then the current counters of all."""
    now_us = int(reply[1])
    chosen = [limits[index - 1] for index in reply[2]]
    counters = [_parsed(limit, raw) for limit, raw in zip(chosen, reply[3], strict=True)]
    wishes = [rules.wish_of(LimitHold(*part)) for part in reply[4]]
    spare = spare_at(ages, now_us)
    nothing = [LimitHold()] * len(chosen)
    denied = rules.refuse(chosen, counters, nothing, wishes, now_us, partial(rules.rate_now, spare=spare))
    assert denied is not None, "the Lua scripts and rules.py disagree"
    current = [advanced(limit, raw, now_us, spare) for limit, raw in zip(limits, reply[5], strict=True)]
    return replace(denied, states=_views(limits, current, now_us, spare))


def denied_top_up(first: Amounts, ahead: Amounts, reply: list[Any], ages: Ages) -> Denied:
    now_us, limits = int(reply[1]), unpack(reply[2])
    spare = spare_at(ages, now_us)
    current = [advanced(limit, raw, now_us, spare) for limit, raw in zip(limits, reply[3], strict=True)]
    # An ended window is judged as it is, not as its successor.
    counters = [
        _parsed(limit, raw) if limit.window is not None else advanced(limit, raw, now_us, spare)
        for limit, raw in zip(limits, reply[5], strict=True)
    ]
    parts = [LimitHold(*part) for part in reply[4]]
    wishes = [rules.wish_more(limit, first, ahead) for limit in limits]
    return _denied(limits, counters, current, parts, wishes, now_us, spare)


def _denied(
    limits: Sequence[Limit],
    counters: Sequence[Counter | None],
    current: Sequence[Counter],
    parts: Sequence[LimitHold],
    wishes: Sequence[Wish],
    now_us: int,
    spare: Spare,
) -> Denied:
    denied = rules.refuse(limits, counters, parts, wishes, now_us, partial(rules.rate_now, spare=spare))
    assert denied is not None, "the Lua scripts and rules.py disagree"
    return replace(denied, states=_views(limits, current, now_us, spare))


def _views(
    limits: Iterable[Limit], counters: Iterable[Counter], now_us: int, spare: Spare
) -> tuple[LimitState, ...]:
    pairs = zip(limits, counters, strict=True)
    return tuple(rules.view(limit, counter, now_us, spare) for limit, counter in pairs)


def spare_at(ages: Ages, now_us: int) -> Spare:
    return by_ages(ages, now_us // 1_000)


def advanced(limit: Limit, raw: bytes, now_us: int, spare: Spare) -> Counter:
    """A counter at `now_us`; empty: never used."""
    return rules.advance(limit, _parsed(limit, raw), now_us, spare)


def _parsed(limit: Limit, raw: bytes) -> Counter | None:
    numbers = [int(number) for number in raw.split()]
    if not numbers:
        return None
    if limit.window is not None:
        return WindowCounter(*numbers)
    return BucketCounter(*numbers) if limit.is_bucket else ConcurrencyCounter(*numbers)


def _amounts(numbers: Sequence[int]) -> Amounts:
    by = dict(zip(_METERS, numbers, strict=True))
    return Amounts(
        input_tokens=by[Meter.INPUT_TOKENS],
        output_tokens=by[Meter.OUTPUT_TOKENS],
        cost_nanousd=by[Meter.COST_NANOUSD],
        requests=by[Meter.REQUESTS],
        gpu_ms=by[Meter.GPU_MS],
    )


# ---------------------------------------------------------------- limits as text

_ADDED = ("model", "above_tokens", "end_user", "ceiling_per_s")
"""Columns at the end, which holds of earlier versions lack."""


def pack(limits: Sequence[Limit]) -> str:
    """Limits as text stored with the hold, so that another process can continue it."""
    return json.dumps(
        [
            [
                limit.limit_id,
                limit.tenant_id,
                limit.kind,
                limit.subject_id,
                limit.meter,
                limit.amount,
                limit.window,
                limit.time_zone,
                limit.rate_per_s,
                limit.mode,
                limit.tier,
                limit.thresholds,
                limit.model,
                limit.above_tokens,
                limit.end_user,
                # Only where there is one, for gateways that do not know of it yet.
                *(() if limit.ceiling_per_s is None else (limit.ceiling_per_s,)),
            ]
            for limit in limits
        ],
        separators=(",", ":"),
    )


def unpack(text: bytes) -> list[Limit]:
    """Inverse of `pack`; also of holds that an earlier version stored, without the last columns."""
    return [
        Limit(
            limit_id,
            tenant_id,
            SubjectKind(kind),
            subject_id,
            Meter(meter),
            amount,
            None if window is None else Window(window),
            time_zone,
            rate_per_s,
            LimitMode(mode),
            None if tier is None else Tier(tier),
            tuple(thresholds),
            **dict(zip(_ADDED, since, strict=False)),
        )
        for (
            limit_id,
            tenant_id,
            kind,
            subject_id,
            meter,
            amount,
            window,
            time_zone,
            rate_per_s,
            mode,
            tier,
            thresholds,
            *since,
        ) in json.loads(text)
    ]
