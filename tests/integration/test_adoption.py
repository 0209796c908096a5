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
from typing import Any, cast

import pytest
from msgspec import structs

from engine.messages import Inventory, SamplingParams, SequenceOutcome
from engine.process.outcomes import OutcomeStore
from gateway.budget.holds import Holds
from gateway.cluster import recovery
from gateway.config import GatewayConfig
from gateway.deps import GatewayDeps
from gateway.domain.call import Call
from gateway.domain.outcomes import RequestOutcome
from gateway.upstream.base import UpstreamLost
from tenants.admin.admin import Admin
from tenants.admin.commands import PriceSet
from tenants.directory.directory import Directory
from tenants.directory.gateways import GatewaySeen
from tenants.errors import DatabaseUnavailable
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow, sum_of
from tenants.ledger.verify import verify_ledger
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Granted, Hold, QuotaStoreUnavailable
from tenants.storage.database import Database
from tenants.types import NOTHING, Amounts, Limit, Meter, Principal, SubjectKind, Tier, Window
from tests.conftest import PEPPER
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

    def seen_by(self, gateway_id: str) -> EngineView:
        return EngineView(self, gateway_id)


@dataclass
class EngineView:
    """One gateway's end of the connection."""

    engine: Engine
    gateway_id: str
    replica_id: str = "engine"

    @property
    def is_up(self) -> bool:
        return self.engine.is_up

    async def collect(self, *, adopt: bool = False) -> Inventory:
        if not self.engine.is_up:
            raise UpstreamLost("away")
        await asyncio.sleep(0)
        outcomes = self.engine.store.collect(
            self.gateway_id, adopt_from_all_but=self.engine.heard if adopt else None
        )
        return Inventory("engine", [], outcomes, sorted(self.engine.heard))

    def acknowledge(self, sequence_ids: Sequence[str]) -> None:
        self.engine.store.acknowledge(sequence_ids)

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
        await Admin(self.database, PEPPER).set_price("cli:tester", wanted)

    def deps(self, gateway_id: str) -> GatewayDeps:
        """What recovery needs of a gateway."""
        unused = cast(Any, None)
        self.engine.heard.add(gateway_id)
        return GatewayDeps(
            config=GatewayConfig(), gateway_id=gateway_id, database=self.database,
            directory=Directory(self.database, PEPPER),
            admin=unused, ledger=self.ledger, quota_store=self.store, prices=unused,
            upstreams=(cast(Any, self.engine.seen_by(gateway_id)),), renderer=unused, model_name="m",
            wall_clock=self.clock,
        )  # fmt: skip

    def holds(self, gateway_id: str) -> Holds:
        return Holds(
            self.ledger, self.store, gateway_id, lease_ttl_s=60, wall_clock=self.clock,
            all_limits=lambda: [BUDGET],
        )  # fmt: skip

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
        """No heartbeat since long ago, and the engine has noticed."""
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
        "basis": "last_report", "uncertain_tokens": 28,
    }  # fmt: skip
    assert [rows[call.request_id].amounts for call in calls[4:]] == [NOTHING, NOTHING]
    assert await house.used() == (3 * 22 + 17, 0)
    assert not len(house.engine.store), "the engine may forget"
    assert (await verify_ledger(house.database, None, running=set())).ok
    assert "dead" not in {each.gateway_id for each in await adopters[0].registry.seen()}


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
