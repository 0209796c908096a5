"""The demo's tenants, with their weights and tiers, and limits as shares of what each is about to ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.demo.trace import TraceRequest
from tenants.types import LimitMode, Tier, Window


@dataclass(frozen=True)
class CastLimit:
    """A limit of `share_of_planned` of what its tenant plans to use."""

    mode: LimitMode
    window: Window
    share_of_planned: float


@dataclass(frozen=True)
class CastTenant:
    name: str
    weight: float = 1.0
    tier: Tier = Tier.STANDARD
    limit: CastLimit | None = None


_INTERACTIVE = ("m07", "m09", "m13", "m21", "m22", "m25")
_BATCH = ("m05", "m06", "m16", "m18")
_WEIGHTS = {"m02": 2.0, "m00": 3.0, "m04": 2.0, "m08": 2.0, "m12": 4.0, "m13": 2.0, "m06": 2.0}
_LIMITS = {
    "m10": CastLimit(LimitMode.HARD, Window.DAY, 0.6),
    "m20": CastLimit(LimitMode.HARD, Window.LIFETIME, 0.5),
    "m15": CastLimit(LimitMode.HARD, Window.HOUR, 0.5),
    "m01": CastLimit(LimitMode.SOFT, Window.DAY, 0.5),
    "m11": CastLimit(LimitMode.SHADOW, Window.DAY, 0.5),
}

CAST: tuple[CastTenant, ...] = tuple(
    CastTenant(
        name,
        weight=_WEIGHTS.get(name, 1.0),
        tier=(Tier.INTERACTIVE if name in _INTERACTIVE else Tier.BATCH if name in _BATCH else Tier.STANDARD),
        limit=_LIMITS.get(name),
    )
    for name in (f"m{number:02d}" for number in range(27))
)


def planned_tokens(requests: Sequence[TraceRequest]) -> Mapping[str, int]:
    planned = {tenant.name: 0 for tenant in CAST}
    for request in requests:
        planned[request.tenant] += request.input_tokens + request.output_tokens
    return planned
