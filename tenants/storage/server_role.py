"""What the role of a running server may do in PostgreSQL, where another role owns the tables.

It reads and writes, changes no schema, and neither changes nor deletes append-only rows, even where the
server was taken over. The triggers that refuse such changes are the owner's."""

from __future__ import annotations

from sqlalchemy import Connection, text

from tenants.errors import Invalid
from tenants.storage.tables import metadata

APPEND_ONLY = ("ledger", "counter_sets", "prices", "audit", "audit_tiles", "audit_checkpoints")
MOVED = ("audit_head",)
"""Of their one row only the values change: it is neither added nor deleted."""
FORBIDDEN = "UPDATE, DELETE, TRUNCATE, TRIGGER"
MAX_ROLE_CHARS = 63


def grant(connection: Connection, role: str) -> None:
    """Grants a role what a running server needs, and revokes all else, in one transaction. Raises `Invalid`
    for a role that does not exist, or that has further rights in other ways."""
    if connection.dialect.name != "postgresql":
        raise Invalid("database_url", "only PostgreSQL has roles: SQLite's file belongs to who can write it")
    if not 0 < len(role) <= MAX_ROLE_CHARS or "\0" in role:
        raise Invalid("role", f"has 1 to {MAX_ROLE_CHARS} characters")
    _require_plain(connection, role)
    for statement in statements(connection, role):
        connection.execute(text(statement))
    _require_guarded(connection, role)


def statements(connection: Connection, role: str) -> list[str]:
    quote = connection.dialect.identifier_preparer.quote_identifier
    schema_name: str = connection.execute(text("SELECT current_schema()")).scalar_one()
    name, schema = quote(role), quote(schema_name)

    def tables(names: list[str]) -> str:
        return ", ".join(f"{schema}.{quote(name)}" for name in names)

    special = {*APPEND_ONLY, *MOVED}
    ordinary = sorted(table.name for table in metadata.tables.values() if table.name not in special)
    return [
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {name}",
        f"REVOKE ALL ON SCHEMA {schema} FROM {name}",
        f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
        f"GRANT USAGE ON SCHEMA {schema} TO {name}",
        f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {name}",
        f"GRANT SELECT ON {tables(['alembic_version'])} TO {name}",
        f"GRANT SELECT, INSERT ON {tables(list(APPEND_ONLY))} TO {name}",
        f"GRANT SELECT, UPDATE ON {tables(list(MOVED))} TO {name}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables(ordinary)} TO {name}",
    ]


_ROLE = text(
    "SELECT rolsuper, rolcreaterole, rolreplication OR rolbypassrls AS is_special,"
    " pg_has_role(rolname, 'pg_write_all_data', 'MEMBER') AS writes_all,"
    " EXISTS (SELECT FROM pg_class WHERE relowner = pg_roles.oid)"
    " OR EXISTS (SELECT FROM pg_proc WHERE proowner = pg_roles.oid)"
    " OR EXISTS (SELECT FROM pg_namespace WHERE nspowner = pg_roles.oid)"
    " OR EXISTS (SELECT FROM pg_database WHERE datname = current_database() AND datdba = pg_roles.oid)"
    " AS owns FROM pg_roles WHERE rolname = :role"
)
_OWNERS = text(
    "SELECT DISTINCT pg_get_userbyid(owner) FROM ("
    " SELECT relowner AS owner FROM pg_class WHERE oid = 'audit'::regclass"
    " UNION SELECT nspowner FROM pg_namespace WHERE nspname = current_schema()"
    " UNION SELECT datdba FROM pg_database WHERE datname = current_database()) AS owners"
    " WHERE pg_has_role(:role, owner, 'MEMBER') AND pg_get_userbyid(owner) <> 'pg_database_owner'"
)
_PRIVILEGES = text("SELECT has_table_privilege(:role, :table, :privileges)")


def _require_plain(connection: Connection, role: str) -> None:
    row = connection.execute(_ROLE, {"role": role}).mappings().first()
    if row is None:
        raise Invalid(
            "role", f"there is no role {role!r}: make one first (CREATE ROLE ... LOGIN PASSWORD '...')"
        )
    if row["rolsuper"] or row["rolcreaterole"] or row["is_special"]:
        raise Invalid(
            "role",
            f"{role!r} is a superuser, or may make roles, replicate or pass row security: it can do anything"
            " here; use another role",
        )
    if row["owns"]:
        raise Invalid(
            "role",
            f"{role!r} owns tables, functions, a schema or this database, so it can take the triggers away:"
            " let another role own them (REASSIGN OWNED), or use another one",
        )
    owners = list(connection.execute(_OWNERS, {"role": role}).scalars())
    if owners or row["writes_all"]:
        of = ", ".join(map(repr, owners or ["pg_write_all_data"]))
        raise Invalid(
            "role", f"{role!r} is a member of {of}, and can do what that may: REVOKE the membership"
        )


def _require_guarded(connection: Connection, role: str) -> None:
    """Raises `Invalid` where PUBLIC, or a role that this one is in, may change append-only tables."""
    for table in APPEND_ONLY:
        values = {"role": role, "table": table, "privileges": FORBIDDEN}
        if connection.execute(_PRIVILEGES, values).scalar_one():
            raise Invalid(
                "role",
                f"{role!r} may still change {table}: by a grant to PUBLIC, or to a role that it is a member"
                " of; REVOKE that",
            )
