"""Everything that a configuration file can hold, read from one snapshot of the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection

from tenants.admin.platform.policy import StoredPolicy, read_policy
from tenants.config_file.parts import Resources
from tenants.directory import queries
from tenants.instants import to_us
from tenants.nouns.key import ApiKey
from tenants.nouns.project import Project
from tenants.nouns.tenant import Tenant
from tenants.pricing.pricing import PriceBook
from tenants.storage import tables
from tenants.types import Limit, SubjectKind

PLATFORM_LIMIT, TENANT_LIMIT, EACH_END_USER = "platform", "tenant", "each_end_user"


@dataclass(frozen=True, slots=True)
class SubjectName:
    """What a limit binds, by name: `kind` is `platform`, `tenant`, `project`, `key`, `end_user` or
    `each_end_user`."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} {self.name}".strip()


@dataclass(slots=True)
class TenantState:
    tenant: Tenant
    projects: dict[str, Project] = field(default_factory=dict)
    """By name."""
    keys: list[ApiKey] = field(default_factory=list)
    """Those that are neither revoked nor expired."""
    limits: list[Limit] = field(default_factory=list)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    """Rows of resources, by their section."""

    def keys_called(self, name: str) -> list[ApiKey]:
        """Keys of this name, within the tenant's tiers and models."""
        return [within(key, self.tenant) for key in self.keys if key.name == name]

    def named_keys(self) -> Iterator[ApiKey]:
        """Usable keys with a unique name, by name."""
        times = Counter(key.name for key in self.keys)
        for stored in sorted(self.keys, key=lambda key: key.name):
            key = within(stored, self.tenant)
            is_usable = key.tiers != frozenset() and key.models != frozenset()
            if key.name and times[key.name] == 1 and is_usable:
                yield key

    def named_limits(self) -> Iterator[tuple[SubjectName, Limit]]:
        projects = {project.project_id: name for name, project in self.projects.items()}
        keys = {key.key_id: key.name for key in self.named_keys()}
        for limit in self.limits:
            match limit.kind:
                case SubjectKind.PROJECT:
                    name = projects.get(limit.subject_id)
                case SubjectKind.KEY:
                    name = keys.get(limit.subject_id)
                case SubjectKind.END_USER if not limit.is_default:
                    name = limit.end_user
                case SubjectKind.END_USER:
                    yield SubjectName(EACH_END_USER), limit
                    continue
                case _:
                    yield SubjectName(TENANT_LIMIT), limit
                    continue
            if name:
                yield SubjectName(limit.kind.value, name), limit


@dataclass(frozen=True, slots=True)
class ConfigState:
    """The directory at one revision."""

    revision: int
    now_us: int
    tenants: Mapping[str, TenantState] = field(default_factory=dict)
    """By name, in the order of names."""
    prices: PriceBook = field(default_factory=PriceBook)
    parts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Rows of resources that are no tenant's, by their section."""
    platform_limits: tuple[Limit, ...] = ()
    policy: StoredPolicy | None = None


def within(key: ApiKey, tenant: Tenant) -> ApiKey:
    """A key within its tenant's tiers and models, as requests have it."""
    tiers = None if key.tiers is None else key.tiers & tenant.tiers
    models = key.models
    if models is not None and tenant.models is not None:
        models = models & tenant.models
    usable = tenant.tiers if tiers is None else tiers
    default = key.default_tier if key.default_tier in usable else None
    return replace(key, tiers=tiers, models=models, default_tier=default)


def read_state(connection: Connection, now_us: int, resources: Resources) -> ConfigState:
    """Everything, in a number of statements that does not depend on the number of tenants."""
    by_id: dict[str, TenantState] = {
        tenant.tenant_id: TenantState(tenant) for tenant in queries.tenants_where(connection)
    }
    for project in queries.projects_where(connection):
        by_id[project.tenant_id].projects[project.name] = project
    for key in queries.keys_where(connection, tables.api_keys.c.revoked_us.is_(None)):
        if key.expires_at is None or to_us(key.expires_at) > now_us:
            by_id[key.tenant_id].keys.append(key)
    platform: list[Limit] = []
    for limit in queries.limits_where(connection):
        if limit.kind is SubjectKind.PLATFORM:
            platform.append(limit)
        else:
            by_id[limit.tenant_id].limits.append(limit)
    parts: dict[str, list[Any]] = {}
    for resource in resources:
        if resource.document is not None:
            for row in resource.document.rows(connection):
                owner = by_id.get(resource.as_json(row).get("tenant_id") or "")
                of_section = parts if owner is None else owner.parts
                of_section.setdefault(resource.document.section, []).append(row)
    return ConfigState(
        queries.revision(connection),
        now_us,
        {state.tenant.name: state for state in by_id.values()},
        queries.price_book(connection),
        parts,
        tuple(platform),
        read_policy(connection),
    )
