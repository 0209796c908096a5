"""Runs Alembic migrations from code, without an alembic.ini.

`upgrade` and `downgrade` run in one transaction, one at a time: a second process that upgrades the same
database waits and then finds nothing to do. On PostgreSQL no change waits long for a lock,
since the gateways' writes would queue behind it: it gives up and is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from migrations import stages
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.release import this_release
from tenants.storage import server_role
from tenants.storage.database import BUSY_TIMEOUT_S, create_sql_engine, is_refused, translate
from tenants.storage.release import require_may_serve

#: PostgreSQL advisory lock key, specific to Fairgate ("fairgate" in bytes).
_ADVISORY_LOCK = int.from_bytes(b"fairgate", "big")
WAIT_S = 300.0
"""How long to wait for a migration of another process on SQLite, where one of a long ledger takes minutes."""
LOCK_TIMEOUT_S = 2.0
"""How long the gateways' writes may queue behind a change of the schema on PostgreSQL."""
LOCK_PAUSE_S = 1.0
"""Between two tries: what has queued is done by then."""
BATCH_TIMEOUT_S = 5.0
"""For each statement of a backfill's batch."""
_LOCK_NOT_AVAILABLE = "55P03"


T = TypeVar("T")
VERSIONS = [Path(__file__).parent / "versions"]
"""Folders of the migrations."""


def head() -> str:
    """The newest revision this program knows."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def current(url: str) -> str | None:
    """The database's revision; None: it has no Fairgate schema. Raises `DatabaseUnavailable`."""
    with _transaction(url, writing=False) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def is_newer(revision: str | None) -> bool:
    """Whether a database's revision is of a later release than this program."""
    return revision is not None and revision > head()


def schema(url: str) -> stages.Schema:
    """What the database says of its schema. Raises `DatabaseUnavailable`."""
    with _transaction(url, writing=False) as connection:
        return stages.schema(connection, ScriptDirectory.from_config(_config()))


def prepare(url: str) -> None:
    """Makes the database ready to be served: upgrades it, and leaves one of a later release as it is.
    Raises `Invalid` where this release may not serve it, and as `upgrade`."""
    _migrate(url, _prepare)


def upgrade(url: str, revision: str = "head") -> None:
    """Raises `DatabaseUnavailable`, `Invalid` for an unknown revision, a database older than the first, or
    a table that others hold for longer than `WAIT_S`."""
    _migrate(url, partial(_move, command.upgrade, revision))


def downgrade(url: str, revision: str) -> None:
    """Takes the database back to `revision` (`base`: everything is dropped, data included). Raises as
    `upgrade`, and `Invalid` where a contract step has taken away what that revision needs."""
    _migrate(url, partial(_move, command.downgrade, revision))


def contract(url: str, stale_s: float) -> list[str]:
    """Runs the pending contract steps; returns their revisions. Raises as `upgrade`, and `Invalid` while a
    gateway of an older release serves (its last heartbeat is no older than `stale_s`) or a backfill is not
    done."""
    # Not in one transaction: the gateways' heartbeats wait for the end of the first.
    _migrate(url, partial(stages.close_to_older, stale_s=stale_s))
    while _migrate(url, stages.fill_late):
        pass
    return _migrate(url, stages.contract)


def backfill(url: str) -> Literal["filled", "busy", "done"]:
    """Runs one short batch of a backfill. Busy: another process migrates or fills. Raises
    `DatabaseUnavailable`."""
    with _transaction(url, writing=True, wait_s=BUSY_TIMEOUT_S) as connection:
        if connection.dialect.name == "postgresql":
            lock = text("SELECT pg_try_advisory_xact_lock(:lock)")
            if not connection.execute(lock, {"lock": _ADVISORY_LOCK}).scalar_one():
                return "busy"
            connection.execute(text(f"SET LOCAL lock_timeout = {round(LOCK_TIMEOUT_S * 1e3)}"))
            connection.execute(text(f"SET LOCAL statement_timeout = {round(BATCH_TIMEOUT_S * 1e3)}"))
        return "filled" if stages.backfill(connection, ScriptDirectory.from_config(_config())) else "done"


def grant(url: str, role: str) -> None:
    """Gives a role of PostgreSQL what a running server needs, and no more. Raises `DatabaseUnavailable`, and
    `Invalid` where it cannot be guarded or the schema is not the newest."""
    with _transaction(url, writing=True) as connection:
        found = MigrationContext.configure(connection).get_current_revision()
        _require_not_newer(found)
        if found != head():
            raise Invalid(
                "database_url", f"its schema is {found or 'missing'}: run `fairgate db upgrade` before"
            )
        server_role.grant(connection, role)


def _migrate(url: str, work: Callable[[Connection, ScriptDirectory], T]) -> T:
    """Runs `work` in one transaction, alone, and again while others hold a table."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return _alone(url, work)
        except DatabaseUnavailable as error:
            cause = error.__cause__
            if not isinstance(cause, DBAPIError) or _sqlstate(cause) != _LOCK_NOT_AVAILABLE:
                raise
        if time.monotonic() > until_s:
            raise Invalid(
                "database_url",
                f"others have held one of its tables for {WAIT_S:g} s: end their long transactions"
                " (pg_stat_activity shows them), and try again",
            )
        time.sleep(LOCK_PAUSE_S)


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", "")


def _alone(url: str, work: Callable[[Connection, ScriptDirectory], T]) -> T:
    with _transaction(url, writing=True) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
            # After the wait for another process that migrates, which may take longer.
            connection.execute(text(f"SET LOCAL lock_timeout = {round(LOCK_TIMEOUT_S * 1e3)}"))
        return work(connection, ScriptDirectory.from_config(_config()))


def _prepare(connection: Connection, script: ScriptDirectory) -> None:
    if not is_newer(MigrationContext.configure(connection).get_current_revision()):
        _move(command.upgrade, "head", connection, script)
    require_may_serve(connection, this_release())


def _move(
    move: Callable[[Config, str], None], revision: str, connection: Connection, script: ScriptDirectory
) -> None:
    _require_start(connection, script)
    config = _config()
    config.attributes["connection"] = connection
    try:
        if move is command.downgrade:
            stages.require_not_contracted(connection, script, revision)
        move(config, revision)
        stages.forget_backfills(connection)
    except CommandError as error:
        raise Invalid("revision", f"{revision!r} is not a revision of this version") from error


def _require_start(connection: Connection, script: ScriptDirectory) -> None:
    """Raises `Invalid` for a schema of a later release, and for one older than the first revision, from which
    no migration leads here."""
    start = script.get_base()
    revision = MigrationContext.configure(connection).get_current_revision()
    _require_not_newer(revision)
    if start is not None and revision is not None and revision < start:
        raise Invalid(
            "database_url",
            f"its schema {revision} is older than {start}, the oldest that this version upgrades:"
            " use an empty database, or upgrade it before with a version that still can",
        )


def _require_not_newer(revision: str | None) -> None:
    if is_newer(revision):
        raise Invalid(
            "database_url",
            f"its schema {revision} is of a later release, and this program knows {head()}: use that release",
        )


@contextmanager
def _transaction(url: str, *, writing: bool, wait_s: float | None = None) -> Iterator[Connection]:
    wait_s = wait_s or (WAIT_S if writing else BUSY_TIMEOUT_S)
    engine = create_sql_engine(url, writing=writing, busy_timeout_s=wait_s)
    try:
        with engine.begin() as connection:
            yield connection
    except SQLAlchemyError as error:
        if writing and is_refused(error):
            raise Invalid(
                "database_url",
                "this role may not change the schema: run `fairgate db upgrade` as the one that owns the"
                " tables, and `fairgate db grant` again",
            ) from error
        raise translate(error) from error
    finally:
        engine.dispose()


def _config() -> Config:
    config = Config()
    # Alembic interpolates %.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(map(str, VERSIONS)).replace("%", "%%"))
    return config
