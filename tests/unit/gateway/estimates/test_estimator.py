"""Estimates follow the queue and stay within their share of the process."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.forecast.calibration import WARM_UP, Bucket
from engine.forecast.length.length import LengthForecast
from engine.forecast.wait.arrivals import RecentArrivals
from engine.forecast.wait.forecast import Forecast
from engine.messages import (
    Delta,
    Inventory,
    ModelInfo,
    Ready,
    RunningSequence,
    Snapshot,
    Submit,
)
from engine.step_time.model import PRIOR
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate, Times
from gateway.estimates.engine_load import flights_of
from gateway.estimates.estimator import Estimator
from gateway.estimates.forecast_cache import DEBT_S, MAX_COMING, Size
from gateway.estimates.forecast_cache import Submit as SubmitPicture
from gateway.estimates.persistence import LENGTHS_FILE, LearnedFiles
from gateway.estimates.service_rate import ServiceRate
from gateway.flow.controller import Ticket
from gateway.flow.window import Replica
from gateway.quotes.offered import offered
from gateway.quotes.quotes import Wanted
from gateway.upstream.base import OnService
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Tier
from tests.support import builders
from tests.support.builders import principal

MODEL = "m"
BATCH = Bucket("plain", False, 2, 4)
SIZE = Size(input_tokens=100, sequences=1, choices=1, max_tokens=300, is_exact=False)


class StillEngine:
    """An upstream with fixed reports, which runs nothing."""

    replica_id = "a"
    is_up = True
    is_drained = False

    def __init__(self) -> None:
        info = ModelInfo(MODEL, "x", 1, 1024, 100, [0], "float32", "cpu", "none")
        self.ready: Ready | None = Ready("a", info, "vtc", 16, 4096, 8, 512, 1)
        self.snapshot: Snapshot | None = None

    def watch(self, on_change: Callable[[], None]) -> None: ...

    def listen(self, on_service: OnService) -> None: ...

    def run(self, submit: Submit) -> AsyncIterator[Delta]:
        raise AssertionError("nothing runs here")

    def cancel(self, sequence_id: str, cause: str) -> None: ...

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None: ...

    async def wait_until_up(self, timeout_s: float) -> bool:
        return True

    async def collect(self) -> Inventory:
        return Inventory("a", [], [])


class Bench:
    """A queue, an engine and estimates."""

    def __init__(
        self, replay_took_s: float = 0.0, *, is_enabled: bool = True, submit: SubmitPicture | None = None
    ) -> None:
        """A replay seems to take `replay_took_s`."""
        readings = itertools.count()
        self.book = uniform_book({MODEL: Price(100, 50, 300)})
        self.engine = StillEngine()
        self.flow = builders.flow_controller(lookahead=2, max_queued=9999, max_queued_per_tenant=9999)
        self.estimates = Estimator(
            flow=self.flow,
            upstreams=[self.engine],
            lengths=LengthForecast(),
            prices=lambda: self.book,
            model=MODEL,
            cache_s=0.05,
            submit=submit,
            stopwatch=lambda: next(readings) * replay_took_s,
        )
        self.estimates.is_enabled = is_enabled
        self.number = 0

    def enqueue(
        self, count: int, tier: int = 1, tenant: str = "other", lengths: tuple[int, int] = (80, 0)
    ) -> None:
        """`lengths`: predicted, median and 90th percentile."""
        for _ in range(count):
            self.number += 1
            entry = QueueEntry(
                f"r{self.number}", tenant, 0.0, 100, lengths[0], tier, predicted_high_tokens=lengths[1]
            )
            assert self.flow.enqueue(Ticket(entry, 1, 180, max_tokens=300), 0.0) is None

    def dispatch(self) -> None:
        self.flow.dispatch(0.0, [Replica("a", 8, 65536)])

    def wait_s(self, now_s: float, tier: Tier = Tier.STANDARD, tenant: str = "me") -> float:
        return self.estimates.estimate(MODEL, tenant, 1.0, tier, SIZE, now_s).wait_s[0]


def full(waiting: int = 0, *, lengths: tuple[int, int] = (80, 0)) -> Bench:
    """Ten of another tenant run, in all places and the lookahead, and so many of `me` wait."""
    bench = Bench()
    bench.enqueue(10, lengths=lengths)
    bench.dispatch()
    bench.enqueue(waiting, tenant="me", lengths=lengths)
    return bench


def test_the_wait_grows_with_the_queue_and_a_higher_tier_waits_less() -> None:
    bench = Bench()
    assert bench.wait_s(0.0) == 0.0
    bench.enqueue(10)
    bench.dispatch()
    assert len(bench.flow.in_flight) == 10
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
    three = Size(100, 3, 3, 300, is_exact=True)
    assert bench.estimates.estimate(MODEL, "me", 1.0, Tier.BATCH, three, 0.0).output_tokens == (900, 900)


@pytest.mark.parametrize("saturated", [False, True])
def test_an_estimate_is_sent_as_it_is_shown(saturated: bool) -> None:
    bench = full(40)
    found = bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, 0.0)
    estimate = replace(found, saturated=saturated, basis='a "replay"; \\')
    assert estimate.wait_s[0] > 0
    assert json.loads(bytes(estimate.encoded())) == estimate.as_json()


def test_without_an_engine_it_says_that_it_cannot_know() -> None:
    bench = Bench()
    bench.engine.is_up = False
    assert bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, 0.0).saturated


def call_of(max_tokens: int, *, choices: int = 1) -> Call:
    return builders.call(
        chat=False, model=MODEL, principal=principal("me"), prompts=([1] * 100,), choices=choices,
        max_tokens=max_tokens, stream=False, include_usage=False,
    )  # fmt: skip


@pytest.mark.parametrize("choices", [1, 3])
def test_lengths_that_are_known_already_change_nothing(choices: int) -> None:
    bench = Bench()
    for length in range(10, 200):
        bench.estimates.lengths.observe("me", MODEL, length)
    call = call_of(150, choices=choices)
    p50, p90 = bench.estimates.predicted_lengths(call, (0.5, 0.9))
    assert p50 < p90
    assert bench.estimates.of_call(call, 0.0, (p50, p90)) == bench.estimates.of_call(call, 0.0)


def test_who_makes_no_estimates_replays_nothing_and_still_knows_lengths_and_paces() -> None:
    bench = Bench(is_enabled=False)
    bench.enqueue(100)
    call = call_of(150)
    assert bench.estimates.of_call(call, 0.0) is None
    bench.estimates.arrived(QueueEntry("r", "me", 0.0, 100, 80, 1))
    for tick in range(20):
        bench.estimates.watch(tick * 0.05)
    assert bench.estimates.forecast_cache.replays == 0
    assert bench.estimates.predicted_output_tokens(call) >= 1
    assert bench.estimates.predicted_gpu_ms(call, 50) >= 1


def test_arrivals_that_are_noted_together_count_as_if_each_had_been_noted_at_once() -> None:
    forecast_cache, one_by_one = Bench().estimates.forecast_cache, RecentArrivals()
    for number in range(2 * MAX_COMING + 7):
        entry = QueueEntry(f"r{number}", f"t{number}", number * 0.01, 100, 80, 1)
        forecast_cache.arrived(entry)
        one_by_one.observe(entry)
        assert len(forecast_cache._coming) < MAX_COMING
    assert one_by_one.pattern(5.2).requests_per_s > 50
    assert forecast_cache.arrivals_per_s(5.2) == one_by_one.pattern(5.2).requests_per_s


def test_replays_on_the_event_loop_take_at_most_a_twenty_fifth_of_it() -> None:
    bench = Bench(replay_took_s=0.004)
    bench.enqueue(40)
    moments: list[float] = []
    for tick in range(1000):
        now_s = tick * 0.001
        bench.enqueue(3)  # the queue changes all the time
        before = bench.estimates.forecast_cache.replays
        bench.wait_s(now_s, tenant=f"tenant-{tick % 27}")
        bench.estimates.watch(now_s)
        moments += [now_s] * (bench.estimates.forecast_cache.replays - before)
    assert 5 <= len(moments) <= 1 + (1.0 + DEBT_S) / (0.004 * 25), "a burst may owe some for a moment"


def test_it_replays_beside_the_requests_and_only_where_somebody_asked() -> None:
    bench = full(100)
    first = bench.wait_s(0.0)
    assert bench.estimates.forecast_cache.replays == 1, "the first one pays for the surface"
    for tick in range(1, 40):
        bench.wait_s(tick * 0.01)
    assert bench.estimates.forecast_cache.replays == 1, "no request after it does"
    bench.estimates.watch(0.4)
    bench.estimates.watch(0.49)
    assert bench.estimates.forecast_cache.replays == 2, "no read since"
    for tick in range(100):
        bench.estimates.watch(0.5 + tick * 0.01)
        bench.wait_s(0.5 + tick * 0.01)
    assert 2 + 15 <= bench.estimates.forecast_cache.replays <= 2 + 21, "twenty a second"
    assert bench.wait_s(1.5) == pytest.approx(first)


def test_while_nobody_waits_it_replays_an_eighth_as_often_and_at_once_when_somebody_does() -> None:
    bench = Bench()
    bench.wait_s(0.0)
    for tick in range(1, 101):
        bench.wait_s(tick * 0.01)
        bench.estimates.watch(tick * 0.01)
    replays = bench.estimates.forecast_cache.replays
    assert replays == 1 + 2, "one in 0.4 s"
    bench.enqueue(10)
    bench.wait_s(1.06)
    bench.estimates.watch(1.06)
    assert bench.estimates.forecast_cache.replays == replays + 1
    bench.dispatch()
    assert len(bench.flow) == 0
    bench.wait_s(1.12)
    bench.estimates.watch(1.12)
    assert bench.estimates.forecast_cache.replays == replays + 2, "the last one saw who waited"


def test_a_surface_is_replayed_for_a_refusal_only_where_requests_have_left() -> None:
    bench = full(100, lengths=(10**6, 10**6))
    long_s = bench.wait_s(0.0)
    cache = bench.estimates.forecast_cache
    assert not cache.renew(0.01), "it is as it was"
    for ticket in list(bench.flow.queue.tickets())[50:]:
        bench.flow.cancel(ticket.entry.entry_id, 0.02)
    assert bench.wait_s(0.02) < 0.6 * long_s, "between two replays an estimate goes by the last one"
    assert (cache.replays, cache.renew(0.03), cache.replays) == (1, True, 2)
    assert bench.wait_s(0.04) == pytest.approx(long_s / 2, rel=0.2)
    assert not cache.renew(0.05)


def test_an_answer_grows_with_the_queue_until_the_next_replay() -> None:
    bench = full(100)
    first = bench.wait_s(0.0)
    bench.enqueue(20, tenant="me")
    read_off = bench.wait_s(0.03)
    assert first * 1.05 < read_off
    bench.estimates.watch(0.05)
    assert bench.estimates.forecast_cache.replays == 2
    assert read_off == pytest.approx(bench.wait_s(0.06), rel=0.1)


def coming(bench: Bench, count: int, *, tenant: str = "me") -> list[float]:
    """So many requests have their estimates at one instant; the waits that they are told."""
    told: list[float] = []
    for _ in range(count):
        bench.number += 1
        call = call_of(150)
        principal = dataclasses.replace(call.principal, tenant_id=tenant)
        call = replace(call, request_id=f"c{bench.number}", principal=principal)
        estimate = bench.estimates.of_call(call, 0.0)
        assert estimate is not None
        told.append(estimate.wait_s[0])
        bench.estimates.coming(call, 0.0, (80, 120))
    return told


def test_each_request_of_a_burst_is_told_of_those_on_their_way() -> None:
    bench = Bench()
    told = coming(bench, 60)
    free = 8 + 2
    assert told[:free] == [0.0] * free
    assert all(earlier <= 1.2 * later for earlier, later in itertools.pairwise(told[free:]))
    assert 0.0 < told[free] < told[-1] / 5
    assert bench.estimates.forecast_cache.replays <= 1 + 6, "again each time that it has grown by half"
    assert bench.wait_s(0.0, tenant="other") < told[-1] / 3, "no other tenant waits for all of it"
    assert bench.wait_s(0.0, Tier.INTERACTIVE, tenant="other") == 0.0
    for number in range(60):
        bench.estimates.gone(f"c{number + 1}")
    assert bench.wait_s(0.01) == 0.0, "all were refused"


def test_what_is_queued_counts_once() -> None:
    bench = Bench()
    coming(bench, 30)
    before = bench.wait_s(0.0)
    for number in range(30):
        entry = QueueEntry(f"c{number + 1}", "me", 0.0, 100, 80, 1)
        bench.estimates.arrived(entry)
        assert bench.flow.enqueue(Ticket(entry, 1, 180, max_tokens=300), 0.0) is None
    assert len(bench.estimates.forecast_cache.on_the_way) == 0
    assert bench.wait_s(0.0) == pytest.approx(before, rel=0.2)


def test_quotes_replay_for_themselves_and_for_all_tiers_at_once_within_limits() -> None:
    bench = Bench(replay_took_s=0.01)
    bench.enqueue(10)
    bench.dispatch()
    bench.enqueue(40)
    tiers = list(Tier)
    offers = bench.estimates.offers(MODEL, "me", 1.0, tiers, SIZE, 0.0)
    assert bench.estimates.forecast_cache.replays == 1
    waits = [offers[tier].wait_s[0] for tier in tiers]
    assert waits == sorted(waits)
    assert waits[0] < waits[2]
    for _ in range(20):
        bench.estimates.offers(MODEL, "me", 1.0, tiers, SIZE, 0.0)
    assert 2 <= bench.estimates.forecast_cache.replays <= 5, "then an older answer does"
    busy = Bench()
    busy.enqueue(300)
    busy.wait_s(0.0)
    assert busy.estimates.offers(MODEL, "me", 1.0, tiers, SIZE, 0.01)
    assert busy.estimates.forecast_cache.replays == 1, "a long queue is not copied for one quote"
    promise = offers[Tier.STANDARD].promise
    assert promise is not None
    assert promise.bucket.kind == "binding"


@pytest.mark.parametrize("for_quote", [True, False])
def test_an_idle_server_tells_no_wait_however_little_time_there_is_for_a_replay(for_quote: bool) -> None:
    bench = Bench(replay_took_s=0.1)
    bench.enqueue(10)
    bench.dispatch()
    bench.enqueue(20, tenant="me")
    before = bench.wait_s(0.0, Tier.BATCH)
    assert before > 0, "and the next replay is 2.4 s away"
    for entry_id in [ticket.entry.entry_id for ticket in bench.flow.queue.tickets()]:
        bench.flow.cancel(entry_id, 0.01)

    def told_s() -> float:
        if not for_quote:
            return bench.wait_s(0.01, Tier.BATCH)
        return bench.estimates.offers(MODEL, "me", 1.0, [Tier.BATCH], SIZE, 0.01)[Tier.BATCH].wait_s[0]

    assert told_s() >= before, "some still run"
    for flight in list(bench.flow.in_flight):
        bench.flow.finish(flight.ticket.entry.entry_id, 100, 10, 0.01)
    replays = bench.estimates.forecast_cache.replays
    assert [told_s(), told_s()] == [0.0, 0.0]
    assert bench.estimates.forecast_cache.replays == replays + 1, "once is enough"


@pytest.mark.parametrize("has_time", [True, False])
def test_a_tenants_outstanding_quotes_count_in_all_figures_of_its_next_one(has_time: bool) -> None:
    bench = Bench(replay_took_s=0.0 if has_time else 0.01)
    cache = bench.estimates.forecast_cache
    quoted: list[QueueEntry] = []
    cache.promised = lambda tenant_id: [each for each in quoted if each.tenant_id == tenant_id]

    def offer(tenant: str) -> Estimate:
        return bench.estimates.offers(MODEL, tenant, 1.0, [Tier.STANDARD], SIZE, 0.0)[Tier.STANDARD]

    if not has_time:  # the replays of these are all that there is time for
        for _ in range(3):
            offer("other")
    replays = cache.replays
    first = offer("me")
    quoted += [QueueEntry(f"q{number}", "me", 0.0, 100, 80) for number in range(7)]
    eighth, others = offer("me"), offer("other")
    assert (cache.replays > replays) == has_time
    quoted += [QueueEntry(f"p{number}", "me", 0.0, 100, 80) for number in range(33)]
    forty_first = offer("me")
    step_time = bench.estimates.step_time
    prompts_s = 7 * 100 * step_time.per_token_s
    assert eighth.ttft_s[0] >= first.ttft_s[0] + 0.9 * prompts_s, "their prompts go first"
    beside_s = 6 * (step_time.per_token_s + step_time.per_sequence_s)
    assert eighth.tpot_s[0] >= first.tpot_s[0] + beside_s, "they decode beside it"
    assert others.ttft_s[0] == pytest.approx(first.ttft_s[0]), "not in another tenant's"
    assert (first.wait_s[0], eighth.wait_s[0]) == (0.0, 0.0), "there are places for them"
    assert forty_first.wait_s[0] > 10 * first.ttft_s[0], "and none for so many"
    kinds = [each.promise and each.promise.bucket.kind for each in (first, eighth, others, forty_first)]
    assert kinds == ["binding", "together", "binding", "together"]
    assert not any(each.promise and each.promise.is_learned for each in (first, eighth))


def test_no_quote_binds_while_no_step_was_timed() -> None:
    bench = Bench()
    wanted = Wanted(MODEL, MODEL, [[1] * SIZE.input_tokens], False, 1, SIZE.max_tokens)

    def quoted(now_s: float) -> tuple[bool, str]:
        [row] = offered(bench.estimates, None, principal("me"), wanted, [Tier.STANDARD], 1, now_s)
        return row["binding"], row.get("not_binding", "")[:21]

    [told] = bench.estimates.offers(MODEL, "me", 1.0, [Tier.STANDARD], SIZE, 0.0).values()
    for number in range(WARM_UP):
        bench.estimates.judge(told, Times(0.0, 0.0, 0.1, 1.0, 10.0 * number), 50)
    assert quoted(400.0) == (False, "nothing measured yet:")
    bench.engine.snapshot = Snapshot("a", 0, 0.0, [], [], 1, 0, 0, 1, replace(PRIOR, samples=1))
    bench.estimates.watch(401.0)
    assert quoted(401.0) == (True, "")


def test_a_crowd_of_quotes_that_was_redeemed_at_one_moment_teaches_a_few_times_only() -> None:
    bench = Bench()
    bench.estimates.forecast_cache.promised = lambda tenant_id: [QueueEntry("q", "me", 0.0, 1, 1)]
    [told] = bench.estimates.offers(MODEL, "me", 1.0, [Tier.STANDARD], SIZE, 0.0).values()
    assert told.promise is not None
    for crowd in range(10):
        for number in range(100):
            ended_s = 1.0 + 10.0 * crowd + number * 0.005
            bench.estimates.judge(told, Times(0.0, 0.0, 0.1, ended_s, ended_s), 50)
        # The 1st, 2nd, 4th, 8th, 16th, 32nd and 64th of each.
        assert bench.estimates.calibration.has_learned(told.promise.bucket) == (7 * (crowd + 1) >= WARM_UP)


def test_of_many_requests_twenty_a_second_are_judged_and_of_few_all() -> None:
    bench = Bench()
    told = bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, 0.0)
    judged = lambda: bench.estimates.calibration.coverage["plain", "e2e", 0.9].judged  # noqa: E731
    for number in range(100):
        bench.estimates.judge(told, Times(0.0, 0.0, 0.1, 1.0 + number, 1.0 + number), 50)
    assert judged() == 100
    for number in range(20_000):
        # Four at a time, two thousand a second.
        ended_s = 200.0 + number // 4 * 0.002
        bench.estimates.judge(told, Times(0.0, 0.0, 0.1, ended_s, ended_s), 50)
    assert 100 + 180 <= judged() <= 100 + 500, "it takes some three hundred to notice how many come"


def test_what_became_of_requests_puts_later_estimates_right() -> None:
    bench = Bench()
    for number in range(2_000):
        at_s = 10.0 * number
        told = bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, at_s)
        bench.estimates.judge(told, Times(at_s, at_s, at_s + 0.3, at_s + 8.0, at_s + 8.0), 50)
    told = bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, 20_000.0)
    assert told.ttft_s[1] == pytest.approx(0.3, rel=0.1)
    assert told.e2e_s[1] == pytest.approx(8.0, rel=0.1)
    assert bench.estimates.calibration.coverage["plain", "ttft", 0.9].judged == 2_000
    for ended_s in (20_000.0, 30_000.0):  # without a turn
        bench.estimates.judge(told, Times(0.0, ended_s=ended_s), None)
    waits = bench.estimates.calibration.coverage["plain", "wait", 0.9]
    assert (waits.judged, waits.within) == (2_002, 2_000)


def test_who_waits_longer_than_it_was_told_teaches_before_it_ends() -> None:
    bench = full(waiting=20)
    calibration = bench.estimates.calibration

    def told(now_s: float) -> Estimate:
        return bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, now_s)

    first = told(0.0)
    assert first.promise is not None
    for number in range(WARM_UP):
        wait_s, ttft_s, e2e_s = (pair[number % 3 == 0] for pair in (first.wait_s, first.ttft_s, first.e2e_s))
        at_s = 10.0 * number
        bench.estimates.judge(
            first, Times(at_s, at_s + wait_s, at_s + ttft_s, at_s + e2e_s, at_s + e2e_s), 50
        )
    asked = told(400.0)
    assert asked.promise is not None
    waiting = bench.estimates.waits("r30", asked, 400.0)
    moved = bench.estimates.waits("r29", replace(asked, promise=replace(asked.promise, bucket=BATCH)), 400.0)
    gone = bench.estimates.waits("r1", asked, 400.0)
    assert waiting is not None
    assert moved is not None
    assert gone is not None
    bench.estimates.watch(400.0 + asked.wait_s[0] - 1e-3)
    assert waiting.taught == set()
    bench.estimates.watch(400.0 + asked.wait_s[0] + 1e-3)
    assert waiting.taught == {("wait", 0)}
    assert calibration.correct(first, asked.promise.bucket).wait_s[0] > asked.wait_s[0]
    bench.estimates.watch(400.0 + 10 * asked.e2e_s[1])
    assert waiting.taught == {(what, index) for what in ("wait", "ttft", "e2e") for index in (0, 1)}
    assert (moved.taught, gone.taught) == (set(), set()), "told of another tier, and dispatched"


def test_what_flies_is_taken_as_the_engine_last_reported_it() -> None:
    bench = Bench()
    bench.enqueue(2)
    bench.dispatch()
    first, second = bench.flow.in_flight
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
    assert [each.entry.predicted_output_tokens for each in flights.values()] == [80, 80, 80]

    bench.flow.foresee(ids[0], (40, 50), 1.0)
    (flight,) = flights_of([first], snapshot)[:1]
    assert flight.entry.predicted_output_tokens == 40, "its end corrects the charge from there"


def test_what_was_learned_survives_a_restart_and_a_damaged_file_costs_nothing(tmp_path: Path) -> None:
    lengths = LengthForecast()
    for _ in range(50):
        lengths.observe("me", MODEL, 33)
    (tmp_path / LENGTHS_FILE).write_text(json.dumps(lengths.to_dict()))
    again = LearnedFiles(tmp_path).lengths()
    assert again.quantile("me", MODEL, 0.5) == lengths.quantile("me", MODEL, 0.5)
    assert again.samples("me", MODEL) == 50
    for damage in ("", "{", '{"version": 99}', "[]"):
        (tmp_path / LENGTHS_FILE).write_text(damage)
        assert LearnedFiles(tmp_path).lengths().samples("me", MODEL) == 0
    assert LearnedFiles(tmp_path / "nowhere").lengths().samples("me", MODEL) == 0


def test_waits_follow_the_lengths_that_the_engine_foresees_of_what_runs() -> None:
    def wait_s(foreseen: int | None) -> float:
        bench = Bench()
        for _ in range(200):
            bench.estimates.lengths.observe("other", MODEL, 80)
        bench.enqueue(10)
        bench.dispatch()
        for flight in list(bench.flow.in_flight):
            name = flight.ticket.entry.entry_id
            bench.flow.progress(name, 1, 1)
            if foreseen is not None:
                bench.flow.foresee(name, (foreseen, foreseen + 1), 0.0)
        running = [
            RunningSequence(f"{name}.0", name, "other", 1, "running", 100, 101, 1, 300, 80)
            for name in (flight.ticket.entry.entry_id for flight in bench.flow.in_flight)
        ]
        bench.engine.snapshot = Snapshot("a", 9, 1.0, running, [], 1, 0, 1, 2, PRIOR)
        bench.enqueue(1)
        # Not a newcomer, which is owed a place at once.
        return bench.wait_s(100.0, tenant="other")

    assert wait_s(5) < wait_s(None) / 4
    assert wait_s(250) > 2 * wait_s(None)


def test_waits_follow_the_forecasts_of_what_waits_where_these_are_sure() -> None:
    def wait_s(*lengths: int) -> float:
        bench = Bench()
        for _ in range(200):
            bench.estimates.lengths.observe("me", MODEL, 80)
        bench.enqueue(8, tenant="me")
        bench.dispatch()
        bench.enqueue(30, tenant="me", lengths=(lengths[0], lengths[1]))
        return bench.wait_s(100.0)

    alike = wait_s(80, 0)
    assert wait_s(8, 10) < alike / 2
    assert wait_s(240, 260) > 1.5 * alike
    # A guess is no better than what the tenant's answers were like.
    assert wait_s(8, 200) == pytest.approx(alike, rel=0.2)


def test_times_without_own_work_stay_in_order() -> None:
    times = Times(1.0, 2.0, 4.0, 9.0, 10.0)
    assert times.without(1.0, 3.0) == Times(1.0, 1.0, 3.0, 6.0, 7.0)
    assert times.without(0.5, 8.5) == Times(1.0, 1.5, 3.5, 3.5, 3.5)
    assert times.without(9.0, 9.0) == Times(1.0, 1.0, 1.0, 1.0, 1.0)
    assert Times(1.0).without(1.0, 1.0) == Times(1.0)


def test_no_wait_is_told_shorter_than_the_tokens_ahead_take_at_the_present_rate() -> None:
    bench = full(waiting=20)

    def told(tier: Tier, now_s: float = 100.0) -> Estimate:
        return bench.estimates.estimate(MODEL, "me", 1.0, tier, SIZE, now_s)

    # Corrections from calmer times would tell almost nothing.
    first = told(Tier.STANDARD, 0.0)
    for number in range(4 * WARM_UP):
        at_s = 10.0 * number
        bench.estimates.judge(first, Times(at_s, at_s + 0.01, at_s + 0.02, at_s + 1.0, at_s + 1.0), 50)
    before = told(Tier.STANDARD)
    assert before.promise is not None
    assert isinstance(before.promise.raw, Forecast)
    assert 0 < before.promise.raw.must_serve < sum(before.tokens_ahead.values()), (
        "what runs beside it need not end first"
    )
    for second in range(10):
        bench.estimates.watch(100.0 + second)
        bench.flow.progress("r1", 5 * (second + 1), 1)
    bench.estimates.watch(110.0)
    after = told(Tier.STANDARD, 110.0)
    rate = bench.estimates.service_rate.cost_per_s
    assert rate == pytest.approx(20.0, rel=0.2), "ten a second, and once the prompt"
    assert after.promise is not None
    assert isinstance(after.promise.raw, Forecast)
    assert before.wait_s[0] < 1.0 < after.promise.raw.must_serve / rate <= after.wait_s[0] <= after.wait_s[1]
    assert after.wait_s[0] <= after.ttft_s[0] <= after.e2e_s[0]
    assert after.ttft_s[0] <= after.ttft_s[1] <= after.e2e_s[1]
    idle = Bench()
    idle.estimates.service_rate = bench.estimates.service_rate
    assert idle.wait_s(120.0) == 0.0, "nothing is ahead"


def test_the_service_rate_counts_time_in_which_something_waits_and_no_outage() -> None:
    rate = ServiceRate()
    for second in range(10):
        rate.see(float(second), 100 * second, waits=second != 4)
    assert rate.cost_per_s == pytest.approx(100.0)
    rate.see(1_000.0, 1_000, waits=True)
    assert 10.0 < (rate.cost_per_s or 0.0) < 100.0, "ten seconds of it count"
    rate.see(1_001.0, 2_000, waits=False)
    rate.see(1_500.0, 2_000, waits=True)
    rate.see(1_501.0, 2_100, waits=True)
    assert (rate.cost_per_s or 0.0) < 100.0, "what went on while nothing waited does not count"
    assert ServiceRate().cost_per_s is None
