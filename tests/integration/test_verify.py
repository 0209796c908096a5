"""`verify` reports every kind of inconsistency by name, and none in a consistent ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from sqlalchemy import Connection, text

from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.directory.gateways import GatewayRegistry
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow, as_list, sum_of
from tenants.ledger.verify import VerifyReport, verify_ledger
from tenants.nouns.limit import LimitSet
from tenants.nouns.tenant import TenantCreate
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Granted, Hold, QuotaStore
from tenants.storage.database import Database, create_sql_engine, open_database
from tenants.types import Amounts, Limit, Meter
from tests.support.limits import limits_of
from tests.support.quota import NOON_S, Clock

HELD = Amounts(10, 50, 600, 1)


class Books:
    """A few requests served by the rules: hold, reserve row, settle row, counters."""

    def __init__(self, database: Database, store: QuotaStore, limits: list[Limit], tenant_id: str) -> None:
        self.database = database
        self.store = store
        self.limits = limits
        self.tenant_id = tenant_id
        self.ledger = Ledger(database)

    def row(
        self, request_id: str, kind: str, amounts: Amounts, charged_to: tuple[str, ...] = ()
    ) -> LedgerRow:
        at = datetime.fromtimestamp(NOON_S, UTC)
        return LedgerRow(
            request_id, kind, self.tenant_id, "prj_a", "key_a", "gw_1", "standard", "small", amounts, "", at,  # type: ignore[arg-type]
            charged_to=charged_to,
        )  # fmt: skip

    async def start(self, request_id: str) -> None:
        granted = await self.store.reserve(request_id, self.limits, Hold.whole(HELD), 60)
        assert isinstance(granted, Granted)
        await self.ledger.append(self.row(request_id, "reserve", HELD, granted.charged_to))

    async def top_up(self, request_id: str, number: int, more: Amounts, used: Amounts) -> None:
        """The request holds `more` than before."""
        [found] = await self.ledger.open_requests(request_ids=[request_id])
        held = sum_of([found.held, more])
        granted = await self.store.top_up(request_id, used, held, held)
        assert isinstance(granted, Granted)
        row = self.row(request_id, "top_up", more)
        await self.ledger.append(replace(row, number=number, detail={"used": as_list(used)}))

    async def end(self, request_id: str, used: Amounts) -> None:
        await self.ledger.append(self.row(request_id, "settle", used))
        await self.store.settle(request_id, used)

    async def verify(self, running: set[str] | None = None) -> VerifyReport:
        return await verify_ledger(self.database, self.store, running=running, pause_s=0.0)

    async def sql(self, *statements: str) -> None:
        """Tampers, from outside: switches the triggers off first."""

        def run(connection: Connection) -> None:
            if self.database.dialect == "postgresql":
                connection.execute(text("ALTER TABLE ledger DISABLE TRIGGER ALL"))
                connection.execute(text("ALTER TABLE counter_sets DISABLE TRIGGER ALL"))
            else:
                for table in ("ledger", "counter_sets"):
                    for change in ("update", "delete"):
                        connection.execute(text(f"DROP TRIGGER IF EXISTS {table}_no_{change}"))
            for statement in statements:
                connection.execute(text(statement))

        engine = create_sql_engine(self.database.url, writing=True)
        with engine.begin() as connection:
            run(connection)
        engine.dispose()


@pytest.fixture(params=["memory and sqlite", "redis and postgresql"])
async def holds(request: pytest.FixtureRequest, pepper: bytes) -> AsyncIterator[Books]:
    is_shared = request.param == "redis and postgresql"
    url = request.getfixturevalue("postgres_url" if is_shared else "sqlite_url")
    clock, database = Clock(), open_database(url)
    admin = Admin(Transactions(database, pepper, clock))
    tenant = await admin.tenants.create("cli:tester", TenantCreate(name="acme"))
    for arguments in (
        {"meter": "total_tokens", "window": "minute", "amount": 10_000},
        {"meter": "cost_nanousd", "window": "lifetime", "amount": 10**9},
        {"meter": "requests", "rate_per_s": 1.0, "amount": 100},
        {"meter": "concurrency", "amount": 10},
    ):
        await admin.limits.set("cli:tester", LimitSet(tenant="acme", **arguments))  # type: ignore[arg-type]
    order = [Meter.TOTAL_TOKENS, Meter.COST_NANOUSD, Meter.REQUESTS, Meter.CONCURRENCY]
    limits = sorted(await limits_of(admin), key=lambda limit: order.index(limit.meter))
    if not is_shared:
        yield Books(database, MemoryQuotaStore(clock), limits, tenant.tenant_id)
    else:
        store = RedisQuotaStore(request.getfixturevalue("redis_url"), timeout_s=30, virtual_clock=clock)
        assert await store.begin_rebuild("test", 60)
        await store.finish_rebuild("test", "1")
        yield Books(database, store, limits, tenant.tenant_id)
        await store.close()
    await database.close()


async def test_honest_books_have_no_problems_while_running_and_after(holds: Books) -> None:
    for index in range(5):
        await holds.start(f"r{index}")
    for index in range(3):
        await holds.end(f"r{index}", Amounts(10, index, 100, 1))
    report = await holds.verify({"r3", "r4"})
    assert report.problems == ()
    assert report.ok
    assert (report.reserves, report.settles, report.open_requests, report.limits) == (5, 3, 2, 4)
    for index in (3, 4):
        await holds.end(f"r{index}", Amounts(requests=0))
    assert (await holds.verify(set())).ok


async def test_top_ups_are_part_of_what_is_held_and_may_be_charged(holds: Books) -> None:
    for request_id in ("a", "b"):
        await holds.start(request_id)
        await holds.top_up(request_id, 1, Amounts(0, 30, 300, 0), Amounts(10, 40, 500, 1))
    assert (await holds.verify({"a", "b"})).problems == ()
    await holds.top_up("a", 2, Amounts(0, 5, 50, 0), Amounts(10, 75, 850, 1))
    await holds.end("a", Amounts(10, 85, 950, 1))
    assert (await holds.verify({"b"})).problems == ()
    await holds.end("b", Amounts(10, 80, 900, 1))
    assert (await holds.verify(set())).problems == ()
    states = {state.limit.meter: state for state in await holds.store.states(holds.limits)}
    assert states[Meter.TOTAL_TOKENS].used == 10 + 85 + 10 + 80
    # One of a's top-up rows is lost: a was charged more than it held by what is left.
    await holds.sql("DELETE FROM ledger WHERE request_id = 'a' AND number = 1")
    await holds.sql("UPDATE ledger SET key_id = 'key_b' WHERE request_id = 'b' AND number = 1")
    assert set((await holds.verify(set())).problems) == {
        "a: a top-up is missing",
        "a: more was charged than reserved and topped up",
        "b: reserved for one tenant, project or key and settled or topped up for another",
    }


async def test_what_another_living_gateway_runs_is_no_problem_here(holds: Books) -> None:
    await holds.start("theirs")
    now_s = [NOON_S]
    registry = GatewayRegistry(holds.database, lambda: now_s[0])

    async def problems(stale_s: float, gateway_id: str) -> tuple[str, ...]:
        report = await verify_ledger(
            holds.database, holds.store, running=set(), gateway_id=gateway_id, stale_s=stale_s, pause_s=0.0
        )
        return report.problems

    lost = ("theirs: reserved, not running, and never settled",)
    assert await problems(1e12, "gw_2") == lost, "gw_1 is not registered"
    await registry.beat("gw_1", "", frozenset())
    assert await problems(1e12, "gw_2") == ()
    assert await problems(1e12, "gw_1") == lost, "gw_1 itself says that it does not run"
    assert await problems(-1.0, "gw_2") == lost, "gw_1 is dead"


async def test_each_kind_of_disagreement_between_rows_is_named(holds: Books) -> None:
    for request_id in ("fine", "twice", "more", "other", "minus", "open", "lost"):
        await holds.start(request_id)
    for request_id in ("fine", "twice", "more", "other", "minus"):
        await holds.end(request_id, Amounts(10, 20, 100, 1))
    await holds.ledger.append(holds.row("ghost", "settle", Amounts(1, 1, 1, 1)))
    await holds.sql(
        "UPDATE ledger SET output_tokens = 51 WHERE request_id = 'more' AND kind = 'settle'",
        "UPDATE ledger SET key_id = 'key_b' WHERE request_id = 'other' AND kind = 'settle'",
        "UPDATE ledger SET input_tokens = -1 WHERE request_id = 'minus' AND kind = 'settle'",
    )
    report = await verify_ledger(holds.database, None, running={"open"}, pause_s=0.0)
    assert set(report.problems) == {
        "ghost: settled or topped up but never reserved",
        "more: more was charged than reserved and topped up",
        "other: reserved for one tenant, project or key and settled or topped up for another",
        "minus: a negative amount",
        "lost: reserved, not running, and never settled",
    }
    assert (report.limits, report.open_requests) == (0, 2)


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO counter_sets SELECT gateway_id, counter_set, 'one more' FROM ledger",
        "UPDATE counter_sets SET counter = counter || 'x'",
        "DELETE FROM counter_sets",
    ],
    ids=["a counter more", "another counter", "none"],
)
async def test_what_requests_are_charged_to_is_not_changed_unseen(holds: Books, change: str) -> None:
    await holds.start("r")
    assert (await verify_ledger(holds.database, None, pause_s=0.0)).ok
    await holds.sql(change)
    report = await verify_ledger(holds.database, None, pause_s=0.0)
    assert report.problems == ("r: what it is charged to was changed",)


async def test_a_second_settlement_in_a_tampered_database_is_found(holds: Books) -> None:
    await holds.start("twice")
    await holds.end("twice", Amounts(1, 1, 1, 1))
    unique = "uq_ledger_request_id_kind_number"
    if holds.database.dialect == "postgresql":
        await holds.sql(f"ALTER TABLE ledger DROP CONSTRAINT {unique}")
    else:
        # SQLite keeps the constraint with the table: rebuild it without.
        await holds.sql(
            "CREATE TABLE loose AS SELECT * FROM ledger",
            "DROP TABLE ledger",
            "ALTER TABLE loose RENAME TO ledger",
        )
    columns = "request_id, kind, tenant_id, project_id, key_id, gateway_id, tier, model, input_tokens, "
    columns += "output_tokens, cost_nanousd, requests, outcome, at_us, detail, number, price_version, gpu_ms"
    await holds.sql(f"INSERT INTO ledger ({columns}) SELECT {columns} FROM ledger WHERE kind = 'settle'")
    report = await verify_ledger(holds.database, None)
    assert "twice: more than one row of one kind" in report.problems


async def test_a_counter_that_differs_from_the_rows_names_its_limit(holds: Books) -> None:
    await holds.start("r")
    await holds.end("r", Amounts(10, 20, 100, 1))
    minute, lifetime, bucket, running = holds.limits
    # Charged in the counters only, as if the ledger had lost the rows.
    await holds.store.reserve("unwritten", [minute, lifetime], Hold.whole(Amounts(5, 0, 7, 1)), 60)
    await holds.store.settle("unwritten", Amounts(5, 0, 7, 1))
    # Held although nothing runs.
    await holds.store.reserve("forgotten", [bucket, running], Hold.whole(Amounts(0, 0, 0, 1)), 60)
    report = await holds.verify(set())
    of_tenant = f"of tenant {holds.tenant_id}"
    assert sorted(report.problems) == sorted(
        [
            f"limit {minute.limit_id} (total_tokens per minute {of_tenant}): "
            "the ledger says 30 used, the counter says 35",
            f"limit {lifetime.limit_id} (cost_nanousd per lifetime {of_tenant}): "
            "the ledger says 100 used, the counter says 107",
            f"limit {bucket.limit_id} (requests per second {of_tenant}): "
            "unsettled requests hold 0, the counter says 1",
            f"limit {running.limit_id} (concurrency {of_tenant}): "
            "unsettled requests hold 0, the counter says 1",
        ]
    )
    await holds.store.settle("forgotten", Amounts(requests=0))
    assert len((await holds.verify(set())).problems) == 2


async def test_a_request_between_two_of_its_steps_is_no_problem_while_it_runs(holds: Books) -> None:
    # Held, and no row yet.
    granted = await holds.store.reserve("r", holds.limits, Hold.whole(HELD), 60)
    assert isinstance(granted, Granted)
    assert (await holds.verify({"r"})).ok
    assert len((await holds.verify(set())).problems) == 4
    await holds.ledger.append(holds.row("r", "reserve", HELD, granted.charged_to))
    assert (await holds.verify({"r"})).ok
    # Settled in the ledger, and not yet in the counters.
    used = Amounts(1, 2, 3, 1)
    await holds.ledger.append(holds.row("r", "settle", used))
    assert (await holds.verify({"r"})).ok
    assert len((await holds.verify(set())).problems) == 4
    await holds.store.settle("r", used)
    assert (await holds.verify(set())).ok


async def test_traffic_while_verifying_is_no_problem(holds: Books) -> None:
    done = asyncio.Event()
    live: set[str] = set()

    async def serve(name: str) -> None:
        for index in range(15):
            live.add(f"{name}{index}")
            await holds.start(f"{name}{index}")
            await holds.end(f"{name}{index}", Amounts(1, 2, 3, 1))
            live.discard(f"{name}{index}")

    async def check() -> list[VerifyReport]:
        reports = []
        while not done.is_set():
            reports.append(
                await verify_ledger(holds.database, holds.store, running=lambda: live, pause_s=0.05)
            )
        return reports

    checking = asyncio.create_task(check())
    await asyncio.gather(*(serve(name) for name in "abcdef"))
    done.set()
    reports = await checking
    assert reports
    assert [problem for report in reports for problem in report.problems] == []
    assert (await holds.verify(set())).problems == ()


async def test_many_examples_are_cut_short(holds: Books) -> None:
    await asyncio.gather(
        *(holds.ledger.append(holds.row(f"g{index:02}", "settle", Amounts())) for index in range(25))
    )
    report = await verify_ledger(holds.database, None)
    assert len(report.problems) == 21
    assert report.problems[-1] == "and more requests: settled or topped up but never reserved"
