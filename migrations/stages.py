"""What a migration's module has beside `upgrade()`, which only adds: its backfill and its contract step.

`backfill(connection, limit)` fills what was added, up to `limit` rows at a time, and returns how many; 0: all
have it. `contract()` takes away what gateways of the release before needed; `NEEDS_RELEASE` is the first
release that does without. No older gateway serves from `close_to_older` on, so nothing is taken from one, and
none writes rows that lack what was added."""

from __future__ import annotations

import time
from dataclasses import dataclass

from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, delete, select, text

from tenants.directory.queries import now_us, put_setting, setting
from tenants.errors import Invalid
from tenants.release import this_release
from tenants.storage.release import OLDEST_RELEASE, is_older, newest
from tenants.storage.tables import gateways, settings

CONTRACTED = "schema.contracted"
"""The row of `settings` with the last contracted revision."""


BACKFILL = "schema.backfill."
"""Before a revision: the row of `settings` with the rows that were filled, and `done` where all are."""
BATCH_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Backfill:
    revision: str
    rows: int
    """Filled so far."""
    is_done: bool

    def __str__(self) -> str:
        return f"backfill {self.revision}: {self.rows:,} rows{'' if self.is_done else ' so far'}"


@dataclass(frozen=True, slots=True)
class Schema:
    """Of one database."""

    revision: str | None
    """None: there is no Fairgate schema."""
    contracted: str | None
    """The last revision that was contracted."""
    oldest_release: str | None
    """That may serve; None: each may."""
    backfills: tuple[Backfill, ...] = ()


def schema(connection: Connection, script: ScriptDirectory) -> Schema:
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        return Schema(None, None, None)
    backfills = tuple(_progress(connection, one) for one in _having("backfill", connection, script))
    return Schema(revision, setting(connection, CONTRACTED), setting(connection, OLDEST_RELEASE), backfills)


def backfill(connection: Connection, script: ScriptDirectory) -> bool:
    """Runs a batch of the first backfill that is not done. False: all are."""
    for step in _having("backfill", connection, script):
        before = _progress(connection, step)
        if not before.is_done:
            rows = step.module.backfill(connection, BATCH_ROWS)
            put_setting(
                connection, BACKFILL + step.revision, f"{before.rows + rows}{'' if rows else ' done'}"
            )
            return True
    return False


def fill_late(connection: Connection, script: ScriptDirectory) -> bool:
    """Fills rows that older gateways wrote after the backfills were done. False: there are none."""
    steps = [one for one in to_contract(connection, script) if hasattr(one.module, "backfill")]
    return any(step.module.backfill(connection, BATCH_ROWS) for step in steps)


def forget_backfills(connection: Connection) -> None:
    """Of revisions that the database no longer has."""
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None:
        is_later = settings.c.name.startswith(BACKFILL, autoescape=True) & (
            settings.c.name > BACKFILL + revision
        )
        connection.execute(delete(settings).where(is_later))


def to_contract(connection: Connection, script: ScriptDirectory) -> list[Script]:
    """Migrations of this database whose contract step is pending, in order."""
    steps = _having("contract", connection, script)
    done = (setting(connection, CONTRACTED) or "") if steps else ""
    return [one for one in steps if one.revision > done]


def _having(name: str, connection: Connection, script: ScriptDirectory) -> list[Script]:
    """Migrations that the database has whose module has this function, in order."""
    revision = MigrationContext.configure(connection).get_current_revision() or ""
    found = (one for one in script.walk_revisions() if one.revision <= revision)
    return [one for one in found if hasattr(one.module, name)][::-1]


def _progress(connection: Connection, step: Script) -> Backfill:
    rows, _, done = (setting(connection, BACKFILL + step.revision) or "0").partition(" ")
    return Backfill(step.revision, int(rows), done == "done")


def close_to_older(connection: Connection, script: ScriptDirectory, stale_s: float) -> None:
    """Lets no gateway serve that needs what the pending steps take away. Raises `Invalid` while one does (its
    last heartbeat is no older than `stale_s`), or while a backfill of theirs is not done."""
    steps = to_contract(connection, script)
    if not steps:
        return
    if connection.dialect.name == "postgresql":
        # A gateway that starts meanwhile writes its row either before, and is found, or after, and then
        # reads the release in the same transaction.
        connection.execute(text("LOCK TABLE gateways IN SHARE ROW EXCLUSIVE MODE"))
    needs = newest(*(step.module.NEEDS_RELEASE for step in steps))
    names = ", ".join(step.revision for step in steps)
    if is_older(this_release(), needs):
        raise Invalid("contract", f"{names} needs Fairgate {needs}, and this is {this_release()}: install it")
    for step in steps:
        if hasattr(step.module, "backfill") and not (found := _progress(connection, step)).is_done:
            raise Invalid("contract", f"{found}; a running gateway goes on: try again when it is done")
    since_us = now_us(connection, time.time) - round(stale_s * 1e6)
    alive = select(gateways.c.id, gateways.c.release).where(gateways.c.heartbeat_us >= since_us)
    older = [
        f"{row.id} ({row.release or 'of an unnamed release'})"
        for row in connection.execute(alive.order_by(gateways.c.id))
        if is_older(row.release, needs)
    ]
    if older:
        raise Invalid(
            "contract",
            f"{names} needs Fairgate {needs} or newer, and older gateways serve: {', '.join(older)}; replace"
            f" them first (one that was killed counts for {stale_s:g} s)",
        )
    put_setting(connection, OLDEST_RELEASE, newest(needs, setting(connection, OLDEST_RELEASE) or ""))


def contract(connection: Connection, script: ScriptDirectory) -> list[str]:
    """Runs the pending steps; returns their revisions."""
    steps = to_contract(connection, script)
    with Operations.context(MigrationContext.configure(connection)):
        for step in steps:
            step.module.contract()
            put_setting(connection, CONTRACTED, step.revision)
    return [step.revision for step in steps]


def require_not_contracted(connection: Connection, script: ScriptDirectory, revision: str) -> None:
    """Raises `Invalid` where the way down to `revision` passes a contracted one."""
    now = MigrationContext.configure(connection).get_current_revision()
    done = setting(connection, CONTRACTED) if now else None
    if done and any(one.revision <= done for one in script.iterate_revisions(now, revision)):
        raise Invalid(
            "revision",
            f"{done} is contracted: what older revisions need is gone; restore a backup from before"
            " (`fairgate restore`), or use an empty database",
        )
