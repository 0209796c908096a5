"""The bill in the audit, on both databases: spans are closed once final, and what was changed is found."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
from sqlalchemy import Connection, text

from gateway.cluster.audit_checkpoints import AuditCheckpoints
from gateway.config import AuditSettings
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.audit import store
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey
from tenants.ledger.digests import LedgerDigests, LedgerFinding, newest, verify_digests
from tenants.ledger.price_check import MAX_FINDINGS, verify_prices
from tenants.ledger.spans import SpanDigest
from tenants.pricing.price_row import PriceSet
from tenants.storage.database import Database, open_database
from tests.support.builders import site
from tests.support.services import libpq_url
from tests.support.usage import MONDAY_US, Row, fold_all, row, traffic, write

KEY = SigningKey("test.example/log", bytes(32))


class Clock:
    def __init__(self) -> None:
        self.now_s = MONDAY_US / 1e6

    def __call__(self) -> float:
        return self.now_s


async def closed(database: Database, after_s: float = 0.0, most: int = 10_000) -> list[tuple[int, int, int]]:
    """The spans that are due: first and last id, and rows."""
    digests, spans = LedgerDigests(database, lambda: MONDAY_US / 1e6 + 1e6, after_s), []
    while (span := await digests.close_due(most)) is not None:
        spans.append((span.first_id, span.last_id, span.rows))
    return spans


async def test_spans_are_closed_when_they_are_full_or_old_enough_and_follow_each_other(
    database: Database,
) -> None:
    clock = Clock()
    digests = LedgerDigests(database, clock, 600.0)
    assert await digests.close_due() is None  # nothing is there
    await write(database, [row(f"a{number}") for number in range(25)])
    assert await digests.close_due(10) is None  # nothing is final
    await fold_all(database)

    async def next_one() -> tuple[int, int, int] | None:
        span = await digests.close_due(10)
        return None if span is None else (span.first_id, span.last_id, span.rows)

    assert await next_one() == (1, 10, 10)
    assert await next_one() == (11, 20, 10)
    assert await next_one() is None
    clock.now_s += 599
    assert await next_one() is None
    clock.now_s += 1
    assert await next_one() == (21, 25, 5)
    assert await next_one() is None  # an idle server digests nothing
    verdict = await verify_digests(database)
    assert (verdict.spans, verdict.rows, verdict.open_rows, verdict.finding) == (3, 25, 0, None)
    await write(database, [row("b")])
    assert (await verify_digests(database)).open_rows == 1


async def test_gateways_that_close_at_once_close_each_span_once(
    database: Database, database_url: str
) -> None:
    other = open_database(database_url)
    await write(database, traffic(40))
    await fold_all(database)
    made = [LedgerDigests(each, lambda: 9e9, 0.0) for each in (database, other, database, other)]
    found: list[SpanDigest | None] = []
    for _ in range(20):
        found += await asyncio.gather(*(each.close_due(7) for each in made))
    verdict = await verify_digests(database)
    assert verdict.finding is None
    assert verdict.spans == len([each for each in found if each is not None]) > 5
    assert verdict.open_rows == 0
    await other.close()


async def test_the_server_s_task_digests_and_signs(database: Database) -> None:
    clock, log = Clock(), AuditLog(database, KEY, Clock())
    await write(database, traffic(3))
    await fold_all(database)
    clock.now_s += 5 * 86_400
    for signs, spans in ((AuditLog(database), 0), (log, 1)):
        task = AuditCheckpoints(site(database, clock, audit=AuditSettings(checkpoint_rows=1)), signs)
        await task.flush()
        assert (await verify_digests(database)).spans == spans  # those that do not sign leave it to others
    assert (await log.state()).signed == (await log.state()).size == 1
    [entry] = await log.rows(0)
    assert (entry.fields["actor"], entry.fields["action"]) == ("system", "ledger.digest")


async def test_a_span_ends_before_a_row_that_an_open_transaction_may_still_add(postgres_url: str) -> None:
    """PostgreSQL: ids become visible out of order."""
    database = open_database(postgres_url)
    await write(database, [row("before")])
    await fold_all(database)
    with psycopg.connect(libpq_url(postgres_url)) as slow:
        slow.execute(
            "INSERT INTO ledger (request_id, kind, tenant_id, project_id, key_id, gateway_id, tier, model,"
            " input_tokens, output_tokens, cost_nanousd, requests, outcome, at_us, detail)"
            " VALUES ('slow', 'settle', 't', 'p', 'k', 'g', 'batch', 'm', 1, 1, 1, 1, '', 1, '{}')"
        )
        await write(database, [row("after")])  # a higher id, visible first
        await fold_all(database)
        assert await closed(database) == [(1, 1, 1)]
        slow.commit()
    await fold_all(database)
    assert await closed(database) == [(2, 3, 2)]
    verdict = await verify_digests(database)
    assert (verdict.rows, verdict.open_rows, verdict.finding) == (3, 0, None)
    await database.close()


def disarm(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        for change in ("update", "delete"):
            connection.execute(text(f"DROP TRIGGER IF EXISTS ledger_no_{change}"))
    else:
        connection.execute(text("ALTER TABLE ledger DISABLE TRIGGER USER"))


COPIED = "request_id, kind, number, tenant_id, project_id, key_id, gateway_id, tier, model, input_tokens"
COPIED += ", output_tokens, cost_nanousd, requests, outcome, at_us, detail"
CHANGED: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "a cost, by one nano-dollar": (
        "UPDATE ledger SET cost_nanousd = cost_nanousd - 1 WHERE id = 4",
        1,
        ("settle",),
    ),
    "a credit removed": ("DELETE FROM ledger WHERE id = 15", 11, ("credit",)),
    "a credit for more": ("UPDATE ledger SET cost_nanousd = cost_nanousd * 2 WHERE id = 15", 11, ("credit",)),
    "a row put in": (
        f"INSERT INTO ledger (id, {COPIED}) SELECT 17, 'new', {COPIED.partition(', ')[2]}"
        " FROM ledger WHERE id = 15",
        11,
        ("credit",),
    ),
    "to another tenant": ("UPDATE ledger SET tenant_id = 'ten_z' WHERE id = 21", 11, ("reserve",)),
    "a detail": ("UPDATE ledger SET detail = '{\"cached_tokens\": 9}' WHERE id = 4", 1, ("settle",)),
    "spaces of a detail": ("UPDATE ledger SET detail = '{ }' WHERE id = 21", 11, ("reserve",)),
    "a kind": ("UPDATE ledger SET kind = 'adjust' WHERE id = 4", 1, ("settle", "adjust")),
    "moved to the end": ("UPDATE ledger SET id = 90 WHERE id = 4", 1, ("settle",)),
    "all of it removed": ("DELETE FROM ledger", 1, ("settle", "reserve")),
    "two spans": ("UPDATE ledger SET gpu_ms = 8 WHERE id IN (4, 15)", 1, ("settle",)),
}


def bill() -> list[Row]:
    """Rows by id from 1: reserve and settle in turns, a credit at 15, and no row at 17."""
    kinds = {number: "settle" if number % 2 == 0 else "reserve" for number in range(1, 31)} | {15: "credit"}
    return [row(f"r{number}", kind) for number, kind in kinds.items()]


async def numbered(database: Database) -> None:
    """Writes the bill, with a gap where 17 was."""
    await write(database, bill())

    def remove(connection: Connection) -> None:
        disarm(connection)
        connection.execute(text("DELETE FROM ledger WHERE id = 17"))

    await database.write(remove)
    await fold_all(database)


async def test_what_is_changed_in_a_closed_span_is_found_and_span_and_kind_named(database: Database) -> None:
    await numbered(database)
    assert await closed(database, most=10) == [(1, 10, 10), (11, 21, 10), (22, 30, 9)]
    assert (await verify_digests(database)).finding is None
    found: dict[str, tuple[int, tuple[str, ...]]] = {}

    async def run(*statements: str) -> None:
        def work(connection: Connection) -> None:
            for statement in statements:
                connection.exec_driver_sql(statement)

        await database.write(work)

    await run("CREATE TABLE kept AS SELECT * FROM ledger")
    for name, (statement, *_) in CHANGED.items():
        await run(statement)
        finding = (await verify_digests(database)).finding
        assert finding is not None, name
        assert f"ledger rows {finding.first_id} to {finding.last_id} (digest in row " in str(finding)
        found[name] = (finding.first_id, finding.kinds)
        await run("DELETE FROM ledger", "INSERT INTO ledger SELECT * FROM kept")
        assert (await verify_digests(database)).finding is None, name
    expected = {name: (first, kinds) for name, (_, first, kinds) in CHANGED.items()}
    assert found == expected
    await run(
        f"INSERT INTO ledger (id, {COPIED}) SELECT -3, 'low', {COPIED.partition(', ')[2]} FROM kept LIMIT 1"
    )
    below = (await verify_digests(database)).finding
    assert below is not None
    assert "1 rows have ids below" in str(below)


async def test_digests_that_do_not_follow_each_other_are_named(database: Database) -> None:
    await numbered(database)
    await closed(database, most=10)
    last = await database.read(newest)
    assert last is not None

    async def noted(after: Any) -> LedgerFinding:
        def work(connection: Connection) -> int:
            row = store.LogEntry(1, "system", "", "ledger.digest", "ledger", after=after)
            return store.append(connection, row)

        seq = await database.write(work)
        finding = (await verify_digests(database)).finding
        assert finding is not None
        assert (finding.seq, finding.kinds) == (seq, ())
        return finding

    again = await noted(last.span.as_json())
    assert "it is of the rows 22 to 30, and the next one begins at 31" in str(again)


async def test_a_digest_that_cannot_be_read_is_named(database: Database) -> None:
    def work(connection: Connection) -> int:
        row = store.LogEntry(1, "system", "", "ledger.digest", "ledger", after={"first_id": 1})
        return store.append(connection, row)

    await database.write(work)
    finding = (await verify_digests(database)).finding
    assert finding is not None
    assert "ledger digest" in str(finding)


async def test_each_charge_is_computed_again_by_the_prices_of_its_version(
    database: Database, pepper: bytes
) -> None:
    admin = Admin(Transactions(database, pepper))
    for price in (100, 200):
        await admin.prices.set("cli:root", PriceSet(model="small", input_nanousd=price, output_nanousd=300))
    detail = '{"cached_tokens": 0}'

    def charge(name: str, cost: int, version: int, **more: Any) -> Row:
        return row(name, cost_nanousd=cost, price_version=version, detail=detail, **more)

    await write(database, [charge("one", 7_000, 1), charge("two", 8_000, 2), row("none")])
    await write(database, [charge("batch", 4_000, 2, tier="batch"), row("held", "reserve")])
    verdict = await verify_prices(database)
    assert (verdict.charges, verdict.unpriced, verdict.wrong) == (3, 1, [])
    await write(database, [charge("less", 7_999, 2), charge("old", 7_000, 2)])
    await write(database, [charge(f"wrong{number}", 1, 2) for number in range(MAX_FINDINGS)])
    verdict = await verify_prices(database)
    assert verdict.wrong_count == MAX_FINDINGS + 2
    assert len(verdict.wrong) == MAX_FINDINGS
    assert [each.request_id for each in verdict.wrong[:2]] == ["less", "old"]
    assert "charged 7999 nano-dollars, its tokens cost 8000" in str(verdict.wrong[0])
