"""Does every way in which a request can end settle it exactly once, and give everything back?

The real lifecycle, queue, quota store and ledger, in front of an upstream that does what each test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from engine.forecast.length import LengthForecast
from engine.messages import (
    Delta,
    Inventory,
    ModelInfo,
    Outcome,
    Ready,
    RunningSequence,
    SamplingParams,
    Snapshot,
    Submit,
)
from engine.scheduling.counters import ServiceCounters
from gateway.account.outcomes import RequestOutcome
from gateway.books import Books
from gateway.dispatcher import Dispatcher
from gateway.estimates import Estimates
from gateway.flow.controller import FlowController
from gateway.flow.window import WindowRule
from gateway.ids import new_request_id
from gateway.lifecycle import Closed, Event, Lifecycle, Piece, Run
from gateway.metrics import Metrics
from gateway.understand import Call
from gateway.upstream.base import SequenceRefused, UpstreamLost, UpstreamUnavailable
from tenants.database import Database, open_database
from tenants.ledger import Ledger, LedgerRow
from tenants.pricing import Price, PriceBook
from tenants.quota.memory import MemoryQuotaStore
from tenants.types import Amounts, Limit, Meter, Principal, SubjectKind, Tier, Window
from tests.engine_process import until

PROMPT = list(range(1, 11))
BUDGET = 1000
LIMITS = (
    Limit("lim_1", "ten_1", SubjectKind.TENANT, "ten_1", Meter.TOTAL_TOKENS, BUDGET, Window.LIFETIME),
    Limit("lim_2", "ten_1", SubjectKind.TENANT, "ten_1", Meter.CONCURRENCY, 5),
    Limit("lim_3", "ten_1", SubjectKind.KEY, "key_1", Meter.REQUESTS, 100, Window.LIFETIME),
)
PRINCIPAL = Principal(
    "ten_1", "acme", "prj_1", "key_1", "fg_live_x", 1.0, frozenset({"inference"}), Tier.STANDARD,
    frozenset(Tier), None, LIMITS,
)  # fmt: skip


class ScriptedEngine:
    """An upstream whose sequences do what the test tells them."""

    replica_id = "a"

    def __init__(self) -> None:
        info = ModelInfo("m", "x", 1, 1024, 1000, [0], "float32", "cpu", "none")
        self.ready: Ready | None = Ready("a", info, "vtc", 16, 64, 2, 512, 1)
        self.snapshot: Snapshot | None = None
        self.is_up = True
        self.watchers: list[Callable[[], None]] = []
        self.submitted: dict[str, Submit] = {}
        self.streams: dict[str, asyncio.Queue[Delta | Exception]] = {}
        self.cancelled: list[str] = []
        self.acknowledged: list[str] = []
        self.answers_cancels = True
        self.emitted: dict[str, int] = {}
        self.arrived = asyncio.Event()

    @property
    def model(self) -> ModelInfo | None:
        return None if self.ready is None else self.ready.model

    def watch(self, on_change: Callable[[], None]) -> None:
        self.watchers.append(on_change)

    def run(self, submit: Submit) -> AsyncIterator[Delta]:
        if not self.is_up:
            raise UpstreamUnavailable("away")
        self.submitted[submit.sequence_id] = submit
        self.streams[submit.sequence_id] = asyncio.Queue()
        self.emitted[submit.sequence_id] = 0
        self.arrived.set()
        return self._deltas(submit.sequence_id)

    async def _deltas(self, sequence_id: str) -> AsyncIterator[Delta]:
        while True:
            item = await self.streams[sequence_id].get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.outcome is not None:
                return

    def emit(self, sequence_id: str, count: int) -> None:
        """Some tokens of a sequence."""
        first = self.emitted[sequence_id]
        self.emitted[sequence_id] += count
        self.streams[sequence_id].put_nowait(Delta(sequence_id, first, [7] * count, "x" * count))

    def end(self, sequence_id: str, finish: str, *, hidden: int = 0) -> None:
        """The last word; `hidden` tokens were emitted that never reached the gateway."""
        submit = self.submitted[sequence_id]
        emitted = self.emitted[sequence_id] + hidden
        computed = len(submit.prompt_token_ids) if emitted else 0
        outcome = Outcome(
            sequence_id, submit.request_id, submit.tenant_id, finish, len(submit.prompt_token_ids), 0,
            computed, emitted, submit.index,
        )  # fmt: skip
        self.streams[sequence_id].put_nowait(Delta(sequence_id, outcome=outcome))

    def fail(self, sequence_id: str, error: Exception) -> None:
        self.streams[sequence_id].put_nowait(error)

    def cancel(self, sequence_id: str, cause: str) -> None:
        self.cancelled.append(sequence_id)
        if self.answers_cancels:
            self.end(sequence_id, cause, hidden=2)

    def acknowledge(self, sequence_ids: Sequence[str]) -> None:
        self.acknowledged += sequence_ids

    async def wait_until_up(self, timeout_s: float) -> bool:
        return self.is_up

    async def collect(self) -> Inventory:
        return Inventory("a", list[RunningSequence](), [])


@dataclass
class House:
    """Everything between the route and the engine."""

    database: Database
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    ttl_s: float = 1e9
    price: dict[str, Price] = field(default_factory=lambda: {"m": Price(100, 50, 300)})

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.ledger = Ledger(self.database)
        self.store = MemoryQuotaStore()
        self.flow = FlowController(
            "vtc", ServiceCounters(), max_queued=3, max_queued_per_tenant=2, queue_ttl_s=[self.ttl_s] * 3,
            window=WindowRule(0, 1.0), log_records=100,
        )  # fmt: skip
        self.dispatcher = Dispatcher(self.flow, [self.engine], clock, engine_grace_s=0.0)
        prices = PriceBook(self.price)
        self.books = Books(
            self.ledger,
            self.store,
            "gw",
            lease_ttl_s=60,
            wall_clock=lambda: 1e9,
            all_limits=lambda: list(LIMITS),
        )
        self.lifecycle = Lifecycle(
            books=self.books,
            dispatcher=self.dispatcher,
            estimates=Estimates(
                flow=self.flow, upstreams=[self.engine], lengths=LengthForecast(), prices=prices, model="m",
                cache_s=0.05,
            ),
            prices=prices,
            metrics=Metrics(),
            clock=clock,
            outcome_wait_s=0.2,
            settle_wait_s=5.0,
        )  # fmt: skip
        self.books.start()
        self.dispatcher.start()

    async def close(self) -> None:
        await self.lifecycle.close(0)
        await self.dispatcher.close()
        await self.books.close(5)

    def begin(self, *, choices: int = 1, max_tokens: int = 20, principal: Principal = PRINCIPAL) -> Run:
        call = Call(
            request_id=new_request_id(1e9), chat=True, model="m", principal=principal, tier=Tier.STANDARD,
            prompts=(PROMPT,), choices=choices, max_tokens=max_tokens, sampling=SamplingParams(), stream=True,
            include_usage=True, created=1,
        )  # fmt: skip
        return self.lifecycle.begin(call)

    async def running(self, **fields: Any) -> tuple[Run, list[str]]:
        """A request whose sequences are in the engine."""
        run = self.begin(**fields)
        ids = [f"{run.call.request_id}.{index}" for index in range(run.call.sequences)]
        async with asyncio.timeout(10):
            while not all(each in self.engine.submitted for each in ids):
                self.engine.arrived.clear()
                await self.engine.arrived.wait()
        return run, ids

    async def closed(self, run: Run) -> tuple[Closed, list[Event]]:
        events: list[Event] = []
        async with asyncio.timeout(10):
            while True:
                events.append(event := await run.events.get())
                if isinstance(event, Closed):
                    return event, events

    async def check(
        self, run: Run, outcome: RequestOutcome, output_tokens: int, *, requests: int = 1
    ) -> LedgerRow:
        """The rule: one reserve row, one settle row, and nothing held, queued or in flight."""
        rows = await self.ledger.find(run.call.request_id)
        assert [row.kind for row in rows] == ["reserve", "settle"]
        settle = rows[1]
        assert settle.outcome == outcome.value
        assert (settle.amounts.output_tokens, settle.amounts.requests) == (output_tokens, requests)
        assert settle.amounts.input_tokens == (len(PROMPT) if output_tokens else 0)
        assert settle.amounts.cost_nanousd == 100 * settle.amounts.input_tokens + 300 * output_tokens
        states = {state.limit.meter: state for state in await self.store.states(LIMITS)}
        assert all(state.held == 0 for state in states.values())
        assert states[Meter.TOTAL_TOKENS].used == settle.amounts.input_tokens + output_tokens
        assert states[Meter.REQUESTS].used == requests
        self.store.check()
        self.flow.check()
        assert self.flow.num_in_flight == 0
        assert len(self.flow) == 0
        assert self.flow.load("a").ahead_of(2) == (0, 0)
        assert self.flow.counters.value("ten_1") == (
            (settle.amounts.input_tokens * run.call.choices + 2 * output_tokens) * 1_000_000
        )
        assert not self.books.live
        return settle


@pytest.fixture
async def house(sqlite_url: str) -> AsyncIterator[House]:
    database = open_database(sqlite_url)
    made = House(database)
    yield made
    await made.close()
    await database.close()


async def test_an_answer_that_ends_is_charged_as_the_engine_counts_it(house: House) -> None:
    run, (one,) = await house.running()
    house.engine.emit(one, 3)
    await until(lambda: [each.output_tokens for each in house.flow.in_flight()] == [3])
    house.engine.emit(one, 4)
    house.engine.end(one, "stop")
    closed, events = await house.closed(run)
    assert closed.error is None
    assert "".join(event.text for event in events if isinstance(event, Piece)) == "x" * 7
    settle = await house.check(run, RequestOutcome.COMPLETED, 7)
    assert settle.detail["finish"] == ["stop"]
    assert house.engine.acknowledged == [one]
    assert closed.account.held == Amounts(10, 20, 100 * 10 + 300 * 20, 1)


async def test_the_client_is_told_only_after_the_settlement_is_durable(house: House) -> None:
    run, (one,) = await house.running()
    acknowledged_when_settled: list[int] = []
    append = house.ledger.append

    async def watched(row: LedgerRow) -> bool:
        assert not any(isinstance(event, Closed) for event in list(run.events._queue))  # type: ignore[attr-defined]
        acknowledged_when_settled.append(len(house.engine.acknowledged))
        return await append(row)

    house.ledger.append = watched  # type: ignore[method-assign]
    house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    await house.closed(run)
    assert acknowledged_when_settled == [0], "the engine may forget only what is durable"
    assert house.engine.acknowledged == [one]


async def test_several_choices_are_one_request_and_one_settlement(house: House) -> None:
    run, ids = await house.running(choices=2)
    house.engine.emit(ids[0], 2)
    house.engine.end(ids[0], "stop")
    house.engine.emit(ids[1], 5)
    house.engine.end(ids[1], "length")
    closed, _ = await house.closed(run)
    assert closed.error is None
    await house.check(run, RequestOutcome.COMPLETED, 7)
    assert sorted(house.engine.acknowledged) == sorted(ids)


async def test_a_client_that_leaves_pays_what_the_engine_emitted(house: House) -> None:
    run, (one,) = await house.running()
    house.engine.emit(one, 3)
    run.interrupt(RequestOutcome.DISCONNECTED)
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert house.engine.cancelled == [one]
    # Two more were emitted before the cancel took effect: the engine's word counts.
    await house.check(run, RequestOutcome.DISCONNECTED, 5)
    assert house.engine.acknowledged == [one]


async def test_without_the_engines_last_word_what_arrived_is_charged(house: House) -> None:
    house.engine.answers_cancels = False
    run, (one,) = await house.running()
    house.engine.emit(one, 3)
    run.interrupt(RequestOutcome.DISCONNECTED)
    await house.closed(run)
    await house.check(run, RequestOutcome.DISCONNECTED, 3)
    assert house.engine.acknowledged == []
    # It comes too late to charge, and is acknowledged all the same, or the engine would keep it for ever.
    house.engine.end(one, "cancelled", hidden=9)
    await until(lambda: house.engine.acknowledged == [one])
    await house.check(run, RequestOutcome.DISCONNECTED, 3)


async def test_a_client_that_leaves_the_queue_pays_nothing(house: House) -> None:
    first, (one,) = await house.running(choices=1)
    second, (two,) = await house.running()
    waiting = house.begin()
    await until(lambda: len(house.flow) == 1)
    waiting.interrupt(RequestOutcome.DISCONNECTED)
    closed, events = await house.closed(waiting)
    assert events == [closed]
    assert closed.account.charged == Amounts(requests=0)
    for run, name in ((first, one), (second, two)):
        house.engine.end(name, "stop")
        await house.closed(run)
    rows = await house.ledger.find(waiting.call.request_id)
    assert [(row.kind, row.amounts.output_tokens, row.amounts.requests) for row in rows] == [
        ("reserve", 20, 1),
        ("settle", 0, 0),
    ]


async def test_an_engine_that_dies_leaves_what_arrived_to_be_charged(house: House) -> None:
    run, ids = await house.running(choices=2)
    house.engine.emit(ids[0], 4)
    for each in ids:
        house.engine.fail(each, UpstreamLost("died"))
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert closed.error.code == "engine_lost"
    assert "4 tokens" in closed.error.message
    rows = await house.ledger.find(run.call.request_id)
    assert (rows[1].outcome, rows[1].amounts.output_tokens, rows[1].amounts.input_tokens) == (
        "engine_lost",
        4,
        10,
    )
    assert house.flow.num_in_flight == 0


async def test_one_choice_that_fails_ends_the_others(house: House) -> None:
    run, ids = await house.running(choices=2)
    house.engine.emit(ids[0], 1)
    house.engine.emit(ids[1], 1)
    house.engine.end(ids[1], "failed")
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert (closed.error.status, closed.error.code) == (500, "engine_failed")
    assert house.engine.cancelled == [ids[0]]
    await house.check(run, RequestOutcome.ENGINE_FAILED, 1 + 2 + 1)


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (SequenceRefused("too_large", "the KV cache holds 10 tokens"), 400, "too_large"),
        (SequenceRefused("engine_full", "try again later"), 503, "engine_unavailable"),
        (SequenceRefused("duplicate", "runs already"), 503, "engine_unavailable"),
    ],
)
async def test_what_the_engine_will_not_take_costs_nothing(
    house: House, refusal: SequenceRefused, status: int, code: str
) -> None:
    run, (one,) = await house.running()
    house.engine.fail(one, refusal)
    closed, events = await house.closed(run)
    assert len(events) == 1, "refused before anything was sent: a clean status"
    assert closed.error is not None
    assert (closed.error.status, closed.error.code) == (status, code)
    await house.check(run, RequestOutcome.REFUSED, 0, requests=0)


async def test_an_engine_that_leaves_between_turn_and_start_costs_nothing(house: House) -> None:
    def leaves(submit: Submit) -> AsyncIterator[Delta]:
        raise UpstreamUnavailable("away")

    house.engine.run = leaves  # type: ignore[method-assign]
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert closed.error.code == "engine_unavailable"
    await house.check(run, RequestOutcome.NO_ENGINE, 0, requests=0)


async def test_a_budget_that_ends_an_answer_is_a_length_with_a_cause(house: House) -> None:
    run, (one,) = await house.running()
    house.engine.emit(one, 6)
    house.engine.end(one, "budget")
    closed, _ = await house.closed(run)
    assert closed.error is None
    assert closed.account.stop_cause == "budget"
    await house.check(run, RequestOutcome.BUDGET, 6)


async def test_a_gateway_that_stops_settles_what_runs_and_refuses_what_waits(house: House) -> None:
    run, (one,) = await house.running()
    second, (two,) = await house.running()
    waiting = house.begin()
    await until(lambda: len(house.flow) == 1)
    house.engine.emit(one, 3)
    closing = asyncio.create_task(house.lifecycle.close(0.05))
    for each in (run, second, waiting):
        closed, _ = await house.closed(each)
        assert closed.error is not None
        assert closed.error.code == "shutting_down"
    await closing
    late = house.begin()
    closed, _ = await house.closed(late)
    assert closed.error is not None
    assert closed.error.code == "shutting_down"
    charged = {}
    for each in (run, second, waiting, late):
        rows = await house.ledger.find(each.call.request_id)
        assert [row.kind for row in rows] == ["reserve", "settle"]
        assert rows[1].outcome == "shutdown"
        charged[each.call.request_id] = rows[1].amounts.output_tokens
    assert list(charged.values()) == [5, 2, 0, 0]
    assert two in house.engine.cancelled


async def test_a_full_queue_refuses_and_gives_back(house: House) -> None:
    runs = [await house.running(), await house.running()]
    waiting = [house.begin(max_tokens=5), house.begin(max_tokens=5)]
    await until(lambda: len(house.flow) == 2)
    refused = house.begin(max_tokens=5)
    closed, _ = await house.closed(refused)
    assert closed.error is not None
    assert (closed.error.status, closed.error.code) == (429, "tenant_queue_full")
    assert closed.error.retry_after_s is not None
    rows = await house.ledger.find(refused.call.request_id)
    assert (rows[1].outcome, rows[1].amounts) == ("refused", Amounts(requests=0))
    for run in waiting:
        run.interrupt(RequestOutcome.DISCONNECTED)
        await house.closed(run)
    for run, (name,) in runs:
        house.engine.end(name, "stop")
        await house.closed(run)


async def test_a_deadline_in_the_queue_is_an_outcome(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, ttl_s=0.05)
    first, (one,) = await house.running()
    second, (two,) = await house.running()
    waiting = house.begin()
    closed, _ = await house.closed(waiting)
    assert closed.error is not None
    assert (closed.error.status, closed.error.code) == (503, "queue_timeout")
    rows = await house.ledger.find(waiting.call.request_id)
    assert (rows[1].outcome, rows[1].amounts) == ("expired", Amounts(requests=0))
    for run, name in ((first, one), (second, two)):
        house.engine.end(name, "stop")
        await house.closed(run)
    await house.close()
    await database.close()


async def test_waiting_ends_when_no_engine_comes_back(house: House) -> None:
    house.engine.is_up = False
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert (closed.error.status, closed.error.code) == (503, "engine_unavailable")
    await house.check(run, RequestOutcome.NO_ENGINE, 0, requests=0)


async def test_a_spent_budget_reserves_and_writes_nothing(house: House) -> None:
    run = house.begin(max_tokens=BUDGET)
    closed, events = await house.closed(run)
    assert events == [closed]
    assert closed.error is not None
    assert closed.error.code == "insufficient_quota"
    assert await house.ledger.find(run.call.request_id) == []
    assert all(state.held == 0 for state in await house.store.states(LIMITS))


async def test_a_model_without_a_price_is_refused_and_answered(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, price={})
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert closed.error.code == "model_not_priced"
    assert await house.ledger.find(run.call.request_id) == []
    await house.close()
    await database.close()


async def test_a_reserve_row_that_cannot_be_written_holds_nothing(house: House, sqlite_url: str) -> None:
    await house.database.close()
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.error is not None
    assert (closed.error.status, closed.error.code) == (503, "database_unavailable")
    assert all(state.held == 0 for state in await house.store.states(LIMITS))
    assert not house.engine.submitted, "nothing runs unmetered"


async def test_holds_are_renewed_while_a_request_runs(house: House) -> None:
    now_s = 1e9
    house.store._clock = lambda: now_s
    run, (one,) = await house.running()
    for _ in range(5):
        now_s += 50
        await house.books.keep_once()
    states = await house.store.states(LIMITS[:1])
    assert states[0].held == 30, "the lease was kept alive"
    house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    await house.closed(run)
    await house.check(run, RequestOutcome.COMPLETED, 1)


async def test_a_listener_that_is_gone_changes_nothing(house: House, tmp_path: Path) -> None:
    """Nobody reads the events: the request runs to its end and settles."""
    run, (one,) = await house.running(principal=replace(PRINCIPAL, limits=LIMITS))
    for _ in range(20):
        house.engine.emit(one, 1)
    house.engine.end(one, "length")
    await until(lambda: not house.lifecycle.running)
    await house.check(run, RequestOutcome.COMPLETED, 20)
