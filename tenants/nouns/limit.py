"""A limit: how it is set and overridden, stored and shown. Pure. What it counts: `tenants/types.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from tenants.fields import Field, fields_of
from tenants.instants import from_us
from tenants.nouns.checks import MAX_MODEL_CHARS, MAX_ZONE_CHARS, REASON, ZONE
from tenants.types import (
    DEFAULT_THRESHOLDS,
    MAX_END_USER_CHARS,
    PLATFORM,
    Limit,
    LimitMode,
    Meter,
    Override,
    SubjectKind,
    Tier,
    Window,
)

MAX_AMOUNT = 9_000_000_000_000_000
"""Below 2**53: Redis computes in doubles, which are exact up to there."""
MAX_ABOVE_TOKENS = 100_000_000
MAX_THRESHOLD = 1_000
"""Ten times the amount: a soft limit may be exceeded."""
MAX_OVERRIDE_S = 366 * 86_400
SUBJECTS = ("tenant", "platform", "project", "key", "end_user", "each_end_user")
"""Fields of the commands that say what a limit binds."""
NARROWER = ("project", "key", "end_user", "each_end_user")
"""Those that say which part of a tenant; one of them at most."""
IDENTITY = (*SUBJECTS, "meter", "window", "time_zone", "tier", "model", "above_tokens")
"""A limit that differs in one of these is another limit; the other fields can be changed."""
IN_FORCE = ("amount", "rate_per_s", "ceiling_per_s")
"""What an override may replace for a time."""
_AMOUNT = {"minimum": 0, "maximum": MAX_AMOUNT}
_RATE = {"exclusiveMinimum": 0}
_FOR = {"exclusiveMinimum": 0, "maximum": MAX_OVERRIDE_S}
_USER = {"maxLength": MAX_END_USER_CHARS}
_ZONE = {"pattern": f"^({ZONE.pattern})$", "maxLength": MAX_ZONE_CHARS}
_MODEL = {"pattern": r"\S", "maxLength": MAX_MODEL_CHARS}
_ABOVE = {"minimum": 0, "maximum": MAX_ABOVE_TOKENS}
_PER_CENT = {"minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": MAX_THRESHOLD}}


class LimitSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/limits`. It binds the platform, or a tenant, or one project, key or end user of it, or
    each of its end users."""

    tenant: Annotated[str | None, Field("Tenant (name or id).")] = None
    platform: Annotated[bool, Field("All tenants together.")] = False
    meter: Annotated[str, Field("What is counted.", "Of", choices=tuple(Meter))]
    project: Annotated[str | None, Field("Only this project of the tenant.")] = None
    key: Annotated[str | None, Field("Only this key of the tenant (id; in a file, name).")] = None
    end_user: Annotated[
        str | None,
        Field("Only this end user, as requests name it (safety_identifier, else user).", schema=_USER),
    ] = None
    each_end_user: Annotated[bool, Field("Each end user without an own limit, each with an own counter.")] = (
        False
    )
    window: Annotated[str | None, Field("Calendar window of the amount.", "In", choices=tuple(Window))] = None
    time_zone: Annotated[
        str,
        Field("Time zone in which the window's days begin.", "Time zone of days and months", schema=_ZONE),
    ] = "UTC"
    rate_per_s: Annotated[
        float | None,
        Field(
            "A bucket that refills by this much a second, up to its burst.",
            "Rate a second",
            "--rate",
            schema=_RATE,
        ),
    ] = None
    ceiling_per_s: Annotated[
        float | None,
        Field(
            "For a hard token rate in tier batch: refill up to this much a second while engines have spare"
            " capacity (gateway.control acting). Left out: never faster than the rate.",
            *("Ceiling a second", "--ceiling"),
            schema=_RATE,
        ),
    ] = None
    amount: Annotated[
        int,
        Field(
            "Size of the window, of the bucket (its burst), or the concurrency, in the meter's unit. 0"
            " refuses all.",
            schema=_AMOUNT,
        ),
    ]
    mode: Annotated[
        str, Field("hard refuses, soft alerts, shadow only counts.", "What it does", choices=tuple(LimitMode))
    ] = "hard"
    tier: Annotated[
        str | None, Field("Only requests in this tier.", "Only of the tier", choices=tuple(Tier))
    ] = None
    model: Annotated[
        str | None, Field("Only requests for this model.", "Only of the model", schema=_MODEL)
    ] = None
    above_tokens: Annotated[
        int,
        Field(
            "Only requests of more tokens than this: prompt plus max_tokens (without max_tokens: what the"
            " context leaves). 0: all.",
            *("Only requests of more tokens than", "--above"),
            schema=_ABOVE,
        ),
    ] = 0
    thresholds: Annotated[
        list[int] | None,
        Field(
            "When a soft limit alerts, in per cent of the amount (repeat).  [default: 80 and 100]",
            option="--threshold",
            schema=_PER_CENT,
            hundred=100,
        ),
    ] = None


class LimitOverride(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/limits/{id}/override`."""

    amount: Annotated[
        int, Field("The window's size, the bucket's burst or the concurrency for that time.", schema=_AMOUNT)
    ]
    rate_per_s: Annotated[
        float | None, Field("A bucket's rate for that time.  [default: its own]", schema=_RATE)
    ] = None
    until: Annotated[
        str | None, Field("When it ends, such as 2026-01-31T18:00:00+01:00.", schema={"format": "date-time"})
    ] = None
    for_s: Annotated[
        float | None,
        Field("How long instead: 2h or 3d.", option="--for", is_duration=True, schema=_FOR),
    ] = None
    reason: Annotated[str, Field("Why; shown with the override.", schema=REASON)]


TERMS = tuple(one.name for one in fields_of(LimitSet) if one.name not in SUBJECTS)


def terms_of(limit: Limit) -> dict[str, Any]:
    """The terms that a limit was set by, but for what it binds."""
    shown = limit_as_json(limit)
    is_usual = limit.thresholds in ((), DEFAULT_THRESHOLDS)
    return {name: shown[name] for name in TERMS} | ({"thresholds": None} if is_usual else {})


def limit_as_json(limit: Limit) -> dict[str, Any]:
    return {
        "id": limit.limit_id,
        "tenant_id": None if limit.kind is SubjectKind.PLATFORM else limit.tenant_id,
        "kind": limit.kind.value,
        "subject_id": limit.subject_id,
        "meter": limit.meter.value,
        "window": limit.window.value if limit.window else None,
        "time_zone": limit.time_zone,
        "amount": limit.amount,
        "rate_per_s": limit.rate_per_s,
        "ceiling_per_s": limit.ceiling_per_s,
        "mode": limit.mode.value,
        "tier": limit.tier.value if limit.tier else None,
        "model": limit.model,
        "above_tokens": limit.above_tokens,
        "end_user": limit.end_user or None,
        "thresholds": list(limit.thresholds),
        "override": None if limit.override is None else _override_as_json(limit.override),
        "counts_since": from_us(limit.created_us).isoformat(),
    }


def _override_as_json(override: Override) -> dict[str, Any]:
    """Readers compare `until` with their own clock."""
    return {
        "amount": override.amount,
        "rate_per_s": override.rate_per_s,
        "until": from_us(override.until_us).isoformat(),
        "reason": override.reason,
    }


def limit_from(row: Mapping[Any, Any], override: Override | None = None) -> Limit:
    mode = LimitMode(row["mode"])
    thresholds = DEFAULT_THRESHOLDS if row["thresholds"] is None else tuple(row["thresholds"])
    return Limit(
        limit_id=row["id"],
        tenant_id=row["tenant_id"] or PLATFORM,
        kind=SubjectKind(row["kind"]),
        subject_id=row["subject_id"],
        meter=Meter(row["meter"]),
        amount=row["amount"],
        window=None if row["shape"] in {"bucket", "concurrency"} else Window(row["shape"]),
        time_zone=row["time_zone"],
        rate_per_s=_rate_from(row["rate_milli"]),
        mode=mode,
        tier=Tier(row["tier"]) if row["tier"] else None,
        thresholds=thresholds if mode is LimitMode.SOFT else (),
        model=row["model"] or None,
        above_tokens=row["above_tokens"],
        end_user=row["end_user"],
        override=override,
        created_us=row["created_us"],
        ceiling_per_s=_rate_from(row["ceiling_milli"]),
    )


def override_from(row: Mapping[Any, Any]) -> Override:
    return Override(row["amount"], _rate_from(row["rate_milli"]), row["until_us"], row["reason"])


def _rate_from(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


def rate_in_words(limit: Limit, as_text: Callable[[float], str] = "{:g}".format, what: str = "") -> str:
    """`50 output_tokens a second (up to 400 by spare capacity)`; empty: it is no bucket."""
    if limit.rate_per_s is None:
        return ""
    text = " ".join(filter(None, (as_text(limit.rate_per_s), what, "a second")))
    if limit.ceiling_per_s is None:
        return text
    return f"{text} (up to {as_text(limit.ceiling_per_s)} by spare capacity)"
