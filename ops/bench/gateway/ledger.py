"""Durable settlements per second of the ledger.

Many requests settle concurrently, each waiting for its own row: the case of group commit. The database is new
and lies in a directory of the caller's choice, with the settings of production (SQLite: WAL,
synchronous=FULL); that COMMIT reaches the disk is measured beside it: a plain file is written and fsynced as
often as the database committed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection

from migrations import runner
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow
from tenants.storage.database import Database, open_database
from tenants.types import Amounts

FSYNCS = 50
AT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LedgerSpeed:
    """One measurement."""

    database: str
    concurrency: int
    settlements: int
    seconds: float
    settlements_per_s: float
    rows_per_commit: float
    """Effect of group commit."""
    fsync_ms: float
    """Median time of one fsync of a plain file in the same directory."""
    synchronous: str
    """The database's own setting of durability."""


async def measure(directory: Path, settlements: int, concurrency: int, url: str = "") -> LedgerSpeed:
    """Reserves and settles `settlements` requests, `concurrency` at a time; only the settlements are timed.
    `url`: a database with its schema; empty: a new SQLite file in `directory`."""
    with tempfile.TemporaryDirectory(prefix="fairgate-ledger-", dir=directory) as scratch:
        if not url:
            url = f"sqlite:///{scratch}/fairgate.db"
            runner.upgrade(url)
        database = open_database(url)
        try:
            ledger = Ledger(database)
            await _append_all(ledger, [_row(index, "reserve") for index in range(settlements)], 1_000)
            rows = [_row(index, "settle") for index in range(settlements)]
            commits, started_s = database.commits, time.perf_counter()
            await _append_all(ledger, rows, concurrency)
            seconds = time.perf_counter() - started_s
            commits = database.commits - commits
            synchronous = await _synchronous(database)
        finally:
            await database.close()
        return LedgerSpeed(
            database.dialect,
            concurrency,
            settlements,
            round(seconds, 3),
            round(settlements / seconds),
            round(settlements / commits, 1),
            round(fsync_ms(Path(scratch)), 2),
            synchronous,
        )


def _row(index: int, kind: str) -> LedgerRow:
    """A row as a gateway writes it."""
    return LedgerRow(
        request_id=f"req_bench{index:021}",
        kind="settle" if kind == "settle" else "reserve",
        tenant_id="ten_bench",
        project_id="prj_bench",
        key_id="key_bench",
        gateway_id="gw_bench",
        tier="standard",
        model="model",
        amounts=Amounts(100, 200, 300_000, 1),
        outcome="completed" if kind == "settle" else "",
        at=AT,
        detail={
            "held": [100, 256, 300_000],
            "top_ups": 2,
            "cached_tokens": 0,
            "wait_s": 0.001,
            "ttft_s": 0.1,
            "e2e_s": 1.0,
            "finish": ["stop"],
            "basis": "engine",
        },
        charged_to=() if kind == "settle" else ("tenant:ten_bench:total_tokens:lifetime/UTC:*@0",),
    )


async def _append_all(ledger: Ledger, rows: list[LedgerRow], concurrency: int) -> None:
    left = iter(rows)

    async def one_after_another() -> None:
        for row in left:
            if not await ledger.append(row):
                raise ValueError(f"{row.request_id} was there already: use an empty database")

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))


async def _synchronous(database: Database) -> str:
    name = "PRAGMA synchronous" if database.dialect == "sqlite" else "SHOW synchronous_commit"

    def look(connection: Connection) -> str:
        return str(connection.exec_driver_sql(name).scalar())

    # Asked on the connection that writes.
    return f"{name.split()[1]}={await database.write(look)}"


def fsync_ms(directory: Path) -> float:
    """Median time of one fsync of a plain file in this directory."""
    taken = []
    with tempfile.NamedTemporaryFile(prefix="fairgate-fsync-", dir=directory) as file:
        for _ in range(FSYNCS):
            started_s = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - started_s)
    return sorted(taken)[FSYNCS // 2] * 1e3


def as_json(runs: list[LedgerSpeed], required_per_s: int) -> dict[str, object]:
    """What `--json` answers."""
    return {
        "runs": [asdict(run) for run in runs],
        "required_per_s": required_per_s,
        "ok": max(run.settlements_per_s for run in runs) >= required_per_s,
    }
