"""Amounts and limits in words. Typed ones are read by `tenants/typed.py`. Pure."""

from __future__ import annotations

from functools import partial

from gateway.console.formats import exact_dollars, number, seconds
from tenants.nouns.limit import rate_in_words
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Window

METERS = {
    Meter.TOTAL_TOKENS: "tokens",
    Meter.INPUT_TOKENS: "input tokens",
    Meter.OUTPUT_TOKENS: "output tokens",
    Meter.REQUESTS: "requests",
    Meter.COST_NANOUSD: "cost",
    Meter.GPU_MS: "device time",
    Meter.CONCURRENCY: "requests at a time",
}
MODES = {
    LimitMode.HARD: "hard: refuses",
    LimitMode.SOFT: "soft: alerts",
    LimitMode.SHADOW: "shadow: counts only",
}
WINDOWS = {
    Window.MINUTE: "a minute",
    Window.HOUR: "an hour",
    Window.DAY: "a day",
    Window.MONTH: "a month",
    Window.LIFETIME: "ever",
}
EVERY = {Window.HOUR: "hourly", Window.DAY: "daily", Window.MONTH: "monthly"}
SUBJECTS = {
    SubjectKind.PLATFORM: "all tenants together",
    SubjectKind.TENANT: "tenant",
    SubjectKind.PROJECT: "project",
    SubjectKind.KEY: "key",
    SubjectKind.END_USER: "end user",
}


def amount_text(meter: Meter, amount: float) -> str:
    if meter is Meter.COST_NANOUSD:
        return f"${exact_dollars(int(amount))}"
    if meter is Meter.GPU_MS:
        return seconds(amount / 1_000)
    return number(amount)


def amount_typed(meter: Meter, amount: int) -> str:
    return exact_dollars(amount) if meter is Meter.COST_NANOUSD else str(amount)


def what_of(limit: Limit) -> str:
    """The limit without its amount: 'tokens a day (UTC)'."""
    what = METERS[limit.meter]
    if limit.is_bucket:
        return f"{what}, refilled by {rate_in_words(limit, partial(amount_text, limit.meter))}"
    if limit.window is None:
        return what
    zone = "" if limit.window is Window.LIFETIME else f" ({limit.time_zone})"
    return f"{what} {WINDOWS[limit.window]}{zone}"


def in_short(limit: Limit) -> str:
    """'daily tokens', 'requests at a time', 'hourly cost of a key'."""
    what = METERS[limit.meter]
    if limit.is_bucket:
        what += " a second"
    elif limit.window in EVERY:
        what = f"{EVERY[limit.window]} {what}"
    elif limit.window is not None:
        what = f"{what} {WINDOWS[limit.window]}"
    if limit.kind is SubjectKind.TENANT:
        return what
    return f"{what} of {'' if limit.kind is SubjectKind.PLATFORM else 'a '}{SUBJECTS[limit.kind]}"


def narrowed(limit: Limit) -> str:
    """Which requests it is restricted to; empty: none."""
    parts = [
        f"tier {limit.tier.value}" if limit.tier is not None else "",
        f"model {limit.model}" if limit.model is not None else "",
        f"requests above {limit.above_tokens:,} tokens" if limit.above_tokens else "",
    ]
    return ", ".join(filter(None, parts))


def subject_text(limit: Limit, name: str | None) -> str:
    """`name`: of the tenant, project or key."""
    if limit.is_default:
        return "each end user"
    if limit.kind is SubjectKind.END_USER:
        return f"end user {limit.end_user}"
    if limit.kind is SubjectKind.PLATFORM:
        return SUBJECTS[limit.kind]
    return f"{SUBJECTS[limit.kind]} {name or limit.subject_id}"
