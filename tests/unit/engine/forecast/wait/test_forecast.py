"""Replay against the gateway and the engine. Small cases, worked out by hand."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import NEW_LOAD_S, NOTHING_CAME, ArrivalPattern, RecentArrivals
from engine.forecast.wait.forecast import Forecast
from engine.forecast.wait.picture import AnswerLength
from engine.forecast.wait.probing import MAX_EVENTS
from engine.forecast.wait.replay import van_der_corput
from engine.forecast.wait.replayed_engine import EngineLoad, Flight
from engine.messages import StepTime
from engine.scheduling.brakes import Brakes
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue
from tests.support.builders import step_time
from tests.support.pictures import forecast_of, picture

ONE_SECOND_STEPS = step_time(1.0, samples=50)


def entry(
    name: str, tenant: str = "t", *, tier: int = 1, output: int = 10, arrived_s: float = 0.0
) -> QueueEntry:
    return QueueEntry(name, tenant, arrived_s, input_tokens=10, predicted_output_tokens=output, tier=tier)


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
    output_tokens: tuple[int, int] | None = None,
    **fields: Any,
) -> Forecast:
    """Its probe has a prompt of 16 tokens where the request has one of 10."""
    counters = counters or ServiceCounters()
    queue = TieredQueue(order, counters)
    for each in waiting:
        queue.add(each)
    return forecast_of(candidate, picture(queue, counters, engines, 100.0, **fields), output_tokens)


def steady(rate_per_s: float, tier: int = 0, output: int = 4) -> ArrivalPattern:
    """What came until the instant of `ask`."""
    recent = RecentArrivals()
    for number in range(int(100 * rate_per_s)):
        at_s = number / rate_per_s
        recent.observe(entry(f"e{number}", "urgent", tier=tier, output=output, arrived_s=at_s))
    return recent.pattern(100.0)


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


def test_padded_steps_take_what_their_size_takes() -> None:
    flights = [flight(entry(f"f{left}", output=20), emitted=20 - left) for left in (7, 3, 12)]
    padded = step_time(per_sequence_s=1.0, samples=50, graph_sizes=(2, 4))
    assert ask(entry("me"), [], engine(*flights, places=3, step_time=padded)).wait_s[0] == 3 * 4
    alone = engine(flights[0], step_time=padded)
    assert ask(entry("me"), [], alone).wait_s[0] == 7 * 2, "steps of one are of two"


def test_where_a_step_has_fewer_slots_than_streams_decode_they_take_turns() -> None:
    flights = [flight(entry(f"f{left}", output=20), emitted=20 - left) for left in (6, 12)]
    seen = ask(entry("me"), [], engine(*flights, places=2, decode_slots=1))
    assert seen.wait_s[0] == 2 * 6, "steps of the engine for six tokens each"
    assert seen.tpot_s[0] == 2.0
    assert ask(entry("me"), [], engine(*flights, places=2, decode_slots=2)).wait_s[0] == 6


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
    assert urgent.ttft_s[0] == 1.5, "half a step is under way; in the engine it takes the lower tier's place"
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
    roomy = ask(entry("me"), [], engine(running, places=4, window_kv_tokens=43))
    full = ask(entry("me"), [], engine(running, places=4, window_kv_tokens=42))
    assert roomy.wait_s[0] == 0
    assert full.wait_s[0] == 8


def test_what_is_larger_than_the_window_goes_when_nothing_else_is_there() -> None:
    assert ask(entry("me"), [], engine(window_kv_tokens=1)).wait_s[0] == 0


def test_a_request_of_several_sequences_counts_as_many() -> None:
    running = [flight(entry(f"f{left}", output=20), emitted=20 - left) for left in (5, 9)]
    seen = ask(entry("me"), [entry("pair")], engine(*running, places=3), sequences={"pair": 2})
    assert seen.wait_s[0] == 9


def test_two_engines_serve_one_queue() -> None:
    busy = engine(flight(entry("a", output=30), emitted=1))
    nearly_done = engine(flight(entry("b", output=30), emitted=26))
    assert ask(entry("me"), [], busy, nearly_done).wait_s[0] == 4


def test_an_engine_that_gets_work_in_the_middle_of_a_long_stretch_does_not_go_back_in_time() -> None:
    long_stretch = engine(flight(entry("a", output=80), emitted=1), places=3, window_kv_tokens=60)
    nearly_done = engine(flight(entry("b", output=80), emitted=70), window_kv_tokens=1000)
    blocks_the_line = QueueEntry("large", "t", 0.0, input_tokens=50, predicted_output_tokens=50)
    seen = ask(entry("me"), [blocks_the_line], long_stretch, nearly_done, order="fcfs")
    assert seen.wait_s[0] == 10
    assert seen.ttft_s[0] == 11.5


def test_charges_are_corrected_in_the_replay_as_in_the_gateway() -> None:
    """Tenant `a` was charged for 100 tokens; once its answer ends after 5 it is its turn."""
    counters = ServiceCounters()
    running = entry("runs", "a", output=100)
    counters.charge("a", 1.0, running.predicted_cost)
    counters.charge("b", 1.0, 100)

    seen = ask(
        entry("me", "a"), [entry("other", "b")], engine(flight(running, emitted=2)), counters=counters,
        lengths={"runs": AnswerLength(5)},
    )  # fmt: skip
    assert seen.wait_s[0] == 3


def test_later_arrivals_that_go_first_are_counted() -> None:
    load, ahead = engine(flight(entry("runs", output=10), emitted=1)), [entry("ahead")]
    assert ask(entry("me"), ahead, load).wait_s[0] == 19
    assert ask(entry("me"), ahead, load, arrivals=steady(0.2)).wait_s[0] > 19
    assert ask(entry("me"), ahead, load, arrivals=steady(0.2, tier=2)).wait_s[0] == 19


def test_beyond_the_limit_a_lower_tier_waits_for_what_comes_above_it_as_long_as_that_comes() -> None:
    """Two turns are replayed, 14 cost tokens in two seconds each, in which nothing comes yet."""
    waiting = [entry(f"w{number}", output=2) for number in range(100)]
    floods = [steady(0.1, output=output) for output in (10, 100, 1_000)]
    without, *told = [
        ask(entry("me", tier=2), waiting, engine(), arrivals=arrivals, most_events=4)
        for arrivals in (NOTHING_CAME, *floods)
    ]
    assert without.wait_s[0] == pytest.approx(2 * 99)
    for forecast, flood in zip(told, floods, strict=True):
        busy = flood.future(100.0).cost_per_s[0] / 7
        longer_s = forecast.wait_s[0] - without.wait_s[0]
        assert longer_s == pytest.approx(busy * (NEW_LOAD_S - 2)), "finite in an overload"
        assert forecast.saturated == (busy >= 1)


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
    depth = MAX_EVENTS * 4
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
    seen = ask(entry("me"), [entry("w")], engine(*running, places=4), output_tokens=(10, 40))
    for pair in (seen.wait_s, seen.ttft_s, seen.tpot_s, seen.e2e_s, seen.output_tokens):
        assert pair[0] <= pair[1]
    assert seen.wait_s[0] < seen.wait_s[1]


def test_lengths_are_spread_over_their_distribution() -> None:
    assert [van_der_corput(index) for index in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]
    known = AnswerLength(1_000, median=100, high=200)
    assert known.draw(0, 0.1) < known.draw(0, 0.5) < known.draw(0, 0.9)
    assert known.draw(0, 0.5) == pytest.approx(100, rel=0.05)
    assert 500 < known.draw(500, 0.5) <= known.draw(500, 0.999) <= 1_000
    like_others = AnswerLength(60, quantiles=[10, 20, 70])
    assert [like_others.draw(0, u) for u in (0.0, 0.5, 0.99)] == [10, 20, 60]
    assert AnswerLength(60).draw(0, 0.01) == 60, "a length that is known"


def test_forecasts_need_neither_numpy_nor_torch() -> None:
    script = textwrap.dedent(
        """
        import sys
        import engine.client.client, engine.forecast.wait.arrivals
        import engine.forecast.length.length, engine.forecast.wait.worker
        import engine.step_time.model, engine.scheduling.tiers, engine.scheduling.policy
        print(sorted({"numpy", "torch", "transformers", "scipy"} & set(sys.modules)))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
