"""Commands of admin acts, one struct each: shared by HTTP body, command line and method.

Types only; `validation.py` checks ranges and rules between fields. None: not given."""

from __future__ import annotations

import msgspec


class TenantCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/tenants`."""

    name: str
    weight: float = 1.0
    tier: str = "standard"
    tiers: list[str] | None = None
    on_low_budget: str = "refuse"
    reserved_tokens_per_s: float = 0.0
    """Cost tokens (input + 2 x output) per second, served before other tenants' requests; 0: none."""
    reserved_tier: str = "all"
    """The tier whose requests are served so; `all`: every one."""


class TenantChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/tenants/{tenant}`."""

    weight: float | None = None
    tier: str | None = None
    tiers: list[str] | None = None
    models: list[str] | None = None
    """An empty list: all."""
    on_low_budget: str | None = None
    reserved_tokens_per_s: float | None = None
    """0 also forgets `reserved_tier`."""
    reserved_tier: str | None = None
    labels: dict[str, list[str]] | None = None
    """Keys of requests' `metadata` that go to the ledger, each with the values allowed; an empty list drops
    the label, and labels that are not named stay."""


class ProjectCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/projects`."""

    tenant: str
    name: str


class KeyCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/keys`."""

    tenant: str
    project: str | None = None
    scopes: list[str] | None = None
    expires_in_s: float | None = None
    expires: str | None = None
    """In place of it: the instant, ISO 8601 with a time zone."""
    models: list[str] | None = None
    tiers: list[str] | None = None
    name: str = ""
    default_tier: str | None = None
    """Of requests that name no tier. None: the tenant's."""
    allow_from: list[str] | None = None
    """Networks in CIDR notation that it may be used from; none: anywhere."""


class Withdrawal(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/tenants/{tenant}/suspend`, `POST /admin/v1/projects/{project}/suspend` and
    `DELETE /admin/v1/keys/{id}`; without a body: not now."""

    now: bool = False
    """What runs ends as well, charged for what it emitted."""


class KeyChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/keys/{id}`."""

    name: str | None = None
    """Empty: no name."""
    default_tier: str | None = None
    """Of requests that name no tier; empty: the tenant's again."""
    allow_from: list[str] | None = None
    """As of a new key; an empty list: anywhere."""
    scopes: list[str] | None = None
    models: list[str] | None = None
    """An empty list: the tenant's again."""
    tiers: list[str] | None = None
    """An empty list: the tenant's again."""
    expires: str | None = None
    """The instant of its end, ISO 8601 with a time zone; empty: it has none."""
    expires_in_s: float | None = None
    """In place of it."""


class BrakeSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PUT /admin/v1/brake`."""

    tier: str
    share: float
    """Of places, KV cache and step tokens, above 0 and at most 1."""
    for_s: float
    """A brake ends by itself."""
    reason: str = ""


class BrakeEnd(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`DELETE /admin/v1/brake?tier={tier}`."""

    tier: str


class ReplicaDrain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/upstreams/{replica}/drain`."""

    reason: str = ""


class LedgerAdjust(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/ledger/adjust`."""

    request_id: str
    reason: str
