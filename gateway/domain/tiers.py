"""Service tiers and their names."""

from __future__ import annotations

from gateway import errors
from tenants.types import Principal, Tier

SERVICE_TIERS: dict[str, Tier | None] = {
    "auto": None,
    "default": None,
    "priority": Tier.INTERACTIVE,
    "flex": Tier.BATCH,
    "interactive": Tier.INTERACTIVE,
    "standard": Tier.STANDARD,
    "batch": Tier.BATCH,
}
"""None: the key's default. Our own names are a vendor extra."""
TIER_NAMES: dict[Tier, str] = {Tier.INTERACTIVE: "priority", Tier.STANDARD: "default", Tier.BATCH: "flex"}
"""`service_tier` of the answer: the tier really used, by OpenAI's name."""


def tier_of(service_tier: str | None, principal: Principal) -> Tier:
    """Raises `ApiError`: 400 for an unknown name, 403 for one not allowed."""
    asked = "auto" if service_tier is None else service_tier
    tier = tier_named(asked, principal.default_tier)
    if tier not in principal.tiers:
        allowed = ", ".join(known for known in Tier if known in principal.tiers)
        raise errors.tier_not_allowed(asked=asked, tier=tier, allowed=allowed)
    return tier


def tier_named(service_tier: str, default: Tier) -> Tier:
    """The tier of a name, allowed or not. Raises `ApiError` (400)."""
    if service_tier not in SERVICE_TIERS:
        raise errors.bad_request(
            f"Invalid 'service_tier': '{service_tier[:64]}'. It is one of {', '.join(SERVICE_TIERS)}.",
            "service_tier",
        )
    return SERVICE_TIERS[service_tier] or default
