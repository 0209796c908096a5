"""Replay against the gateway and the engine. Small cases, worked out by hand."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import ArrivalRates, ArrivalStream
from engine.forecast.wait.forecast import EngineLoad, Flight, Forecast, forecast, lognormal_lengths
from engine.forecast.wait.replay import MAX_REPLAYED, van_der_corput
from engine.messages import StepTime
from engine.scheduling.brakes import Brakes
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue
from tests.support.builders import step_time

ONE_SECOND_STEPS = step_time(1.0, samples=50)


def entry(
    name: str, tenant: str = "t", *, tier: int = 1, output: int = 10, arrived_s: float = 0.0
) -> QueueEntry:
    return QueueEntry(name, tenant, arrived_s, input_tokens=10, predicted_output_tokens=output, tier=tier)


def exactly_predicted(each: QueueEntry, generated: int, u: float) -> int:
    return max(generated + 1, each.predicted_output_tokens)


def engine(*flights: Flight, places: int = 1, window: int | None = None, **changes: object) -> EngineLoad:
    values: dict[str, object] = {
        "replica_id": "e",
        "step_time": ONE_SECOND_STEPS,
        "max_sequences": places,
        "max_batched_tokens": 100,
        "window_sequences": places if window is None else window,
        "window_kv_tokens": 10_000,
        "flights": flights,
    }
    return EngineLoad(**{**values, **changes})  # type: ignore[arg-type]


def flight(each: QueueEntry, emitted: int = 1) -> Flight:
    return Flight(each, prompt_left=0, context_tokens=10 + emitted - 1, emitted_tokens=emitted, kv_tokens=20)


def ask(
    candidate: QueueEntry,
    waiting: list[QueueEntry],
    *engines: EngineLoad,
    order: str = "vtc",
    counters: ServiceCounters | None = None,
    **options: object,
) -> Forecast:
    counters = counters or ServiceCounters()
    queue = TieredQueue(order, counters)
    for each in waiting:
        queue.add(each)
    values: dict[str, object] = {
        "output_tokens": (candidate.predicted_output_tokens, candidate.predicted_output_tokens),
        "now_s": 100.0,
        "draw_length": exactly_predicted,
    }
    return forecast(candidate, queue=queue, counters=counters, engines=engines, **{**values, **options})  # type: ignore[arg-type]


def test_on_an_idle_engine_a_request_goes_at_once() -> None:
    seen = ask(entry("me"), [], engine())
    assert seen.wait_s == (0.0, 0.0)
    assert seen.ttft_s[0] == 1.0, "one step for its prompt"
    assert seen.tpot_s[0] == 1.0
    assert seen.e2e_s[0] == 10.0
    assert seen.tokens_ahead == {"own": 0, "others": 0, "higher_tier": 0}
    assert (seen.basis, seen.samples, seen.saturated) == ("replay", 50, False)


def test_a_long_prompt_takes_several_steps() -> None:
    candidate = QueueEntry("me", "t", 0.0, input_tokens=250, predicted_output_tokens=10)
    assert ask(candidate, [], engine()).ttft_s[0] == 3.0


def test_it_waits_for_what_runs_and_for_what_is_ahead() -> None:
    running = flight(entry("runs", output=10), emitted=4)
    seen = ask(entry("me"), [entry("ahead", output=5)], engine(running))
    assert seen.wait_s[0] == 6 + 5
    assert seen.ttft_s[0] == 12
    assert seen.e2e_s[0] == 12 + 9


def test_a_flight_that_still_computes_its_prompt_takes_longer() -> None:
    starts = Flight(
        entry("runs", output=4), prompt_left=150, context_tokens=50, emitted_tokens=0, kv_tokens=20
    )
    assert ask(entry("me"), [], engine(starts)).wait_s[0] == 2 + 3


def test_places_free_up_in_the_order_of_completion() -> None:
    flights = [flight(entry(f"f{left}", output=20), emitted=20 - left) for left in (7, 3, 12)]
    assert ask(entry("me"), [], engine(*flights, places=3)).wait_s[0] == 3
    assert ask(entry("me"), [entry("ahead", output=50)], engine(*flights, places=3)).wait_s[0] == 7


def test_the_fair_order_lets_the_candidate_pass_a_flood() -> None:
    running = flight(entry("runs", output=10), emitted=9)
    flood = [entry(f"f{number}", "flood") for number in range(20)]
    counters = ServiceCounters()
    counters.charge("flood", 1.0, 1000)
    fair = ask(entry("me", "calm", arrived_s=9.0), flood, engine(running), counters=counters.clone())
    assert fair.wait_s[0] <= 1 + 10, "lifted to the flood's level, it has its turn after one more at most"
    queue_like = ask(entry("me", "calm", arrived_s=9.0), flood, engine(running), order="fcfs")
    assert queue_like.wait_s[0] == 1 + 20 * 10


def test_a_higher_tier_passes_the_queue_and_is_not_kept_out_by_a_window_full_of_batch() -> None:
    batch = flight(entry("runs", tier=2, output=100))
    waiting = [entry(f"w{number}", tier=2) for number in range(5)]
    urgent = ask(entry("me", tier=0), waiting, engine(batch))
    assert urgent.wait_s[0] == 0
    assert urgent.ttft_s[0] == 1, "in the engine it takes the lower tier's place"
    assert ask(entry("me", tier=2), waiting, engine(batch)).wait_s[0] == 99 + 50


def test_a_braked_tier_waits_for_its_own_place_and_lower_tiers_pass_it() -> None:
    waiting = [entry("w1"), entry("w2")]
    free = engine(places=4)
    assert ask(entry("me", arrived_s=1.0), waiting, free).wait_s[0] == 0
    braked = engine(places=4, brakes=Brakes({1: 0.25}))
    assert ask(entry("me", arrived_s=1.0), waiting, braked).wait_s[0] == 20, "one after the other"
    assert ask(entry("me", tier=2), waiting, braked).wait_s[0] == 0


def test_tokens_ahead_are_told_apart_by_cause() -> None:
    waiting = [
        entry("own", "me", output=3),
        entry("other", "them", output=4),
        entry("urgent", "them", tier=0, output=5),
        entry("batch", "them", tier=2, output=100),
    ]
    running = flight(entry("runs", "them", output=10), emitted=8)
    seen = ask(entry("me", "me", arrived_s=1.0), waiting, engine(running), order="fcfs")
    assert seen.tokens_ahead == {"own": 10 + 6, "others": 10 + 8 + 4, "higher_tier": 10 + 10}


def test_a_window_of_tokens_holds_back_too() -> None:
    running = flight(entry("runs", output=10), emitted=2)
    roomy = ask(entry("me"), [], engine(running, places=4, window_kv_tokens=40))
    full = ask(entry("me"), [], engine(running, places=4, window_kv_tokens=39))
    assert roomy.wait_s[0] == 0
    assert full.wait_s[0] == 8


def test_what_is_larger_than_the_window_goes_when_nothing_else_is_there() -> None:
    assert ask(entry("me"), [], engine(window_kv_tokens=1)).wait_s[0] == 0


def test_a_request_of_several_sequences_counts_as_many() -> None:
    running = [flight(entry(f"f{left}", output=20), emitted=20 - left) for left in (5, 9)]
    seen = ask(entry("me"), [], engine(*running, places=3), sequences={"me": 2})
    assert seen.wait_s[0] == 5


def test_two_engines_serve_one_queue() -> None:
    busy = engine(flight(entry("a", output=30), emitted=1))
    nearly_done = engine(flight(entry("b", output=30), emitted=26))
    assert ask(entry("me"), [], busy, nearly_done).wait_s[0] == 4


def test_a_candidate_that_waits_already_is_forecast_from_where_it_stands() -> None:
    running = flight(entry("runs", output=10), emitted=4)
    me = entry("me")
    seen = ask(me, [me, entry("behind")], engine(running), order="fcfs")
    assert seen.wait_s[0] == 6


def test_an_engine_that_gets_work_in_the_middle_of_a_long_stretch_does_not_go_back_in_time() -> None:
    long_stretch = engine(flight(entry("a", output=80), emitted=1), places=3, window_kv_tokens=60)
    nearly_done = engine(flight(entry("b", output=80), emitted=70), window_kv_tokens=1000)
    blocks_the_line = QueueEntry("large", "t", 0.0, input_tokens=50, predicted_output_tokens=50)
    seen = ask(entry("me"), [blocks_the_line], long_stretch, nearly_done, order="fcfs")
    assert seen.wait_s[0] == 10
    assert seen.ttft_s[0] == 11


def test_charges_are_corrected_in_the_replay_as_in_the_gateway() -> None:
    """Tenant `a` was charged for 100 tokens; once its answer ends after 5 it is its turn."""
    counters = ServiceCounters()
    running = entry("runs", "a", output=100)
    counters.charge("a", 1.0, running.predicted_cost)
    counters.charge("b", 1.0, 100)

    def draw(each: QueueEntry, generated: int, u: float) -> int:
        return 5 if each.entry_id == "runs" else each.predicted_output_tokens

    seen = ask(
        entry("me", "a"), [entry("other", "b")], engine(flight(running, emitted=2)), counters=counters,
        draw_length=draw,
    )  # fmt: skip
    assert seen.wait_s[0] == 3


def test_later_arrivals_that_go_first_are_counted() -> None:
    running = flight(entry("runs", output=10), emitted=1)
    stream = ArrivalStream(
        tenant_id="urgent", tier=0, weight=1.0, rate_per_s=0.2, lasts_s=30.0, input_tokens=10,
        predicted_output_tokens=4,
    )  # fmt: skip
    without = ask(entry("me"), [], engine(running))
    with_them = ask(entry("me"), [], engine(running), arrivals=[stream])
    assert without.wait_s[0] == 9
    assert with_them.wait_s[0] > without.wait_s[0]
    lower = ArrivalStream("batch", 2, 1.0, 0.2, 30.0, 10, 4)
    assert ask(entry("me"), [], engine(running), arrivals=[lower]).wait_s[0] == 9


def test_more_queue_means_more_wait() -> None:
    waits = []
    for depth in (0, 1, 5, 20, 100, 400, 1000):
        running = flight(entry("runs", output=10), emitted=5)
        waiting = [entry(f"w{number}", "ab"[number % 2]) for number in range(depth)]
        waits.append(ask(entry("me", "a", arrived_s=1e6), waiting, engine(running), order="fcfs").wait_s[0])
    assert waits == sorted(waits)
    assert len(set(waits)) == len(waits)


def test_a_very_long_queue_is_extrapolated_and_says_so() -> None:
    running = flight(entry("runs", output=10), emitted=5)
    depth = MAX_REPLAYED * 4
    waiting = [entry(f"w{number}") for number in range(depth)]
    seen = ask(entry("me", arrived_s=1e6), waiting, engine(running), order="fcfs")
    assert seen.basis == "replay, extrapolated"
    assert not seen.saturated
    assert seen.wait_s[0] == pytest.approx(5 + depth * 10, rel=0.02)
    assert seen.tokens_ahead["own"] == pytest.approx(depth * 30, rel=0.02)


def test_without_an_engine_the_forecast_is_saturated() -> None:
    seen = ask(entry("me"), [entry("other")])
    assert seen.saturated
    assert seen.samples == 0


def test_before_the_first_measured_step_the_basis_says_so() -> None:
    guess = StepTime(1.0, 0.0, 0.0, 0.0, samples=0, relative_error=1.0)
    seen = ask(entry("me"), [], engine(step_time=guess))
    assert seen.basis == "replay, step time not measured yet"


def test_p90_is_never_below_p50() -> None:
    running = [flight(entry(f"f{number}", output=30), emitted=number + 1) for number in range(4)]
    seen = ask(
        entry("me"), [entry("w")], engine(*running, places=4), output_tokens=(10, 40), draw_length=None
    )
    for pair in (seen.wait_s, seen.ttft_s, seen.tpot_s, seen.e2e_s, seen.output_tokens):
        assert pair[0] <= pair[1]
    assert seen.wait_s[0] < seen.wait_s[1]


def test_lengths_are_spread_over_their_distribution() -> None:
    assert [van_der_corput(index) for index in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]
    draw = lognormal_lengths(0.7)
    each = entry("x", output=100)
    assert draw(each, 0, 0.5) == 100
    assert draw(each, 0, 0.1) < 100 < draw(each, 0, 0.9)
    assert draw(each, 500, 0.5) > 500
    assert draw(each, 500, 0.999) > draw(each, 500, 0.5)


def test_a_steady_stream_is_seen_as_often_as_it_comes() -> None:
    rates = ArrivalRates()
    for number in range(400):
        rates.observe(entry(f"e{number}"), number * 0.25)
    (stream,) = rates.streams(100.0)
    assert stream.rate_per_s == pytest.approx(4.0, rel=0.05)
    assert (stream.tenant_id, stream.tier, stream.input_tokens) == ("t", 1, 10)
    assert stream.lasts_s == pytest.approx(99.75)


def test_a_burst_is_not_a_rate() -> None:
    rates = ArrivalRates()
    for number in range(50):
        rates.observe(entry(f"e{number}"), number * 0.001)
    assert all(stream.rate_per_s * stream.lasts_s < 2 for stream in rates.streams(0.05))


def test_a_burst_in_a_steady_stream_is_no_rate_either_and_a_flood_is_one() -> None:
    rates, flood = ArrivalRates(), ArrivalRates()
    for number in range(400):
        rates.observe(entry(f"e{number}"), number * 1.0)
    for number in range(200):
        rates.observe(entry(f"b{number}"), 400.0)
    (stream,) = rates.streams(400.1)
    assert stream.rate_per_s == pytest.approx(1.0, rel=0.3)
    for number in range(4000):
        flood.observe(entry(f"f{number}"), number * 0.01)
    (stream,) = flood.streams(40.0)
    assert stream.rate_per_s == pytest.approx(100.0, rel=0.05)


def test_a_stream_that_stopped_is_forgotten() -> None:
    rates = ArrivalRates()
    for number in range(40):
        rates.observe(entry(f"e{number}"), number * 0.1)
    assert rates.streams(4.0) != []
    assert rates.streams(104.0) == []


def test_a_single_request_is_no_stream() -> None:
    rates = ArrivalRates()
    rates.observe(entry("e"), 5.0)
    assert rates.streams(5.0) == []
    assert rates.streams(6.0) == []


def test_streams_are_bounded() -> None:
    rates = ArrivalRates(max_streams=10)
    for number in range(1000):
        rates.observe(entry(f"e{number}", f"t{number % 100}"), number * 0.01)
    assert len(rates.streams(10.0)) <= 10
    with pytest.raises(ValueError, match="memory_s"):
        ArrivalRates(memory_s=0.0)


def test_forecasts_need_neither_numpy_nor_torch() -> None:
    script = textwrap.dedent(
        """
        import sys
        import engine.client.client, engine.forecast.wait.arrivals
        import engine.forecast.length.length, engine.forecast.wait.forecast
        import engine.step_time.model, engine.scheduling.tiers, engine.scheduling.policy
        print(sorted({"numpy", "torch", "transformers", "scipy"} & set(sys.modules)))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
