"""Admin acts on tenants, projects and keys; `Admin` has these and all others.

Every act of command line and API is a method of `Admin`, and one transaction with its audit row
(`transaction.py`). Acts on brakes, limits, the policy, prices and targets are in `brakes.py`, `limits.py`,
`policy.py`, `prices.py` and `slos.py`, reads of the audit in `audit_query.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, delete, insert, update
from sqlalchemy.exc import IntegrityError

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.audit_query import AuditCommands
from tenants.admin.brakes import BrakeCommands
from tenants.admin.commands import KeyChange, KeyCreate, ProjectCreate, TenantChange, TenantCreate
from tenants.admin.limits import LimitCommands
from tenants.admin.policy import PolicyCommands
from tenants.admin.prices import PriceCommands
from tenants.admin.slos import SloCommands
from tenants.admin.transaction import Change
from tenants.directory import queries
from tenants.directory.keys import PEPPER_SETTING, fingerprint, new_id, new_key
from tenants.directory.records import ApiKey, Project, Status, Tenant, from_us, limit_as_json, tier_names
from tenants.errors import AlreadyExists, Invalid, PepperMismatch
from tenants.networks import Network
from tenants.storage import tables
from tenants.types import Limit, OnLowBudget, Tier

DEFAULT_PROJECT = "default"
DEFAULT_SCOPES = ("inference", "quote", "usage:read")
DEFAULT_GRACE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant with its projects, keys and limits."""

    tenant: Tenant
    projects: tuple[Project, ...]
    keys: tuple[ApiKey, ...]
    limits: tuple[Limit, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.tenant.as_json(),
            "projects": [project.as_json() for project in self.projects],
            "keys": [key.as_json() for key in self.keys],
            "limits": [limit_as_json(limit) for limit in self.limits],
            "has_limits": bool(self.limits),
        }


class Admin(AuditCommands, BrakeCommands, LimitCommands, PolicyCommands, PriceCommands, SloCommands):
    """Every admin act."""

    # ------------------------------------------------------------ tenants and projects

    async def create_tenant(
        self, actor: Actor | str, wanted: TenantCreate, models: Iterable[str] | None = None
    ) -> Tenant:
        """Creates a tenant with a project `default`. `tiers` None: `tier` and the ones served after it."""
        name = validation.name("name", wanted.name)
        low_budget = validation.choice("on_low_budget", OnLowBudget, wanted.on_low_budget)
        default_tier = validation.choice("tier", Tier, wanted.tier)
        weight, allowed_models = validation.weight(wanted.weight), validation.models(models)
        allowed = validation.tiers(default_tier, wanted.tiers)
        reserved = validation.reserved(wanted.reserved_tokens_per_s)
        reserved_tier = validation.reserved_tier(wanted.reserved_tier, reserved)

        def change(connection: Connection, now_us: int) -> Change[Tenant]:
            if queries.count(connection, tables.tenants) >= validation.MAX_TENANTS:
                raise Invalid(
                    "tenant", f"there are {validation.MAX_TENANTS} tenants already, which is the most"
                )
            tenant = Tenant(
                tenant_id=new_id("ten"),
                name=name,
                status="active",
                weight=weight,
                default_tier=default_tier,
                tiers=allowed,
                models=allowed_models,
                created_at=from_us(now_us),
                on_low_budget=low_budget,
                reserved_tokens_per_s=reserved,
                reserved_tier=reserved_tier,
            )
            _insert_unique(
                connection,
                insert(tables.tenants).values(
                    id=tenant.tenant_id, revision=0, created_us=now_us, **_columns(tenant)
                ),
                "tenant",
                name,
            )
            _insert_project(connection, tenant, DEFAULT_PROJECT, now_us)
            return Change(tenant, tenant.tenant_id, tenant.tenant_id, after=tenant.as_json())

        return await self._act(actor, "tenant.create", change)

    async def update_tenant(self, actor: Actor | str, tenant: str, wanted: TenantChange) -> Tenant:
        """Changes the given fields. A new `tier` without `tiers` sets those to it and the ones after it."""

        def edit(before: Tenant) -> Tenant:
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
                new["models"] = validation.models(wanted.models)
            if wanted.labels is not None:
                new["labels"] = validation.labels(before.labels, wanted.labels)
            return replace(before, **new)

        return await self._edit_tenant(actor, "tenant.update", tenant, edit)

    async def suspend_tenant(self, actor: Actor | str, tenant: str) -> Tenant:
        """Its keys are refused until `resume_tenant`; running requests go on to their end."""
        return await self._edit_tenant(
            actor, "tenant.suspend", tenant, lambda before: replace(before, status="suspended")
        )

    async def resume_tenant(self, actor: Actor | str, tenant: str) -> Tenant:
        """Undoes `suspend_tenant`."""
        return await self._edit_tenant(
            actor, "tenant.resume", tenant, lambda before: replace(before, status="active")
        )

    async def list_tenants(self) -> list[Tenant]:
        """All tenants, by name."""
        return await self._database.read(queries.tenants_where)

    async def show_tenant(self, tenant: str) -> TenantView:
        """One tenant, by id or name. Raises `NotFound`."""

        def view(connection: Connection) -> TenantView:
            found = queries.find_tenant(connection, tenant)
            ids = [found.tenant_id]
            return TenantView(
                found,
                tuple(queries.projects_of(connection, ids)),
                tuple(queries.keys_of(connection, ids)),
                tuple(queries.limits_of(connection, ids)),
            )

        return await self._database.read(view)

    async def create_project(self, actor: Actor | str, wanted: ProjectCreate) -> Project:
        """Creates a project in a tenant; names are unique within it."""
        name = validation.name("name", wanted.name)

        def change(connection: Connection, now_us: int) -> Change[Project]:
            owner = queries.find_tenant(connection, wanted.tenant)
            have = queries.count(connection, tables.projects, tables.projects.c.tenant_id == owner.tenant_id)
            if have >= validation.MAX_PROJECTS_PER_TENANT:
                raise Invalid(
                    "project", f"a tenant has at most {validation.MAX_PROJECTS_PER_TENANT} projects"
                )
            project = _insert_project(connection, owner, name, now_us)
            return Change(project, project.project_id, owner.tenant_id, after=project.as_json())

        return await self._act(actor, "project.create", change)

    async def suspend_project(self, actor: Actor | str, project: str, tenant: str | None = None) -> Project:
        """Its keys are refused until `resume_project`; running requests go on to their end. `project` is an
        id, or with `tenant` a name."""
        return await self._set_project_status(actor, "project.suspend", project, tenant, "suspended")

    async def resume_project(self, actor: Actor | str, project: str, tenant: str | None = None) -> Project:
        """Undoes `suspend_project`."""
        return await self._set_project_status(actor, "project.resume", project, tenant, "active")

    async def list_projects(self, tenant: str | None = None) -> list[Project]:
        """Projects of one tenant, or of all, by tenant and name."""

        def find(connection: Connection) -> list[Project]:
            if tenant is None:
                owners = queries.tenants_where(connection)
            else:
                owners = [queries.find_tenant(connection, tenant)]
            return queries.projects_of(connection, [each.tenant_id for each in owners])

        return await self._database.read(find)

    # ------------------------------------------------------------ keys

    async def create_key(
        self,
        actor: Actor | str,
        wanted: KeyCreate,
        *,
        name: str = "",
        default_tier: str | None = None,
    ) -> tuple[ApiKey, str]:
        """Creates a key; returns it with its secret, which cannot be read again. `models` and `tiers` None:
        the tenant's, also when those change later; otherwise they must lie within the tenant's."""
        chosen_scopes = validation.scopes(DEFAULT_SCOPES if wanted.scopes is None else wanted.scopes)
        chosen_models, expires_in_s = validation.models(wanted.models), wanted.expires_in_s
        networks = validation.networks(wanted.allow_from)
        if name:
            validation.name("name", name)
        if expires_in_s is not None:
            validation.seconds("expires_in_s", expires_in_s, validation.MAX_EXPIRY_S, least=1)
        default = None if default_tier is None else validation.choice("default_tier", Tier, default_tier)
        chosen_tiers = (
            None
            if wanted.tiers is None
            else frozenset(validation.choice("tiers", Tier, tier) for tier in wanted.tiers)
        )
        secret = new_key(self._pepper)

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            owner = queries.find_tenant(connection, wanted.tenant)
            _check_tiers(owner, chosen_tiers, default)
            if owner.models is not None and chosen_models is not None and chosen_models - owner.models:
                raise Invalid(
                    "models", f"beyond the tenant's: {', '.join(sorted(chosen_models - owner.models))}"
                )
            home = queries.find_project(connection, wanted.project or DEFAULT_PROJECT, owner)
            have = queries.count(
                connection,
                tables.api_keys,
                tables.api_keys.c.tenant_id == owner.tenant_id,
                tables.api_keys.c.revoked_us.is_(None),
            )
            if have >= validation.MAX_KEYS_PER_TENANT:
                raise Invalid(
                    "key",
                    f"a tenant has at most {validation.MAX_KEYS_PER_TENANT} keys; revoke an unused one",
                )
            key_id = new_id("key")
            connection.execute(
                insert(tables.api_keys).values(
                    id=key_id,
                    tenant_id=owner.tenant_id,
                    project_id=home.project_id,
                    name=name,
                    scopes=sorted(chosen_scopes),
                    models=None if chosen_models is None else sorted(chosen_models),
                    tiers=None if chosen_tiers is None else tier_names(chosen_tiers),
                    default_tier=default.value if default else None,
                    created_us=now_us,
                    expires_us=None if expires_in_s is None else now_us + round(expires_in_s * 1e6),
                    allow_from=_network_column(networks),
                )
            )
            _insert_secret(connection, key_id, secret.public_id, secret.digest, now_us)
            key = queries.find_key(connection, key_id)
            return Change(key, key_id, owner.tenant_id, after=key.as_json())

        return await self._act(actor, "key.create", change), secret.text

    async def update_key(
        self, actor: Actor | str, key: str, wanted: KeyChange, tenant: str | None = None
    ) -> ApiKey:
        """Changes the given fields of a key, by id or visible prefix. With `tenant` only a key of that tenant
        is found."""

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            before = after = self._find_key(connection, key, tenant)
            if wanted.allow_from is not None:
                after = replace(before, allow_from=validation.networks(wanted.allow_from))
            connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == before.key_id)
                .values(allow_from=_network_column(after.allow_from))
            )
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, "key.update", change)

    async def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Keys of one tenant, or of all; revoked ones included."""

        def find(connection: Connection) -> list[ApiKey]:
            if tenant is None:
                return queries.keys_where(connection)
            return queries.keys_of(connection, [queries.find_tenant(connection, tenant).tenant_id])

        return await self._database.read(find)

    async def revoke_key(self, actor: Actor | str, key: str, tenant: str | None = None) -> ApiKey:
        """Revokes a key, by id or visible prefix, in every gateway within a second. Revoking twice changes
        nothing. With `tenant` only a key of that tenant is found."""

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            before = self._find_key(connection, key, tenant)
            connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == before.key_id, tables.api_keys.c.revoked_us.is_(None))
                .values(revoked_us=now_us)
            )
            after = queries.find_key(connection, before.key_id)
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, "key.revoke", change)

    async def rotate_key(
        self, actor: Actor | str, key: str, grace_s: float = DEFAULT_GRACE_S, tenant: str | None = None
    ) -> tuple[ApiKey, str]:
        """Gives a key a new secret (id, limits and scopes stay); older secrets work `grace_s` longer."""
        validation.seconds("grace_s", grace_s, validation.MAX_GRACE_S)
        secret = new_key(self._pepper)
        stored = tables.key_secrets

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            before = self._find_key(connection, key, tenant)
            if before.revoked_at is not None:
                raise Invalid("key", "was revoked; create a new one")
            mine = stored.c.key_id == before.key_id
            connection.execute(delete(stored).where(mine, stored.c.expires_us <= now_us))
            if queries.count(connection, stored, mine) >= validation.MAX_SECRETS_PER_KEY:
                raise Invalid(
                    "key",
                    f"{validation.MAX_SECRETS_PER_KEY} of its secrets are valid; wait for the end of a grace",
                )
            until_us = now_us + round(grace_s * 1e6)
            connection.execute(
                update(stored)
                .where(mine, stored.c.expires_us.is_(None) | (stored.c.expires_us > until_us))
                .values(expires_us=until_us)
            )
            _insert_secret(connection, before.key_id, secret.public_id, secret.digest, now_us)
            after = queries.find_key(connection, before.key_id)
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, "key.rotate", change), secret.text

    # ------------------------------------------------------------ shared

    async def _edit_tenant(
        self, actor: Actor | str, action: str, reference: str, edit: Callable[[Tenant], Tenant]
    ) -> Tenant:
        def change(connection: Connection, now_us: int) -> Change[Tenant]:
            before = queries.find_tenant(connection, reference)
            after = edit(before)
            connection.execute(
                update(tables.tenants)
                .where(tables.tenants.c.id == before.tenant_id)
                .values(**_columns(after))
            )
            return Change(after, after.tenant_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, action, change)

    async def _set_project_status(
        self, actor: Actor | str, action: str, project: str, tenant: str | None, status: Status
    ) -> Project:
        def change(connection: Connection, now_us: int) -> Change[Project]:
            owner = None if tenant is None else queries.find_tenant(connection, tenant)
            before = queries.find_project(connection, project, owner)
            after = replace(before, status=status)
            connection.execute(
                update(tables.projects).where(tables.projects.c.id == before.project_id).values(status=status)
            )
            return Change(after, after.project_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, action, change)

    def _find_key(self, connection: Connection, key: str, tenant: str | None) -> ApiKey:
        tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
        return queries.find_key(connection, key, tenant_id)

    def _check_pepper(self, connection: Connection) -> None:
        """The first key stores the pepper's fingerprint. Raises `PepperMismatch` for another pepper."""
        stored = queries.setting(connection, PEPPER_SETTING)
        if stored is None:
            connection.execute(
                insert(tables.settings).values(name=PEPPER_SETTING, value=fingerprint(self._pepper))
            )
        elif stored != fingerprint(self._pepper):
            raise PepperMismatch


def _columns(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "status": tenant.status,
        "weight": tenant.weight,
        "default_tier": tenant.default_tier.value,
        "tiers": tier_names(tenant.tiers),
        "models": None if tenant.models is None else sorted(tenant.models),
        "on_low_budget": tenant.on_low_budget.value,
        "reserved_tokens_per_s": tenant.reserved_tokens_per_s,
        "reserved_tier": None if tenant.reserved_tier is None else tenant.reserved_tier.value,
        "labels": {key: list(values) for key, values in tenant.labels.items()} or None,
    }


def _network_column(networks: Iterable[Network]) -> list[str] | None:
    return [str(network) for network in networks] or None


def _insert_unique(connection: Connection, statement: Any, what: str, name: str) -> None:
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except IntegrityError:
        raise AlreadyExists(what, name) from None


def _insert_project(connection: Connection, tenant: Tenant, name: str, now_us: int) -> Project:
    project = Project(new_id("prj"), tenant.tenant_id, name, "active", from_us(now_us))
    statement = insert(tables.projects).values(
        id=project.project_id, tenant_id=tenant.tenant_id, name=name, status="active", created_us=now_us
    )
    _insert_unique(connection, statement, "project", name)
    return project


def _insert_secret(connection: Connection, key_id: str, public_id: str, digest: bytes, now_us: int) -> None:
    connection.execute(
        insert(tables.key_secrets).values(
            public_id=public_id, key_id=key_id, digest=digest, created_us=now_us
        )
    )


def _check_tiers(tenant: Tenant, chosen: frozenset[Tier] | None, default: Tier | None) -> None:
    if chosen is not None and (not chosen or chosen - tenant.tiers):
        known = ", ".join(tier_names(tenant.tiers))
        raise Invalid("tiers", f"must lie within the tenant's: {known}")
    if default is not None and default not in (tenant.tiers if chosen is None else chosen):
        raise Invalid("default_tier", f"{default.value!r} is not among the key's tiers")
