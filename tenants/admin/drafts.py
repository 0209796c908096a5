"""Tenants and keys as commands make or change them, within the bounds of the tenant. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tenants.admin import validation
from tenants.admin.commands import KeyChange, TenantChange, TenantCreate
from tenants.directory.records import ApiKey, Tenant, from_us, tier_names, to_us
from tenants.errors import Invalid
from tenants.types import OnLowBudget, Tier


def new_tenant(wanted: TenantCreate, models: Iterable[str] | None = None) -> Tenant:
    """A new tenant, without id and time. Raises `Invalid`."""
    default_tier = validation.choice("tier", Tier, wanted.tier)
    reserved = validation.reserved(wanted.reserved_tokens_per_s)
    return Tenant(
        tenant_id="",
        name=validation.name("name", wanted.name),
        status="active",
        weight=validation.weight(wanted.weight),
        default_tier=default_tier,
        tiers=validation.tiers(default_tier, wanted.tiers),
        models=validation.models(models),
        created_at=from_us(0),
        on_low_budget=validation.choice("on_low_budget", OnLowBudget, wanted.on_low_budget),
        reserved_tokens_per_s=reserved,
        reserved_tier=validation.reserved_tier(wanted.reserved_tier, reserved),
    )


def changed_tenant(before: Tenant, wanted: TenantChange) -> Tenant:
    """Raises `Invalid`."""
    new: dict[str, Any] = {}
    if wanted.on_low_budget is not None:
        new["on_low_budget"] = validation.choice("on_low_budget", OnLowBudget, wanted.on_low_budget)
    if wanted.weight is not None:
        new["weight"] = validation.weight(wanted.weight)
    reserved = before.reserved_tokens_per_s
    if wanted.reserved_tokens_per_s is not None:
        reserved = new["reserved_tokens_per_s"] = validation.reserved(wanted.reserved_tokens_per_s)
    if wanted.reserved_tier is not None:
        new["reserved_tier"] = validation.reserved_tier(wanted.reserved_tier, reserved)
    elif not reserved:
        new["reserved_tier"] = None
    if wanted.tier is not None or wanted.tiers is not None:
        chosen = before.default_tier if wanted.tier is None else wanted.tier
        default = validation.choice("tier", Tier, chosen)
        new |= {"default_tier": default, "tiers": validation.tiers(default, wanted.tiers)}
    if wanted.models is not None:
        new["models"] = validation.models(wanted.models or None)
    if wanted.labels is not None:
        new["labels"] = validation.labels(before.labels, wanted.labels)
    return replace(before, **new)


def changed_key(before: ApiKey, wanted: KeyChange, owner: Tenant, now_us: int) -> ApiKey:
    """Raises `Invalid`."""
    new: dict[str, Any] = {}
    if wanted.name is not None:
        new["name"] = validation.name("name", wanted.name) if wanted.name else ""
    if wanted.allow_from is not None:
        new["allow_from"] = validation.networks(wanted.allow_from)
    if wanted.scopes is not None:
        new["scopes"] = validation.scopes(wanted.scopes)
    if wanted.models is not None:
        new["models"] = validation.models(wanted.models or None)
    if wanted.tiers is not None:
        new["tiers"] = chosen_tiers(wanted.tiers or None)
    if wanted.default_tier is not None:
        new["default_tier"] = chosen_default_tier(wanted.default_tier)
    if wanted.expires is not None or wanted.expires_in_s is not None:
        end_us = end_of_key_us(now_us, wanted.expires, wanted.expires_in_s)
        new["expires_at"] = None if end_us is None else from_us(end_us)
    after = replace(before, **new)
    # What is not changed may lie beyond the tenant's, which has narrowed it since.
    check_models(owner, new.get("models"))
    check_tiers(owner, new.get("tiers"))
    if "tiers" in new or "default_tier" in new:
        check_default_tier(owner, after.tiers, after.default_tier)
    return after


def chosen_tiers(wanted: Iterable[str] | None) -> frozenset[Tier] | None:
    """None: those of its tenant."""
    return None if wanted is None else frozenset(validation.choice("tiers", Tier, tier) for tier in wanted)


def chosen_default_tier(wanted: str | None) -> Tier | None:
    """None or empty: inherit from the tenant."""
    return validation.choice("default_tier", Tier, wanted) if wanted else None


def end_of_key_us(now_us: int, expires: str | None, expires_in_s: float | None) -> int | None:
    """An instant, or so many seconds from now; None or empty: no end."""
    if expires_in_s is not None:
        validation.seconds("expires_in_s", expires_in_s, validation.MAX_EXPIRY_S, least=1)
    if expires == "" and expires_in_s is None:
        return None
    end_us = None if expires is None else to_us(validation.instant("expires", expires))
    return validation.expires_us(now_us, end_us, expires_in_s)


def check_within(
    tenant: Tenant,
    models: frozenset[str] | None,
    tiers: frozenset[Tier] | None,
    default_tier: Tier | None,
) -> None:
    """Raises `Invalid` unless a key's models and tiers lie within its tenant's. None: inherited."""
    check_tiers(tenant, tiers)
    check_default_tier(tenant, tiers, default_tier)
    check_models(tenant, models)


def check_tiers(tenant: Tenant, tiers: frozenset[Tier] | None) -> None:
    if tiers is not None and (not tiers or tiers - tenant.tiers):
        raise Invalid("tiers", f"must lie within the tenant's: {', '.join(tier_names(tenant.tiers))}")


def check_models(tenant: Tenant, models: frozenset[str] | None) -> None:
    if tenant.models is not None and models is not None and models - tenant.models:
        raise Invalid("models", f"beyond the tenant's: {', '.join(sorted(models - tenant.models))}")


def check_default_tier(tenant: Tenant, tiers: frozenset[Tier] | None, default_tier: Tier | None) -> None:
    if default_tier is not None and default_tier not in (tenant.tiers if tiers is None else tiers):
        raise Invalid("default_tier", f"{default_tier.value!r} is not among the key's tiers")
