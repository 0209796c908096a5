"""Adoption: a dead gateway's requests are settled once, by the gateway with the right to, from the best
source.

The real ledger, registry, quota store and outcome store; only the connection between gateway and engine is
replaced by direct calls.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec import structs
from sqlalchemy import insert

from engine.messages import Inventory, SamplingParams, SequenceOutcome
from engine.process.outcomes import OutcomeStore
from gateway.budget.holds import Holds
from gateway.cluster import recovery
from gateway.config import GatewayConfig
from gateway.deps import GatewayDeps
from gateway.domain.call import Call
from gateway.pools.pool import PoolSpec
from gateway.upstream.base import UpstreamLost
from gateway.upstream.replica_set import ReplicaSet
from tenants.admin.admin import Admin
from tenants.admin.commands import LedgerAdjust
from tenants.admin.ledger import GivenBack
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.directory.gateways import GatewaySeen
from tenants.errors import DatabaseUnavailable, Invalid, NotFound
from tenants.ledger.ledger import Ledger
from tenants.ledger.progress import Progress
from tenants.ledger.rows import LedgerRow, sum_of
from tenants.ledger.verify import verify_ledger
from tenants.outcomes import RequestOutcome
from tenants.pricing.price_row import PriceSet
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Granted, Hold, QuotaStoreUnavailable
from tenants.resources.reading import read_page
from tenants.resources.records.audit import AUDIT, AuditQuery
from tenants.storage.database import Database
from tenants.storage.tables import limits
from tenants.types import NOTHING, Amounts, Limit, Meter, Principal, SubjectKind, Tier, Window
from tests.support.builders import site
from tests.support.database_fixtures import PEPPER
from tests.support.quota import Clock

STALE_S = 10.0
PROMPT = [1, 2, 3, 4, 5]
BUDGET = Limit("lim", "ten", SubjectKind.TENANT, "ten", Meter.TOTAL_TOKENS, 10_000, Window.LIFETIME)
PRINCIPAL = Principal(
    "ten", "acme", "prj", "key", "fg_live_x", 1.0, frozenset({"inference"}), Tier.STANDARD, frozenset(Tier),
    None, (BUDGET,),
)  # fmt: skip
HOLD = Hold(Amounts(5, 5, 1_000, 1), Amounts(5, 20, 6_500, 1), Amounts(5, 100, 30_500, 1))


@dataclass
class Engine:
    """An engine's knowledge without an engine: the outcomes it keeps, and its connected gateways."""

    store: OutcomeStore = field(default_factory=OutcomeStore)
    heard: set[str] = field(default_factory=set)
    is_up: bool = True
    life: str = "1"
    most: int = 1_000_000
    """Outcomes that it tells at a time."""

    def seen_by(self, gateway_id: str) -> EngineView:
        return EngineView(self, gateway_id)


@dataclass
class EngineView:
    """One gateway's end of the connection."""

    engine: Engine
    gateway_id: str
    replica_id: str = "engine"
    name: str = "engine"
    address: str = "ipc:///engine.sock"

    @property
    def is_up(self) -> bool:
        return self.engine.is_up

    @property
    def ready(self) -> Any:
        return SimpleNamespace(engine_id="engine", life=self.engine.life)

    async def collect(self, *, adopt: bool = False) -> Inventory:
        if not self.engine.is_up:
            raise UpstreamLost("away")
        await asyncio.sleep(0)
        outcomes = self.engine.store.collect(
            self.gateway_id, adopt_from_all_but=self.engine.heard if adopt else None
        )
        most = self.engine.most
        heard = sorted(self.engine.heard)
        return Inventory("engine", [], outcomes[:most], heard, is_partial=len(outcomes) > most)

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        self.engine.store.acknowledge(self.gateway_id, sequence_ids)

    async def wait_until_up(self, timeout_s: float) -> bool:
        return self.engine.is_up


@dataclass
class House:
    """Gateways on one database, one store and one engine."""

    database: Database
    clock: Clock = field(default_factory=Clock)
    engine: Engine = field(default_factory=Engine)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.database)
        self.store = MemoryQuotaStore(self.clock)
        self.requests = 0

    async def set_price(self) -> None:
        """Of the model `m`."""
        wanted = PriceSet(model="m", input_nanousd=100, output_nanousd=300)
        await Admin(Transactions(self.database, PEPPER)).prices.set("cli:tester", wanted)

    async def add_limit(self, limit: Limit = BUDGET) -> None:
        """A lifetime's limit of the tenant, as the directory has it."""
        values: dict[str, Any] = {
            "id": limit.limit_id,
            "tenant_id": None,
            "kind": "tenant",
            "subject_id": "ten",
            "tier": "",
        }
        values |= {"meter": limit.meter.value, "shape": "lifetime", "time_zone": "UTC", "amount": 10_000}
        values |= {"mode": "hard", "created_us": 1, "model": ""}
        await self.database.write(lambda connection: connection.execute(insert(limits).values(**values)))

    def deps(self, gateway_id: str) -> GatewayDeps:
        """What recovery needs of a gateway."""
        unused = cast(Any, None)
        self.engine.heard.add(gateway_id)
        return GatewayDeps(
            config=GatewayConfig(), gateway_id=gateway_id, database=self.database,
            directory=Directory(self.database, PEPPER),
            admin=unused, ledger=self.ledger, quota_store=self.store, prices=unused,
            upstreams=ReplicaSet([cast(Any, self.engine.seen_by(gateway_id))]),
            renderer=unused, model_name="m",
            wall_clock=self.clock,
        )  # fmt: skip

    def holds(self, gateway_id: str) -> Holds:
        here = site(self.database, self.clock, gateway_id=gateway_id)
        return Holds(here, self.ledger, self.store, all_limits=lambda: [BUDGET])

    async def begin(self, holds: Holds) -> Call:
        """A request that holds its quantile."""
        self.requests += 1
        call = Call(
            request_id=f"req_{self.requests}", chat=True, model="m", principal=PRINCIPAL, tier=Tier.STANDARD,
            prompts=(PROMPT,), choices=1, max_tokens=100, sampling=SamplingParams(), stream=True,
            include_usage=True, created=1,
        )  # fmt: skip
        await holds.reserve(call, HOLD, price_version=1)
        return call

    def emitted(self, call: Call, gateway_id: str, tokens: int) -> None:
        """The engine keeps this outcome for the gateway."""
        self.engine.store.keep(
            gateway_id,
            SequenceOutcome(f"{call.request_id}.0", call.request_id, "ten", "cancelled", 5, 0, 5, tokens),
        )

    async def dies(self, gateway_id: str) -> GatewaySeen:
        """No heartbeat since long ago, and the engine has noticed. Its last record names the engine, and
        nothing that had been sent."""
        record = Progress(frozenset({"engine/1"}), frozenset({"m"}))
        await self.deps(gateway_id).progress.write(gateway_id, msgspec.msgpack.encode(record), 1)
        await self.deps(gateway_id).registry.beat(gateway_id, "", frozenset({"engine"}))
        self.engine.heard.discard(gateway_id)
        self.clock.advance(STALE_S + 5)
        return GatewaySeen(gateway_id, "", frozenset({"engine"}), STALE_S + 5)

    async def beats(self, gateway_id: str) -> None:
        await self.deps(gateway_id).registry.beat(gateway_id, "", frozenset({"engine"}))

    async def used(self) -> tuple[int, int]:
        """Of the budget: settled and held."""
        [state] = await self.store.states([BUDGET])
        return state.used, state.held

    async def settlements(self) -> dict[str, LedgerRow]:
        ids = [f"req_{number + 1}" for number in range(self.requests)]
        return await self.ledger.settled(ids)


@pytest.fixture
async def house(sqlite_database: Database) -> House:
    # SQLite, so that age is measured on the test's own clock.
    house = House(sqlite_database)
    await house.set_price()
    return house


@pytest.fixture
async def sqlite_database(sqlite_url: str) -> Any:
    opened = Database(sqlite_url, busy_timeout_s=0.1)
    yield opened
    await opened.close()


def more(output_tokens: int) -> Amounts:
    return Amounts(5, output_tokens, 500 + 300 * output_tokens, 1)


async def test_two_adopters_at_once_settle_everything_once_and_by_the_best_word(house: House) -> None:
    dying = house.holds("dead")
    calls = [await house.begin(dying) for _ in range(6)]
    for call in calls[:3]:
        house.emitted(call, "dead", 17)
    await dying.top_up(calls[3].request_id, more(12), more(20), more(40))
    assert dying.held(calls[3].request_id) == more(40)
    dead = await house.dies("dead")
    adopters = [house.deps("one"), house.deps("two")]
    for each in adopters:
        await house.beats(each.gateway_id)
    reports = await asyncio.gather(
        *(recovery.adopt(each, dead, STALE_S, frozenset()) for each in adopters),
        *(recovery.adopt(each, dead, STALE_S, frozenset()) for each in adopters),
    )
    assert sum(report.recovered for report in reports) >= 3
    rows = await house.settlements()
    assert len(rows) == 6
    assert [rows[call.request_id].amounts for call in calls[:3]] == [more(17)] * 3
    assert {rows[call.request_id].detail["basis"] for call in calls[:3]} == {"engine"}
    assert rows[calls[3].request_id].amounts == more(12)
    assert rows[calls[3].request_id].detail == {
        "held": [5, 40, 12_500, 1, 0], "top_ups": 1, "reserved_by": "dead", "engine_counted": 0,
        "basis": "last_report", "uncertain_tokens": 0,
    }  # fmt: skip
    assert [rows[call.request_id].amounts for call in calls[4:]] == [NOTHING, NOTHING]
    assert await house.used() == (3 * 22 + 17, 0)
    assert not len(house.engine.store), "the engine may forget"
    assert (await verify_ledger(house.database, None, running=set())).ok
    assert "dead" not in {each.gateway_id for each in await adopters[0].registry.seen()}


async def test_where_the_engine_died_too_limits_count_what_was_held_and_bills_what_was_reported(
    house: House,
) -> None:
    dying = house.holds("dead")
    calls = [await house.begin(dying) for _ in range(2)]
    await dying.top_up(calls[1].request_id, more(12), more(20), more(40))
    dead = await house.dies("dead")
    house.engine.life = "2"
    await house.beats("one")
    await recovery.adopt(house.deps("one"), dead, STALE_S, frozenset())
    rows = await house.settlements()
    whole, topped_up = (rows[call.request_id] for call in calls)
    assert (whole.amounts, whole.counted) == (Amounts(requests=1), more(20))
    assert topped_up.amounts == more(12)
    assert topped_up.counted == more(40)
    assert topped_up.detail["in_doubt"] == [0, 28, 8_400, 0, 0]
    assert await house.used() == (25 + 45, 0)
    report = await verify_ledger(house.database, None, running=set())
    assert report.ok
    assert report.in_doubt_tokens == 25 + 28
    # Nobody needs its record any more.
    assert await house.deps("one").progress.read("dead") == Progress()


async def test_what_is_in_doubt_is_given_back_once_and_nothing_else_is(house: House) -> None:
    dying = house.holds("dead")
    calls = [await house.begin(dying) for _ in range(3)]
    house.emitted(calls[0], "dead", 17)
    dead = await house.dies("dead")
    house.engine.life = "2"
    await house.beats("one")
    await recovery.adopt(house.deps("one"), dead, STALE_S, frozenset())
    assert await house.used() == (22 + 25 + 25, 0)
    admin = Admin(Transactions(house.database, PEPPER))

    async def adjust(request_id: str, store: MemoryQuotaStore | None) -> GivenBack:
        wanted = LedgerAdjust(request_id=request_id, reason="the client has its answer")
        return await admin.ledger.adjust("cli:tester", wanted, store)

    # Of limits that are in the directory.
    await house.add_limit()
    given = await adjust(calls[1].request_id, house.store)
    assert (given.amounts, given.is_new) == (more(20), True)
    assert await house.used() == (22 + 25, 0)
    assert not (await adjust(calls[1].request_id, house.store)).is_new
    assert await house.used() == (22 + 25, 0)
    with pytest.raises(Invalid, match="in doubt"):
        await adjust(calls[0].request_id, house.store)
    with pytest.raises(NotFound):
        await adjust("req_none", house.store)
    # Without a store the ledger says it, from which counters are filled.
    await adjust(calls[2].request_id, None)
    [(_, used)] = (await house.ledger.standing([BUDGET], datetime.now(UTC))).used
    assert used == 22
    report = await verify_ledger(house.database, None, running=set())
    assert (report.ok, report.in_doubt_tokens) == (True, 0)
    assert sum(total.requests for total in await house.ledger.totals()) == 1, "bills count what ran"
    acts = await read_page(admin, AUDIT, AuditQuery(act="ledger.adjust"))
    assert [row.target for row in acts.rows] == [calls[2].request_id, calls[1].request_id]


async def test_it_is_given_back_on_a_limit_that_came_later_as_well(house: House) -> None:
    dying = house.holds("dead")
    call = await house.begin(dying)
    later = replace(BUDGET, limit_id="lim_2", meter=Meter.OUTPUT_TOKENS)
    assert isinstance(await dying.rebind(call.request_id, [BUDGET, later], must_fit=True), Granted)
    dead = await house.dies("dead")
    house.engine.life = "2"
    await house.beats("one")
    await recovery.adopt(house.deps("one"), dead, STALE_S, frozenset())
    [state] = await house.store.states([later])
    assert (state.used, state.held) == (20, 0)
    await house.add_limit()
    await house.add_limit(later)
    wanted = LedgerAdjust(request_id=call.request_id, reason="the client has its answer")
    given = await Admin(Transactions(house.database, PEPPER)).ledger.adjust("cli:tester", wanted, house.store)
    assert len(given.charged_to) == 2
    [state] = await house.store.states([later])
    assert state.used == 0
    report = await verify_ledger(house.database, house.store, running=set())
    assert report.ok, report.problems


async def test_more_given_back_than_was_in_doubt_is_named(house: House) -> None:
    holds = house.holds("one")
    call = await house.begin(holds)
    assert await holds.settle(call, more(9), RequestOutcome.COMPLETED, {}, lambda: None).within(10)
    [reserve, _] = await house.ledger.find(call.request_id)
    given = structs.replace(reserve, kind="adjust", amounts=NOTHING, counted_output=-9, charged_to=())
    assert await house.ledger.append(given)
    report = await verify_ledger(house.database, None, running=set())
    assert report.problems == (f"{call.request_id}: given back is not what was in doubt",)


async def test_a_live_gateway_is_not_adopted(house: House) -> None:
    holds = house.holds("slow")
    call = await house.begin(holds)
    dead = await house.dies("slow")
    adopter = house.deps("one")
    await house.beats("one")
    # It was only slow: its heartbeat comes before the adopter has the right.
    await house.beats("slow")
    assert (await recovery.adopt(adopter, dead, STALE_S, frozenset())).open_reserves == 0
    # Its heartbeat is late, but an engine is still connected to it.
    house.clock.advance(STALE_S + 1)
    await house.beats("one")
    house.engine.heard.add("slow")
    assert (await recovery.adopt(adopter, dead, STALE_S, frozenset())).left_open == 1
    # It used an engine that the adopter does not know, and that may know more.
    house.engine.heard.discard("slow")
    elsewhere = replace(dead, engines=frozenset({"engine", "another"}))
    assert (await recovery.adopt(adopter, elsewhere, STALE_S, frozenset())).open_reserves == 0
    # The engine cannot be asked.
    house.engine.is_up = False
    assert (await recovery.adopt(adopter, dead, STALE_S, frozenset())).left_open == 1
    assert await house.settlements() == {}
    assert await house.used() == (0, 25)
    house.engine.is_up = True
    assert (await recovery.adopt(adopter, dead, STALE_S, frozenset())).lost == 1
    assert set(await house.settlements()) == {call.request_id}


async def test_what_engines_left_that_are_no_members_any_more_is_settled_after_a_while(house: House) -> None:
    call = await house.begin(house.holds("dead"))
    dead = await house.dies("dead")
    await house.beats("one")
    members: Any = SimpleNamespace(is_complete=False)
    adopter = replace(house.deps("one"), members=members)

    async def adopted(*engines: str, silent_s: float) -> tuple[int, int]:
        row = replace(dead, engines=frozenset(engines), silent_s=silent_s)
        report = await recovery.adopt(adopter, row, STALE_S, frozenset())
        return report.left_open, report.lost

    gone_s = recovery.LEFT_S
    assert await adopted("engine", "has-left", silent_s=gone_s - 1) == (0, 0)
    assert await adopted("engine", "engine-0@dead", silent_s=gone_s) == (0, 0), "its own engine knows more"
    assert await adopted("of-another-pool", silent_s=gone_s) == (0, 0)
    assert await adopted("engine", "has-left", silent_s=gone_s) == (1, 0), "not every source was heard yet"
    members.is_complete = True
    assert await adopted("ipc:///engine.sock", silent_s=0.0) == (0, 1), "a row from before names"
    assert set(await house.settlements()) == {call.request_id}


async def test_what_an_engine_has_yet_to_tell_is_waited_for(house: House) -> None:
    dying = house.holds("dead")
    calls = [await house.begin(dying) for _ in range(3)]
    for call in calls:
        house.emitted(call, "dead", 17)
    dead = await house.dies("dead")
    house.engine.most = 2
    await house.beats("one")
    adopter = house.deps("one")
    first = await recovery.adopt(adopter, dead, STALE_S, frozenset())
    assert (first.recovered, first.lost, first.left_open) == (2, 0, 1)
    assert "dead" in {each.gateway_id for each in await adopter.registry.seen()}
    second = await recovery.adopt(adopter, dead, STALE_S, frozenset())
    assert (second.recovered, second.lost, second.left_open) == (1, 0, 0)
    assert {row.detail["basis"] for row in (await house.settlements()).values()} == {"engine"}
    assert "dead" not in {each.gateway_id for each in await adopter.registry.seen()}


async def test_a_server_of_another_model_that_is_away_keeps_nothing_open(house: House) -> None:
    dying = house.holds("dead")
    house.emitted(await house.begin(dying), "dead", 17)
    await house.begin(dying)
    dead = await house.dies("dead")
    await house.beats("one")
    adopter = house.deps("one")
    away = cast(Any, Engine(is_up=False).seen_by("one"))
    unused = cast(Any, None)
    pools = (PoolSpec("m", adopter.upstreams, unused), PoolSpec("other", ReplicaSet([away]), unused))
    adopter = replace(adopter, upstreams=ReplicaSet([*adopter.upstreams, away]), pools=pools)
    report = await recovery.adopt(adopter, dead, STALE_S, frozenset())
    assert (report.recovered, report.lost, report.left_open) == (1, 1, 0)
    assert await house.used() == (22, 0)


async def test_the_right_to_adopt_passes_on_only_when_the_adopter_dies(house: House) -> None:
    await house.dies("dead")
    one, two = house.deps("one").registry, house.deps("two").registry
    await house.beats("one")
    await house.beats("two")
    assert await one.claim("dead", "one", STALE_S)
    assert not await two.claim("dead", "two", STALE_S)
    assert await one.claim("dead", "one", STALE_S)
    house.clock.advance(STALE_S + 1)
    await house.beats("two")
    assert await two.claim("dead", "two", STALE_S)
    assert not await two.claim("two", "one", STALE_S), "a gateway that lives"


async def test_the_settlement_of_one_that_was_adopted_changes_nothing(house: House) -> None:
    stalled = house.holds("stalled")
    call = await house.begin(stalled)
    house.emitted(call, "stalled", 15)
    dead = await house.dies("stalled")
    adopter = house.deps("one")
    await house.beats("one")
    await recovery.adopt(adopter, dead, STALE_S, frozenset())
    assert await house.used() == (20, 0)
    # It comes back and settles by what it received.
    settlement = stalled.settle(call, more(9), RequestOutcome.ENGINE_LOST, {}, lambda: None)
    assert await settlement.within(10)
    assert (await house.settlements())[call.request_id].amounts == more(15)
    assert await house.used() == (20, 0)


async def test_a_settle_row_of_an_adopter_that_died_is_counted_as_it_stands(house: House) -> None:
    stalled = house.holds("stalled")
    call = await house.begin(stalled)
    [found] = await house.ledger.open_requests()
    await house.ledger.settle(structs.replace(found.reserve, kind="settle", amounts=more(15), charged_to=()))
    settlement = stalled.settle(call, more(9), RequestOutcome.ENGINE_LOST, {}, lambda: None)
    assert await settlement.within(10)
    assert await house.used() == (20, 0)


async def test_what_another_gateway_has_settled_is_topped_up_no_more(house: House) -> None:
    stalled = house.holds("stalled")
    call = await house.begin(stalled)
    [found] = await house.ledger.open_requests()
    await house.ledger.settle(structs.replace(found.reserve, kind="settle", charged_to=()))
    await house.store.settle(call.request_id, found.held)
    with pytest.raises(QuotaStoreUnavailable):
        await stalled.top_up(call.request_id, more(1), more(20), more(40))
    assert await house.used() == (25, 0)


async def test_a_charge_that_the_counters_missed_is_counted_once_by_its_finder(house: House) -> None:
    dying, living = house.holds("dead"), house.holds("one")
    settled, unwritten, open_one = [await house.begin(dying) for _ in range(3)]
    # Killed between the settle row and the counters, and between hold and reserve row.
    [row] = [each.reserve for each in await house.ledger.open_requests(request_ids=[settled.request_id])]
    await house.ledger.settle(structs.replace(row, kind="settle", amounts=more(8), charged_to=()))
    await house.store.reserve("req_unwritten", [BUDGET], HOLD, 60)
    await house.store.settle(unwritten.request_id, NOTHING)
    assert await house.used() == (0, 75)
    await living.keep_once()
    assert await house.used() == (0, 75), "as long as they may be alive, nothing is touched"
    house.clock.advance(61)
    for _ in range(2):
        await living.keep_once()
    assert await house.used() == (13, 25), "what is open stays held until it is adopted"
    assert open_one.request_id in {each.request_id for each in await house.ledger.open_requests()}


async def test_what_the_engine_hears_of_is_in_the_ledger_first(house: House, sqlite_url: str) -> None:
    holds = house.holds("one")
    call = await house.begin(holds)
    held = holds.held(call.request_id)
    assert held == HOLD.ahead
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable):
        await holds.top_up(call.request_id, more(10), more(20), more(40))
    assert holds.held(call.request_id) == held, "no engine may be notified"
    other.execute("ROLLBACK")
    other.close()
    granted = await holds.top_up(call.request_id, more(10), more(20), more(40))
    assert isinstance(granted, Granted)
    assert granted.covered == more(40) == holds.held(call.request_id)
    [found] = await house.ledger.open_requests()
    assert found.held == more(40)
    assert found.used == more(10)
    assert sum_of([found.reserve.amounts, *(row.amounts for row in found.top_ups)]) == more(40)
    # A repeat asks for nothing new, and writes nothing.
    await holds.top_up(call.request_id, more(11), more(20), more(40))
    assert len((await house.ledger.open_requests())[0].top_ups) == 1


async def test_an_attempt_that_had_been_written_after_all_is_not_held_twice(house: House) -> None:
    holds = house.holds("one")
    call = await house.begin(holds)
    [found] = await house.ledger.open_requests()
    # What a failed attempt may leave: its row, and a gateway that does not know.
    row = structs.replace(
        found.reserve, kind="top_up", number=1, amounts=Amounts(0, 7, 2_100, 0), charged_to=(),
        detail={"used": [5, 3, 1_400, 1, 0]}, at=datetime.fromtimestamp(house.clock(), UTC),
    )  # fmt: skip
    await house.ledger.append(row)
    await holds.top_up(call.request_id, more(10), more(20), more(40))
    [found] = await house.ledger.open_requests()
    assert [each.amounts.output_tokens for each in found.top_ups] == [7, 13]
    assert found.held == more(40) == holds.held(call.request_id)
