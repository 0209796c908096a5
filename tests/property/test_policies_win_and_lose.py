"""Strengths and weaknesses of each kind of policy.

Small versions of the benchmarks of `fairgate bench policies`: virtual time, fixed seeds, few requests.
Each test also shows that its case was met: that there was a queue, a flood, padding, a preemption.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache

import pytest

from engine.scheduling.policy import POLICIES, make_policy
from ops.bench.policies.batches import KEEPS_ROWS, PADDED, UNPADDED, arena_lengths, unlike_documents
from ops.bench.policies.capacity import at_load
from ops.bench.policies.compose import composition
from ops.bench.policies.figures import service_bound, widest_gap
from ops.bench.policies.mixed import INTERACTIVE_OPTIONS
from ops.bench.policies.published_settings import A10G_LLAMA_2_7B, PUBLISHED, short_and_long
from ops.bench.policies.workloads import (
    FEW_PLACES,
    LONG_CONTEXT,
    clumps,
    heavy_tail,
    long_prompts,
    unlike_prompts,
)
from ops.reporting import quantile
from ops.simulate.engine_run import EngineRun, run_load, tenants_of
from ops.simulate.traffic.arrivals import all_at_once, exact, shuffled
from ops.simulate.traffic.requests import SimulatedRequest

SEED = 7
OVERLOAD_S = 90.0


def mean_e2e_s(run: EngineRun) -> float:
    return statistics.fmean(each.e2e_s for each in run.served)


def mean_ttft_s(run: EngineRun) -> float:
    return statistics.fmean(each.ttft_s for each in run.served)


def p99_ttft_s(run: EngineRun, kind: str = "all") -> float:
    return quantile((each.ttft_s for each in run.of(kind)), 0.99)


def test_shortest_first_finishes_sooner_on_average_and_only_with_good_predictions() -> None:
    arrivals = all_at_once(heavy_tail(SEED)[:150])
    fcfs = run_load("fcfs", arrivals, FEW_PLACES)
    known = run_load("sjf", arrivals, FEW_PLACES, predictions=exact)
    wrong = run_load("sjf", arrivals, FEW_PLACES, predictions=shuffled)
    assert mean_ttft_s(fcfs) > 10, "there was a queue"
    assert mean_e2e_s(known) < 0.75 * mean_e2e_s(fcfs)
    assert mean_e2e_s(wrong) > 0.85 * mean_e2e_s(fcfs)


def test_the_highest_response_ratio_helps_short_prompts_behind_long_ones() -> None:
    arrivals = at_load(unlike_prompts(SEED)[:400], 1.0, FEW_PLACES)
    fcfs, hrrn = (run_load(policy, arrivals, FEW_PLACES) for policy in ("fcfs", "hrrn"))
    assert mean_ttft_s(fcfs) > 0.3, "there was a queue"
    assert mean_ttft_s(hrrn) < 0.75 * mean_ttft_s(fcfs)


def test_a_static_batch_waits_for_its_longest_member_and_pads_to_it() -> None:
    arrivals = all_at_once(arena_lengths(SEED)[:80])
    continuous = run_load("fcfs", arrivals, UNPADDED)
    static = run_load("static", arrivals, UNPADDED)
    padded = run_load("static", arrivals, KEEPS_ROWS)
    assert static.tokens_per_s < 0.7 * continuous.tokens_per_s
    assert padded.tokens_per_s < static.tokens_per_s
    assert padded.padded_tokens > 0.5 * padded.computed_tokens
    assert static.padded_tokens == 0


def test_a_window_catches_the_clump_that_a_static_batch_misses() -> None:
    arrivals = clumps(SEED)[:64]
    static, dynamic = (run_load(policy, arrivals, FEW_PLACES) for policy in ("static", "dynamic"))
    assert mean_e2e_s(dynamic) < 0.8 * mean_e2e_s(static)


@cache
def gap_over_bound(policy: str) -> float:
    """The largest service difference of the two clients of the published overload, over 2U."""
    setting = PUBLISHED["overload"]
    arrivals = [each for each in setting.arrivals(SEED) if each.arrival_s < OVERLOAD_S]
    weights = tenants_of(arrivals)
    run = run_load(policy, arrivals, A10G_LLAMA_2_7B, until_s=OVERLOAD_S, watch=True)
    both = sum(moment.backlogged == set(weights) for moment in run.moments)
    assert both > 0.8 * len(run.moments), "both were backlogged"
    bound = service_bound(A10G_LLAMA_2_7B.kv_tokens, setting.longest_input, weights)
    return widest_gap(run.moments, weights) / bound


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
def test_service_of_backlogged_tenants_stays_together_in_an_overload(policy: str) -> None:
    assert gap_over_bound(policy) < 0.3
    assert gap_over_bound("fcfs") > 2 * gap_over_bound(policy)


def test_short_requests_do_not_feel_long_prompts_when_their_tier_goes_first() -> None:
    arrivals = at_load([each for each in long_prompts(SEED) if each.arrival_s < 40], 0.6, LONG_CONTEXT)
    tiers = [replace(each, tier=0 if each.kind == "short" else 1) for each in arrivals]
    alone = run_load("fcfs", [each for each in arrivals if each.kind == "short"], LONG_CONTEXT)
    fcfs = run_load("fcfs", arrivals, LONG_CONTEXT)
    hybrid = run_load(lambda: make_policy("hybrid", INTERACTIVE_OPTIONS), tiers, LONG_CONTEXT)
    assert len(fcfs.of("long")) > 5
    assert p99_ttft_s(hybrid, "short") < p99_ttft_s(fcfs, "short") / 3
    assert p99_ttft_s(hybrid, "short") < 2 * p99_ttft_s(alone, "short")
    assert hybrid.tokens_per_s > 0.95 * fcfs.tokens_per_s


def test_short_requests_do_not_wait_for_memory_behind_long_ones_in_their_own_tier() -> None:
    """The published `poisson_short_long`, where the short ones ask for nearly half of the machine."""
    draw = short_and_long((64, 64), (256, 256), 60.0)
    arrivals = at_load(draw(random.Random(SEED)), 0.8, A10G_LLAMA_2_7B)
    alone = run_load("fcfs", [each for each in arrivals if each.kind == "short"], A10G_LLAMA_2_7B)
    fcfs, hybrid = (run_load(policy, arrivals, A10G_LLAMA_2_7B) for policy in ("fcfs", "hybrid"))
    assert p99_ttft_s(fcfs, "short") > 5 * p99_ttft_s(alone, "short"), "there was a queue"
    assert p99_ttft_s(hybrid, "short") < p99_ttft_s(fcfs, "short") / 3
    assert p99_ttft_s(hybrid, "short") < 1.7 * p99_ttft_s(alone, "short")
    assert hybrid.tokens_per_s > 0.95 * fcfs.tokens_per_s
    assert all(each.done for each in hybrid.served)


def test_buckets_spare_padding_and_nothing_else() -> None:
    arrivals = {
        machine: at_load(unlike_documents(SEED)[:150], 0.95, machine) for machine in (PADDED, UNPADDED)
    }
    runs = {
        (policy, machine): run_load(policy, arrivals[machine], machine)
        for policy in ("fcfs", "buckets")
        for machine in (PADDED, UNPADDED)
    }
    wasted = {
        policy: runs[policy, PADDED].padded_tokens / runs[policy, PADDED].computed_tokens
        for policy in ("fcfs", "buckets")
    }
    assert wasted["fcfs"] > 0.2, "the case is met"
    assert wasted["buckets"] < wasted["fcfs"] / 2
    assert mean_ttft_s(runs["buckets", PADDED]) < 0.8 * mean_ttft_s(runs["fcfs", PADDED])
    assert mean_ttft_s(runs["buckets", UNPADDED]) > mean_ttft_s(runs["fcfs", UNPADDED])


def test_tokens_match_weights_when_more_sequences_run_than_slots() -> None:
    report = composition(())
    assert len(report.rows) == 4
    assert all(row["windows"] > 50 for row in report.rows)
    assert [str(check) for check in report.checks if not check.ok] == []


def test_every_policy_serves_every_request_of_a_busy_hour() -> None:
    rng = random.Random(SEED)
    arrivals = [
        SimulatedRequest(
            number * 0.3, f"tenant-{number % 3}", rng.randint(8, 900), rng.randint(1, 60), tier=number % 2
        )
        for number in range(50)
    ]
    for policy in POLICIES:
        run = run_load(policy, arrivals, replace(A10G_LLAMA_2_7B, kv_tokens=3000))
        assert all(each.done for each in run.served), policy
        assert all(each.emitted_tokens == each.arrival.output_tokens for each in run.served), policy
