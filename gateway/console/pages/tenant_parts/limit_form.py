"""The form of a limit, and the commands it makes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.console.pages.tenant_parts.amounts import (
    METERS,
    MODES,
    amount_text,
    amount_typed,
    narrowed,
    subject_text,
    what_of,
)
from tenants.errors import Invalid
from tenants.fields import CommandField, fields_of
from tenants.nouns.limit import (
    IDENTITY,
    NARROWER,
    SUBJECTS,
    LimitOverride,
    LimitSet,
    limit_as_json,
    limit_from,
    terms_of,
)
from tenants.nouns.limit_checks import limit_columns
from tenants.people.roles import Act
from tenants.typed import amount_of, decimal_typed, rate_of, whole_typed
from tenants.types import PLATFORM, Limit, LimitMode, Meter, SubjectKind, Tier, Window

RATE = "rate"
"""Selected instead of a window: a token bucket."""
SUBJECT_KINDS = {
    "tenant": "the whole tenant",
    "project": "one project",
    "key": "one key",
    "end_user": "one end user",
    "each_end_user": "each end user",
}
TYPED_TERMS = tuple(one for one in fields_of(LimitSet) if one.name not in SUBJECTS and one.kind is not list)
"""On the form, in this order; thresholds are not."""
FIELDS = ("on", "subject", *(one.name for one in TYPED_TERMS))
NEW_LIMIT = {"on": "tenant", "meter": Meter.TOTAL_TOKENS.value, "window": "day"} | {
    one.name: str(one.default) for one in TYPED_TERMS if one.default and isinstance(one.default, str)
}
SENTENCE = ("amount", "meter", "window")
"""With what it binds they make the sentence; the rest stands under "More"."""
FURTHER_TERMS = tuple(one for one in TYPED_TERMS if one.name not in SENTENCE)
EFFECTS = {
    LimitMode.HARD: "Further requests are refused.",
    LimitMode.SOFT: "It alerts, and refuses nothing.",
    LimitMode.SHADOW: "It only counts, and refuses nothing.",
}
NAMED_FIELD = dict.fromkeys(NARROWER, "subject") | {"burst": "amount", "tenant": "on"}
"""Form fields of command fields with other names."""
OPTIONS = {
    "meter": [(meter.value, words) for meter, words in METERS.items()],
    "window": [
        *((window.value, window.value) for window in Window if window is not Window.LIFETIME),
        (Window.LIFETIME.value, "lifetime, in all"),
        (RATE, "second, as a rate"),
    ],
    "mode": [(mode.value, words) for mode, words in MODES.items()],
    "tier": [("", "all tiers together"), *((tier.value, tier.value) for tier in Tier)],
}
HINTS = dict.fromkeys(("meter", "mode", "tier"), "") | {
    "amount": "Such as 1,000,000 or 1m. Cost in dollars, device time in milliseconds; of a rate the burst.",
    "window": "Requests at a time need none.",
    "rate_per_s": "Of a rate: what it refills by a second.",
    "model": "Empty: all models together.",
    "above_tokens": "Prompt and longest answer together; empty: all requests.",
}
"""Where a form is filled in otherwise than a command."""


def changed_terms(limit: Limit) -> list[CommandField]:
    """What can be changed of a limit; rates only of a bucket."""
    return [
        one for one in TYPED_TERMS if one.name not in IDENTITY and (limit.is_bucket or one.kind is not float)
    ]


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


def set_of(form: Mapping[str, str], tenant_id: str | None) -> LimitSet:
    """None: on all tenants together. Raises `Invalid`."""
    on, subject, meter = form.get("on", ""), form.get("subject", "").strip(), form.get("meter", "")
    if on in ("project", "key", "end_user") and not subject:
        raise Invalid("subject", f"say which {on.replace('_', ' ')}")
    given = _typed(meter, TYPED_TERMS, form)
    is_rate, is_concurrency = form.get("window") == RATE, meter == Meter.CONCURRENCY
    if is_rate or is_concurrency:
        given["window"] = None
    if is_concurrency or not is_rate:
        given["rate_per_s"] = None
    elif given["rate_per_s"] is None:
        raise Invalid("rate_per_s", "give a number from 0 on, such as 12.5")
    if tenant_id is None:
        return LimitSet(platform=True, **given)
    bound = {} if on == "tenant" else {on: True if on == "each_end_user" else subject}
    return LimitSet(tenant=tenant_id, **given | bound)


def preview_of(wanted: LimitSet, form: Mapping[str, str], owner: str) -> str:
    """The limit as a sentence. `owner`: the tenant's name. Raises `Invalid`."""
    kind = SubjectKind.PLATFORM if wanted.platform else kind_of(form)
    ids = {"id": "", "tenant_id": PLATFORM, "kind": kind.value, "subject_id": PLATFORM, "created_us": 0}
    limit = limit_from(limit_columns(wanted) | ids)
    is_whole = kind in (SubjectKind.PLATFORM, SubjectKind.TENANT)
    whom = subject_text(limit, owner if is_whole else form.get("subject", "").strip())
    of, only = "" if is_whole else f" of {owner}", narrowed(limit)
    amount = f"{amount_text(limit.meter, limit.amount)} {what_of(limit)}"
    return f"At most {amount} for {whom}{of}{only and f', only {only}'}. {EFFECTS[limit.mode]}"


def same_with(limit: Limit, form: Mapping[str, str]) -> LimitSet:
    """The command that sets what the form changes of a limit. Raises `Invalid`."""
    terms = terms_of(limit) | _typed(limit.meter.value, changed_terms(limit), form)
    if terms["mode"] != LimitMode.SOFT:
        terms["thresholds"] = None
    bound: dict[str, Any] = {}
    if limit.kind is SubjectKind.PLATFORM:
        return LimitSet(platform=True, **terms)
    if limit.is_default:
        bound = {"each_end_user": True}
    elif limit.kind is not SubjectKind.TENANT:
        bound = {limit.kind.value: limit.end_user or limit.subject_id}
    return LimitSet(tenant=limit.tenant_id, **terms | bound)


def _typed(meter: str, terms: Iterable[CommandField], form: Mapping[str, str]) -> dict[str, Any]:
    """Values of the fields, of empty ones the default. Raises `Invalid`."""
    given: dict[str, Any] = {}
    for one in terms:
        text = form.get(one.name, "").strip()
        if one.name == "amount":
            given[one.name] = amount_of(meter, text)
        elif not text:
            given[one.name] = "" if one.is_required else one.default
        elif one.kind is float:
            given[one.name] = rate_of(meter, text, one.name)
        else:
            given[one.name] = whole_typed(one.name, text) if one.kind is int else text
    return given


def override_of(limit: Limit, form: Mapping[str, str]) -> LimitOverride:
    meter, rate = limit.meter.value, form.get("override_rate", "").strip()
    return LimitOverride(
        amount=amount_of(meter, form.get("override_amount", "")),
        rate_per_s=rate_of(meter, rate) if rate else None,
        for_s=float(decimal_typed("for_h", form.get("for_h", "")) * 3_600),
        reason=form.get("reason", ""),
    )


def stored_in_form(limit: Limit) -> dict[str, str]:
    """What can be changed, as the form has it."""
    shown = limit_as_json(limit)
    return {one.name: _as_typed(limit.meter, one, shown[one.name]) for one in changed_terms(limit)}


def _as_typed(meter: Meter, one: CommandField, value: Any) -> str:
    if value is None:
        return ""
    if one.kind is float:
        return f"{value / 1e9 if meter is Meter.COST_NANOUSD else value:.15g}"
    return amount_typed(meter, value) if one.name == "amount" else str(value)
