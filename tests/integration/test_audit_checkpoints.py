"""Checkpoints of the audit in both databases: when, by whom, and never of two histories."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection, text

from gateway.cluster.audit_checkpoints import AuditCheckpoints
from gateway.config import AuditSettings
from ops.serving import audit_key
from ops.serving.datadir import DataDirRefused
from tenants.audit import store
from tenants.audit.log import AuditLog, verify_stored
from tenants.audit.note import SigningKey, open_checkpoint, parse_proof
from tenants.audit.tree import is_consistent
from tenants.audit.verify import AuditFinding, Damage
from tenants.errors import AuditDamaged, Invalid, NotFound
from tenants.storage.database import Database, open_database
from tests.support.builders import site

KEY = SigningKey("test.example/log", bytes(32))
OTHER = SigningKey("test.example/other", bytes(31) + b"1")
OTHER_SAME_NAME = SigningKey(KEY.name, bytes(31) + b"2")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


async def add(database: Database, count: int = 1) -> None:
    def rows(connection: Connection) -> None:
        for number in range(count):
            store.append(connection, store.LogEntry(number, "cli:root", "cli", "tenant.update", "ten_1"))

    await database.write(rows)


async def forge(database: Database, statement: str) -> None:
    """Executes a statement with the triggers away."""

    def work(connection: Connection) -> None:
        disarm(connection)
        connection.execute(text(statement))

    await database.write(work)


def disarm(connection: Connection) -> None:
    """Takes the triggers away."""
    for table in ("audit", "audit_tiles", "audit_checkpoints"):
        if connection.dialect.name == "sqlite":
            connection.execute(text("PRAGMA ignore_check_constraints = ON"))
            for change in ("update", "delete"):
                connection.execute(text(f"DROP TRIGGER IF EXISTS {table}_no_{change}"))
        else:
            connection.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER USER"))


def signer(database: Database, log: AuditLog, clock: Clock, registry: CollectorRegistry) -> AuditCheckpoints:
    audit = AuditSettings(checkpoint_rows=10, verify_s=3_600.0)
    return AuditCheckpoints(site(database, clock, registry, audit=audit), log)


async def test_damage_in_old_rows_is_found_by_the_regular_check(database: Database) -> None:
    clock, registry = Clock(), CollectorRegistry()
    log = AuditLog(database, KEY, clock)
    work = signer(database, log, clock, registry)
    await add(database, 12)
    await work.flush()
    assert work.complaint == ""
    await forge(database, "UPDATE audit SET actor = 'cli:mallory' WHERE seq = 3")
    await add(database, 12)
    clock.now_s += 3_599.0
    await work.flush()
    assert (await log.state()).signed == 24, "the newest rows do not show it"
    assert (work.complaint, registry.get_sample_value("fairgate_audit_damaged")) == ("", 0)
    clock.now_s += 1.0
    await work.flush()
    assert work.complaint.startswith("the audit is damaged: ")
    assert "3" in work.complaint
    assert registry.get_sample_value("fairgate_audit_damaged") == 1
    await forge(database, "UPDATE audit SET actor = 'cli:root' WHERE seq = 3")
    clock.now_s += 3_600.0
    await work.flush()
    assert (work.complaint, registry.get_sample_value("fairgate_audit_damaged")) == ("", 0)


async def test_the_audit_is_signed_by_rows_and_by_time_and_not_without_new_rows(database: Database) -> None:
    clock, registry = Clock(), CollectorRegistry()
    log = AuditLog(database, KEY, clock)
    work = signer(database, log, clock, registry)

    async def sizes_after(rows: int, seconds: float) -> list[int]:
        await add(database, rows)
        clock.now_s += seconds
        await work.flush()
        return [each.size for each in await log.checkpoints()]

    def gauges() -> tuple[float | None, float | None]:
        names = ("fairgate_audit_rows", "fairgate_audit_checkpoint_age_seconds")
        return registry.get_sample_value(names[0]), registry.get_sample_value(names[1])

    assert await sizes_after(0, 1_000) == []
    assert gauges() == (0, 0)
    assert await sizes_after(1, 1) == [1]  # the first row waits for nothing
    assert await sizes_after(9, 59) == [1]
    assert gauges() == (10, 59)
    assert await sizes_after(0, 1) == [1, 10]
    assert gauges() == (10, 0)
    assert await sizes_after(0, 1_000) == [1, 10]
    assert await sizes_after(10, 0) == [1, 10, 20]
    notes = [open_checkpoint(each.note, [KEY.public]) for each in await log.checkpoints()]
    for old in notes:
        for new in notes:
            if old.size <= new.size:
                proof = await log.consistency(old.size, new.size)
                assert is_consistent(old.size, old.root, new.size, new.root, proof)


async def test_two_gateways_make_one_checkpoint_of_a_head(database: Database, database_url: str) -> None:
    clock, other = Clock(), open_database(database_url)
    logs = [AuditLog(each, KEY, clock) for each in (database, other)]
    for size in range(1, 6):
        await add(database)
        made = await asyncio.gather(*(log.make_checkpoint() for log in logs))
        assert {each.size for each in made} == {size}
        assert len({each.note for each in made}) == 1
    assert [each.size for each in await logs[1].checkpoints(after=2)] == [3, 4, 5]
    await other.close()


async def test_a_log_has_one_key(database: Database) -> None:
    await add(database)
    with pytest.raises(Invalid, match="there is none here"):
        await AuditLog(database).make_checkpoint()
    log = AuditLog(database, KEY)
    await log.make_checkpoint()
    with pytest.raises(Invalid, match=r"signed with another one: test\.example/log"):
        await AuditLog(database, OTHER).make_checkpoint()
    assert (await log.state()).public_key == KEY.public
    assert [each.size for each in await log.checkpoints()] == [1]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM audit WHERE seq = 3",
        "UPDATE audit SET entry = (SELECT entry FROM audit WHERE seq = 2) WHERE seq = 3",
        "UPDATE audit_head SET size = 4, frontier = (SELECT root FROM audit_head)",
        # Text: SQLite keeps it as such, PostgreSQL makes bytes of it.
        """UPDATE audit SET entry = '{"seq"\\:3}' WHERE seq = 3""",
        "UPDATE audit_head SET frontier = 'x'",
    ],
)
async def test_a_changed_log_is_not_signed(database: Database, statement: str) -> None:
    log, registry, clock = AuditLog(database, KEY), CollectorRegistry(), Clock()
    await add(database, 6)
    await log.make_checkpoint()
    await add(database, 20)
    await forge(database, statement)
    with pytest.raises(AuditDamaged):
        await log.make_checkpoint()
    work = signer(database, log, clock, registry)
    with contextlib.suppress(AuditDamaged):  # where there is no head
        await work.flush()  # logs it, and goes on
    assert registry.get_sample_value("fairgate_audit_damaged") == 1
    await work.close()
    assert [each.size for each in await log.checkpoints()] == [6]


async def test_one_row_is_proved_without_the_others(database: Database) -> None:
    log = AuditLog(database, KEY)
    await add(database, 300)
    with pytest.raises(Invalid, match="row 7 is not signed yet"):
        await log.prove(7)
    await log.make_checkpoint()
    await add(database, 3)
    for seq in (0, 7, 255, 256, 299):
        proof = parse_proof((await log.prove(seq)).text)
        assert proof.entry is not None
        assert proof.proves(proof.entry, open_checkpoint(proof.checkpoint, [KEY.public]))
        assert (await log.rows(seq, 1))[0].entry == proof.entry
    with pytest.raises(Invalid, match="row 300 is not signed yet"):
        await log.prove(300)
    for seq in (303, -1):
        with pytest.raises(NotFound):
            await log.prove(seq)
    for old, new in ((5, 4), (0, 304), (-1, 4)):
        with pytest.raises(Invalid):
            await log.consistency(old, new)


async def test_the_key_is_made_with_the_log_and_by_one_gateway(database: Database, tmp_path: Path) -> None:
    log = AuditLog(database)
    homes = [tmp_path / name for name in ("one", "two", "three")]
    for home in homes:
        home.mkdir()
    made = await asyncio.gather(*(audit_key.own(home, log) for home in homes))
    [winner] = [key for key in made if key is not None]
    assert (await log.state()).public_key == winner.public
    files = [home / audit_key.AUDIT_KEY_FILE for home in homes]
    [file] = [each for each in files if each.exists()]
    assert file.stat().st_mode & 0o777 == 0o600
    assert await audit_key.own(file.parent, log) == winner
    # A copy signs, too; another log's key does not, and stays.
    (other,) = [each for each in files[:2] if each != file][:1]
    other.write_text(file.read_text())
    assert await audit_key.own(other.parent, log) == winner
    other.write_text(OTHER.to_secret_text())
    assert await audit_key.own(other.parent, log) is None
    assert other.exists()
    other.write_text(OTHER.to_secret_text()[:-9])
    with pytest.raises(DataDirRefused, match="is damaged"):
        await audit_key.own(other.parent, log)


DONE: dict[str, tuple[str, Damage, int, int]] = {
    "column": ("UPDATE audit SET actor = 'cli:x' WHERE seq = 9", Damage.COLUMN, 9, 9),
    "json": ("UPDATE audit SET after = '{\"weight\": 9}' WHERE seq = 9", Damage.COLUMN, 9, 9),
    "bytes": (
        "UPDATE audit SET entry = (SELECT entry FROM audit WHERE seq = 8) WHERE seq = 9",
        Damage.DUPLICATED,
        9,
        9,
    ),
    "text": ("""UPDATE audit SET entry = '{"seq":9}' WHERE seq = 9""", Damage.EDITED, 9, 9),
    "deleted": ("DELETE FROM audit WHERE seq = 9", Damage.MISSING, 9, 9),
    "seq": ("UPDATE audit SET seq = 10000 WHERE seq = 9", Damage.REORDERED, 9, 9),
    "last": ("DELETE FROM audit WHERE seq >= 290", Damage.TRUNCATED, 290, 299),
    "all": ("DELETE FROM audit", Damage.TRUNCATED, 0, 299),
    "tile": ("UPDATE audit_tiles SET root = (SELECT root FROM audit_head)", Damage.SUBTREE, 0, 255),
    "head": ("UPDATE audit_head SET root = (SELECT root FROM audit_tiles)", Damage.HEAD, 299, 299),
    "head gone": ("DELETE FROM audit_head", Damage.HEAD, 0, 299),
    "note": (
        "UPDATE audit_checkpoints SET note = (SELECT note FROM audit_checkpoints WHERE size = 20)"
        " WHERE size = 300",
        Damage.CHECKPOINT,
        299,
        299,
    ),
}


async def test_what_is_done_in_the_database_is_found(database: Database) -> None:
    log = AuditLog(database, KEY)
    for count in (20, 280):
        await add(database, count)
        await log.make_checkpoint()
    verdict = await log.verify([KEY.public], [each.note for each in await log.checkpoints()])
    assert (verdict.rows, verdict.signed, verdict.checkpoints, verdict.finding) == (300, 300, 2, None)
    found: dict[str, AuditFinding | None] = {}

    def try_all(connection: Connection) -> None:
        for name, (statement, *_) in DONE.items():
            savepoint = connection.begin_nested()
            disarm(connection)
            connection.exec_driver_sql(statement)
            found[name] = verify_stored(connection, [KEY.public]).finding
            savepoint.rollback()

    await database.write(try_all)
    assert {name: each and (each.damage, each.first, each.last) for name, each in found.items()} == {
        name: expected for name, (_, *expected_) in DONE.items() for expected in [tuple(expected_)]
    }
    with pytest.raises(Invalid, match="no known key"):
        await log.verify([KEY.public], [OTHER_SAME_NAME.signed("test.example/log\n1\n" + "A" * 43 + "=\n")])
