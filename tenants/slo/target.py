"""A latency target: how it is set, what it is, how it is stored and shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field
from tenants.types import Tier

METRICS = ("ttft", "tpot", "e2e")
MIN_TARGET_S = 0.000_1
MAX_TARGET_S = 86_400.0


class SloSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sets a target of a tier, or of one tenant in a tier."""

    tier: Annotated[str, Field("Whose requests it binds.", choices=tuple(Tier))]
    metric: Annotated[
        str,
        Field(
            "ttft: arrival to first token; tpot: per further token; e2e: arrival to last token.",
            choices=METRICS,
        ),
    ]
    target_s: Annotated[
        float,
        Field(
            "Seconds.",
            *("Within", "--target"),
            schema={"minimum": MIN_TARGET_S, "maximum": MAX_TARGET_S},
            unit="seconds",
            form_help="",
        ),
    ]
    percentile: Annotated[
        float,
        Field(
            "Per cent of the requests that must meet it; the rest is the error budget.",
            "For",
            unit="% of requests",
            hundred=100,
            form_help="The rest is the error budget.",
            schema={"minimum": 1, "maximum": 100},
        ),
    ] = 95.0
    tenant: Annotated[
        str | None,
        Field(
            "Only this tenant's (name or id); then the tier's does not bind it.",
            form_help="Empty: every tenant without a target of its own in this tier.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Slo:
    id: str
    tenant_id: str
    """Empty: the default of tenants without a target of their own for that tier and metric."""
    tier: Tier
    metric: str
    target_us: int
    per_mille: int
    """Share of requests that must meet it, in thousandths."""

    @property
    def target_s(self) -> float:
        return self.target_us / 1e6

    def as_json(self) -> dict[str, Any]:
        shown = as_row(self)
        target_us, per_mille = shown.pop("target_us"), shown.pop("per_mille")
        return shown | {
            "tenant_id": self.tenant_id or None,
            "target_s": target_us / 1e6,
            "percentile": per_mille / 10,
        }


NAMES = tuple(field.name for field in fields(Slo))


def as_row(slo: Slo) -> dict[str, Any]:
    """Its columns."""
    return {name: getattr(slo, name) for name in NAMES} | {"tier": slo.tier.value}


def of_row(row: Mapping[str, Any]) -> Slo:
    return Slo(**{name: row[name] for name in NAMES} | {"tier": Tier(row["tier"])})


def draft_of(wanted: SloSet) -> Slo:
    """A new target, without id and tenant. Raises `Invalid`."""
    if wanted.tier not in tuple(Tier):
        raise Invalid("tier", f"{wanted.tier!r} is not one of {', '.join(Tier)}")
    if wanted.metric not in METRICS:
        raise Invalid("metric", f"{wanted.metric!r} is not one of {', '.join(METRICS)}")
    given = {name: getattr(wanted, name) for name in NAMES if name in SloSet.__struct_fields__}
    converted = {"tier": Tier(wanted.tier), "target_us": _target_us(wanted.target_s)}
    return Slo(**given | converted | {"id": "", "tenant_id": "", "per_mille": _per_mille(wanted.percentile)})


def _target_us(value: float) -> int:
    _finite("target_s", value, "a finite number of seconds")
    if not MIN_TARGET_S <= value <= MAX_TARGET_S:
        raise Invalid("target_s", f"must lie between {MIN_TARGET_S} and {MAX_TARGET_S:g} seconds")
    return round(value * 1e6)


def _per_mille(value: float) -> int:
    _finite("percentile", value, "a finite number, such as 95")
    if not 1 <= value <= 100 or abs(value * 10 - round(value * 10)) > 1e-6:
        raise Invalid(
            "percentile", "must lie between 1 and 100, with one decimal at most, such as 95 or 99.9"
        )
    return round(value * 10)


def _finite(field: str, value: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(field, f"must be {what}")
