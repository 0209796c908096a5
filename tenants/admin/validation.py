"""Checks of the values that admin acts set. Pure; each error names the field, the bound and the remedy.

The counts below keep the directory small enough for memory and a reservation for one atomic step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from tenants.admin.commands import LimitSet
from tenants.errors import Invalid
from tenants.networks import Network, network_of
from tenants.people.roles import Role
from tenants.types import (
    MAX_END_USER_CHARS,
    SCOPES,
    TOKEN_METERS,
    Labels,
    Limit,
    LimitMode,
    Meter,
    OnLowBudget,
    Tier,
    Window,
)

MAX_TENANTS = 10_000
MAX_PROJECTS_PER_TENANT = 200
MAX_KEYS_PER_TENANT = 1_000
MAX_LIMITS_PER_TENANT = 500
MAX_LIMITS_PER_SUBJECT = 32
MAX_SECRETS_PER_KEY = 4
MAX_MODELS = 100
MAX_MODEL_CHARS = 256
MAX_NETWORKS = 32
MAX_LABELS = 8
MAX_LABEL_VALUES = 64
MAX_LABEL_CHARS = 64

MIN_WEIGHT = 0.01
MAX_WEIGHT = 1_000.0
MAX_RESERVED_TOKENS_PER_S = 1e9

MAX_ABOVE_TOKENS = 100_000_000

MAX_AMOUNT = 9_000_000_000_000_000
"""Below 2**53: Redis computes in doubles, which are exact up to there."""
MAX_BUCKET_AMOUNT = 9_000_000_000
MAX_BUCKET_NANOUSD = 9_000_000_000_000
MAX_FILL_S = 31 * 86_400
MAX_EXPIRY_S = 10 * 366 * 86_400
MAX_GRACE_S = 30 * 86_400
MAX_OVERRIDE_S = 366 * 86_400
MAX_REASON_CHARS = 200
MAX_ZONE_CHARS = 64
MAX_THRESHOLDS = 8
MAX_THRESHOLD = 1_000
"""Ten times the amount: a soft limit may be exceeded."""

ALL_TIERS = "all"
"""Of a reservation that is not for one tier."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+/-]*")
_ID = re.compile(r"(ten|prj|key|lim)_")


def name(field: str, value: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Invalid(field, "use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    if _ID.match(value):
        raise Invalid(field, "must not look like an id (ten_, prj_, key_, lim_)")
    return value


def plain_text(field: str, value: str, most: int = 256) -> str:
    """A value to look for, of printable characters: PostgreSQL takes no NUL."""
    if not value or len(value) > most or not value.isprintable():
        raise Invalid(field, f"needs 1 to {most} printable characters; leave it out for any")
    return value


def finite(field: str, value: float, what: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(field, f"must be {what}")
    return value


def weight(value: float) -> float:
    if not MIN_WEIGHT <= finite("weight", value) <= MAX_WEIGHT:
        raise Invalid("weight", f"must lie between {MIN_WEIGHT} and {MAX_WEIGHT:g}")
    return float(value)


def reserved(value: float) -> float:
    name = "reserved_tokens_per_s"
    finite(name, value, "a finite number of cost tokens per second (0: no reservation)")
    if not 0 <= value <= MAX_RESERVED_TOKENS_PER_S:
        raise Invalid(name, f"must lie between 0 (no reservation) and {MAX_RESERVED_TOKENS_PER_S:g}")
    return float(value)


def reserved_tier(value: str, tokens_per_s: float) -> Tier | None:
    """None: all tiers."""
    if value == ALL_TIERS:
        return None
    if value not in list(Tier):
        raise Invalid("reserved_tier", f"{value!r} is not one of {', '.join(Tier)}, {ALL_TIERS}")
    if not tokens_per_s:
        raise Invalid(
            "reserved_tier", f"nothing is reserved for {value!r}: give reserved_tokens_per_s above 0, too"
        )
    return Tier(value)


E = TypeVar("E", Tier, Meter, LimitMode, Window, OnLowBudget, Role)


def choice(field: str, kind: type[E], value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise Invalid(field, f"{value!r} is not one of {known}") from None


def tiers(default: Tier, values: Iterable[str] | None) -> frozenset[Tier]:
    """None: the default tier and those served after it, not the better ones."""
    if values is None:
        order = list(Tier)
        return frozenset(order[order.index(default) :])
    chosen = frozenset(choice("tiers", Tier, value) for value in values)
    if default not in chosen:
        raise Invalid("tiers", f"must hold the default tier {default.value!r}")
    return chosen


def models(values: Iterable[str] | None) -> frozenset[str] | None:
    """None: all."""
    if values is None:
        return None
    chosen = frozenset(values)
    if not chosen or len(chosen) > MAX_MODELS:
        raise Invalid("models", f"name 1 to {MAX_MODELS} models, or leave it out to allow all")
    return frozenset(model("models", value) for value in chosen)


def model(field: str, value: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_MODEL_CHARS:
        raise Invalid(field, f"a model's name has 1 to {MAX_MODEL_CHARS} characters")
    return value


def end_user(value: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_END_USER_CHARS:
        raise Invalid("end_user", f"the name of an end user has 1 to {MAX_END_USER_CHARS} characters")
    return value


def subject(wanted: LimitSet) -> None:
    narrower = [name for name in ("project", "key", "end_user") if getattr(wanted, name) is not None]
    narrower += ["each_end_user"] if wanted.each_end_user else []
    if wanted.platform and (wanted.tenant is not None or narrower):
        raise Invalid("platform", "binds all tenants together: name no tenant and nothing of one")
    if not wanted.platform and wanted.tenant is None:
        raise Invalid("tenant", "name the tenant that the limit binds, or set platform to bind all together")
    if len(narrower) > 1:
        raise Invalid(narrower[1], f"a limit binds one subject: leave out {' or '.join(narrower)}")


def scopes(values: Iterable[str]) -> frozenset[str]:
    chosen = frozenset(values)
    if not chosen or chosen - SCOPES:
        wrong = ", ".join(sorted(map(repr, chosen - SCOPES))) or "none"
        raise Invalid("scopes", f"{wrong} given; choose from {', '.join(sorted(SCOPES))}")
    return chosen


def networks(values: Iterable[str] | None) -> tuple[Network, ...]:
    """None: anywhere."""
    try:
        chosen = dict.fromkeys(network_of(value) for value in values or ())
    except ValueError as error:
        raise Invalid("allow_from", str(error)) from None
    if len(chosen) > MAX_NETWORKS:
        raise Invalid("allow_from", f"{len(chosen)} networks; the most is {MAX_NETWORKS}: name larger ones")
    return tuple(chosen)


def labels(before: Labels, wanted: Mapping[str, Iterable[str]]) -> Labels:
    """Each label that is `wanted` has these values, or is dropped where there are none; the others stay."""
    after = dict(before)
    for key, values in wanted.items():
        chosen = tuple(sorted({_label(value) for value in values}))
        if chosen:
            after[_label_key(key)] = chosen
        elif after.pop(key, None) is None:
            known = ", ".join(map(repr, before)) or "none"
            raise Invalid(
                "labels", f"{key[:MAX_LABEL_CHARS]!r} is not there to be dropped; there are: {known}"
            )
    for key, chosen in after.items():
        if len(chosen) > MAX_LABEL_VALUES:
            raise Invalid("labels", f"{key!r} has {len(chosen)} values; the most is {MAX_LABEL_VALUES}")
    if len(after) > MAX_LABELS:
        raise Invalid("labels", f"{len(after)} of them; the most is {MAX_LABELS}: drop one that is not used")
    return after


def _label_key(text: str) -> str:
    if "," in text or "=" in text:
        raise Invalid("labels", f"{text[:MAX_LABEL_CHARS]!r}: keys have no ',' and no '='")
    return _label(text)


def _label(text: str) -> str:
    if not 0 < len(text) <= MAX_LABEL_CHARS or not text.isprintable() or text != text.strip():
        raise Invalid(
            "labels",
            f"{text[:MAX_LABEL_CHARS]!r}: keys and values have 1 to {MAX_LABEL_CHARS} printable characters,"
            " without spaces around them",
        )
    return text


def seconds(field: str, value: float, most: float, *, least: float = 0.0) -> float:
    if not least <= finite(field, value, "a finite number of seconds") <= most:
        raise Invalid(field, f"must lie between {least:g} and {most:g} seconds")
    return float(value)


def expires_us(now_us: int, expires: int | None, expires_in_s: float | None) -> int | None:
    """An instant in microseconds, or so many seconds from now; None: no end."""
    if expires is None:
        return None if expires_in_s is None else now_us + round(expires_in_s * 1e6)
    if expires_in_s is not None:
        raise Invalid("expires", "say when the key ends once: give expires or expires_in_s")
    if not now_us + 1_000_000 <= expires <= now_us + MAX_EXPIRY_S * 1_000_000:
        raise Invalid("expires", f"must lie 1 second to {MAX_EXPIRY_S // 86_400} days ahead")
    return expires


def whole(value: int, most: int, *, least: int = 0, field: str = "amount") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(field, "must be a whole number")
    if not least <= value <= most:
        raise Invalid(field, f"must lie between {least} and {most}")
    return value


def rate_milli(meter: Meter, burst: int, rate_per_s: float) -> int:
    """A bucket's rate in thousandths per second. Steps of 0.001 (of 1 for money) make refilling exact."""
    if not 0.001 <= finite("rate_per_s", rate_per_s) <= 9e9:
        raise Invalid("rate_per_s", "must lie between 0.001 and 9,000,000,000")
    exact = round(rate_per_s * 1000)
    if abs(exact / 1000 - rate_per_s) > 1e-9 * max(1.0, rate_per_s):
        raise Invalid("rate_per_s", "use steps of 0.001")
    if meter is Meter.COST_NANOUSD and exact % 1000:
        raise Invalid("rate_per_s", "use whole nano-dollars per second")
    if meter is not Meter.COST_NANOUSD and rate_per_s > 9_000_000:
        raise Invalid("rate_per_s", "must lie between 0.001 and 9,000,000")
    if burst / rate_per_s > MAX_FILL_S:
        raise Invalid("rate_per_s", "would take more than 31 days to fill the burst; use a calendar window")
    return exact


def ceiling_milli(wanted: LimitSet) -> int | None:
    """In thousandths per second; None: no ceiling. Raises `Invalid`."""
    ceiling_per_s, rate_per_s = wanted.ceiling_per_s, wanted.rate_per_s
    if ceiling_per_s is None:
        return None
    assert rate_per_s is not None
    field = "ceiling_per_s"
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
    exact = round(finite(field, ceiling_per_s) * 1000)
    if ceiling_per_s > 9_000_000:
        raise Invalid(field, "must lie between rate_per_s and 9,000,000")
    if abs(exact / 1000 - ceiling_per_s) > 1e-9 * max(1.0, ceiling_per_s):
        raise Invalid(field, "use steps of 0.001")
    if ceiling_per_s < rate_per_s:
        raise Invalid(
            field,
            f"{ceiling_per_s:g} is below rate_per_s, {rate_per_s:g}, which is promised: give at least that,"
            " or leave it out",
        )
    return exact


def iana_zone(value: str) -> str:
    try:
        if len(value) > MAX_ZONE_CHARS or ZONE.fullmatch(value) is None:
            raise ValueError
        ZoneInfo(value)
    except (ValueError, OSError, KeyError, TypeError):
        raise Invalid(
            "time_zone", f"{str(value)[:64]!r} is not a time zone such as UTC or Europe/Berlin"
        ) from None
    return value


def limit_columns(wanted: LimitSet) -> dict[str, Any]:
    """Raises `Invalid`."""
    meter, amount = choice("meter", Meter, wanted.meter), wanted.amount
    columns: dict[str, Any] = {
        "meter": meter.value,
        "mode": choice("mode", LimitMode, wanted.mode).value,
        "tier": "" if wanted.tier is None else choice("tier", Tier, wanted.tier).value,
        "model": "" if wanted.model is None else model("model", wanted.model),
        "above_tokens": whole(wanted.above_tokens, MAX_ABOVE_TOKENS, field="above_tokens"),
        "end_user": "" if wanted.end_user is None else end_user(wanted.end_user),
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
        whole(amount, 1_000_000)
    elif wanted.rate_per_s is not None:
        if wanted.window is not None:
            raise Invalid(
                "window", "a limit is a window with an amount or a rate with a burst; set two limits"
            )
        most = MAX_BUCKET_NANOUSD if meter is Meter.COST_NANOUSD else MAX_BUCKET_AMOUNT
        whole(amount, most, least=1, field="burst")
        columns |= {"shape": "bucket", "rate_milli": rate_milli(meter, amount, wanted.rate_per_s)}
        columns["ceiling_milli"] = ceiling_milli(wanted)
    elif wanted.window is None:
        raise Invalid("window", "give a window (minute, hour, day, month, lifetime) or a rate_per_s")
    else:
        columns["shape"] = choice("window", Window, wanted.window).value
        whole(amount, MAX_AMOUNT)
    return columns | {"thresholds": thresholds(columns["mode"], wanted.thresholds)}


def thresholds(mode: str, values: Iterable[int] | None) -> list[int] | None:
    """Where a soft limit alerts, in per cent of its amount, rising; None: the default ones."""
    if values is None:
        return None
    if mode != LimitMode.SOFT.value:
        raise Invalid("thresholds", "only a soft limit alerts: use mode soft, or leave them out")
    chosen = sorted({whole(value, MAX_THRESHOLD, least=1, field="thresholds") for value in values})
    if not 1 <= len(chosen) <= MAX_THRESHOLDS:
        raise Invalid("thresholds", f"give 1 to {MAX_THRESHOLDS} of them, in per cent of the amount")
    return chosen


def override_until_us(now_us: int, until_us: int | None, for_s: float | None) -> int:
    """An instant, or `for_s` seconds from now."""
    if (until_us is None) == (for_s is None):
        raise Invalid("until", "say when the override ends: give until or for_s, one of them")
    if for_s is not None:
        return now_us + round(seconds("for_s", for_s, MAX_OVERRIDE_S, least=1) * 1e6)
    assert until_us is not None
    if until_us <= now_us:
        raise Invalid("until", "has passed already: an override that has expired would change nothing")
    if until_us > now_us + MAX_OVERRIDE_S * 1_000_000:
        raise Invalid("until", f"is more than {MAX_OVERRIDE_S // 86_400} days ahead; set the limit instead")
    return until_us


def override_rate_milli(limit: Limit, amount: int, rate_per_s: float | None) -> int | None:
    """Checks an override against the limit's shape; returns its rate in thousandths, if given."""
    if limit.is_bucket:
        most = MAX_BUCKET_NANOUSD if limit.meter is Meter.COST_NANOUSD else MAX_BUCKET_AMOUNT
        whole(amount, most, least=1)
        rate = limit.rate_per_s if rate_per_s is None else rate_per_s
        assert rate is not None
        exact = rate_milli(limit.meter, amount, rate)
        return None if rate_per_s is None else exact
    if rate_per_s is not None:
        raise Invalid("rate_per_s", "this limit is no token bucket: override its amount only")
    whole(amount, 1_000_000 if limit.meter is Meter.CONCURRENCY else MAX_AMOUNT)
    return None


def reason(value: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_REASON_CHARS:
        raise Invalid("reason", f"say why, in 1 to {MAX_REASON_CHARS} characters")
    return value


def instant(field: str, value: str) -> datetime:
    """ISO 8601 with a time zone, such as 2026-01-31T18:00:00+01:00."""
    try:
        at = datetime.fromisoformat(value)
        if at.tzinfo is None:
            raise ValueError
        return at.astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        raise Invalid(
            field,
            f"{str(value)[:40]!r} is not an instant with a time zone, such as 2026-01-31T18:00:00+01:00",
        ) from None
