"""Strengths and weaknesses of each kind of policy.

Virtual time, fixed seeds, few requests; results at full size are in docs/benchmarks.md. Each test also shows
that its case was met: that there was a queue, a flood, padding, a preemption.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from functools import cache

import pytest

from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.evict.victims import FairVictim
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import POLICIES, Policy, make_policy
from ops.bench.estimates.control import A10G_LLAMA_2_7B
from ops.reporting import quantile
from ops.simulate.traffic.requests import SimulatedRequest
from tests.support.drawn_arrivals import all_at_once, exact, fixed, merged, shuffled, stream
from tests.support.engine_run import EngineRun, run_load, tenants_of
from tests.support.policy_traffic import (
    FEW_PLACES,
    KEEPS_ROWS,
    LONG_CONTEXT,
    PADDED,
    arena_lengths,
    at_load,
    clumps,
    heavy_tail,
    long_prompts,
    overload,
    service_bound,
    short_and_long,
    unlike_documents,
    unlike_prompts,
    widest_gap,
)

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
    continuous = run_load("fcfs", arrivals, A10G_LLAMA_2_7B)
    static = run_load("static", arrivals, A10G_LLAMA_2_7B)
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
    arrivals = overload(SEED, OVERLOAD_S)
    weights = tenants_of(arrivals)
    run = run_load(policy, arrivals, A10G_LLAMA_2_7B, until_s=OVERLOAD_S, watch=True)
    both = sum(moment.backlogged == set(weights) for moment in run.moments)
    assert both > 0.8 * len(run.moments), "both were backlogged"
    bound = service_bound(A10G_LLAMA_2_7B.kv_tokens, 256, weights)
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
    options = PolicyOptions(max_num_partial_prefills=4, target_step_s=0.1)
    hybrid = run_load(lambda: make_policy("hybrid", options), tiers, LONG_CONTEXT)
    assert len(fcfs.of("long")) > 5
    assert p99_ttft_s(hybrid, "short") < p99_ttft_s(fcfs, "short") / 3
    assert p99_ttft_s(hybrid, "short") < 2 * p99_ttft_s(alone, "short")
    assert hybrid.tokens_per_s > 0.95 * fcfs.tokens_per_s


def test_short_requests_do_not_wait_for_memory_behind_long_ones_in_their_own_tier() -> None:
    """The short ones ask for nearly half of the machine."""
    arrivals = at_load(short_and_long(SEED, 60.0), 0.8, A10G_LLAMA_2_7B)
    alone = run_load("fcfs", [each for each in arrivals if each.kind == "short"], A10G_LLAMA_2_7B)
    fcfs, hybrid = (run_load(policy, arrivals, A10G_LLAMA_2_7B) for policy in ("fcfs", "hybrid"))
    assert p99_ttft_s(fcfs, "short") > 5 * p99_ttft_s(alone, "short"), "there was a queue"
    assert p99_ttft_s(hybrid, "short") < p99_ttft_s(fcfs, "short") / 3
    assert p99_ttft_s(hybrid, "short") < 1.7 * p99_ttft_s(alone, "short")
    assert hybrid.tokens_per_s > 0.95 * fcfs.tokens_per_s
    assert all(each.done for each in hybrid.served)


def test_buckets_spare_padding_and_nothing_else() -> None:
    arrivals = {
        machine: at_load(unlike_documents(SEED)[:150], 0.95, machine) for machine in (PADDED, A10G_LLAMA_2_7B)
    }
    runs = {
        (policy, machine): run_load(policy, arrivals[machine], machine)
        for policy in ("fcfs", "buckets")
        for machine in (PADDED, A10G_LLAMA_2_7B)
    }
    wasted = {
        policy: runs[policy, PADDED].padded_tokens / runs[policy, PADDED].computed_tokens
        for policy in ("fcfs", "buckets")
    }
    assert wasted["fcfs"] > 0.2, "the case is met"
    assert wasted["buckets"] < wasted["fcfs"] / 2
    assert mean_ttft_s(runs["buckets", PADDED]) < 0.8 * mean_ttft_s(runs["fcfs", PADDED])
    assert mean_ttft_s(runs["buckets", A10G_LLAMA_2_7B]) > mean_ttft_s(runs["fcfs", A10G_LLAMA_2_7B])


# ---------------------------------------------------------------- token-fair composition

SLOTS = 25
WINDOW_STEPS = 64
SETTLED_STEPS = 100
"""After the last prompt: what one tenant's prompts had while the other had none is paid back by then."""
CAP_TOKENS = 32
PROMPT_TOKENS = 48
"""Longer than the cap, so that the cap acts."""


def run_token_fair(tenants: dict[str, tuple[int, float]]) -> EngineRun:
    """All sequences of all tenants (name -> sequences, weight) from the first instant."""
    arrivals = merged(
        stream([0.0] * sequences, name, fixed(PROMPT_TOKENS, 300), random.Random(0), weight=weight)
        for name, (sequences, weight) in tenants.items()
    )
    machine = replace(A10G_LLAMA_2_7B, kv_tokens=64_000, max_sequences=64, max_batched_tokens=256)

    def policy() -> Policy:
        compose = TokenFair(slots=SLOTS, cap_tokens=CAP_TOKENS)
        return Policy("token-fair", "vtc", PredictedReserve(), compose, FairVictim())

    return run_load(policy, arrivals, machine, watch=True, watch_running=True)


def tokens_in_windows(run: EngineRun, tenants: dict[str, tuple[int, float]], tenant: str) -> list[int]:
    """Output tokens of `tenant` in every stretch of `WINDOW_STEPS` steps in which all sequences decode."""
    everything = {name: sequences for name, (sequences, _) in tenants.items()}
    last_prompt = max(step for step, moment in enumerate(run.moments) if any(moment.computed.values()))
    sums, windows = [0], []
    for moment in run.moments[last_prompt + SETTLED_STEPS :]:
        if moment.running != everything:
            sums = [0]
            continue
        sums.append(sums[-1] + moment.emitted.get(tenant, 0))
        if len(sums) > WINDOW_STEPS:
            windows.append(sums[-1] - sums[-1 - WINDOW_STEPS])
    return windows


@pytest.mark.parametrize(
    ("few", "many", "due_a_step"),
    [
        # By weight, at most one token a step for each sequence; the other tenant has the rest.
        ((1, 1.0), (50, 1.0), 1.0),
        ((1, 1.0), (50, 49.0), 0.5),
        ((20, 1.0), (31, 1.0), 12.5),
        ((20, 1.0), (31, 4.0), 5.0),
    ],
)
def test_tokens_match_weights_when_more_sequences_run_than_slots(
    few: tuple[int, float], many: tuple[int, float], due_a_step: float
) -> None:
    tenants = {"few": few, "many": many}
    run = run_token_fair(tenants)
    windows = tokens_in_windows(run, tenants, "few")
    assert len(windows) > 50
    assert max(abs(tokens - WINDOW_STEPS * due_a_step) for tokens in windows) <= SLOTS
    assert run.policy is not None
    compose = run.policy.compose
    assert isinstance(compose, TokenFair)
    assert min(compose.floor_tokens, compose.credit_tokens, compose.capped_chunks) >= 1, "all three acted"


# ---------------------------------------------------------------- all policies


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
