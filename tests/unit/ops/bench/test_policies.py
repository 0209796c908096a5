"""Figures, workloads and virtual engine of the policy benchmarks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from engine.core.model_runner import SequenceSlice
from engine.messages import SamplingParams, StepTime
from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.policy import Policy, UnknownPolicy, make_policy
from engine.sequence import Sequence
from engine.virtual.replica import VirtualClock, VirtualRunner
from ops.bench.policies.capacity import at_load, load_of
from ops.bench.policies.compose import ComposeTenant, due_a_step
from ops.bench.policies.figures import LatencyTargets, attainment, service_bound, widest_gap
from ops.bench.policies.published_settings import A10G_LLAMA_2_7B, PUBLISHED
from ops.bench.policies.run import run_cases
from ops.reporting import Check, Spread, number, plain, quantile
from ops.simulate.engine_run import EngineRun, Moment, ServedRequest, run_load
from ops.simulate.machines.machines import profile_machine
from ops.simulate.traffic.arrivals import (
    PREDICTIONS,
    even_times,
    fixed,
    from_trace,
    only_while_on,
    poisson_times,
    rising_times,
    stream,
)
from ops.simulate.traffic.requests import SimulatedRequest

SECOND_A_TOKEN = StepTime(
    base_s=0.0, per_token_s=1.0, per_context_token_s=0.0, per_sequence_s=0.0, samples=0, relative_error=0.0
)
SECOND_A_STEP = StepTime(
    base_s=1.0, per_token_s=0.0, per_context_token_s=0.0, per_sequence_s=0.0, samples=0, relative_error=0.0
)
SMALL = profile_machine(
    "a second a step",
    SECOND_A_STEP,
    kv_tokens=1024,
    max_sequences=2,
    max_batched_tokens=64,
    context_tokens=512,
)

# ---------------------------------------------------------------- arrivals


def test_even_arrivals_are_equally_spaced_at_their_rate() -> None:
    times = even_times(random.Random(1), 2.0, 60.0)
    gaps = {round(later - earlier, 9) for earlier, later in pairwise(times)}
    assert gaps == {0.5}
    assert len(times) == 120
    assert 0 <= times[0] < 0.5
    assert times[-1] < 60.0


def test_poisson_arrivals_have_their_rate_and_differ_by_seed() -> None:
    times = poisson_times(random.Random(1), 5.0, 1000.0)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times == poisson_times(random.Random(1), 5.0, 1000.0)
    assert times != poisson_times(random.Random(2), 5.0, 1000.0)


def test_a_rising_rate_sends_as_many_in_each_part_as_its_integral() -> None:
    times = rising_times(random.Random(1), 0.2, 2.0, 600.0)
    first = sum(at_s < 300 for at_s in times)
    assert times == sorted(times)
    assert len(times) == 660
    assert first == pytest.approx(0.2 * 300 + 0.003 * 300**2 / 2, abs=1)


def test_on_and_off_begins_with_on() -> None:
    assert only_while_on([0.0, 59.0, 60.0, 119.0, 120.0], 60.0) == [0.0, 59.0, 120.0]


def test_published_settings_send_what_they_say() -> None:
    overload = PUBLISHED["overload"].arrivals(42)
    by_tenant = {
        name: [each for each in overload if each.tenant == name] for name in ("client-0", "client-1")
    }
    assert [len(each) for each in by_tenant.values()] == [540, 1080]
    assert {(each.input_tokens, each.output_tokens) for each in overload} == {(256, 256)}
    weighted = {each.tenant: each.weight for each in PUBLISHED["overload-weighted"].arrivals(42)}
    assert weighted == {"client-0": 1.0, "client-1": 2.0, "client-2": 3.0, "client-3": 4.0}
    silent = [
        each.arrival_s for each in PUBLISHED["on_off_overload"].arrivals(42) if each.tenant == "client-0"
    ]
    assert all(int(at_s / 60) % 2 == 0 for at_s in silent)
    assert len({each.tenant for each in PUBLISHED["real"].arrivals(42)}) == 27


def test_a_trace_with_a_bad_line_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,tenant,input_tokens,output_tokens\n0,a,3,4\n1,b,many,4\n")
    with pytest.raises(ValueError, match="line 3"):
        from_trace(path)


def test_predictions_are_as_wrong_as_they_say() -> None:
    rng = random.Random(3)
    arrivals = [SimulatedRequest(0.0, "one", 1, rng.randint(10, 1000)) for _ in range(500)]
    lengths = [arrival.output_tokens for arrival in arrivals]
    predicted = {
        name: [median for median, _ in predict(arrivals, random.Random(4))]
        for name, predict in PREDICTIONS.items()
    }
    assert predicted["exact"] == lengths
    ratios = [guess / length for guess, length in zip(predicted["noisy"], lengths, strict=True)]
    assert 0.45 < min(ratios) < 0.6
    assert 1.4 < max(ratios) < 1.55
    assert sorted(predicted["shuffled"]) == sorted(lengths)
    assert predicted["shuffled"] != lengths
    assert set(predicted["none"]) == {sorted(lengths)[250]}


# ---------------------------------------------------------------- figures


def test_the_widest_gap_is_that_of_all_intervals_of_backlogged_stretches() -> None:
    rng = random.Random(5)
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    moments = [
        Moment(
            float(step),
            {tenant: rng.randint(0, 9) for tenant in weights},
            {},
            {},
            frozenset(tenant for tenant in weights if rng.random() < 0.9),
        )
        for step in range(60)
    ]
    widest = 0.0
    for left, right in combinations(weights, 2):
        for start in range(60):
            for end in range(start + 1, 61):
                part = moments[start:end]
                if all({left, right} <= moment.backlogged for moment in part):
                    services = [
                        sum(moment.service[tenant] for moment in part) / weights[tenant]
                        for tenant in (left, right)
                    ]
                    widest = max(widest, abs(services[0] - services[1]))
    assert widest > 20
    assert widest_gap(moments, weights) == pytest.approx(widest)


def test_the_bound_is_twice_the_larger_of_prompt_and_batch_by_the_lightest_weight() -> None:
    assert service_bound(10_000, 256, {"a": 1.0, "b": 4.0}) == 40_000
    assert service_bound(100, 5000, {"a": 2.0}) == 5000


def test_quantiles_attainment_and_numbers() -> None:
    assert quantile([4, 1, 3, 2], 0.5) == 2
    assert quantile(range(1, 101), 0.99) == 99
    assert math.isnan(quantile([], 0.5))
    served = [
        ServedRequest(SimulatedRequest(0.0, "a", 1, 3), first_s=first_s, last_s=first_s + 2, emitted_tokens=3)
        for first_s in (1, 9)
    ]
    served[0].finish = served[1].finish = "stop"
    assert attainment(
        [*served, ServedRequest(SimulatedRequest(0.0, "a", 1, 3))], LatencyTargets(ttft_s=5, tpot_s=1)
    ) == pytest.approx(1 / 3)
    assert [number(value) for value in (1234.5, 0.01234, 1.5, math.inf)] == [
        "1,234",
        "0.0123",
        "1.50",
        "never",
    ]
    assert plain({"a": Spread(1.0, 0.5, math.inf)}) == {"a": {"median": 1.0, "least": 0.5, "most": None}}


def test_a_check_holds_to_its_side() -> None:
    assert Check("x", 1.0, 1.0).ok
    assert not Check("x", 1.1, 1.0).ok
    assert Check("x", 1.1, 1.0, at_most=False).ok
    assert not Check("x", 0.9, 1.0, at_most=False).ok


def test_what_is_due_by_weight_is_no_more_than_the_sequences_can_take() -> None:
    one, many = ComposeTenant("one", 1, 1.0), ComposeTenant("many", 50, 1.0)
    assert due_a_step([one, many], 25) == {"one": 1.0, "many": 24.0}
    assert due_a_step([one, replace(many, weight=49.0)], 25) == {"one": 0.5, "many": 24.5}


# ---------------------------------------------------------------- padded shapes


def piece(name: str, position: int, num_tokens: int) -> SequenceSlice:
    total = position + num_tokens
    return SequenceSlice(name, [1] * total, total, position, num_tokens, [0] * 8, True, SamplingParams(), 1)


def test_a_padded_step_takes_the_time_of_its_longest_parts() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=SECOND_A_TOKEN, padded=True)
    runner.execute([piece("a", 0, 10), piece("b", 0, 30), piece("c", 40, 1), piece("d", 90, 1)])
    assert clock.now_s == 2 * 30 + 2
    assert runner.padded_tokens == 20


def test_padded_decodes_attend_to_the_longest_context() -> None:
    clock = VirtualClock()
    step_time = StepTime(
        base_s=0.0,
        per_token_s=0.0,
        per_context_token_s=1.0,
        per_sequence_s=0.0,
        samples=0,
        relative_error=0.0,
    )
    VirtualRunner(clock, step_time=step_time, padded=True).execute([piece("c", 9, 1), piece("d", 99, 1)])
    assert clock.now_s == 200


def test_who_ended_keeps_a_row_until_the_batch_is_over() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=SECOND_A_TOKEN, keeps_rows=True)
    runner.execute([piece("a", 5, 1), piece("b", 5, 1), piece("c", 5, 1)])
    runner.execute([piece("a", 6, 1)])
    assert clock.now_s == 3 + 3
    assert runner.padded_tokens == 2
    runner.execute([piece("d", 5, 1)])
    assert clock.now_s == 3 + 3 + 1


def test_without_padding_nothing_is_padded() -> None:
    clock = VirtualClock()
    runner = VirtualRunner(clock, step_time=SECOND_A_TOKEN)
    runner.execute([piece("a", 0, 10), piece("b", 0, 30)])
    assert clock.now_s == 40
    assert runner.padded_tokens == 0


# ---------------------------------------------------------------- the driver


def two_seconds_apart() -> list[SimulatedRequest]:
    return stream([0.5, 2.25, 2.5, 2.75], "one", fixed(16, 3), random.Random(1))


def test_times_count_from_the_arrival_and_not_from_the_step_that_saw_it() -> None:
    run = run_load("fcfs", two_seconds_apart(), SMALL)
    # Two places, steps of a second: the first runs 0.5 to 3.5; the second comes at 2.25, into the step
    # that begins at 2.5; the other two wait for places.
    assert run.served[0].ttft_s == pytest.approx(1.0)
    assert run.served[0].e2e_s == pytest.approx(3.0)
    assert run.served[1].ttft_s == pytest.approx(3.5 - 2.25)
    assert run.served[2].ttft_s == pytest.approx(4.5 - 2.5)
    assert all(each.done and each.emitted_tokens == 3 for each in run.served)
    assert run.total_tokens == 4 * 19


def test_a_run_is_the_same_every_time() -> None:
    def figures() -> list[tuple[float, float]]:
        arrivals = at_load(PUBLISHED["real"].arrivals(1)[:80], 0.9, A10G_LLAMA_2_7B)
        run = run_load("vtc", arrivals, A10G_LLAMA_2_7B)
        return [(each.ttft_s, each.e2e_s) for each in run.served]

    assert figures() == figures()


def test_a_stated_load_is_that_part_of_what_the_machine_finishes() -> None:
    arrivals = PUBLISHED["real"].arrivals(1)[:80]
    assert load_of(at_load(arrivals, 0.5, A10G_LLAMA_2_7B), A10G_LLAMA_2_7B) == pytest.approx(0.5)


def test_a_request_that_can_never_run_ends_the_run() -> None:
    with pytest.raises(ValueError, match=r"request 0 .* was refused"):
        run_load("fcfs", [SimulatedRequest(0.0, "one", 600, 5)], SMALL)


class NeverAdmits(PredictedReserve):
    """Never admits: no admission may do that."""

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        return Defer("never", None)


def test_an_engine_that_hangs_is_found_out() -> None:
    def hangs() -> Policy:
        return replace(make_policy("fcfs"), admit=NeverAdmits())

    with pytest.raises(RuntimeError, match="the engine hangs at"):
        run_load(hangs, [SimulatedRequest(0.0, "one", 5, 5)], SMALL)


def test_unknown_cases_and_policies_are_named() -> None:
    with pytest.raises(ValueError, match="no case 'nonsense'; there are mixed"):
        run_cases(["nonsense"], [])
    with pytest.raises(UnknownPolicy, match="no policy 'nonsense'; there are"):
        run_cases(["mixed"], ["nonsense"])


def test_a_run_that_is_cut_off_counts_only_what_was_answered() -> None:
    run = run_load("fcfs", two_seconds_apart(), SMALL, until_s=4.0)
    assert isinstance(run, EngineRun)
    assert [each.done for each in run.served] == [True, False, False, False]
    assert run.served[3].ttft_s == math.inf
    assert run.total_tokens == 19
