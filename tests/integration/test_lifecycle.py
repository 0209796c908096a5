"""Every outcome of a request settles it exactly once and gives everything back.

The real lifecycle, queue, quota store and ledger, in front of an upstream that does what each test says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.forecast.length.length import LengthForecast
from engine.messages import (
    Delta,
    Inventory,
    ModelInfo,
    Ready,
    RunningSequence,
    SamplingParams,
    SequenceOutcome,
    Snapshot,
    StepTime,
    Submit,
)
from gateway.background import Site
from gateway.budget.holds import Holds
from gateway.cluster.crash_charge import reckon
from gateway.config import GatewayConfig
from gateway.dispatch.admission import Admission
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.call import Call
from gateway.domain.ids import new_request_id, sequence_id
from gateway.error_mapping import refusal_of
from gateway.errors import ApiError
from gateway.estimates.estimator import Estimator
from gateway.flow.window import WindowRule
from gateway.metrics.registry import Metrics
from gateway.requests.lifecycle import Lifecycle, PrincipalStandings
from gateway.requests.run import SHORTEST_LAG_S, Closed, Event, Run, SequenceEnded, SequenceOutput
from gateway.upstream.base import (
    OnService,
    ReaderTooSlow,
    SequenceRefused,
    UpstreamLost,
    UpstreamUnavailable,
    Wording,
)
from gateway.upstream.capabilities import PLAIN_TEXT
from gateway.upstream.replica_set import ReplicaSet
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import Price, PriceBook, PriceEntry, TokenWeights, uniform_book
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.database import Database, open_database
from tenants.types import Amounts, Limit, Meter, OnLowBudget, Principal, SubjectKind, Tier, Window
from tests.support.builders import flow_controller
from tests.support.engine_process import until
from tests.support.freed import no_cycles_left

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

    capabilities = PLAIN_TEXT

    def __init__(self, replica_id: str = "a") -> None:
        info = ModelInfo("m", "x", 1, 1024, 1000, [0], "float32", "cpu", "none")
        self.replica_id = self.name = replica_id
        self.ready: Ready | None = Ready(replica_id, info, "vtc", 16, 64, 2, 512, 1)
        self.snapshot: Snapshot | None = None
        self.is_up = True
        self.is_drained = False
        self.watchers: list[Callable[[], None]] = []
        self.submitted: dict[str, Submit] = {}
        self.streams: dict[str, asyncio.Queue[Delta | Exception]] = {}
        self.cancelled: list[str] = []
        self.acknowledged: list[str] = []
        self.leases: dict[str, list[int]] = {}
        """What it was told of each sequence, one after the other."""
        self.gpu_us: dict[str, int] = {}
        self.gpu_leases: dict[str, list[int | None]] = {}
        self.takes_no_commands = 0
        """How many commands it ignores."""
        self.answers_cancels = True
        self.hides_after_cancel = 2
        """Tokens emitted before a cancel took effect."""
        self.emitted: dict[str, int] = {}
        self.arrived = asyncio.Event()

    def watch(self, on_change: Callable[[], None]) -> None:
        self.watchers.append(on_change)

    def listen(self, on_service: OnService) -> None:
        pass

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        if not self.is_up:
            raise UpstreamUnavailable("away")
        self.submitted[submit.sequence_id] = submit
        self.streams[submit.sequence_id] = asyncio.Queue()
        self.emitted[submit.sequence_id] = 0
        self.leases[submit.sequence_id] = [submit.lease_tokens]
        self.gpu_leases[submit.sequence_id] = []
        self.gpu_us[submit.sequence_id] = 0
        self.arrived.set()
        return self._deltas(submit.sequence_id)

    async def _deltas(self, sequence_id: str) -> AsyncIterator[Delta]:
        while True:
            item = await self.streams[sequence_id].get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.outcome is not None:
                if not self.streams[sequence_id].empty():
                    last = self.streams[sequence_id].get_nowait()
                    assert isinstance(last, Exception)
                    raise last
                return

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        if self.takes_no_commands:
            self.takes_no_commands -= 1
            raise UpstreamUnavailable("its queue is full")
        self.leases[sequence_id].append(lease_tokens)
        self.gpu_leases[sequence_id].append(lease_gpu_us)
        self.arrived.set()

    def emit(self, sequence_id: str, count: int, *, gpu_us: int = 0) -> None:
        """Some tokens of a sequence; as the engine, never more than its lease covers."""
        first = self.emitted[sequence_id]
        self.emitted[sequence_id] += count
        assert self.emitted[sequence_id] <= self.leases[sequence_id][-1], "the test emits what is not covered"
        self.gpu_us[sequence_id] = gpu_us
        delta = Delta(sequence_id, first, [7] * count, "x" * count, gpu_us=gpu_us)
        self.streams[sequence_id].put_nowait(delta)

    def end(
        self, sequence_id: str, finish: str, *, hidden: int = 0, first_token_s: float | None = None
    ) -> None:
        """The last word; `hidden` tokens were emitted that never reached the gateway."""
        submit = self.submitted[sequence_id]
        emitted = self.emitted[sequence_id] + hidden
        computed = len(submit.prompt_token_ids) if emitted else 0
        outcome = SequenceOutcome(
            sequence_id, submit.request_id, submit.tenant_id, finish, len(submit.prompt_token_ids), 0,
            computed, emitted, self.gpu_us[sequence_id], index=submit.index, first_token_s=first_token_s,
            chunks=[(0.0, computed)],
        )  # fmt: skip
        self.streams[sequence_id].put_nowait(Delta(sequence_id, outcome=outcome))

    def fail(self, sequence_id: str, error: Exception) -> None:
        self.streams[sequence_id].put_nowait(error)

    def cancel(self, sequence_id: str, cause: str) -> None:
        self.cancelled.append(sequence_id)
        if self.answers_cancels:
            self.end(sequence_id, cause, hidden=self.hides_after_cancel)

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        self.acknowledged += sequence_ids

    async def wait_until_up(self, timeout_s: float) -> bool:
        return self.is_up

    async def collect(self) -> Inventory:
        return Inventory("a", list[RunningSequence](), [])


CONFIG = GatewayConfig(
    outcome_wait_s=0.2, settle_wait_s=5.0, hold_wait_s=0.3, accounts_wait_s=5.0, slow_reader_s=0.2,
    max_buffered_events=100, max_buffered_bytes=10**6, max_queued_per_tenant=100,
    ttl_interactive_s=60.0, ttl_standard_s=60.0, ttl_batch_s=60.0,
)  # fmt: skip


@dataclass
class House:
    """Everything between the route and the engine."""

    database: Database
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    ttl_s: float = 1e9
    config: GatewayConfig = CONFIG
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    price: dict[str, Price] = field(default_factory=lambda: {"m": Price(100, 50, 300)})
    elsewhere: Callable[[Call], Lifecycle] | None = None
    standings: PrincipalStandings | None = None
    others: Sequence[ScriptedEngine] = ()

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.ledger = Ledger(self.database)
        self.store = MemoryQuotaStore()
        self.flow = flow_controller(
            max_queued=3, max_queued_per_tenant=2, queue_ttl_s=[self.ttl_s] * 3, log_records=100
        )
        self.dispatcher = Dispatcher(
            self.flow, ReplicaSet([self.engine, *self.others]), clock, engine_grace_s=0.0
        )
        self.prices = uniform_book(self.price)
        here = Site(
            gateway_id="gw", database=self.database, config=self.config, clock=clock, wall_clock=lambda: 1e9
        )
        self.holds = Holds(here, self.ledger, self.store, all_limits=lambda: list(LIMITS))
        self.lifecycle = Lifecycle(
            here,
            self.holds,
            self.dispatcher,
            Estimator(
                flow=self.flow, upstreams=[self.engine], lengths=LengthForecast(), prices=lambda: self.prices,
                model="m", cache_s=0.05,
            ),
            Metrics(),
            sleep=self.sleep,
            elsewhere=self.elsewhere,
            standings=self.standings,
        )  # fmt: skip
        self.holds.start()
        self.dispatcher.start()

    async def close(self) -> None:
        await self.lifecycle.close(0)
        await self.dispatcher.close()
        await self.holds.close(5)

    def begin(
        self,
        *,
        choices: int = 1,
        max_tokens: int = 20,
        principal: Principal = PRINCIPAL,
        asked_max_tokens: bool = True,
        timeout_s: float | None = None,
        max_wait_s: float | None = None,
        names_timeout: bool = False,
        tier: Tier = Tier.STANDARD,
    ) -> Run:
        call = Call(
            request_id=new_request_id(1e9), chat=True, model="m", principal=principal, tier=tier,
            prompts=(PROMPT,), choices=choices, max_tokens=max_tokens, sampling=SamplingParams(), stream=True,
            include_usage=True, created=1, asked_max_tokens=asked_max_tokens, timeout_s=timeout_s,
            max_wait_s=max_wait_s, names_timeout=names_timeout,
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
        assert len(self.flow.in_flight) == 0
        assert len(self.flow) == 0
        assert self.flow.placement.load("a").ahead_of(2) == (0, 0)
        assert self.flow.counters.value("ten_1") == (
            (settle.amounts.input_tokens * run.call.choices + 2 * output_tokens) * 1_000_000
        )
        assert not self.holds.live
        return settle


def told(run: Run, closed: Closed) -> ApiError:
    """What the client is told."""
    error = refusal_of(run, closed)
    assert error is not None
    return error


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
    await until(lambda: [each.output_tokens for each in house.flow.in_flight] == [3])
    house.engine.emit(one, 4)
    house.engine.end(one, "stop")
    closed, events = await house.closed(run)
    assert closed.cause is None
    assert "".join(event.text for event in events if isinstance(event, SequenceOutput)) == "x" * 7
    settle = await house.check(run, RequestOutcome.COMPLETED, 7)
    assert settle.detail["finish"] == ["stop"]
    assert house.engine.acknowledged == [one]
    assert closed.account.held == Amounts(10, 20, 100 * 10 + 300 * 20, 1)


async def test_the_client_is_told_only_after_the_settlement_is_durable(house: House) -> None:
    run, (one,) = await house.running()
    acknowledged_when_settled: list[int] = []
    settle = house.ledger.settle

    async def watched(row: LedgerRow) -> LedgerRow:
        assert not any(isinstance(event, Closed) for event in run.events.take())
        acknowledged_when_settled.append(len(house.engine.acknowledged))
        return await settle(row)

    house.ledger.settle = watched  # type: ignore[method-assign]
    house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    await house.closed(run)
    assert acknowledged_when_settled == [0], "the engine may forget only what is durable"
    assert house.engine.acknowledged == [one]


async def test_a_listener_gets_ready_while_an_upstream_works_and_not_before(house: House) -> None:
    sent: list[tuple[Run, list[str]]] = []

    def get_ready(run: Run) -> None:
        sent.append((run, list(house.engine.submitted)))

    run = house.begin()
    run.get_ready = get_ready
    await until(lambda: sent)
    assert sent == [(run, [sequence_id(run.call.request_id, 0)])]
    assert run.limit_states, "limit states are known by then"
    assert not run.events.take()
    house.engine.is_up = False
    unsent = house.begin()
    unsent.get_ready = get_ready
    await house.closed(unsent)
    assert len(sent) == 1
    house.engine.end(*sent[0][1], "stop")
    await house.closed(run)


async def test_a_cancellation_costs_no_settlement_also_while_a_move_is_under_way(house: House) -> None:
    run, (one,) = await house.running()
    await run.accounts.acquire()  # as a move to another tier does
    house.engine.emit(one, 2)
    house.engine.end(one, "stop")
    await until(lambda: run.uses[0].outcome is not None)
    task = house.lifecycle._tasks[run]
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "it does not settle before the move has ended"
    run.accounts.release()
    await house.closed(run)
    await house.check(run, RequestOutcome.COMPLETED, 2)


async def test_a_cancellation_ends_the_wait_for_the_books_and_not_their_writing(house: House) -> None:
    run, (one,) = await house.running()
    settle, may_settle = house.ledger.settle, asyncio.Event()

    async def held_up(row: LedgerRow) -> LedgerRow:
        await may_settle.wait()
        return await settle(row)

    house.ledger.settle = held_up  # type: ignore[method-assign]
    house.engine.emit(one, 2)
    house.engine.end(one, "stop")
    await until(lambda: house.holds.pending)
    house.lifecycle._tasks[run].cancel()
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert told(run, closed).code == "settlement_pending"
    may_settle.set()
    await until(lambda: not house.holds.pending)
    await house.check(run, RequestOutcome.COMPLETED, 2)


async def test_several_choices_are_one_request_and_one_settlement(house: House) -> None:
    run, ids = await house.running(choices=2)
    house.engine.emit(ids[0], 2)
    house.engine.end(ids[0], "stop")
    house.engine.emit(ids[1], 5)
    house.engine.end(ids[1], "length")
    closed, _ = await house.closed(run)
    assert closed.cause is None
    await house.check(run, RequestOutcome.COMPLETED, 7)
    assert sorted(house.engine.acknowledged) == sorted(ids)


async def test_a_client_that_leaves_pays_what_the_engine_emitted(house: House) -> None:
    run, (one,) = await house.running()
    house.engine.emit(one, 3)
    run.interrupt(RequestOutcome.DISCONNECTED)
    closed, _ = await house.closed(run)
    assert closed.cause is not None
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
    assert closed.cause is not None
    assert told(run, closed).code == "engine_lost"
    assert "4 tokens" in told(run, closed).message
    rows = await house.ledger.find(run.call.request_id)
    assert (rows[1].outcome, rows[1].amounts.output_tokens, rows[1].amounts.input_tokens) == (
        "engine_lost",
        4,
        10,
    )
    assert len(house.flow.in_flight) == 0


async def test_one_choice_that_fails_ends_the_others(house: House) -> None:
    run, ids = await house.running(choices=2)
    house.engine.emit(ids[0], 1)
    house.engine.emit(ids[1], 1)
    house.engine.end(ids[1], "failed")
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert (told(run, closed).status, told(run, closed).code) == (500, "engine_failed")
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
    assert closed.cause is not None
    assert (told(run, closed).status, told(run, closed).code) == (status, code)
    await house.check(run, RequestOutcome.REFUSED, 0, requests=0)


async def test_an_engine_that_leaves_between_turn_and_start_costs_nothing(house: House) -> None:
    def leaves(submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        raise UpstreamUnavailable("away")

    house.engine.run = leaves  # type: ignore[method-assign]
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert told(run, closed).code == "engine_unavailable"
    await house.check(run, RequestOutcome.NO_ENGINE, 0, requests=0)


async def test_a_budget_that_ends_an_answer_is_a_length_with_a_cause(house: House) -> None:
    run, (one,) = await house.running()
    house.engine.emit(one, 6)
    house.engine.end(one, "budget")
    closed, _ = await house.closed(run)
    assert closed.cause is None
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
        assert closed.cause is not None
        assert told(each, closed).code == "shutting_down"
    await closing
    late = house.begin()
    closed, _ = await house.closed(late)
    assert closed.cause is not None
    assert told(late, closed).code == "shutting_down"
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
    assert closed.cause is not None
    assert (told(refused, closed).status, told(refused, closed).code) == (429, "tenant_queue_full")
    assert told(refused, closed).retry_after_s is not None
    rows = await house.ledger.find(refused.call.request_id)
    assert (rows[1].outcome, rows[1].amounts) == ("refused", Amounts(requests=0))
    for run in waiting:
        run.interrupt(RequestOutcome.DISCONNECTED)
        await house.closed(run)
    for run, (name,) in runs:
        house.engine.end(name, "stop")
        await house.closed(run)


async def test_requests_count_from_their_estimate_until_they_are_queued_or_refused(house: House) -> None:
    way = house.lifecycle._estimates.forecast_cache.on_the_way
    runs = [house.begin() for _ in range(5)]
    poor = house.begin(principal=principal_with(output_window(1)))
    await asyncio.sleep(0)
    assert len(way) == 5, "one is refused; of the others the budget is being made durable"
    closed, _ = await house.closed(poor)
    assert closed.cause is not None
    await until(lambda: all(run.in_line for run in runs))
    assert len(way) == 0
    for run in runs:
        run.interrupt(RequestOutcome.DISCONNECTED)
        await house.closed(run)


def timed(samples: int, step_s: float = 1.0) -> Snapshot:
    """An engine of which so many steps were timed."""
    step_time = StepTime(step_s, 1e-9, 1e-12, 1e-9, samples, 0.1)
    return Snapshot("a", 0, 0.0, [], [], 64, 0, 0, 64, step_time)


async def test_a_stall_of_the_gateway_teaches_no_forecast(house: House) -> None:
    run, (name,) = await house.running()
    await asyncio.sleep(0)  # it listens
    assert run.estimate is not None
    told_s = (SHORTEST_LAG_S, SHORTEST_LAG_S)
    run.estimate = structs.replace(run.estimate, ttft_s=told_s)
    asyncio.get_running_loop().call_soon(time.sleep, 2 * SHORTEST_LAG_S)
    house.engine.emit(name, 1)
    house.engine.end(name, "stop", first_token_s=0.001)
    await house.closed(run)
    await asyncio.sleep(0)
    assert run.times.ttft_s is not None
    assert run.lag_s == pytest.approx(run.times.ttft_s, abs=0.1)
    assert run.lag_s > 1.5 * SHORTEST_LAG_S
    judged = house.lifecycle._estimates.calibration.coverage["plain", "ttft", 0.9]
    assert (judged.judged, judged.within) == (1, 1)


async def test_a_target_out_of_reach_is_refused_before_anything_is_held(house: House) -> None:
    house.engine.snapshot = timed(100)
    house.lifecycle.admission = Admission(lambda tenant_id, tier: {"ttft": 1e-9})
    run, (name,) = await house.running()
    house.engine.end(name, "stop")
    assert (await house.closed(run))[0].cause is None, "a target alone refuses no request"
    house.lifecycle.admission.strictness = 1.0
    refused = house.begin()
    closed, _ = await house.closed(refused)
    assert closed.cause is not None
    assert (told(refused, closed).status, told(refused, closed).code) == (503, "target_unreachable")
    assert not refused.in_line
    assert await house.ledger.find(refused.call.request_id) == []
    assert house.lifecycle.admission.expected_late.at(0.0) > 0.5


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({}, "target_unreachable"),
        ({"timeout_s": 0.05}, "deadline_unreachable"),
        ({"max_wait_s": 0.05}, "estimate_exceeds"),
    ],
    ids=["target", "deadline", "bound on the wait"],
)
async def test_while_no_step_was_timed_nothing_is_refused_by_a_forecast(
    house: House, asked: dict[str, float], refusal: str
) -> None:
    """What bounds its wait waits so long then, and leaves."""
    house.engine.snapshot = timed(0)
    house.lifecycle.admission = Admission(lambda tenant_id, tier: {"ttft": 1e-9})
    house.lifecycle.admission.strictness = 1.0
    names = [(await house.running())[1][0] for _ in range(2)]  # all places
    waiting = house.begin(**asked)
    if asked:
        closed, _ = await house.closed(waiting)
        assert told(waiting, closed).code == "queue_timeout"
        assert closed.account.times.e2e_s is not None
        assert closed.account.times.e2e_s >= 0.05
    else:
        await until(lambda: waiting.in_line)
    assert waiting.estimate is not None
    assert waiting.estimate.basis.endswith("step time not measured yet")
    house.engine.snapshot = timed(1)
    house.lifecycle._estimates.forecast_cache._build(asyncio.get_running_loop().time())
    refused = house.begin(**asked)
    closed, _ = await house.closed(refused)
    assert told(refused, closed).code == refusal
    house.lifecycle.cancel(waiting)
    for name in names:
        house.engine.end(name, "stop")


async def test_who_leaves_unanswered_is_compared_with_what_it_was_told(house: House) -> None:
    """Told next to nothing; one waits in the engine's places, one in the queue, and both are cancelled."""
    calibration = house.lifecycle._estimates.calibration
    house.engine.snapshot = timed(100, 1e-9)
    running, _ = await house.running(choices=2)
    waiting = house.begin()
    await until(lambda: waiting.in_line)
    assert waiting.waiting is not None, "it may teach meanwhile"
    for run in (waiting, running):
        house.lifecycle.cancel(run)
        await house.closed(run)
    await until(lambda: calibration.coverage["plain", "e2e", 0.9].judged == 2)
    assert calibration.coverage["plain", "e2e", 0.9].within == 0


async def test_a_deadline_in_the_queue_is_an_outcome(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, ttl_s=0.05)
    first, (one,) = await house.running()
    second, (two,) = await house.running()
    waiting = house.begin()
    closed, _ = await house.closed(waiting)
    assert closed.cause is not None
    assert (told(waiting, closed).status, told(waiting, closed).code) == (503, "queue_timeout")
    rows = await house.ledger.find(waiting.call.request_id)
    assert (rows[1].outcome, rows[1].amounts) == ("expired", Amounts(requests=0))
    for run, name in ((first, one), (second, two)):
        house.engine.end(name, "stop")
        await house.closed(run)
    await house.close()
    await database.close()


@pytest.mark.parametrize(
    ("tier", "timeout_s", "names_timeout", "waits_s"),
    [
        # Tiers allow 60 seconds here, and in the batch tier more to a client that says so itself.
        (Tier.BATCH, 86_400.0, True, 86_400.0),
        (Tier.BATCH, 5.0, True, 5.0),
        (Tier.BATCH, 599.0, False, 60.0),
        (Tier.STANDARD, 86_400.0, True, 60.0),
        (Tier.STANDARD, 5.0, True, 5.0),
    ],
)
async def test_a_batch_request_waits_as_long_as_its_client_says_and_its_hold_lasts(
    house: House, tier: Tier, timeout_s: float, names_timeout: bool, waits_s: float
) -> None:
    now_s = 1e9
    house.store._clock = lambda: now_s
    running = [await house.running() for _ in range(2)]
    waiting = house.begin(tier=tier, timeout_s=timeout_s, names_timeout=names_timeout)
    await until(lambda: waiting.in_line)
    [ticket] = house.flow.queue.tickets()
    assert house.flow.queue.expires_s(ticket) - waiting.times.arrived_s == pytest.approx(waits_s)
    while now_s < 1e9 + waits_s:
        now_s += 50
        await house.holds.keep_once()
    assert (await house.store.states(LIMITS[:1]))[0].held == 3 * 30
    house.lifecycle.cancel(waiting)
    await house.closed(waiting)
    for run, (name,) in running:
        house.engine.end(name, "stop")
        await house.closed(run)


async def test_waiting_ends_when_no_engine_comes_back(house: House) -> None:
    house.engine.is_up = False
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert (told(run, closed).status, told(run, closed).code) == (503, "engine_unavailable")
    await house.check(run, RequestOutcome.NO_ENGINE, 0, requests=0)


async def test_a_spent_budget_reserves_and_writes_nothing(house: House) -> None:
    run = house.begin(max_tokens=BUDGET)
    closed, events = await house.closed(run)
    assert events == [closed]
    assert closed.cause is not None
    assert told(run, closed).code == "insufficient_quota"
    assert await house.ledger.find(run.call.request_id) == []
    assert all(state.held == 0 for state in await house.store.states(LIMITS))


async def test_a_model_without_a_price_is_refused_and_answered(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, price={})
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert told(run, closed).code == "model_not_priced"
    assert await house.ledger.find(run.call.request_id) == []
    await house.close()
    await database.close()


async def test_a_request_is_charged_by_the_prices_it_was_reserved_with(house: House) -> None:
    run, (one,) = await house.running()
    house.prices = uniform_book({"m": Price(7_000, 7_000, 7_000)}, version=2)
    for _ in range(5):
        house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    assert closed.cause is None
    rows = await house.ledger.find(run.call.request_id)
    assert {row.price_version for row in rows} == {1}
    assert rows[-1].amounts.cost_nanousd == len(PROMPT) * 100 + 5 * 300
    later, (two,) = await house.running()
    house.engine.emit(two, 1)
    house.engine.end(two, "stop")
    await house.closed(later)
    settled = (await house.ledger.find(later.call.request_id))[-1]
    assert (settled.price_version, settled.amounts.cost_nanousd) == (2, (len(PROMPT) + 1) * 7_000)


async def test_limits_count_weighted_tokens_and_the_ledger_keeps_both(house: House) -> None:
    weights = TokenWeights(input=500, cached_input=100, output=2_500)
    house.prices = PriceBook({("m", Tier.STANDARD): PriceEntry(Price(100, 50, 300), 1_000, weights)}, 1)
    run, (one,) = await house.running(principal=replace(PRINCIPAL, limits=LIMITS))
    for _ in range(5):
        house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    assert closed.cause is None
    counted_input, counted_output = -(-len(PROMPT) // 2), 13
    settled = (await house.ledger.find(run.call.request_id))[-1]
    assert (settled.amounts.input_tokens, settled.amounts.output_tokens) == (len(PROMPT), 5)
    assert (settled.counted_input, settled.counted_output) == (counted_input, counted_output)
    for state in await house.store.states(LIMITS):
        assert state.held == 0
        if state.limit.meter is Meter.TOTAL_TOKENS:
            assert state.used == counted_input + counted_output
    assert any(limit.meter is Meter.TOTAL_TOKENS for limit in LIMITS)


async def test_a_reserve_row_that_cannot_be_written_holds_nothing(house: House, sqlite_url: str) -> None:
    await house.database.close()
    run = house.begin()
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert (told(run, closed).status, told(run, closed).code) == (503, "database_unavailable")
    assert all(state.held == 0 for state in await house.store.states(LIMITS))
    assert not house.engine.submitted, "nothing runs unmetered"


async def test_holds_are_renewed_while_a_request_runs(house: House) -> None:
    now_s = 1e9
    house.store._clock = lambda: now_s
    run, (one,) = await house.running()
    for _ in range(5):
        now_s += 50
        await house.holds.keep_once()
    states = await house.store.states(LIMITS[:1])
    assert states[0].held == 30, "the lease was kept alive"
    house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    await house.closed(run)
    await house.check(run, RequestOutcome.COMPLETED, 1)


async def test_a_listener_that_is_gone_changes_nothing(house: House, tmp_path: Path) -> None:
    """Without a reader the request runs to its end and settles."""
    run, (one,) = await house.running(principal=replace(PRINCIPAL, limits=LIMITS))
    for _ in range(20):
        house.engine.emit(one, 1)
    house.engine.end(one, "length")
    await until(lambda: not house.lifecycle.running)
    await house.check(run, RequestOutcome.COMPLETED, 20)


# ---------------------------------------------------------------- leases and top-ups


async def leased(house: House, sequence_id: str, tokens: int) -> None:
    """Until the engine has been told that a sequence may emit so much."""
    await until(lambda: house.engine.leases[sequence_id][-1] >= tokens)


async def held_of(house: House, limit: Limit) -> int:
    return (await house.store.states([limit]))[0].held


def principal_with(*limits: Limit, on_low_budget: OnLowBudget = OnLowBudget.REFUSE) -> Principal:
    return replace(PRINCIPAL, limits=limits, on_low_budget=on_low_budget)


def output_window(amount: int) -> Limit:
    return Limit("o", "ten_1", SubjectKind.TENANT, "ten_1", Meter.OUTPUT_TOKENS, amount, Window.LIFETIME)


def output_bucket(rate_per_s: float, burst: int) -> Limit:
    return Limit("r", "ten_1", SubjectKind.TENANT, "ten_1", Meter.OUTPUT_TOKENS, burst, rate_per_s=rate_per_s)


async def test_what_is_probably_needed_is_held_and_topped_up_before_it_runs_out(house: House) -> None:
    for length in [40] * 300:
        house.lifecycle._estimates.lengths.observe("ten_1", "m", length)
    run, (one,) = await house.running(max_tokens=900)
    first = house.engine.leases[one][0]
    assert 16 <= first < 60, "the quantile, not max_tokens"
    assert await held_of(house, LIMITS[0]) == len(PROMPT) + first
    emitted = 0
    while emitted < 300:
        left = house.engine.leases[one][-1] - emitted
        assert left > 0, "the engine had to wait"
        step = min(left, 7)
        house.engine.emit(one, step)
        emitted += step
        # The next tokens are covered before those that are have run out.
        await leased(house, one, emitted + 1)
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    rows = await house.ledger.find(run.call.request_id)
    assert [row.kind for row in rows] == ["reserve", *["top_up"] * closed.account.top_ups, "settle"]
    assert closed.account.top_ups >= 1
    assert sum(row.amounts.output_tokens for row in rows[:-1]) == house.engine.leases[one][-1]
    assert rows[-1].amounts.output_tokens == emitted
    assert await held_of(house, LIMITS[0]) == 0
    assert closed.account.as_json()["top_ups"] == closed.account.top_ups


async def test_a_smaller_quantile_holds_less_from_the_next_request_on(house: House) -> None:
    for length in range(10, 310):
        house.lifecycle._estimates.lengths.observe("ten_1", "m", length)
    held: list[int] = []
    for quantile in (0.9, 0.5):
        house.lifecycle.reserve_quantile = quantile
        run, (one,) = await house.running(max_tokens=900)
        held.append(house.engine.leases[one][0])
        house.engine.emit(one, 1)
        house.engine.end(one, "stop")
        await house.closed(run)
    assert held[1] < held[0] - 50
    assert house.lifecycle.prefix_hits.value == 0.0, "nothing was found in a cache"


async def test_a_top_up_reports_tokens_as_bills_have_them_beside_what_limits_count(house: House) -> None:
    weights = TokenWeights(input=500, cached_input=100, output=2_500)
    house.prices = PriceBook({("m", Tier.STANDARD): PriceEntry(Price(100, 50, 300), 1_000, weights)}, 1)
    run, (one,) = await house.running(max_tokens=200, principal=principal_with(output_bucket(1e3, 50)))
    first = house.engine.leases[one][-1]
    assert first == 10, "half a burst"
    house.engine.emit(one, first)
    await leased(house, one, first + 1)
    [found] = await house.ledger.open_requests()
    # As if every gateway had died now.
    reckoning = reckon(found, [], house.prices)
    cost_nanousd = 10 * 100 + 10 * 300
    assert reckoning.detail["basis"] == "last_report"
    assert reckoning.charged == Amounts(10, 10, cost_nanousd, 1)
    assert reckoning.counted == Amounts(5, 25, cost_nanousd, 1)
    house.engine.end(one, "stop")
    await house.closed(run)
    rows = await house.ledger.find(run.call.request_id)
    assert (rows[-1].amounts, rows[-1].counted) == (reckoning.charged, reckoning.counted)


async def test_an_engine_hears_of_a_top_up_only_when_it_is_durable(house: House) -> None:
    principal = principal_with(output_bucket(1000.0, 40))
    run, (one,) = await house.running(max_tokens=200, principal=principal)
    append, told_at_append = house.ledger.append, []

    async def watched(row: LedgerRow, **fields: Any) -> bool:
        told_at_append.append(list(house.engine.leases[one]))
        return await append(row, **fields)

    house.ledger.append = watched  # type: ignore[method-assign]
    before = list(house.engine.leases[one])
    house.engine.emit(one, before[-1])
    await leased(house, one, before[-1] + 1)
    assert told_at_append == [before]
    house.engine.end(one, "stop")
    await house.closed(run)


async def test_choices_share_what_is_covered(house: House) -> None:
    principal = principal_with(output_window(30))
    run, (one, two) = await house.running(
        choices=2, max_tokens=900, principal=principal, asked_max_tokens=False
    )
    assert [house.engine.leases[each][0] for each in (one, two)] == [15, 15]
    house.engine.emit(one, 4)
    house.engine.end(one, "stop")
    await leased(house, two, 26)
    house.engine.emit(two, 26)
    closed, _ = await house.closed(run)
    assert house.engine.cancelled == [two]
    assert (closed.account.outcome, closed.account.stop_cause) == ("budget", "budget")
    # The scripted engine claims two more with its last word, which nothing covers: they are not charged.
    assert closed.account.charged.output_tokens == 30
    assert (await house.store.states([output_window(30)]))[0].used == 30


async def test_a_spent_budget_is_used_to_its_last_token_and_then_ends_the_answer(house: House) -> None:
    house.engine.hides_after_cancel = 0
    for number, budget in enumerate((1, 37, 100)):
        limit = replace(output_window(budget), subject_id=f"ten_{number}")
        principal = principal_with(limit, on_low_budget=OnLowBudget.TRUNCATE)
        run, (one,) = await house.running(max_tokens=500, principal=principal)
        emitted = 0
        while emitted < budget:
            await leased(house, one, emitted + 1)
            count = min(house.engine.leases[one][-1] - emitted, 5)
            house.engine.emit(one, count)
            emitted += count
        closed, events = await house.closed(run)
        assert closed.cause is None
        assert (closed.account.outcome, closed.account.stop_cause) == ("budget", "budget")
        assert closed.account.charged.output_tokens == budget
        assert [event.finish for event in events if isinstance(event, SequenceEnded)] == ["budget"]
        assert (await house.store.states([limit]))[0].used == budget
        assert max(house.engine.leases[one]) == budget


async def test_a_refused_worst_case_is_not_admitted_unless_it_may_be_cut(house: House) -> None:
    limit = output_window(100)
    run = house.begin(max_tokens=500, principal=principal_with(limit))
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert told(run, closed).code == "insufficient_quota"
    truncating = principal_with(limit, on_low_budget=OnLowBudget.TRUNCATE)
    for fields in (
        {"principal": truncating},
        {"principal": principal_with(limit), "asked_max_tokens": False},
    ):
        run, (one,) = await house.running(max_tokens=500, **fields)
        house.engine.emit(one, 1)
        house.engine.end(one, "stop")
        closed, _ = await house.closed(run)
        assert closed.cause is None


async def test_who_was_admitted_by_its_quantile_gets_its_worst_case(house: House) -> None:
    """However many others come meanwhile."""
    for length in [20] * 300:
        house.lifecycle._estimates.lengths.observe("ten_1", "m", length)
    limit = output_window(650)
    principal = principal_with(limit)
    run, (one,) = await house.running(max_tokens=600, principal=principal)
    assert house.engine.leases[one][0] < 50
    other = house.begin(max_tokens=60, principal=principal)
    closed, _ = await house.closed(other)
    assert closed.cause is not None, "what the first may still need is not there for others"
    emitted = 0
    while emitted < 600:
        await leased(house, one, emitted + 1)
        count = house.engine.leases[one][-1] - emitted
        house.engine.emit(one, count)
        emitted += count
    house.engine.end(one, "length")
    closed, _ = await house.closed(run)
    assert (closed.account.outcome, closed.account.charged.output_tokens) == ("completed", 600)


async def test_a_rate_lets_the_sequence_rest_until_the_bucket_has_refilled(sqlite_url: str) -> None:
    now_s = 1e9
    naps: list[float] = []
    rested = asyncio.Event()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        naps.append(seconds)
        rested.set()
        await asyncio.sleep(0)
        now_s += seconds

    database = open_database(sqlite_url)
    house = House(database, sleep=sleep)
    house.store._clock = lambda: now_s
    bucket = output_bucket(10.0, 8)
    run, (one,) = await house.running(max_tokens=60, principal=principal_with(bucket))
    assert house.engine.leases[one] == [4], "half the burst"
    emitted = 0
    while emitted < 20:
        await leased(house, one, emitted + 1)
        count = house.engine.leases[one][-1] - emitted
        house.engine.emit(one, count)
        emitted += count
    # 8 were there from the start, the other 12 flowed in at 10 a second; none was cut.
    assert naps
    assert 1.199 <= now_s - 1e9 <= 2.0
    assert house.engine.cancelled == []
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    assert closed.account.outcome == "completed"
    assert closed.account.charged.output_tokens == 20
    await house.close()
    await database.close()


async def test_an_engine_that_did_not_hear_of_a_top_up_is_told_again(house: House) -> None:
    run, (one,) = await house.running(max_tokens=200, principal=principal_with(output_bucket(1e3, 20)))
    house.engine.takes_no_commands = 2
    house.engine.emit(one, 10)
    await leased(house, one, 20)
    assert house.engine.takes_no_commands == 0
    house.engine.end(one, "stop")
    closed, _ = await house.closed(run)
    assert closed.account.top_ups == 1, "it was asked for once"


async def test_more_streams_than_a_rate_feeds_wait_and_hold_nothing(house: House) -> None:
    bucket = output_bucket(100.0, 100)
    principal = principal_with(bucket)
    fed = 1 + int(100.0 // house.lifecycle._estimates.stream_tokens_per_s())
    house.flow.placement.window = WindowRule(100, 100.0)
    runs = [house.begin(max_tokens=50, principal=principal) for _ in range(fed + 3)]
    await until(lambda: len(house.engine.submitted) == fed)
    await until(lambda: len(house.lifecycle._stream_limiter) == 3)
    assert await held_of(house, bucket) == 16 * fed, "those that wait hold nothing"
    assert len(house.lifecycle._estimates.forecast_cache.on_the_way) == 0, "nor are they about to be queued"
    runs[-1].interrupt(RequestOutcome.DISCONNECTED)
    closed, _ = await house.closed(runs[-1])
    assert closed.account.outcome == "disconnected"
    assert await house.ledger.find(runs[-1].call.request_id) == []
    for run in runs[:-1]:
        one = f"{run.call.request_id}.0"
        await until(lambda one=one: one in house.engine.submitted)
        house.engine.emit(one, 1)
        house.engine.end(one, "stop")
        closed, _ = await house.closed(run)
        assert closed.cause is None
    assert len(house.lifecycle._stream_limiter) == 0


async def test_device_time_is_leased_reported_and_charged(house: House) -> None:
    limit = Limit("g", "ten_1", SubjectKind.TENANT, "ten_1", Meter.GPU_MS, 900, Window.LIFETIME)
    principal = principal_with(limit, on_low_budget=OnLowBudget.TRUNCATE)
    run, (one,) = await house.running(max_tokens=500, principal=principal)
    assert house.engine.submitted[one].lease_gpu_us is not None
    house.engine.emit(one, 1, gpu_us=house.engine.submitted[one].lease_gpu_us)
    await until(lambda: bool(house.engine.gpu_leases[one]) or bool(house.engine.cancelled))
    while not house.engine.cancelled:
        lease_us = house.engine.gpu_leases[one][-1]
        assert lease_us is not None
        house.engine.emit(one, 1, gpu_us=lease_us + 3_500)
        await until(
            lambda lease_us=lease_us: (
                house.engine.gpu_leases[one][-1] > lease_us or bool(house.engine.cancelled)
            )
        )
    closed, _ = await house.closed(run)
    assert closed.account.stop_cause == "budget"
    rows = await house.ledger.find(run.call.request_id)
    assert rows[-1].amounts.gpu_ms == 904, "to one step: 3.5 ms more, rounded up"
    assert (await house.store.states([limit]))[0].used == 904


async def test_a_store_that_is_away_for_too_long_ends_a_request_that_needs_more(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, config=structs.replace(CONFIG, accounts_wait_s=0.2))
    run, (one,) = await house.running(max_tokens=200, principal=principal_with(output_bucket(1e3, 20)))
    top_up = house.store.top_up

    async def away(*arguments: Any) -> Any:
        raise QuotaStoreUnavailable("away")

    house.store.top_up = away  # type: ignore[method-assign]
    house.engine.emit(one, 10)
    closed, _ = await house.closed(run)
    house.store.top_up = top_up  # type: ignore[method-assign]
    assert closed.cause is not None
    assert told(run, closed).code == "quota_store_unavailable"
    rows = await house.ledger.find(run.call.request_id)
    assert (rows[-1].outcome, rows[-1].amounts.output_tokens) == ("accounts_lost", 10)
    await house.close()
    await database.close()


async def test_a_top_up_under_way_is_over_before_the_request_is_settled(house: House) -> None:
    run, (one,) = await house.running(max_tokens=200, principal=principal_with(output_bucket(1e3, 20)))
    may_go, order = asyncio.Event(), []
    top_up, settle = house.holds.top_up, house.holds.settle

    async def slow(*arguments: Any) -> Any:
        order.append("asked")
        await may_go.wait()
        answer = await top_up(*arguments)
        order.append("topped up")
        return answer

    def watched(*arguments: Any, **fields: Any) -> Any:
        order.append("settles")
        return settle(*arguments, **fields)

    house.holds.top_up = slow  # type: ignore[method-assign]
    house.holds.settle = watched  # type: ignore[method-assign]
    house.engine.emit(one, 10)
    await until(lambda: order == ["asked"])
    run.interrupt(RequestOutcome.DISCONNECTED)
    await until(lambda: bool(house.engine.cancelled))
    may_go.set()
    await house.closed(run)
    assert order == ["asked", "topped up", "settles"]
    assert await held_of(house, output_bucket(1e3, 20)) == 0


async def test_a_reader_that_is_too_slow_is_cut_and_pays_what_was_emitted(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, config=structs.replace(CONFIG, max_buffered_events=4))
    run, (one,) = await house.running(max_tokens=200)
    for _ in range(9):
        house.engine.emit(one, 1)
    await until(lambda: run.interrupted.done())
    closed, events = await house.closed(run)
    assert sum(isinstance(event, SequenceOutput) for event in events) < 4, "the buffer is bounded"
    assert closed.cause is not None
    assert (told(run, closed).code, closed.account.outcome) == ("slow_reader", "slow_reader")
    rows = await house.ledger.find(run.call.request_id)
    assert (rows[-1].outcome, rows[-1].amounts.output_tokens) == ("slow_reader", 9 + 2)
    assert rows[-1].detail["most_buffered_events"] == 4
    assert house.engine.acknowledged == [one]
    await house.close()
    await database.close()


async def test_a_stream_that_the_engines_client_cut_is_a_slow_readers(house: House) -> None:
    run, (one,) = await house.running(max_tokens=200)
    house.engine.emit(one, 3)
    house.engine.end(one, "cancelled")
    house.engine.fail(one, ReaderTooSlow("more than the buffer holds"))
    closed, _ = await house.closed(run)
    assert closed.cause is not None
    assert (told(run, closed).code, closed.account.outcome) == ("slow_reader", "slow_reader")
    assert closed.account.charged.output_tokens == 3


async def test_a_reader_that_catches_up_is_not_cut(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    house = House(database, config=structs.replace(CONFIG, max_buffered_events=4, slow_reader_s=30.0))
    run, (one,) = await house.running(max_tokens=200)
    for _ in range(12):
        house.engine.emit(one, 1)
    house.engine.end(one, "stop")
    await until(lambda: len(run.events) == 4)
    closed, events = await house.closed(run)
    assert closed.cause is None
    assert "".join(event.text for event in events if isinstance(event, SequenceOutput)) == "x" * 12
    await house.close()
    await database.close()


async def test_a_request_that_ended_is_freed_at_once(house: House) -> None:
    async def one_request() -> None:
        run, (one,) = await house.running()
        house.engine.emit(one, 7)
        house.engine.end(one, "stop")
        closed, _ = await house.closed(run)
        assert closed.cause is None
        await house.check(run, RequestOutcome.COMPLETED, 7)

    with no_cycles_left():
        await one_request()
        await until(lambda: not house.lifecycle.running)
