"""Which limits can be set and overridden: bounds, and rules between fields. Pure.

Each error names the field, the bound and the remedy. The counts keep the directory small enough for memory,
and a reservation for one atomic step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenants.errors import Invalid
from tenants.instants import to_us
from tenants.nouns.checks import choice, finite, iana_zone, instant, model, reason, seconds, whole
from tenants.nouns.limit import (
    MAX_ABOVE_TOKENS,
    MAX_AMOUNT,
    MAX_OVERRIDE_S,
    MAX_THRESHOLD,
    NARROWER,
    LimitOverride,
    LimitSet,
)
from tenants.types import MAX_END_USER_CHARS, TOKEN_METERS, Limit, LimitMode, Meter, Tier, Window

MAX_LIMITS_PER_TENANT = 500
MAX_LIMITS_PER_SUBJECT = 32
MAX_BUCKET_AMOUNT = 9_000_000_000
MAX_BUCKET_NANOUSD = 9_000_000_000_000
MAX_CONCURRENCY = 1_000_000
MAX_RATE = 9_000_000
"""A second; of money a thousand times as many nano-dollars."""
MAX_FILL_S = 31 * 86_400
MAX_THRESHOLDS = 8


def narrowed_to(wanted: Any) -> list[str]:
    """The fields that say which part of a tenant it binds."""
    return [name for name in NARROWER if getattr(wanted, name) not in (None, False)]


def limit_columns(wanted: LimitSet) -> dict[str, Any]:
    """The row of the limit, but for its ids. Raises `Invalid`."""
    _check_subject(wanted)
    meter, amount = choice("meter", Meter, wanted.meter), wanted.amount
    columns: dict[str, Any] = {
        "meter": meter.value,
        "mode": choice("mode", LimitMode, wanted.mode).value,
        "tier": "" if wanted.tier is None else choice("tier", Tier, wanted.tier).value,
        "model": "" if wanted.model is None else model("model", wanted.model),
        "above_tokens": whole(wanted.above_tokens, MAX_ABOVE_TOKENS, field="above_tokens"),
        "end_user": "" if wanted.end_user is None else _end_user(wanted.end_user),
        "time_zone": iana_zone(wanted.time_zone),
        "rate_milli": None,
        "ceiling_milli": None,
        "amount": amount,
    }
    if wanted.ceiling_per_s is not None and wanted.rate_per_s is None:
        raise Invalid(
            "ceiling_per_s",
            "only a rate has a ceiling: give rate_per_s with it, or leave it out (the amount of a window or"
            " of concurrency is never moved)",
        )
    if meter is Meter.CONCURRENCY:
        if wanted.window is not None or wanted.rate_per_s is not None:
            raise Invalid("meter", "concurrency takes an amount only: no window, rate or burst")
        columns["shape"] = "concurrency"
        whole(amount, MAX_CONCURRENCY)
    elif wanted.rate_per_s is not None:
        if wanted.window is not None:
            raise Invalid(
                "window", "a limit is a window with an amount or a rate with a burst; set two limits"
            )
        columns |= {"shape": "bucket", "rate_milli": _rate_milli(meter, amount, wanted.rate_per_s, "burst")}
        columns["ceiling_milli"] = _ceiling_milli(wanted, wanted.rate_per_s)
    elif wanted.window is None:
        raise Invalid("window", "give a window (minute, hour, day, month, lifetime) or a rate_per_s")
    else:
        columns["shape"] = choice("window", Window, wanted.window).value
        whole(amount, MAX_AMOUNT)
    return columns | {"thresholds": _thresholds(columns["mode"], wanted.thresholds)}


def override_columns(limit: Limit, wanted: LimitOverride, now_us: int) -> dict[str, Any]:
    """The row of the override, but for its limit. Raises `Invalid`."""
    return {
        "amount": wanted.amount,
        "reason": reason(wanted.reason),
        "until_us": _until_us(wanted, now_us),
        "rate_milli": override_rate_milli(limit, wanted.amount, wanted.rate_per_s),
        "created_us": now_us,
    }


def override_rate_milli(limit: Limit, amount: int, rate_per_s: float | None) -> int | None:
    """Checks an override against the limit's shape; returns its rate in thousandths, if given."""
    if limit.rate_per_s is not None:
        milli = _rate_milli(limit.meter, amount, limit.rate_per_s if rate_per_s is None else rate_per_s)
        return None if rate_per_s is None else milli
    if rate_per_s is not None:
        raise Invalid("rate_per_s", "this limit is no token bucket: override its amount only")
    whole(amount, MAX_CONCURRENCY if limit.meter is Meter.CONCURRENCY else MAX_AMOUNT)
    return None


def _check_subject(wanted: LimitSet) -> None:
    narrower = narrowed_to(wanted)
    if wanted.platform and (wanted.tenant is not None or narrower):
        raise Invalid("platform", "binds all tenants together: name no tenant and nothing of one")
    if not wanted.platform and wanted.tenant is None:
        raise Invalid("tenant", "name the tenant that the limit binds, or set platform to bind all together")
    if len(narrower) > 1:
        raise Invalid(narrower[1], f"a limit binds one subject: leave out {' or '.join(narrower)}")


def _end_user(value: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_END_USER_CHARS:
        raise Invalid("end_user", f"the name of an end user has 1 to {MAX_END_USER_CHARS} characters")
    return value


def _rate_milli(meter: Meter, burst: int, rate_per_s: float, burst_field: str = "amount") -> int:
    """A bucket's rate in thousandths per second. Steps of 0.001 (of 1 for money) make refilling exact."""
    is_money = meter is Meter.COST_NANOUSD
    whole(burst, MAX_BUCKET_NANOUSD if is_money else MAX_BUCKET_AMOUNT, least=1, field=burst_field)
    if not 0.001 <= finite("rate_per_s", rate_per_s) <= 9e9:
        raise Invalid("rate_per_s", "must lie between 0.001 and 9,000,000,000")
    exact = _milli("rate_per_s", rate_per_s)
    if is_money and exact % 1000:
        raise Invalid("rate_per_s", "use whole nano-dollars per second")
    if not is_money and rate_per_s > MAX_RATE:
        raise Invalid("rate_per_s", f"must lie between 0.001 and {MAX_RATE:,}")
    if burst / rate_per_s > MAX_FILL_S:
        raise Invalid("rate_per_s", "would take more than 31 days to fill the burst; use a calendar window")
    return exact


def _milli(field: str, rate_per_s: float) -> int:
    exact = round(rate_per_s * 1000)
    if abs(exact / 1000 - rate_per_s) > 1e-9 * max(1.0, rate_per_s):
        raise Invalid(field, "use steps of 0.001")
    return exact


def _ceiling_milli(wanted: LimitSet, rate_per_s: float) -> int | None:
    """In thousandths per second; None: no ceiling."""
    field, ceiling_per_s = "ceiling_per_s", wanted.ceiling_per_s
    if ceiling_per_s is None:
        return None
    if wanted.meter not in TOKEN_METERS:
        raise Invalid(
            field,
            f"only rates of tokens ({', '.join(TOKEN_METERS)}) follow spare capacity, not {wanted.meter}:"
            " leave it out",
        )
    if wanted.mode != LimitMode.HARD.value:
        raise Invalid(field, f"a {wanted.mode} limit refuses nothing: use mode hard, or leave it out")
    if wanted.tier != Tier.BATCH.value:
        raise Invalid(
            field, "only limits of tier batch follow spare capacity: add tier batch, or leave it out"
        )
    if wanted.each_end_user:
        raise Invalid(
            field,
            "each end user has a counter of its own, so their ceilings would add up without a bound: set it"
            " on the tenant, a project, a key or one end user",
        )
    if finite(field, ceiling_per_s) > MAX_RATE:
        raise Invalid(field, f"must lie between rate_per_s and {MAX_RATE:,}")
    exact = _milli(field, ceiling_per_s)
    if ceiling_per_s < rate_per_s:
        raise Invalid(
            field,
            f"{ceiling_per_s:g} is below rate_per_s, {rate_per_s:g}, which is promised: give at least that,"
            " or leave it out",
        )
    return exact


def _thresholds(mode: str, values: Iterable[int] | None) -> list[int] | None:
    """Where a soft limit alerts, in per cent of its amount, rising; None: the default ones."""
    if values is None:
        return None
    if mode != LimitMode.SOFT.value:
        raise Invalid("thresholds", "only a soft limit alerts: use mode soft, or leave them out")
    chosen = sorted({whole(value, MAX_THRESHOLD, least=1, field="thresholds") for value in values})
    if not 1 <= len(chosen) <= MAX_THRESHOLDS:
        raise Invalid("thresholds", f"give 1 to {MAX_THRESHOLDS} of them, in per cent of the amount")
    return chosen


def _until_us(wanted: LimitOverride, now_us: int) -> int:
    if (wanted.until is None) == (wanted.for_s is None):
        raise Invalid("until", "say when the override ends: give until or for_s, one of them")
    if wanted.for_s is not None:
        return now_us + round(seconds("for_s", wanted.for_s, MAX_OVERRIDE_S, least=1) * 1e6)
    assert wanted.until is not None
    until_us = to_us(instant("until", wanted.until))
    if until_us <= now_us:
        raise Invalid("until", "has already passed")
    if until_us > now_us + MAX_OVERRIDE_S * 1_000_000:
        raise Invalid("until", f"is more than {MAX_OVERRIDE_S // 86_400} days ahead; set the limit instead")
    return until_us
