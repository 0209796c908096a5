"""Admin acts on tenants, projects and keys; `Admin` has these and all others.

Every act of command line and API is one method and one transaction with its audit row (`transaction.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, delete, insert, update
from sqlalchemy.exc import IntegrityError

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.brakes import BrakeCommands
from tenants.admin.commands import KeyChange, KeyCreate, ProjectCreate, TenantChange, TenantCreate
from tenants.admin.drafts import (
    changed_key,
    changed_tenant,
    check_within,
    chosen_default_tier,
    chosen_tiers,
    end_of_key_us,
    new_tenant,
)
from tenants.admin.drains import DrainCommands
from tenants.admin.ledger import LedgerCommands
from tenants.admin.limits import LimitCommands
from tenants.admin.lists.audit import AuditCommands
from tenants.admin.lists.engine_time import EngineTimeReads
from tenants.admin.lists.flow import FlowLists
from tenants.admin.lists.history import HistoryLists
from tenants.admin.lists.moves import MoveReads
from tenants.admin.lists.objects import ObjectLists
from tenants.admin.lists.requests import RequestLists
from tenants.admin.lists.sessions import SessionLists
from tenants.admin.lists.usage import UsageCommands
from tenants.admin.people import PeopleCommands
from tenants.admin.policy import PolicyCommands
from tenants.admin.prices import PriceCommands
from tenants.admin.slos import SloCommands
from tenants.admin.transaction import Change, IfMatch
from tenants.admin.webhooks import WebhookCommands
from tenants.directory import queries
from tenants.directory.keys import PEPPER_SETTING, fingerprint, new_id, new_key
from tenants.directory.records import (
    ApiKey,
    Project,
    Status,
    Tenant,
    from_us,
    limit_as_json,
    tier_names,
    to_us,
)
from tenants.errors import AlreadyExists, Invalid, PepperMismatch
from tenants.networks import Network
from tenants.storage import tables
from tenants.types import Limit

DEFAULT_PROJECT = "default"
DEFAULT_SCOPES = ("inference", "quote", "usage:read")
DEFAULT_GRACE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TenantView:
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


class Admin(
    ObjectLists,
    HistoryLists,
    RequestLists,
    AuditCommands,
    BrakeCommands,
    DrainCommands,
    EngineTimeReads,
    FlowLists,
    LedgerCommands,
    LimitCommands,
    MoveReads,
    PeopleCommands,
    PolicyCommands,
    PriceCommands,
    SessionLists,
    SloCommands,
    UsageCommands,
    WebhookCommands,
):
    """Every admin act."""

    # ------------------------------------------------------------ tenants and projects

    async def create_tenant(
        self, actor: Actor | str, wanted: TenantCreate, models: Iterable[str] | None = None
    ) -> Tenant:
        """Creates a tenant with a project `default`. `tiers` None: `tier` and the ones served after it."""
        draft = new_tenant(wanted, models)

        def change(connection: Connection, now_us: int) -> Change[Tenant]:
            if queries.count(connection, tables.tenants) >= validation.MAX_TENANTS:
                raise Invalid(
                    "tenant", f"there are {validation.MAX_TENANTS} tenants already, which is the most"
                )
            tenant = replace(draft, tenant_id=new_id("ten"), created_at=from_us(now_us))
            _insert_unique(
                connection,
                insert(tables.tenants).values(
                    id=tenant.tenant_id, revision=0, created_us=now_us, **_columns(tenant)
                ),
                "tenant",
                tenant.name,
            )
            _insert_project(connection, tenant, DEFAULT_PROJECT, now_us)
            return Change(tenant, tenant.tenant_id, tenant.tenant_id, after=tenant.as_json())

        return await self._act(actor, "tenant.create", change)

    async def update_tenant(
        self, actor: Actor | str, tenant: str, wanted: TenantChange, *, if_match: IfMatch = None
    ) -> Tenant:
        """Changes the given fields. A new `tier` without `tiers` sets those to it and the ones after it."""

        return await self._edit_tenant(
            actor, "tenant.update", tenant, lambda before: changed_tenant(before, wanted), if_match
        )

    async def suspend_tenant(
        self, actor: Actor | str, tenant: str, *, now: bool = False, if_match: IfMatch = None
    ) -> Tenant:
        """Its keys are refused until `resume_tenant`, and its waiting requests end; running ones finish, or
        with `now` end as well, charged for what they emitted."""
        return await self._edit_tenant(
            actor,
            "tenant.suspend",
            tenant,
            lambda before: replace(before, status="suspended", ends_running=now),
            if_match,
        )

    async def resume_tenant(self, actor: Actor | str, tenant: str, *, if_match: IfMatch = None) -> Tenant:
        return await self._edit_tenant(
            actor,
            "tenant.resume",
            tenant,
            lambda before: replace(before, status="active", ends_running=False),
            if_match,
        )

    async def list_tenants(self) -> list[Tenant]:
        return await self._database.read(queries.tenants_where)

    async def show_tenant(self, tenant: str) -> TenantView:
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

    async def suspend_project(
        self,
        actor: Actor | str,
        project: str,
        tenant: str | None = None,
        *,
        now: bool = False,
        if_match: IfMatch = None,
    ) -> Project:
        """As `suspend_tenant`, until `resume_project`. `project` is an id, or with `tenant` a name."""
        return await self._set_project_status(
            actor, "project.suspend", project, tenant, "suspended", now, if_match
        )

    async def resume_project(
        self, actor: Actor | str, project: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> Project:
        return await self._set_project_status(
            actor, "project.resume", project, tenant, "active", False, if_match
        )

    async def list_projects(self, tenant: str | None = None) -> list[Project]:
        def find(connection: Connection) -> list[Project]:
            if tenant is None:
                owners = queries.tenants_where(connection)
            else:
                owners = [queries.find_tenant(connection, tenant)]
            return queries.projects_of(connection, [owner.tenant_id for owner in owners])

        return await self._database.read(find)

    # ------------------------------------------------------------ keys

    async def create_key(
        self,
        actor: Actor | str,
        wanted: KeyCreate,
    ) -> tuple[ApiKey, str]:
        """Returns the key with its secret, which cannot be read again. `models` and `tiers` None: the
        tenant's, also when those change later; otherwise they must lie within the tenant's."""
        chosen_scopes = validation.scopes(DEFAULT_SCOPES if wanted.scopes is None else wanted.scopes)
        chosen_models, chosen = validation.models(wanted.models), chosen_tiers(wanted.tiers)
        networks = validation.networks(wanted.allow_from)
        if wanted.name:
            validation.name("name", wanted.name)
        default = chosen_default_tier(wanted.default_tier)
        secret = new_key(self._pepper)

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            owner = queries.find_tenant(connection, wanted.tenant)
            expires_us = end_of_key_us(now_us, wanted.expires, wanted.expires_in_s)
            check_within(owner, chosen_models, chosen, default)
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
                    name=wanted.name,
                    scopes=sorted(chosen_scopes),
                    models=None if chosen_models is None else sorted(chosen_models),
                    tiers=None if chosen is None else tier_names(chosen),
                    default_tier=default.value if default else None,
                    created_us=now_us,
                    expires_us=expires_us,
                    allow_from=_network_column(networks),
                )
            )
            _insert_secret(connection, key_id, secret.public_id, secret.digest, now_us)
            key = queries.find_key(connection, key_id)
            return Change(key, key_id, owner.tenant_id, after=key.as_json())

        return await self._act(actor, "key.create", change), secret.text

    async def update_key(
        self,
        actor: Actor | str,
        key: str,
        wanted: KeyChange,
        tenant: str | None = None,
        *,
        if_match: IfMatch = None,
    ) -> ApiKey:
        """By id or visible prefix. Its end counts for waiting requests, too; the rest from the next request
        on. With `tenant` only a key of that tenant is found."""

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            before = self._find_key(connection, key, tenant)
            owner = queries.find_tenant(connection, before.tenant_id)
            after = changed_key(before, wanted, owner, now_us)
            connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == before.key_id)
                .values(
                    name=after.name,
                    scopes=sorted(after.scopes),
                    models=None if after.models is None else sorted(after.models),
                    tiers=None if after.tiers is None else tier_names(after.tiers),
                    default_tier=after.default_tier.value if after.default_tier else None,
                    expires_us=None if after.expires_at is None else to_us(after.expires_at),
                    allow_from=_network_column(after.allow_from),
                )
            )
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, "key.update", change, if_match)

    async def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Revoked ones included."""

        def find(connection: Connection) -> list[ApiKey]:
            if tenant is None:
                return queries.keys_where(connection)
            return queries.keys_of(connection, [queries.find_tenant(connection, tenant).tenant_id])

        return await self._database.read(find)

    async def revoke_key(
        self,
        actor: Actor | str,
        key: str,
        tenant: str | None = None,
        *,
        now: bool = False,
        if_match: IfMatch = None,
    ) -> ApiKey:
        """By id or visible prefix; its waiting and running requests as of `suspend_tenant`. Revoking twice
        changes nothing, but that `now` ends what runs. With `tenant` only a key of that tenant is found."""

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            before = self._find_key(connection, key, tenant)
            connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == before.key_id, tables.api_keys.c.revoked_us.is_(None))
                .values(revoked_us=now_us)
            )
            if now:
                connection.execute(
                    update(tables.api_keys)
                    .where(tables.api_keys.c.id == before.key_id)
                    .values(ends_running=True)
                )
            after = queries.find_key(connection, before.key_id)
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, "key.revoke", change, if_match)

    async def rotate_key(
        self,
        actor: Actor | str,
        key: str,
        grace_s: float = DEFAULT_GRACE_S,
        tenant: str | None = None,
        *,
        if_match: IfMatch = None,
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

        return await self._act(actor, "key.rotate", change, if_match), secret.text

    # ------------------------------------------------------------ shared

    async def _edit_tenant(
        self,
        actor: Actor | str,
        action: str,
        reference: str,
        edit: Callable[[Tenant], Tenant],
        if_match: IfMatch,
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

        return await self._act(actor, action, change, if_match)

    async def _set_project_status(
        self,
        actor: Actor | str,
        action: str,
        project: str,
        tenant: str | None,
        status: Status,
        ends_running: bool,
        if_match: IfMatch,
    ) -> Project:
        def change(connection: Connection, now_us: int) -> Change[Project]:
            owner = None if tenant is None else queries.find_tenant(connection, tenant)
            before = queries.find_project(connection, project, owner)
            after = replace(before, status=status, ends_running=ends_running)
            connection.execute(
                update(tables.projects)
                .where(tables.projects.c.id == before.project_id)
                .values(status=status, ends_running=ends_running)
            )
            return Change(after, after.project_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._act(actor, action, change, if_match)

    def _find_key(self, connection: Connection, key: str, tenant: str | None) -> ApiKey:
        tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
        return queries.find_key(connection, key, tenant_id)

    async def is_own_pepper(self) -> bool:
        """Whether the keys in this database, if any, were made with this pepper."""
        stored = await self._database.read(lambda connection: queries.setting(connection, PEPPER_SETTING))
        return stored in (None, fingerprint(self._pepper))

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
        "ends_running": tenant.ends_running,
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
