"""Do estimates follow the queue, and stay within their share of the process?"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from engine.forecast.length import LengthForecast
from engine.forecast.step_time import PRIOR
from engine.messages import Delta, Inventory, ModelInfo, Ready, RunningSequence, Snapshot, Submit
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order import Entry
from gateway.estimates import LENGTHS_FILE, Estimates, Size, flights_of, load_lengths, save_lengths
from gateway.flow.controller import FlowController, Ticket
from gateway.flow.window import Replica, WindowRule
from tenants.pricing import Price, uniform_book
from tenants.types import Tier

MODEL = "m"
SIZE = Size(input_tokens=100, prompts=1, choices=1, max_tokens=300, is_exact=False)


class StillEngine:
    """An upstream that says what it is told to say, and runs nothing."""

    replica_id = "a"
    is_up = True

    def __init__(self) -> None:
        info = ModelInfo(MODEL, "x", 1, 1024, 100, [0], "float32", "cpu", "none")
        self.ready: Ready | None = Ready("a", info, "vtc", 16, 4096, 8, 512, 1)
        self.snapshot: Snapshot | None = None

    @property
    def model(self) -> ModelInfo | None:
        return None if self.ready is None else self.ready.model

    def watch(self, on_change: Callable[[], None]) -> None: ...

    def run(self, submit: Submit) -> AsyncIterator[Delta]:
        raise AssertionError("nothing runs here")

    def cancel(self, sequence_id: str, cause: str) -> None: ...

    def acknowledge(self, sequence_ids: Sequence[str]) -> None: ...

    async def wait_until_up(self, timeout_s: float) -> bool:
        return True

    async def collect(self) -> Inventory:
        return Inventory("a", [], [])


class Bench:
    """A queue, an engine and estimates."""

    def __init__(self, replay_took_s: float = 0.0) -> None:
        """A replay seems to take `replay_took_s`."""
        readings = itertools.count()
        self.engine = StillEngine()
        self.flow = FlowController(
            "vtc", ServiceCounters(), max_queued=9999, max_queued_per_tenant=9999, queue_ttl_s=[1e9] * 3,
            window=WindowRule(2, 1.0), log_records=10,
        )  # fmt: skip
        self.estimates = Estimates(
            flow=self.flow,
            upstreams=[self.engine],
            lengths=LengthForecast(),
            prices=lambda: uniform_book({MODEL: Price(100, 50, 300)}),
            model=MODEL,
            cache_s=0.05,
            stopwatch=lambda: next(readings) * replay_took_s,
        )
        self.number = 0

    def enqueue(self, count: int, tier: int = 1, tenant: str = "other") -> None:
        for _ in range(count):
            self.number += 1
            entry = Entry(f"r{self.number}", tenant, 0.0, 100, 80, tier)
            assert self.flow.enqueue(Ticket(entry, 1, 180, max_tokens=300), 0.0) is None

    def dispatch(self) -> None:
        self.flow.dispatch(0.0, [Replica("a", 8, 65536)])

    def wait_s(self, now_s: float, tier: Tier = Tier.STANDARD, tenant: str = "me") -> float:
        return self.estimates.estimate(MODEL, tenant, 1.0, tier, SIZE, now_s).wait_s[0]


def test_the_wait_grows_with_the_queue_and_a_higher_tier_waits_less() -> None:
    bench = Bench()
    assert bench.wait_s(0.0) == 0.0
    bench.enqueue(10)
    bench.dispatch()
    assert bench.flow.num_in_flight == 10
    bench.enqueue(20, tenant="me")
    after_20 = bench.wait_s(100.0)
    bench.enqueue(80, tenant="me")
    after_100 = bench.wait_s(200.0)
    assert 0 < after_20 < after_100
    assert after_100 == pytest.approx(5 * after_20, rel=0.5)
    assert bench.wait_s(300.0, Tier.INTERACTIVE) < after_20 / 4
    assert bench.wait_s(400.0, Tier.BATCH) >= after_100 * 0.99


def test_costs_follow_the_price_book_and_the_most_is_what_is_held() -> None:
    bench = Bench()
    for _ in range(200):
        bench.estimates.lengths.observe("me", MODEL, 20)
    estimate = bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, 0.0)
    assert estimate.output_tokens == (20, 20)
    assert estimate.cost_nanousd == (100 * 100 + 300 * 20, 100 * 100 + 300 * 20)
    assert estimate.max_cost_nanousd == 100 * 100 + 300 * 300
    assert estimate.samples == 200
    three = Size(100, 1, 3, 300, is_exact=True)
    assert bench.estimates.estimate(MODEL, "me", 1.0, Tier.BATCH, three, 0.0).output_tokens == (900, 900)


def test_without_an_engine_it_says_that_it_cannot_know() -> None:
    bench = Bench()
    bench.engine.is_up = False
    assert bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, 0.0).saturated


def test_replays_take_at_most_a_fifth_of_the_process() -> None:
    bench = Bench(replay_took_s=0.016)
    bench.enqueue(40)
    moments: list[float] = []
    for tick in range(1000):
        now_s = tick * 0.001
        bench.enqueue(3)  # the queue changes all the time
        before = bench.estimates.replays
        bench.wait_s(now_s, tenant=f"tenant-{tick % 27}")
        moments += [now_s] * (bench.estimates.replays - before)
    assert len(moments) >= 10
    assert min(later - earlier for earlier, later in itertools.pairwise(moments)) >= 0.016 * 4


def test_an_answer_is_kept_for_a_moment_and_grows_with_the_queue() -> None:
    bench = Bench()
    bench.enqueue(10)
    bench.dispatch()
    bench.enqueue(100, tenant="me")
    first = bench.wait_s(0.0)
    assert bench.wait_s(0.02) == first
    assert bench.estimates.replays == 1
    bench.enqueue(4, tenant="me")
    assert bench.wait_s(0.03) == pytest.approx(first * 105 / 101)
    assert bench.estimates.replays == 1
    bench.enqueue(40, tenant="me")
    assert bench.wait_s(0.04) > first * 1.2
    assert bench.estimates.replays == 2, "the queue has changed too much for an old answer"
    bench.wait_s(10.0)
    assert bench.estimates.replays == 3


def test_what_flies_is_taken_as_the_engine_last_reported_it() -> None:
    bench = Bench()
    bench.enqueue(2)
    bench.dispatch()
    first, second = bench.flow.in_flight()
    ids = [first.ticket.entry.entry_id, second.ticket.entry.entry_id]
    running = [
        RunningSequence(f"{ids[0]}.0", ids[0], "other", 1, "running", 100, 129, 30, 300, 80),
        RunningSequence("stranger.0", "stranger", "x", 1, "running", 50, 20, 0, 300, 80),
    ]
    snapshot = Snapshot("a", 9, 1.0, running, [], 1, 0, 1, 2, PRIOR)
    flights = {each.entry.entry_id: each for each in flights_of([first, second], snapshot)}
    assert (flights[ids[0]].prompt_left, flights[ids[0]].emitted_tokens) == (0, 30)
    assert (flights[ids[1]].prompt_left, flights[ids[1]].emitted_tokens) == (100, 0), "not reported yet"
    assert (flights["stranger"].prompt_left, flights["stranger"].context_tokens) == (30, 20)


def test_what_was_learned_survives_a_restart_and_a_damaged_file_costs_nothing(tmp_path: Path) -> None:
    lengths = LengthForecast()
    for _ in range(50):
        lengths.observe("me", MODEL, 33)
    save_lengths(tmp_path, json.dumps(lengths.to_dict()))
    again = load_lengths(tmp_path)
    assert again.quantile("me", MODEL, 0.5) == lengths.quantile("me", MODEL, 0.5)
    assert again.samples("me", MODEL) == 50
    for damage in ("", "{", '{"version": 99}', "[]"):
        (tmp_path / LENGTHS_FILE).write_text(damage)
        assert load_lengths(tmp_path).samples("me", MODEL) == 0
    assert load_lengths(tmp_path / "nowhere").samples("me", MODEL) == 0
