"""The audit as a log in both databases: dense, one tree with its acts, never one without the other."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor

import pytest
from pymerkle import InmemoryTree
from sqlalchemy import Connection, select, text

from tenants.audit import entry, store
from tenants.audit.note import InclusionProof, SigningKey
from tenants.audit.tree import consistency_proof, inclusion_proof, is_consistent, root_of
from tenants.errors import Invalid
from tenants.storage.database import Database, create_sql_engine, open_database
from tenants.storage.tables import audit, audit_head
from tests.support.server_process import until

KEY = SigningKey("test.example/log", bytes(32))


def row(number: int, **more: object) -> store.LogEntry:
    return store.LogEntry(number, "cli:root", "cli", "tenant.update", f"ten_{number}", **more)  # type: ignore[arg-type]


async def add(database: Database, count: int, first: int = 0) -> None:
    def rows(connection: Connection) -> None:
        for number in range(first, first + count):
            store.append(connection, row(number, after={"weight": float(number)}))

    await database.write(rows)


def their_tree(connection: Connection) -> InmemoryTree:
    """The same tree by pymerkle; checks that the rows are dense, and say what their entries say."""
    tree = InmemoryTree(algorithm="sha256")
    for seq, found in enumerate(connection.execute(select(audit).order_by(audit.c.seq)).mappings()):
        fields = {name: found[name] for name in entry.FIELDS}
        assert entry.first_difference(seq, fields, entry.decode(found["entry"])) is None
        tree.append_entry(found["entry"])
    return tree


async def test_rows_make_one_tree_whose_proofs_are_made_from_what_is_stored(database: Database) -> None:
    await add(database, 530)

    def check(connection: Connection) -> None:
        tree, edge, subtree = their_tree(connection), store.head(connection), store.subtree(connection)
        stored = connection.execute(select(audit_head.c.root)).scalar_one()
        assert (edge.size, edge.root) == (530, tree.get_root())
        assert stored == edge.root
        for size in (1, 255, 256, 257, 511, 512, 513, 530):
            assert root_of(0, size, subtree) == tree.get_root(size)
            proof = consistency_proof(size, 530, subtree)
            assert is_consistent(size, tree.get_root(size), 530, edge.root, proof)
            path = inclusion_proof(size - 1, 530, subtree)
            assert [tree.get_leaf(size), *path] == tree.prove_inclusion(size).path
        proof = InclusionProof(3, tuple(inclusion_proof(3, 530, subtree)), "")
        assert base64.b64encode(edge.root).decode() not in proof.text

    await database.read(check)


async def test_an_act_that_fails_leaves_no_row_and_no_gap(database: Database) -> None:
    await add(database, 3)

    def fails(connection: Connection) -> None:
        store.append(connection, row(9))
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            await database.write(fails)
    await asyncio.gather(*(add(database, 1, number) for number in range(3, 10)))
    await database.read(lambda connection: their_tree(connection))

    def check(connection: Connection) -> None:
        assert store.head(connection).root == their_tree(connection).get_root()
        targets = connection.execute(select(audit.c.target).order_by(audit.c.seq)).scalars()
        assert sorted(targets) == [f"ten_{number}" for number in range(10)]

    await database.read(check)


async def test_a_row_that_cannot_be_written_undoes_its_act(database: Database) -> None:
    def act(connection: Connection) -> None:
        connection.execute(text("UPDATE directory_revision SET revision = revision + 1"))
        store.append(connection, row(1, after={"weight": float("nan")}))

    with pytest.raises(Invalid, match="audit row"):
        await database.write(act)
    revision = await database.read(
        lambda connection: connection.execute(text("SELECT revision FROM directory_revision")).scalar()
    )
    assert revision == 0
    assert (await database.read(store.head)).size == 0


async def test_two_writers_make_one_tree(database: Database, database_url: str) -> None:
    other = open_database(database_url)
    await asyncio.gather(*(add(each, 1, number) for number in range(60) for each in (database, other)))
    await other.close()

    def check(connection: Connection) -> None:
        tree, edge = their_tree(connection), store.head(connection)
        assert (edge.size, edge.root) == (120, tree.get_root())

    await database.read(check)


def test_a_writer_waits_for_one_that_has_not_ended(postgres_url: str) -> None:
    engine = create_sql_engine(postgres_url, writing=True, pool_size=2)

    def second() -> int:
        with engine.begin() as connection:
            return store.append(connection, row(2))

    waiting = text("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as connection:
            assert store.append(connection, row(1)) == 0
            later = pool.submit(second)
            until(lambda: connection.execute(waiting).scalar())
        assert later.result() == 1
    with engine.begin() as connection:
        assert store.head(connection).root == their_tree(connection).get_root()
    engine.dispose()
