"""Tenants, projects, keys as frozen values; `as_json`: as CLI, admin API and audit show them, no secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import RowMapping

from tenants.directory.keys import prefix_of
from tenants.instants import from_us as from_us
from tenants.instants import to_us as to_us
from tenants.networks import Network, network_of
from tenants.types import Labels, OnLowBudget, Tier

Status = Literal["active", "suspended"]


def _optional(at_us: int | None) -> datetime | None:
    return None if at_us is None else from_us(at_us)


def _now(ends_running: bool) -> dict[str, Any]:
    """`"now": true` where a suspension or revocation also ends what runs."""
    return {"now": True} if ends_running else {}


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. `models` None: all."""

    tenant_id: str
    name: str
    status: Status
    weight: float
    default_tier: Tier
    tiers: frozenset[Tier]
    models: frozenset[str] | None
    created_at: datetime
    on_low_budget: OnLowBudget = OnLowBudget.REFUSE
    reserved_tokens_per_s: float = 0.0
    """In cost tokens (input + 2 x output); 0: none."""
    reserved_tier: Tier | None = None
    """The tier that they are for; None: all."""
    labels: Labels = field(default_factory=dict, hash=False)
    ends_running: bool = False
    """Whether its suspension also ends what runs."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.tenant_id,
            "name": self.name,
            "status": self.status,
            "weight": self.weight,
            "reserved_tokens_per_s": self.reserved_tokens_per_s,
            "reserved_tier": None if self.reserved_tier is None else self.reserved_tier.value,
            "on_low_budget": self.on_low_budget.value,
            "default_tier": self.default_tier.value,
            "tiers": tier_names(self.tiers),
            "models": None if self.models is None else sorted(self.models),
            "labels": {key: list(values) for key, values in self.labels.items()},
            "created_at": _iso(self.created_at),
            **_now(self.ends_running),
        }


@dataclass(frozen=True, slots=True)
class Project:
    """A part of a tenant; every key belongs to one."""

    project_id: str
    tenant_id: str
    name: str
    status: Status
    created_at: datetime
    ends_running: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.project_id,
            "tenant_id": self.tenant_id,
            "name": self.name,
            "status": self.status,
            "created_at": _iso(self.created_at),
            **_now(self.ends_running),
        }


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. `tiers` and `models` None: those of its tenant."""

    key_id: str
    tenant_id: str
    project_id: str
    name: str
    prefix: str
    """The visible part of its newest secret."""
    scopes: frozenset[str]
    models: frozenset[str] | None
    tiers: frozenset[Tier] | None
    default_tier: Tier | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    allow_from: tuple[Network, ...] = ()
    """Networks that it may be used from; empty: anywhere."""
    ends_running: bool = False
    """Whether its revocation also ends what runs."""

    def status(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """The key's own status at `now`, regardless of its tenant's."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.key_id,
            "tenant_id": self.tenant_id,
            "project_id": self.project_id,
            "name": self.name,
            "prefix": self.prefix,
            "scopes": sorted(self.scopes),
            "models": None if self.models is None else sorted(self.models),
            "tiers": None if self.tiers is None else tier_names(self.tiers),
            "default_tier": self.default_tier.value if self.default_tier else None,
            "allow_from": [str(network) for network in self.allow_from],
            "created_at": _iso(self.created_at),
            "expires_at": _iso(self.expires_at),
            "revoked_at": _iso(self.revoked_at),
            **_now(self.ends_running),
        }


def tier_names(tiers: frozenset[Tier]) -> list[str]:
    """Names in order of service."""
    return [tier.value for tier in Tier if tier in tiers]


Row = RowMapping


def tenant_from(row: Row) -> Tenant:
    return Tenant(
        tenant_id=row["id"],
        name=row["name"],
        status=row["status"],
        weight=row["weight"],
        default_tier=Tier(row["default_tier"]),
        tiers=frozenset(Tier(tier) for tier in row["tiers"]),
        models=None if row["models"] is None else frozenset(row["models"]),
        created_at=from_us(row["created_us"]),
        on_low_budget=OnLowBudget(row["on_low_budget"]),
        reserved_tokens_per_s=row["reserved_tokens_per_s"],
        reserved_tier=None if row["reserved_tier"] is None else Tier(row["reserved_tier"]),
        labels={key: tuple(values) for key, values in (row["labels"] or {}).items()},
        ends_running=bool(row["ends_running"]),
    )


def project_from(row: Row) -> Project:
    return Project(
        project_id=row["id"],
        tenant_id=row["tenant_id"],
        name=row["name"],
        status=row["status"],
        created_at=from_us(row["created_us"]),
        ends_running=bool(row["ends_running"]),
    )


def key_from(row: Row, public_id: str) -> ApiKey:
    return ApiKey(
        key_id=row["id"],
        tenant_id=row["tenant_id"],
        project_id=row["project_id"],
        name=row["name"],
        prefix=prefix_of(public_id),
        scopes=frozenset(row["scopes"]),
        models=None if row["models"] is None else frozenset(row["models"]),
        tiers=None if row["tiers"] is None else frozenset(Tier(tier) for tier in row["tiers"]),
        default_tier=Tier(row["default_tier"]) if row["default_tier"] else None,
        created_at=from_us(row["created_us"]),
        expires_at=_optional(row["expires_us"]),
        revoked_at=_optional(row["revoked_us"]),
        allow_from=tuple(network_of(network) for network in row["allow_from"] or ()),
        ends_running=bool(row["ends_running"]),
    )
