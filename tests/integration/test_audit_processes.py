"""Processes that write one audit at once, one of them killed: one dense tree, and nothing half done."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from pymerkle import InmemoryTree
from sqlalchemy import Connection, select, text

from tenants.audit import store
from tenants.audit.log import AuditLog, verify_stored
from tenants.audit.note import SigningKey, open_checkpoint
from tenants.audit.tree import is_consistent
from tenants.storage.database import Database
from tenants.storage.tables import audit

KEY = SigningKey("test.example/log", bytes(32))
ACTS, LONG_ACTS = 60, 500
"""Of each of two processes, and as many rows beside acts."""
WRITER = """
import asyncio, sys
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.nouns.tenant import TenantCreate
from tenants.audit import store
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey
from tenants.storage.database import open_database

url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

async def main():
    database = open_database(url)
    admin = Admin(Transactions(database, b"a pepper for tests, 32 bytes....."))
    log = AuditLog(database, SigningKey("test.example/log", bytes(32)))

    async def act(number):
        await admin.tenants.create("cli:root", TenantCreate(name=f"{name}-{number}"))
        print(f"{name}-{number}", flush=True)

    async def beside(number):
        row = store.LogEntry(number, f"person:{name}", "10.0.0.7", "session.open", f"ses_{name}_{number}")
        await database.write(lambda connection: store.append(connection, row))
        if number % 10 == 0:
            await log.make_checkpoint()

    for first in range(0, count, 10):
        numbers = range(first, first + 10)
        await asyncio.gather(*map(act, numbers), *map(beside, numbers))
    await database.close()

asyncio.run(main())
"""


def writer(url: str, name: str, count: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WRITER, url, name, str(count)]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("acts", [ACTS, pytest.param(LONG_ACTS, marks=pytest.mark.long)])
async def test_one_tree_is_left_by_many_writers_and_a_killed_one(
    database: Database, database_url: str, acts: int
) -> None:
    two = [writer(database_url, name, acts) for name in ("one", "two")]
    killed = writer(database_url, "killed", 100_000)
    assert killed.stdout is not None
    told = [killed.stdout.readline().strip() for _ in range(max(25, acts // 2))]
    killed.send_signal(signal.SIGKILL)
    told += [line.strip() for line in killed.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    killed.wait()
    killed.stdout.close()
    for each in two:
        answered, _ = each.communicate(timeout=300)
        assert each.returncode == 0
        assert len(answered.splitlines()) == acts

    def check(connection: Connection) -> None:
        tree = InmemoryTree(algorithm="sha256")
        for seq, row in enumerate(connection.execute(select(audit).order_by(audit.c.seq)).mappings()):
            assert row["seq"] == seq
            tree.append_entry(row["entry"])
        assert store.head(connection).root == tree.get_root()
        # Each act is there with its row, or neither is; what was told to be done is.
        query = (
            "SELECT name FROM tenants WHERE id IN (SELECT target FROM audit WHERE action = 'tenant.create')"
        )
        names = set(connection.execute(text(query)).scalars())
        assert names == set(connection.execute(text("SELECT name FROM tenants")).scalars())
        assert names >= set(told)
        made = text("SELECT COUNT(*) FROM audit WHERE action = 'tenant.create'")
        assert connection.execute(made).scalar() == len(names)
        verdict = verify_stored(connection, [KEY.public])
        assert verdict.finding is None
        assert verdict.rows == tree.get_size()

    await database.read(check)
    log = AuditLog(database, KEY)
    notes = [open_checkpoint(each.note, [KEY.public]) for each in await log.checkpoints()]
    assert len(notes) > acts // 10
    for old, new in pairwise(notes):
        proof = await log.consistency(old.size, new.size)
        assert is_consistent(old.size, old.root, new.size, new.root, proof)
    assert (await log.make_checkpoint()).size >= notes[-1].size
