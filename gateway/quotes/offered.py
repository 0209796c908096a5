"""Quotes as JSON, for `POST /v1/quotes` and for refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.forecast.calibration import WARM_UP
from gateway.dispatch.admission import EstimateExceeds, NotInTime
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate
from gateway.domain.fallback import NoneTook
from gateway.domain.tiers import TIER_NAMES
from gateway.estimates.estimator import Estimator
from gateway.quotes.quotes import Quotes, Wanted
from tenants.types import Principal, Tier


def tiers_instead(call: Call, cause: BaseException | None, *, is_long: bool) -> Sequence[Tier]:
    """Tiers that a refusal quotes: all if the estimate was too high, batch if a long request was late."""
    allowed = call.principal.tiers
    if isinstance(cause, NoneTook):
        cause = cause.first
    if isinstance(cause, EstimateExceeds):
        return [tier for tier in Tier if tier in allowed]
    may_wait = call.tier is not Tier.BATCH and Tier.BATCH in allowed
    return [Tier.BATCH] if isinstance(cause, NotInTime) and is_long and may_wait else []


UNPROMISED = "The prices hold, and the times are not credited."
NOT_MEASURED = f"nothing measured yet: no step of a server of this model was timed. {UNPROMISED}"
NOT_LEARNED = (
    f"nothing learned yet: fewer than {WARM_UP} answers of this kind were compared with their forecasts."
    f" {UNPROMISED}"
)


def offered(
    estimates: Estimator,
    quotes: Quotes | None,
    principal: Principal,
    wanted: Wanted,
    tiers: Sequence[Tier],
    price_version: int,
    now_s: float,
) -> list[dict[str, Any]]:
    """A quote for each tier, issued by `quotes`; None: only figures. Raises `UnknownPrice`."""
    made = estimates.offers(wanted.model, principal.tenant_id, principal.weight, tiers, wanted.size, now_s)
    counted_in = principal.default_tier if principal.default_tier in made else tiers[0]
    tokens: dict[Tier, str] = {}
    if quotes is not None:
        tokens = quotes.issue(principal, wanted, made, price_version, counted_in, now_s)
    return [
        {
            "tier": tier.value,
            "service_tier": TIER_NAMES[tier],
            **estimate.as_json(),
            "displaces": estimates.displacement(
                principal.tenant_id, tier, wanted.choices, estimate.output_tokens[0]
            ).as_json(),
            "token": tokens.get(tier),
            **_binding(estimate),
        }
        for tier, estimate in made.items()
    ]


def _binding(estimate: Estimate) -> dict[str, Any]:
    if estimate.promise is None or estimate.promise.is_learned:
        return {"binding": True}
    return {"binding": False, "not_binding": NOT_LEARNED if estimate.is_measured else NOT_MEASURED}
