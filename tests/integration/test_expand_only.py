"""Migrations only add: gateways of the release before go on, and none waits for a scan of a large table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa
from alembic import op
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from migrations import runner
from tenants.storage.database import create_sql_engine

FIRST = "0026"
"""The migrations before it are of databases that no older gateway serves."""
SMALL = {
    "alembic_version", "audit_head", "directory_revision", "drains", "gateways", "limits", "model_aliases",
    "people", "placed_engines", "projects", "settings", "slos", "tenants", "usage_fold", "webhooks",
}  # fmt: skip
"""They do not grow with the traffic: all others may have millions of rows."""
BRIEF = {"AccessShareLock", "RowShareLock", "ShareUpdateExclusiveLock"}
"""Locks that stop neither reads nor writes."""
TABLES = text(
    "SELECT oid, relname, relfilenode FROM pg_class WHERE relkind = 'r'"
    " AND relnamespace = current_schema()::regnamespace"
)
COLUMNS = text(
    "SELECT attrelid, attname, atttypid, attnotnull, atthasdef FROM pg_attribute"
    " WHERE attnum > 0 AND NOT attisdropped"
)
PARTS = text(
    "SELECT conrelid, conname, convalidated FROM pg_constraint WHERE contype <> 'n'"
    " UNION ALL SELECT indrelid, indexrelid::regclass::text, false FROM pg_index"
)
LOCKS = text("SELECT relation, mode FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation'")


@dataclass
class Table:
    name: str
    file: int
    """Another one: all rows were written again."""
    columns: dict[str, tuple[int, bool, bool]]
    """Type, whether it is NOT NULL, whether it has a default."""
    parts: dict[str, bool]
    """Constraints and indexes; whether all rows were checked for it."""


def catalogue(connection: Connection) -> dict[int, Table]:
    found = {oid: Table(name, file, {}, {}) for oid, name, file in connection.execute(TABLES)}
    for oid, name, *column in connection.execute(COLUMNS):
        if oid in found:
            found[oid].columns[name] = tuple(column)
    for oid, name, is_checked in connection.execute(PARTS):
        if oid in found:
            found[oid].parts[name] = is_checked
    return found


def faults(connection: Connection, upgrade: Callable[[], None]) -> list[str]:
    """What `upgrade` does to tables that were there before, and must not do."""
    before = catalogue(connection)
    with Operations.context(MigrationContext.configure(connection)):
        upgrade()
    after, locks = catalogue(connection), connection.execute(LOCKS).all()
    return [
        f"{fault} {old.name}"
        for oid, old in before.items()
        for fault in _faults(
            old, after.get(oid), {mode for relation, mode in locks if relation == oid} - BRIEF
        )
    ]


def _faults(old: Table, new: Table | None, locks: set[str]) -> Iterator[str]:
    if new is None or new.name != old.name:
        yield "drops or renames"
        return
    if new.file != old.file:
        yield "rewrites"
    eased = False
    for name, (kind, not_null, _) in old.columns.items():
        column = new.columns.get(name)
        if column is None:
            yield f"drops or renames {name} of"
        elif column[0] != kind:
            yield f"changes the type of {name} of"
        elif column[1] > not_null:
            yield f"scans for NULL in {name} of"
        else:
            eased = eased or column[1] < not_null
    added = new.columns.keys() - old.columns.keys()
    yield from (
        f"needs from older gateways {name} of" for name in added if new.columns[name][1:] == (True, False)
    )
    yield from (f"drops {name} of" for name in old.parts.keys() - new.parts.keys())
    yield from (f"scans for {name} of" for name in new.parts.keys() - old.parts.keys() if new.parts[name])
    if old.name not in SMALL:
        # Adding a column takes a moment, as giving up NOT NULL does.
        yield from (
            f"takes {mode} on"
            for mode in sorted(locks - ({"AccessExclusiveLock"} if added or eased else set()))
        )


@contextmanager
def undone(url: str) -> Iterator[Connection]:
    engine = create_sql_engine(url, writing=True)
    with engine.connect() as connection:
        yield connection
        connection.rollback()
    engine.dispose()


def test_every_migration_since_only_adds(empty_postgres_url: str) -> None:
    steps = ScriptDirectory.from_config(runner._config()).walk_revisions()
    for step in sorted((step for step in steps if step.revision >= FIRST), key=lambda step: step.revision):
        runner.upgrade(empty_postgres_url, str(step.down_revision))
        with undone(empty_postgres_url) as connection:
            assert (step.revision, faults(connection, step.module.upgrade)) == (step.revision, [])
        assert not hasattr(step.module, "contract") or isinstance(step.module.NEEDS_RELEASE, str)


def test_what_adds_is_accepted(postgres_url: str) -> None:
    def upgrade() -> None:
        op.add_column("ledger", sa.Column("one", sa.String(9)))
        op.add_column("refusals", sa.Column("two", sa.String(9), nullable=False, server_default=""))
        op.create_table("new", sa.Column("id", sa.Integer, primary_key=True))
        op.create_index("ix_small", "model_aliases", ["max_price"])
        op.alter_column("timelines", "tenant_id", nullable=True)

    with undone(postgres_url) as connection:
        assert faults(connection, upgrade) == []


REFUSED = {
    "ALTER TABLE ledger DROP COLUMN detail": "drops or renames detail of ledger",
    "ALTER TABLE ledger RENAME detail TO details": "drops or renames detail of ledger",
    "ALTER TABLE settings RENAME TO facts": "drops or renames settings",
    "DROP TABLE drains": "drops or renames drains",
    "ALTER TABLE ledger ALTER requests TYPE numeric": "changes the type of requests of ledger",
    "ALTER TABLE ledger ADD at timestamptz DEFAULT clock_timestamp()": "rewrites ledger",
    "ALTER TABLE ledger ADD weight integer NOT NULL": "needs from older gateways weight of ledger",
    "ALTER TABLE gateways ALTER served_revision SET NOT NULL": "scans for NULL in served_revision of",
    "ALTER TABLE ledger ADD CONSTRAINT positive CHECK (at_us >= 0)": "scans for positive of ledger",
    "DROP INDEX ix_prices_model_tier_version": "drops ix_prices_model_tier_version of prices",
    "CREATE INDEX ix_large ON ledger (model)": "takes ShareLock on ledger",
    "UPDATE timelines SET tenant_id = ''": "takes RowExclusiveLock on timelines",
    "LOCK TABLE ledger": "takes AccessExclusiveLock on ledger",
}


def test_what_drops_renames_rewrites_or_holds_up_a_large_table_is_refused(postgres_url: str) -> None:
    for statement, fault in REFUSED.items():
        with undone(postgres_url) as connection:
            found = "\n".join(faults(connection, partial(op.execute, statement)))
            assert fault in found, statement
