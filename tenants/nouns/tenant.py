"""A tenant: how it is made, changed, stored and shown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.nouns.columns import As, Record
from tenants.types import Labels, OnLowBudget, Tier

MAX_TENANTS = 10_000
"""Bounds keep the directory small enough for memory."""
MAX_LABELS = 8
MAX_LABEL_VALUES = 64
MAX_LABEL_CHARS = 64
MIN_WEIGHT = 0.01
MAX_WEIGHT = 1_000.0
MAX_RESERVED_TOKENS_PER_S = 1e9
ALL_TIERS = "all"
"""Of a reservation that is not for one tier."""
TIERS = tuple(Tier)
Status = Literal["active", "suspended"]
Id = Annotated[str, As("id")]
EndsRunning = Annotated[bool, As(json="now", is_only_if_true=True)]
"""Whether a suspension or revocation also ends what runs."""
_NAME = Field(is_argument=True, schema={"pattern": f"^({checks.NAME.pattern})$"})
DISPLAY_NAME = Field(
    "A name for people, with spaces; empty: none.",
    schema={"maxLength": checks.MAX_DISPLAY_CHARS},
)
_WEIGHT = Field(
    "Share of the GPU when busy: weight 2 gets twice as much as weight 1.",
    schema={"minimum": MIN_WEIGHT, "maximum": MAX_WEIGHT},
)
_LOW_BUDGET = Field(
    "When a budget does not cover the longest answer of a request: refuse it, or shorten the answer.",
    choices=tuple(OnLowBudget),
)
_RESERVED = Field(
    "Cost tokens (input + 2 x output) per second that it gets before all others. 0: none.",
    option="--reserve",
    schema={"minimum": 0, "maximum": MAX_RESERVED_TOKENS_PER_S},
)
_RESERVED_TIER = Field(
    "Tier whose requests --reserve is for.", option="--reserve-tier", choices=(*TIERS, ALL_TIERS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant(Record):
    tenant_id: Id
    name: str
    status: Status
    weight: float
    reserved_tokens_per_s: float = 0.0
    """In cost tokens (input + 2 x output); 0: none."""
    reserved_tier: Tier | None = None
    """The tier that they are for; None: all."""
    on_low_budget: OnLowBudget = OnLowBudget.REFUSE
    default_tier: Tier
    tiers: frozenset[Tier]
    models: frozenset[str] | None
    """None: all."""
    labels: Labels = field(default_factory=dict, hash=False)
    created_at: datetime
    ends_running: EndsRunning = False
    display_name: str | None = None
    """For people."""


class TenantCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/tenants`."""

    name: Annotated[str, _NAME]
    weight: Annotated[float, _WEIGHT] = 1.0
    tier: Annotated[str, Field("Default tier of its requests.", choices=TIERS)] = Tier.STANDARD.value
    tiers: Annotated[
        list[str] | None,
        Field(
            "Tier it may use (repeat).  [default: --tier and those served after it]",
            option="--may-use",
            choices=TIERS,
        ),
    ] = None
    on_low_budget: Annotated[str, _LOW_BUDGET] = OnLowBudget.REFUSE.value
    reserved_tokens_per_s: Annotated[float, _RESERVED] = 0.0
    reserved_tier: Annotated[str, _RESERVED_TIER] = ALL_TIERS
    display_name: Annotated[str | None, DISPLAY_NAME] = None


class TenantChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/tenants/{tenant}`. None: it stays."""

    weight: Annotated[float | None, _WEIGHT] = None
    tier: Annotated[str | None, Field("Default tier of its requests.", choices=TIERS)] = None
    tiers: Annotated[
        list[str] | None, Field("Tier it may use (repeat).", option="--may-use", choices=TIERS)
    ] = None
    models: Annotated[list[str] | None, Field("Model it may use (repeat).", option="--model")] = None
    """An empty list: all."""
    on_low_budget: Annotated[str | None, _LOW_BUDGET] = None
    reserved_tokens_per_s: Annotated[float | None, _RESERVED] = None
    """0 also forgets `reserved_tier`."""
    reserved_tier: Annotated[str | None, _RESERVED_TIER] = None
    labels: Annotated[
        dict[str, list[str]] | None,
        Field(
            "Allowed value of a label of its requests (repeat for all allowed values).",
            option="--label",
            metavar="KEY=VALUE",
            none="--drop-label",
            none_help="Remove this label (repeat).",
        ),
    ] = None
    """Keys of requests' `metadata` that go to the ledger, each with the values allowed; an empty list drops
    the label, and labels that are not named stay."""
    display_name: Annotated[str | None, DISPLAY_NAME] = None


class Withdrawal(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/tenants/{tenant}/suspend`, `POST /admin/v1/projects/{project}/suspend` and
    `DELETE /admin/v1/keys/{id}`; without a body: not now."""

    now: Annotated[bool, Field("Also end running requests, charged for the tokens they emitted.")] = False


def tier_names(tiers: frozenset[Tier]) -> list[str]:
    """Names in order of service."""
    return [tier.value for tier in Tier if tier in tiers]


def new_tenant(wanted: TenantCreate, models: Iterable[str] | None = None) -> Tenant:
    """A new tenant, without id and time. Raises `Invalid`."""
    default_tier = checks.choice("tier", Tier, wanted.tier)
    reserved = checked_reservation(wanted.reserved_tokens_per_s)
    return Tenant(
        tenant_id="",
        name=checks.name("name", wanted.name),
        status="active",
        weight=checked_weight(wanted.weight),
        default_tier=default_tier,
        tiers=checked_tiers(default_tier, wanted.tiers),
        models=checks.models(models),
        created_at=from_us(0),
        on_low_budget=checks.choice("on_low_budget", OnLowBudget, wanted.on_low_budget),
        reserved_tokens_per_s=reserved,
        reserved_tier=_reserved_tier(wanted.reserved_tier, reserved),
        display_name=checks.display_name(wanted.display_name or ""),
    )


def changed_tenant(before: Tenant, wanted: TenantChange) -> Tenant:
    """Raises `Invalid`."""
    new: dict[str, Any] = {}
    if wanted.on_low_budget is not None:
        new["on_low_budget"] = checks.choice("on_low_budget", OnLowBudget, wanted.on_low_budget)
    if wanted.weight is not None:
        new["weight"] = checked_weight(wanted.weight)
    reserved = before.reserved_tokens_per_s
    if wanted.reserved_tokens_per_s is not None:
        reserved = new["reserved_tokens_per_s"] = checked_reservation(wanted.reserved_tokens_per_s)
    if wanted.reserved_tier is not None:
        new["reserved_tier"] = _reserved_tier(wanted.reserved_tier, reserved)
    elif not reserved:
        new["reserved_tier"] = None
    if wanted.tier is not None or wanted.tiers is not None:
        chosen = before.default_tier if wanted.tier is None else wanted.tier
        default = checks.choice("tier", Tier, chosen)
        new |= {"default_tier": default, "tiers": checked_tiers(default, wanted.tiers)}
    if wanted.models is not None:
        new["models"] = checks.models(wanted.models or None)
    if wanted.labels is not None:
        new["labels"] = checked_labels(before.labels, wanted.labels)
    if wanted.display_name is not None:
        new["display_name"] = checks.display_name(wanted.display_name)
    return replace(before, **new)


def checked_weight(value: float) -> float:
    if not MIN_WEIGHT <= checks.finite("weight", value) <= MAX_WEIGHT:
        raise Invalid("weight", f"must lie between {MIN_WEIGHT} and {MAX_WEIGHT:g}")
    return float(value)


def checked_reservation(value: float) -> float:
    name = "reserved_tokens_per_s"
    checks.finite(name, value, "a finite number of cost tokens per second (0: no reservation)")
    if not 0 <= value <= MAX_RESERVED_TOKENS_PER_S:
        raise Invalid(name, f"must lie between 0 (no reservation) and {MAX_RESERVED_TOKENS_PER_S:g}")
    return float(value)


def _reserved_tier(value: str, tokens_per_s: float) -> Tier | None:
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


def checked_tiers(default: Tier, values: Iterable[str] | None) -> frozenset[Tier]:
    """None: the default tier and those served after it, not the better ones."""
    if values is None:
        order = list(Tier)
        return frozenset(order[order.index(default) :])
    chosen = frozenset(checks.choice("tiers", Tier, value) for value in values)
    if default not in chosen:
        raise Invalid("tiers", f"must hold the default tier {default.value!r}")
    return chosen


def checked_labels(before: Labels, wanted: Mapping[str, Iterable[str]]) -> Labels:
    """Each label that is `wanted` has these values, or is dropped where there are none; the others stay."""
    after = dict(before)
    for key, values in wanted.items():
        chosen = tuple(sorted({_label(value) for value in values}))
        if chosen:
            after[_label_key(key)] = chosen
        elif after.pop(key, None) is None:
            known = ", ".join(map(repr, before)) or "none"
            raise Invalid("labels", f"there is no label {key[:MAX_LABEL_CHARS]!r}; labels: {known}")
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
