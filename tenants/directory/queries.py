"""Statements shared by the directory (`directory.py`) and the admin acts (`tenants/admin/admin.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table, and_, func, select, text, true
from sqlalchemy.sql import ColumnElement

from tenants.directory.keys import prefix_of
from tenants.errors import Invalid, NotFound
from tenants.nouns.alias import Alias, read_alias
from tenants.nouns.key import ApiKey
from tenants.nouns.limit import limit_from, override_from
from tenants.nouns.project import Project
from tenants.nouns.tenant import Tenant
from tenants.pricing.price_row import entry_of
from tenants.pricing.pricing import PriceBook
from tenants.storage.tables import (
    api_keys,
    directory_revision,
    key_secrets,
    limit_overrides,
    limits,
    model_aliases,
    prices,
    projects,
    settings,
    tenants,
)
from tenants.storage.upserts import insert
from tenants.types import Limit, Override, Tier

#: Bind parameters of one `IN (…)`: of the longest page and the row after it. SQLite takes 32,766.
CHUNK = 1_001


@dataclass(frozen=True, slots=True)
class Secret:
    """A stored secret; expiry None: that of the key."""

    public_id: str
    key_id: str
    digest: bytes
    expires_us: int | None


def revision(connection: Connection) -> int:
    return int(connection.execute(select(directory_revision.c.revision)).scalar_one())


def now_us(connection: Connection, wall_clock: Callable[[], float]) -> int:
    """The database's clock; with SQLite, `wall_clock`."""
    if connection.dialect.name == "postgresql":
        query = text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
        return int(connection.execute(query).scalar_one())
    return round(wall_clock() * 1e6)


def setting(connection: Connection, name: str) -> str | None:
    return connection.execute(select(settings.c.value).where(settings.c.name == name)).scalar()


def put_setting(connection: Connection, name: str, value: str) -> None:
    row = insert(connection, settings).values(name=name, value=value)
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": value}))


def tenants_where(
    connection: Connection, *conditions: ColumnElement[bool], most: int | None = None
) -> list[Tenant]:
    """Tenants by name, at most `most`."""
    query = select(tenants).where(*conditions).order_by(tenants.c.name).limit(most)
    return [Tenant.from_row(row) for row in connection.execute(query).mappings()]


def plain(reference: str) -> str:
    """A reference without NUL, which PostgreSQL refuses; what replaces it is in no id or name."""
    return reference.replace("\0", "\ufffd")


def find_tenant(connection: Connection, reference: str) -> Tenant:
    """By id or by name (names cannot look like ids)."""
    asked = plain(reference)
    rows = tenants_where(connection, (tenants.c.id == asked) | (tenants.c.name == asked))
    if not rows:
        raise NotFound("tenant", reference)
    return rows[0]


NAMED: dict[str, Table] = {"tenant": tenants, "project": projects, "key": api_keys}
"""Kinds of things that have a name."""


def names_of(connection: Connection, kind: str, ids: Iterable[str]) -> dict[str, str]:
    """Existing ones only."""
    table = NAMED[kind]
    return {
        row.id: row.name
        for chunk in chunks(sorted(set(ids)))
        for row in connection.execute(select(table.c.id, table.c.name).where(table.c.id.in_(chunk)))
    }


def owners_of(connection: Connection, project_ids: Iterable[str]) -> dict[str, str]:
    """Names of tenants by the ids of their projects."""
    owned = select(projects.c.id, tenants.c.name).join(tenants, tenants.c.id == projects.c.tenant_id)
    return {
        project_id: name
        for chunk in chunks(sorted(project_ids))
        for project_id, name in connection.execute(owned.where(projects.c.id.in_(chunk)))
    }


def ids_of(
    connection: Connection, reference: str, *, kinds: Iterable[str] = NAMED, tenant_id: str | None = None
) -> list[str]:
    """Ids of all with this name, id or (keys) visible prefix; with `tenant_id` only of that tenant."""
    ids: list[str] = []
    for kind in kinds:
        table = NAMED[kind]
        is_it = (table.c.id == reference) | (table.c.name == reference)
        if table is api_keys:
            is_it = is_it | table.c.id.in_(_keys_of_prefix(reference))
        owner = table.c.id if table is tenants else table.c.tenant_id
        query = select(table.c.id).where(is_it, true() if tenant_id is None else owner == tenant_id)
        ids += connection.execute(query.limit(CHUNK)).scalars()
    return ids


def find_project(connection: Connection, reference: str, tenant: Tenant | None = None) -> Project:
    """By id, or within a tenant by name. Raises `NotFound`, `Invalid` for a name alone (ambiguous)."""
    asked = plain(reference)
    is_it = projects.c.id == asked
    if tenant is not None:
        is_it = (is_it | (projects.c.name == asked)) & (projects.c.tenant_id == tenant.tenant_id)
    row = connection.execute(select(projects).where(is_it)).mappings().first()
    if row is not None:
        return Project.from_row(row)
    if tenant is None and not reference.startswith("prj_"):
        raise Invalid(
            "tenant", f"is needed beside the project's name {reference[:64]!r}; beside its id it is not"
        )
    raise NotFound("project", reference)


def find_key(connection: Connection, reference: str, tenant_id: str | None = None) -> ApiKey:
    """By id or by visible prefix; with `tenant_id` only among that tenant's."""
    asked = plain(reference)
    condition = (api_keys.c.id == asked) | api_keys.c.id.in_(_keys_of_prefix(asked))
    if tenant_id is not None:
        condition = condition & (api_keys.c.tenant_id == tenant_id)
    keys = keys_where(connection, condition)
    if not keys:
        # Shortened: the reference may be a whole key, secret included.
        raise NotFound("key", reference if len(reference) <= 24 else reference[:20] + "…")
    return keys[0]


def _keys_of_prefix(reference: str) -> Select[Any]:
    """The key whose secret begins so, or is this."""
    public_id = reference.removeprefix("fg_live_").partition("_")[0]
    return select(key_secrets.c.key_id).where(key_secrets.c.public_id == public_id)


def keys_where(
    connection: Connection, *conditions: ColumnElement[bool], most: int | None = None
) -> list[ApiKey]:
    """Keys with the visible part of their newest secret, in order of creation; two statements in all."""
    in_order = (api_keys.c.created_us, api_keys.c.id)
    wanted = select(api_keys).where(*conditions).order_by(*in_order).limit(most)
    rows = list(connection.execute(wanted).mappings())
    those = wanted.with_only_columns(api_keys.c.id).subquery()
    secrets = (
        select(key_secrets.c.key_id, key_secrets.c.public_id)
        .join(those, those.c.id == key_secrets.c.key_id)
        .order_by(key_secrets.c.created_us)
    )
    newest: dict[str, str] = {row.key_id: row.public_id for row in connection.execute(secrets)}
    return [ApiKey.from_row(row, prefix=prefix_of(newest.get(row["id"], ""))) for row in rows]


def secrets_of(connection: Connection, key_ids: list[str]) -> list[Secret]:
    """Secrets of the keys, oldest first."""
    rows: list[RowMapping] = []
    for chunk in chunks(key_ids):
        query = select(key_secrets).where(key_secrets.c.key_id.in_(chunk)).order_by(key_secrets.c.created_us)
        rows.extend(connection.execute(query).mappings())
    return [Secret(row["public_id"], row["key_id"], bytes(row["digest"]), row["expires_us"]) for row in rows]


def projects_of(connection: Connection, tenant_ids: list[str]) -> list[Project]:
    return [
        Project.from_row(row)
        for chunk in chunks(tenant_ids)
        for row in connection.execute(
            select(projects).where(projects.c.tenant_id.in_(chunk)).order_by(projects.c.name)
        ).mappings()
    ]


def keys_of(connection: Connection, tenant_ids: list[str]) -> list[ApiKey]:
    return [
        key for chunk in chunks(tenant_ids) for key in keys_where(connection, api_keys.c.tenant_id.in_(chunk))
    ]


def limits_of(connection: Connection, tenant_ids: list[str]) -> list[Limit]:
    return [
        limit
        for chunk in chunks(tenant_ids)
        for limit in limits_where(connection, limits.c.tenant_id.in_(chunk))
    ]


def aliases_of_models(connection: Connection) -> dict[str, Alias]:
    """The stored ones, by name."""
    rows = connection.execute(select(model_aliases).order_by(model_aliases.c.name))
    return {row.name: read_alias(row.means, row.max_price) for row in rows}


def platform_limits(connection: Connection) -> list[Limit]:
    return limits_where(connection, limits.c.tenant_id.is_(None))


def projects_where(
    connection: Connection, *conditions: ColumnElement[bool], most: int | None = None
) -> list[Project]:
    """Projects by tenant's id and name, at most `most`."""
    query = select(projects).where(*conditions).order_by(projects.c.tenant_id, projects.c.name).limit(most)
    return [Project.from_row(row) for row in connection.execute(query).mappings()]


def limits_where(
    connection: Connection, *conditions: ColumnElement[bool], most: int | None = None
) -> list[Limit]:
    """Limits with their overrides, expired ones included, in order of creation, at most `most`."""
    query = select(limits).where(*conditions).order_by(limits.c.created_us, limits.c.id).limit(most)
    those = query.with_only_columns(limits.c.id).subquery()
    joined = select(limit_overrides).join(those, those.c.id == limit_overrides.c.limit_id)
    overrides: dict[str, Override] = {
        row["limit_id"]: override_from(row) for row in connection.execute(joined).mappings()
    }
    return [limit_from(row, overrides.get(row["id"])) for row in connection.execute(query).mappings()]


def find_limit(connection: Connection, limit_id: str, tenant_id: str | None = None) -> Limit:
    """By id; with `tenant_id` only among that tenant's."""
    rows = limits_where(connection, limits.c.id == plain(limit_id))
    if not rows or (tenant_id is not None and rows[0].tenant_id != tenant_id):
        raise NotFound("limit", limit_id)
    return rows[0]


def price_version(connection: Connection) -> int:
    """The newest version of the price book; 0: no prices."""
    return int(connection.execute(select(func.max(prices.c.version))).scalar() or 0)


def price_book(connection: Connection, version: int | None = None) -> PriceBook:
    """The prices as of `version`, or the newest."""
    as_of = price_version(connection) if version is None else version
    rows = connection.execute(prices_in_force(as_of)).mappings()
    return PriceBook({(row["model"], Tier(row["tier"])): entry_of(row) for row in rows}, as_of)


def prices_in_force(version: int) -> Select[Any]:
    """The newest row of each model and tier, as of `version`."""
    newest = (
        select(prices.c.model, prices.c.tier, func.max(prices.c.version).label("version"))
        .where(prices.c.version <= version)
        .group_by(prices.c.model, prices.c.tier)
        .subquery()
    )
    same = [prices.c[name] == newest.c[name] for name in ("model", "tier", "version")]
    return select(prices).join(newest, and_(*same))


def count(connection: Connection, table: Any, *conditions: ColumnElement[bool]) -> int:
    return int(connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one())


def chunks(values: list[str]) -> list[list[str]]:
    return [values[start : start + CHUNK] for start in range(0, len(values), CHUNK)]
