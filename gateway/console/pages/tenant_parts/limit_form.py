"""The form of a limit, and the commands it makes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.console.pages.tenant_parts.amounts import (
    amount_of,
    amount_typed,
    decimal_typed,
    rate_of,
    whole_typed,
)
from tenants.admin.commands import LimitOverride, LimitSet
from tenants.errors import Invalid
from tenants.people.roles import Act
from tenants.types import Limit, Meter, SubjectKind

RATE = "rate"
"""Selected instead of a window: a token bucket."""
SUBJECT_KINDS = {
    "tenant": "The tenant, all of it together",
    "project": "A project",
    "key": "A key",
    "end_user": "One end user",
    "each_end_user": "Each end user, for itself",
}
FIELDS = (
    "on",
    "subject",
    "meter",
    "amount",
    "window",
    "time_zone",
    "rate_per_s",
    "ceiling_per_s",
    "mode",
    "tier",
    "model",
    "above_tokens",
)
NEW_LIMIT = {
    "on": "tenant",
    "meter": Meter.TOTAL_TOKENS.value,
    "window": "day",
    "time_zone": "UTC",
    "mode": "hard",
}
NAMED_FIELD = {
    "project": "subject",
    "key": "subject",
    "end_user": "subject",
    "burst": "amount",
    "tenant": "on",
}
"""Form fields of command fields with other names."""


def act_on(kind: SubjectKind) -> Act:
    """The right needed to set, override or remove a limit on such a subject."""
    match kind:
        case SubjectKind.PLATFORM:
            return Act.CHANGE_PLATFORM
        case SubjectKind.TENANT:
            return Act.CHANGE_TENANT
        case _:
            return Act.LIMIT_BELOW_TENANT


def kind_of(form: Mapping[str, str]) -> SubjectKind:
    on = form.get("on", "")
    if on not in SUBJECT_KINDS:
        raise Invalid("on", f"{on[:40]!r} is not one of {', '.join(SUBJECT_KINDS)}")
    return SubjectKind.END_USER if on == "each_end_user" else SubjectKind(on)


def set_of(form: Mapping[str, str], tenant_id: str) -> LimitSet:
    on, subject, meter = form.get("on", ""), form.get("subject", "").strip(), form.get("meter", "")
    if on in ("project", "key", "end_user") and not subject:
        raise Invalid("subject", f"say which {on.replace('_', ' ')}")
    window = form.get("window", "")
    is_rate, is_concurrency = window == RATE, meter == Meter.CONCURRENCY
    above = form.get("above_tokens", "").strip()
    return LimitSet(
        tenant=tenant_id,
        project=subject if on == "project" else None,
        key=subject if on == "key" else None,
        end_user=subject if on == "end_user" else None,
        each_end_user=on == "each_end_user",
        meter=meter,
        amount=amount_of(meter, form.get("amount", "")),
        window=None if is_rate or is_concurrency else window,
        time_zone=form.get("time_zone", "").strip() or "UTC",
        rate_per_s=rate_of(meter, form.get("rate_per_s", "")) if is_rate and not is_concurrency else None,
        ceiling_per_s=_ceiling_of(meter, form),
        mode=form.get("mode", ""),
        tier=form.get("tier") or None,
        model=form.get("model", "").strip() or None,
        above_tokens=whole_typed("above_tokens", above) if above else 0,
    )


def same_with(limit: Limit, form: Mapping[str, str]) -> LimitSet:
    """The command that sets the form's amount, rate, ceiling and mode on a limit. Raises `Invalid`."""
    meter, mode = limit.meter.value, form.get("mode", "")
    return LimitSet(
        tenant=limit.tenant_id,
        project=limit.subject_id if limit.kind is SubjectKind.PROJECT else None,
        key=limit.subject_id if limit.kind is SubjectKind.KEY else None,
        end_user=limit.end_user if limit.kind is SubjectKind.END_USER and not limit.is_default else None,
        each_end_user=limit.is_default,
        meter=meter,
        amount=amount_of(meter, form.get("amount", "")),
        window=None if limit.window is None else limit.window.value,
        time_zone=limit.time_zone,
        rate_per_s=rate_of(meter, form.get("rate_per_s", "")) if limit.is_bucket else None,
        ceiling_per_s=_ceiling_of(meter, form) if limit.is_bucket else None,
        mode=mode,
        tier=None if limit.tier is None else limit.tier.value,
        model=limit.model,
        above_tokens=limit.above_tokens,
        thresholds=list(limit.thresholds) if mode == "soft" and limit.thresholds else None,
    )


def _ceiling_of(meter: str, form: Mapping[str, str]) -> float | None:
    typed = form.get("ceiling_per_s", "").strip()
    return rate_of(meter, typed, "ceiling_per_s") if typed else None


def override_of(limit: Limit, form: Mapping[str, str]) -> LimitOverride:
    meter, rate = limit.meter.value, form.get("override_rate", "").strip()
    return LimitOverride(
        amount=amount_of(meter, form.get("override_amount", "")),
        rate_per_s=rate_of(meter, rate) if rate else None,
        for_s=float(decimal_typed("for_h", form.get("for_h", "")) * 3_600),
        reason=form.get("reason", ""),
    )


def stored_in_form(limit: Limit) -> dict[str, str]:
    rate = limit.rate_per_s or 0
    shown = rate / 1e9 if limit.meter is Meter.COST_NANOUSD else rate
    return {
        "amount": amount_typed(limit.meter, limit.amount),
        "rate_per_s": f"{shown:.15g}" if limit.is_bucket else "",
        "ceiling_per_s": "" if limit.ceiling_per_s is None else f"{limit.ceiling_per_s:.15g}",
        "mode": limit.mode.value,
    }
