"""An API key: how it is made, changed, stored and shown. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field
from tenants.instants import from_us, to_us
from tenants.networks import Network, network_of
from tenants.nouns import checks
from tenants.nouns.columns import As, Record
from tenants.nouns.tenant import DISPLAY_NAME, TIERS, EndsRunning, Id, Tenant, tier_names
from tenants.types import SCOPES, Tier

MAX_KEYS_PER_TENANT = 1_000
MAX_SECRETS_PER_KEY = 4
MAX_NETWORKS = 32
MAX_EXPIRY_S = 10 * 366 * 86_400
MAX_GRACE_S = 30 * 86_400
DEFAULT_SCOPES = ("inference", "quote", "usage:read")
DEFAULT_GRACE_S = 86_400.0
OF_TENANT, NEVER = "tenant", "never"
"""Words on the command line: as its tenant has it; without end."""
_NAME = {"pattern": f"^(({checks.NAME.pattern})?)$"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey(Record):
    """A key without its secret."""

    key_id: Id
    tenant_id: str
    project_id: str
    name: str = ""
    prefix: Annotated[str, As(is_stored=False)] = ""
    """The visible part of its newest secret."""
    scopes: frozenset[str]
    models: frozenset[str] | None = None
    """None: its tenant's; the same of `tiers` and `default_tier`."""
    tiers: frozenset[Tier] | None = None
    default_tier: Tier | None = None
    allow_from: tuple[Network, ...] = ()
    """Networks that it may be used from; empty: anywhere."""
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    ends_running: EndsRunning = False
    display_name: str | None = None
    """For people."""

    def status(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """The key's own status at `now`, regardless of its tenant's."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class KeyChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`PATCH /admin/v1/keys/{id}`. None: it stays; empty: it has none of its own."""

    name: Annotated[str | None, Field("A name, without spaces; empty: none.", schema=_NAME)] = None
    scopes: Annotated[
        list[str] | None,
        Field(
            "What it may do (repeat for all scopes).",
            option="--scope",
            choices=tuple(sorted(SCOPES)),
            schema={"minItems": 1},
            without="inference, quote and usage:read",
        ),
    ] = None
    expires_in_s: Annotated[
        float | None,
        Field(
            "When it expires, from now: 12h or 30d.",
            option="--expires-in",
            is_duration=True,
            schema={"exclusiveMinimum": 0, "maximum": MAX_EXPIRY_S},
            without="never",
        ),
    ] = None
    expires: Annotated[
        str | None, Field("When it expires, such as 2027-01-31T18:00:00+01:00.", none=NEVER)
    ] = None
    models: Annotated[
        list[str] | None,
        Field(
            "Model it may use (repeat for all models).",
            option="--model",
            none="--all-models",
            none_help="Allow all models of its tenant again.",
            without="the tenant's",
        ),
    ] = None
    tiers: Annotated[
        list[str] | None,
        Field(
            "Tier it may use (repeat for all tiers).",
            option="--tier",
            choices=TIERS,
            none=OF_TENANT,
            without="the tenant's",
        ),
    ] = None
    default_tier: Annotated[
        str | None,
        Field("Default tier of its requests.", choices=TIERS, none=OF_TENANT, without="the tenant's"),
    ] = None
    allow_from: Annotated[
        list[str] | None,
        Field(
            "Network or address that it may be used from (repeat).",
            metavar="CIDR",
            none="--allow-from-anywhere",
            none_help="Allow all addresses again.",
            without="anywhere",
        ),
    ] = None
    display_name: Annotated[str | None, DISPLAY_NAME] = None


class KeyCreate(KeyChange, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/keys`."""

    tenant: Annotated[str, Field("Tenant (name or id).")]
    project: Annotated[str | None, Field("Project; created if it does not exist.", without="default")] = None


class KeyRotate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/keys/{id}/rotate`."""

    grace_s: Annotated[
        float,
        Field(
            "How long the old secret still works.",
            option="--grace",
            option_default="1h",
            is_duration=True,
            schema={"minimum": 0, "maximum": MAX_GRACE_S},
        ),
    ] = 0.0


def new_key(wanted: KeyCreate, owner: Tenant, project_id: str, now_us: int) -> ApiKey:
    """A new key, without id. `models` and `tiers` None: the tenant's, also when those change later;
    otherwise they must lie within the tenant's. Raises `Invalid`."""
    key = ApiKey(
        key_id="",
        tenant_id=owner.tenant_id,
        project_id=project_id,
        created_at=from_us(now_us),
        **{"scopes": frozenset(DEFAULT_SCOPES)} | _checked(wanted),
    )
    check_within(owner, key.models, key.tiers, key.default_tier)
    return replace(key, expires_at=_end_of(wanted, now_us))


def changed_key(before: ApiKey, wanted: KeyChange, owner: Tenant, now_us: int) -> ApiKey:
    """Raises `Invalid`."""
    new = _checked(wanted, emptied=("models", "tiers"))
    if wanted.expires is not None or wanted.expires_in_s is not None:
        new["expires_at"] = _end_of(wanted, now_us)
    after = replace(before, **new)
    # What is not changed may lie beyond the tenant's, which has narrowed it since.
    check_models(owner, new.get("models"))
    check_tiers(owner, new.get("tiers"))
    if "tiers" in new or "default_tier" in new:
        check_default_tier(owner, after.tiers, after.default_tier)
    return after


def _checked(wanted: KeyChange, emptied: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields given that the key has under the same name. `emptied`: an empty list is None."""
    given = {name: getattr(wanted, name) for name in KeyChange.__struct_fields__ if name in _OF_RECORD}
    given = {name: value for name, value in given.items() if value is not None}
    none = {name: None for name in emptied if given.get(name) == []}
    return checked({name: value for name, value in given.items() if name not in none}) | none


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a command as the key has them. Raises `Invalid`."""
    return {name: _CHECKS[name](value) if name in _CHECKS else value for name, value in given.items()}


def _end_of(wanted: KeyChange, now_us: int) -> datetime | None:
    """An instant, or a number of seconds from now; None: no end."""
    if wanted.expires_in_s is not None:
        checks.seconds("expires_in_s", wanted.expires_in_s, MAX_EXPIRY_S, least=1)
    elif wanted.expires == "":
        return None
    end_us = None if wanted.expires is None else to_us(checks.instant("expires", wanted.expires))
    at_us = expires_us(now_us, end_us, wanted.expires_in_s)
    return None if at_us is None else from_us(at_us)


def chosen_tiers(wanted: Iterable[str] | None) -> frozenset[Tier] | None:
    """None: those of its tenant."""
    return None if wanted is None else frozenset(checks.choice("tiers", Tier, tier) for tier in wanted)


def scopes(values: Iterable[str]) -> frozenset[str]:
    chosen = frozenset(values)
    if not chosen or chosen - SCOPES:
        wrong = ", ".join(sorted(map(repr, chosen - SCOPES))) or "none"
        raise Invalid("scopes", f"{wrong} given; choose from {', '.join(sorted(SCOPES))}")
    return chosen


def networks(values: Iterable[str] | None) -> tuple[Network, ...]:
    """None: anywhere."""
    try:
        chosen = dict.fromkeys(network_of(value) for value in values or ())
    except ValueError as error:
        raise Invalid("allow_from", str(error)) from None
    if len(chosen) > MAX_NETWORKS:
        raise Invalid("allow_from", f"{len(chosen)} networks; the most is {MAX_NETWORKS}: name larger ones")
    return tuple(chosen)


def expires_us(now_us: int, expires: int | None, expires_in_s: float | None) -> int | None:
    """An instant in microseconds, or a number of seconds from now; None: no end."""
    if expires is None:
        return None if expires_in_s is None else now_us + round(expires_in_s * 1e6)
    if expires_in_s is not None:
        raise Invalid("expires", "say when the key ends once: give expires or expires_in_s")
    if not now_us + 1_000_000 <= expires <= now_us + MAX_EXPIRY_S * 1_000_000:
        raise Invalid("expires", f"must lie 1 second to {MAX_EXPIRY_S // 86_400} days ahead")
    return expires


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


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "name": lambda value: checks.name("name", value) if value else "",
    "display_name": checks.display_name,
    "allow_from": networks,
    "scopes": scopes,
    "models": checks.models,
    "tiers": chosen_tiers,
    "default_tier": lambda value: checks.choice("default_tier", Tier, value) if value else None,
}
"""Of fields that commands and key have under the same name; others are taken as they are."""
_OF_RECORD = {field.name for field in fields(ApiKey)} - {"expires_at"}
