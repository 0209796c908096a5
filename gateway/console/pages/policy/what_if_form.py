"""The form of a what-if. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

from gateway.domain.what_if import Stretch, WhatIfAsked
from tenants.config_file.base import ConfigInvalid
from tenants.config_file.document import ConfigLimit
from tenants.config_file.plan_limits import limit_in_file
from tenants.errors import Invalid
from tenants.nouns.tenant import checked_weight
from tenants.types import Meter, Window

FIELDS = (
    *("stretch", "from", "to", "model", "gateway", "policies", "options", "replicas", "weights", "rows"),
    "limits",
)
LINES = ("limits",)
"""Multi-line fields."""
POLICY = "policy-"
"""Before the name of a policy: its checkbox."""
LAST_S = 3_600
"""Of the traffic where neither a stretch nor a time is given."""
LOOKED_BACK_S = 7 * 86_400
MOST_LOOKED = 20_000
"""The newest requests, in which stretches are found."""
MOST_STRETCHES = 6
FIRST_CHECKED = ("hybrid", "vtc", "fcfs")
"""Policies that are compared where nobody chose any."""
METERS = (Meter.TOTAL_TOKENS, Meter.INPUT_TOKENS, Meter.OUTPUT_TOKENS, Meter.REQUESTS, Meter.CONCURRENCY)
MOST_REPLICAS = 256
MOST_POLICIES = 8
MOST_ROWS = 500_000
MOST_LIMITS = 100
MOST_AMOUNT_DIGITS = 15


def asked_of(
    typed: Mapping[str, str],
    now_us: int,
    *,
    policies: Collection[str],
    tenants: Collection[str],
    models: Collection[str],
) -> WhatIfAsked:
    """`policies`, `tenants`, `models`: known names. Raises `Invalid`, which names the form's field."""
    model = typed["model"]
    if typed["stretch"] and not typed["from"]:
        since_us, until_us, model = _stretch(typed["stretch"])
    else:
        since_us, until_us = _window(typed, now_us)
    if model and model not in models:
        raise Invalid("model", f"there is no model {model!r}")
    weights = pairs_of("weights", typed["weights"])
    return WhatIfAsked(
        since_us,
        until_us,
        policies=_policies(typed["policies"], policies),
        options={
            name.replace("-", "_"): value for name, value in pairs_of("options", typed["options"]).items()
        },
        replicas=_whole("replicas", typed["replicas"], MOST_REPLICAS),
        weights={_tenant("weights", name, tenants): _weight(value) for name, value in weights.items()},
        limits=_limits(typed["limits"], tenants),
        model=model,
        gateway=typed["gateway"],
        rows=_whole("rows", typed["rows"], MOST_ROWS),
    )


def _window(typed: Mapping[str, str], now_us: int) -> tuple[int, int]:
    until_us = _instant("to", typed["to"]) if typed["to"] else now_us
    if typed["from"]:
        since_us = _instant("from", typed["from"])
    else:
        since_us = until_us - LAST_S * 1_000_000
    if not since_us < until_us:
        raise Invalid("from", "it must lie before the end")
    return since_us, until_us


def stretch_value(stretch: Stretch) -> str:
    return f"{stretch.since_us} {stretch.until_us} {stretch.server.model}"


def _stretch(text: str) -> tuple[int, int, str]:
    since, _, rest = text.partition(" ")
    until, _, model = rest.partition(" ")
    if not (since.isascii() and since.isdigit() and until.isascii() and until.isdigit() and len(text) < 200):
        raise Invalid("stretch", "choose one of the list")
    return int(since), int(until), model


def offered(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Those that can be replayed, the newest first."""
    found = (stretch for stretch in stretches if stretch.can_be_replayed)
    return sorted(found, key=lambda stretch: -stretch.until_us)[:MOST_STRETCHES]


def checked(typed: Mapping[str, str], policies: Collection[str], in_force: str) -> list[str]:
    """The policies of the form's checkboxes; of a new form some others than the one in force."""
    if typed["policies"] or any(typed.values()):
        return typed["policies"].replace(",", " ").split()
    return [name for name in FIRST_CHECKED if name in policies and name != in_force]


def policies_typed(form: Mapping[str, str]) -> str:
    """Of checkboxes, or of one field."""
    boxes = [name.removeprefix(POLICY) for name in form if name.startswith(POLICY)]
    return " ".join(boxes) or form.get("policies", "")


def _instant(field: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(field, "write it such as 2026-03-02T09:00, in UTC") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    at_us = round(moment.timestamp() * 1e6)
    if at_us < 0:
        raise Invalid(field, "it lies before 1970")
    return at_us


def _policies(text: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.replace(",", " ").split()))
    for name in names:
        if name not in known:
            raise Invalid("policies", f"there is no policy {name!r}; there are {', '.join(known)}")
    if len(names) > MOST_POLICIES:
        raise Invalid("policies", f"compare at most {MOST_POLICIES} at a time")
    return names


def pairs_of(field: str, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.replace(",", " ").split():
        name, separator, value = part.rpartition("=")
        if not separator or not name or not value:
            raise Invalid(field, f"{part!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def _whole(field: str, text: str, most: int) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise Invalid(field, f"a whole number from 1 to {most:,}")
    return int(text)


def _tenant(field: str, name: str, tenants: Collection[str]) -> str:
    if name not in tenants:
        raise Invalid(field, f"there is no tenant {name!r}")
    return name


def _weight(text: str) -> float:
    try:
        return checked_weight(float(text))
    except ValueError:
        raise Invalid("weights", f"{text!r} is not a number") from None
    except Invalid as error:
        raise Invalid("weights", f"a weight {error.message}") from None


def _limits(text: str, tenants: Collection[str]) -> dict[str, list[ConfigLimit]]:
    """Limits by tenant from lines `TENANT METER AMOUNT [WINDOW]`. Raises `Invalid`, which names the line."""
    limits: dict[str, list[ConfigLimit]] = {}
    lines: dict[tuple[str, str, str | None], int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if len(lines) == MOST_LIMITS:
            raise Invalid("limits", f"line {number}: give at most {MOST_LIMITS} limits")
        try:
            tenant, limit = _limit(line.split(), tenants)
            first = lines.setdefault((tenant, limit.meter, limit.window), number)
            if first != number:
                raise Invalid("limits", f"line {first} sets this limit already")
        except Invalid as error:
            raise Invalid("limits", f"line {number}: {error.message}") from None
        limits.setdefault(tenant, []).append(limit)
    return limits


def _limit(words: list[str], tenants: Collection[str]) -> tuple[str, ConfigLimit]:
    """A line's tenant and limit. Raises `Invalid`."""
    if len(words) not in (3, 4):
        raise Invalid("limits", "write TENANT METER AMOUNT WINDOW, such as acme total_tokens 100000 day")
    tenant, meter, amount = _tenant("limits", words[0], tenants), words[1], words[2]
    if meter not in METERS:
        raise Invalid("limits", f"there is no meter {meter[:40]!r}; there are {', '.join(METERS)}")
    if not (amount.isascii() and amount.isdigit() and len(amount) <= MOST_AMOUNT_DIGITS):
        raise Invalid(
            "limits", f"{amount[:40]!r} is not a whole number of at most {MOST_AMOUNT_DIGITS} digits"
        )
    window = words[3] if len(words) == 4 else None if meter == Meter.CONCURRENCY else Window.DAY.value
    limit = ConfigLimit(meter=meter, amount=int(amount), window=window)
    try:
        limit_in_file(tenant, limit, (), {})
    except ConfigInvalid as error:
        raise Invalid("limits", f"{error.field}: {error.message}") from None
    return tenant, limit
