"""Contests that show each policy's strength and weakness.

One contest: a policy against another on one kind of traffic, by one figure. Every policy has one that it is
made for and the one that is known to be its weak side; both are shown by the number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from ops.bench.policies.batches import PADDED, UNPADDED, unlike_documents
from ops.bench.policies.figures import SEEDS, service_bound, spread, widest_gap
from ops.bench.policies.workloads import (
    FEW_PLACES,
    FOUR_PLACES,
    LITTLE_MEMORY,
    LONG_CONTEXT,
    Traffic,
    alike,
    brief,
    clumps,
    flood,
    heavy_tail,
    hot_and_cold,
    long_prompts,
    short_and_long_contexts,
    tenants_with_prefixes,
    two_backlogged,
    unlike_prompts,
    with_deadlines,
)
from ops.reporting import Check, Report, Spread, number, quantile
from ops.simulate.engine_run import EngineRun, run_load, tenants_of
from ops.simulate.traffic.arrivals import PREDICTIONS
from ops.simulate.traffic.requests import SimulatedRequest

Measure = Callable[[EngineRun], float]


@dataclass(frozen=True, slots=True)
class Figure:
    """A compared figure."""

    name: str
    measure: Measure
    more_is_better: bool = False
    watch: bool = False


def _mean_e2e_s(run: EngineRun) -> float:
    return statistics.fmean(each.e2e_s for each in run.served)


def _mean_ttft_s(run: EngineRun) -> float:
    return statistics.fmean(each.ttft_s for each in run.served)


def _p99_gap_s(run: EngineRun) -> float:
    return quantile((each.longest_gap_s for each in run.served), 0.99)


def _ttft_p50_s(run: EngineRun) -> float:
    return quantile((each.ttft_s for each in run.served), 0.5)


def _ttft_p99_s(run: EngineRun) -> float:
    return quantile((each.ttft_s for each in run.served), 0.99)


def _longest_ttft_s(run: EngineRun) -> float:
    return max(each.ttft_s for each in run.served)


def _ttft_p99_of(kind: str) -> Measure:
    return lambda run: quantile((each.ttft_s for each in run.of(kind)), 0.99)


def _e2e_p99_of(kind: str) -> Measure:
    return lambda run: quantile((each.e2e_s for each in run.of(kind)), 0.99)


def _share_in_time(run: EngineRun) -> float:
    return sum(each.meets_target for each in run.served) / len(run.served)


def _cached_share(run: EngineRun) -> float:
    return sum(each.cached_tokens for each in run.served) / sum(
        each.arrival.input_tokens for each in run.served
    )


def _gap_over_bound(run: EngineRun) -> float:
    arrivals = [each.arrival for each in run.served]
    weights = tenants_of(arrivals)
    longest = max(arrival.input_tokens for arrival in arrivals)
    return widest_gap(run.moments, weights) / service_bound(FEW_PLACES.kv_tokens, longest, weights)


def _kv_of_long_over_short(run: EngineRun) -> float:
    both = [moment.kv_tokens for moment in run.moments if {"long", "short"} <= moment.backlogged]
    long = sum(held.get("long", 0) for held in both)
    return long / max(1, sum(held.get("short", 0) for held in both))


MEAN_E2E = Figure("E2E mean, s", _mean_e2e_s)
MEAN_TTFT = Figure("TTFT mean, s", _mean_ttft_s)
TTFT_P50 = Figure("TTFT p50, s", _ttft_p50_s)
TTFT_P99 = Figure("TTFT p99, s", _ttft_p99_s)
LONGEST_TTFT = Figure("longest TTFT, s", _longest_ttft_s)
LONGEST_GAP = Figure("longest gap between tokens, p99, s", _p99_gap_s)
THROUGHPUT = Figure("tokens/s", lambda run: run.tokens_per_s, more_is_better=True)
RECOMPUTED = Figure("tokens recomputed", lambda run: float(run.recomputed_tokens))
SHORT_P99 = Figure("short TTFT p99, s", _ttft_p99_of("short"))
LONG_P99 = Figure("long TTFT p99, s", _ttft_p99_of("long"))
CALM_P99 = Figure("calm tenant's TTFT p99, s", _ttft_p99_of("calm"))
URGENT_P99 = Figure("urgent E2E p99, s", _e2e_p99_of("urgent"))
PATIENT_P99 = Figure("patient E2E p99, s", _e2e_p99_of("patient"))
IN_TIME = Figure("share in time", _share_in_time, more_is_better=True)
CACHED = Figure("prompt tokens found in the cache, share", _cached_share, more_is_better=True)
GAP = Figure("service difference / 2U", _gap_over_bound, watch=True)
KV_SHARE = Figure("KV of the long tenant / of the short one", _kv_of_long_over_short, watch=True)


TAIL_AT_ONCE = Traffic("heavy-tailed answers, all at once", heavy_tail, at_once=True)
TAIL = Traffic("heavy-tailed answers, load 0.95", heavy_tail, load=0.95)
TAIL_FOUR_PLACES = Traffic(
    "heavy-tailed answers, load 0.8, four places, memory for all", heavy_tail, FOUR_PLACES, 0.8
)
TAIL_LITTLE_MEMORY = Traffic(
    "heavy-tailed answers, load 0.95, little memory", heavy_tail, LITTLE_MEMORY, 0.95
)
CLUMPS = Traffic("clumps of 16 requests within 40 ms", clumps)
SPARSE = Traffic("brief requests alike, load 0.05", brief, load=0.05)
ALIKE = Traffic("requests alike, load 0.95", alike, load=0.95)
UNLIKE_PROMPTS = Traffic("unlike prompts, load 0.95", unlike_prompts, load=0.95)
DEADLINES = Traffic("SLOs of 6 s and 30 s, load 0.95", with_deadlines, load=0.95)
DEADLINES_OVERLOAD = Traffic("SLOs of 6 s and 30 s, load 1.5", with_deadlines, load=1.5)
PREFIXES = Traffic(
    "eight tenants, each with a prefix of its own, load 2", tenants_with_prefixes, LITTLE_MEMORY, 2.0
)
HOT_AND_COLD = Traffic("half the prompts share eight prefixes, load 1.2", hot_and_cold, LITTLE_MEMORY, 1.2)
BACKLOGGED = Traffic("two tenants backlogged, large and small requests", two_backlogged)
FLOOD = Traffic("a calm tenant beside a flood", flood)
CONTEXTS = Traffic("tenants of long and of short contexts, both backlogged", short_and_long_contexts)
LONG_PROMPTS = Traffic("8k prompts among short ones, load 0.7", long_prompts, LONG_CONTEXT, 0.7)
BUCKETS_PADDED = Traffic(
    "unlike prompts and brief answers, load 0.95, padded", unlike_documents, PADDED, 0.95
)
BUCKETS_UNPADDED = Traffic(
    "unlike prompts and brief answers, load 0.95, nothing padded", unlike_documents, UNPADDED, 0.95
)


@dataclass(frozen=True, slots=True)
class Contest:
    """A policy against another on one kind of traffic, by one figure."""

    policy: str
    wins: bool
    against: str
    traffic: Traffic
    figure: Figure
    predictions: str = "exact"
    even: float | None = None
    """Figure of a perfect policy, where the policy is compared with that."""

    def measured(self, policy: str) -> Spread:
        """The figure over all seeds."""
        return spread([self.figure.measure(_run(policy, self, seed)) for seed in SEEDS])


CONTESTS: tuple[Contest, ...] = (
    Contest("static", True, "fcfs", TAIL_AT_ONCE, LONGEST_GAP),
    Contest("static", False, "fcfs", TAIL_AT_ONCE, THROUGHPUT),
    Contest("dynamic", True, "static", CLUMPS, MEAN_E2E),
    Contest("dynamic", False, "fcfs", SPARSE, TTFT_P50),
    Contest("buckets", True, "fcfs", BUCKETS_PADDED, TTFT_P99),
    Contest("buckets", False, "fcfs", BUCKETS_UNPADDED, MEAN_TTFT),
    Contest("fcfs", True, "sjf", TAIL, LONGEST_TTFT),
    Contest("fcfs", False, "hrrn", UNLIKE_PROMPTS, MEAN_TTFT),
    Contest("hrrn", True, "fcfs", UNLIKE_PROMPTS, MEAN_TTFT),
    Contest("hrrn", False, "sjf", TAIL_AT_ONCE, MEAN_E2E),
    Contest("sjf", True, "fcfs", TAIL_AT_ONCE, MEAN_E2E),
    Contest("sjf", False, "fcfs", TAIL, TTFT_P99, "shuffled"),
    Contest("srpt", True, "sjf", TAIL_FOUR_PLACES, MEAN_E2E),
    Contest("srpt", False, "sjf", TAIL, LONGEST_GAP),
    Contest("las", True, "fcfs", TAIL, MEAN_E2E, "none"),
    Contest("las", False, "fcfs", ALIKE, MEAN_E2E),
    Contest("mlfq", True, "fcfs", TAIL, MEAN_E2E, "none"),
    Contest("mlfq", False, "fcfs", TAIL_LITTLE_MEMORY, RECOMPUTED, "none"),
    Contest("priority", True, "fcfs", DEADLINES, URGENT_P99),
    Contest("priority", False, "fcfs", DEADLINES_OVERLOAD, PATIENT_P99),
    Contest("edf", True, "fcfs", DEADLINES, IN_TIME),
    Contest("edf", False, "fcfs", DEADLINES_OVERLOAD, IN_TIME),
    Contest("drr", True, "vtc", PREFIXES, CACHED),
    Contest("drr", False, "vtc", BACKLOGGED, GAP),
    Contest("dlpm", True, "drr", HOT_AND_COLD, CACHED),
    Contest("dlpm", False, "vtc", BACKLOGGED, GAP),
    Contest("vtc", True, "fcfs", FLOOD, CALM_P99),
    Contest("vtc", False, "an even split", CONTEXTS, KV_SHARE, even=1.0),
    Contest("hybrid", True, "fcfs", LONG_PROMPTS, SHORT_P99),
    Contest("hybrid", False, "fcfs", LONG_PROMPTS, LONG_P99),
)
"""`static-padded` decides as `static` does: its padding is in the table of `policies_batches`."""

COLUMNS = (
    ("policy", "policy"),
    ("side", "wins or loses"),
    ("against", "against"),
    ("traffic", "traffic"),
    ("figure", "figure"),
    ("value", "its value"),
    ("other", "the other's"),
    ("shown", "shown"),
)


def contests(policies: Collection[str]) -> Report:
    """Every contest of `policies`."""
    report = Report("where each policy wins and where it loses", COLUMNS)
    for contest in CONTESTS:
        if contest.policy not in policies:
            continue
        own = contest.measured(contest.policy)
        other = spread([contest.even]) if contest.even is not None else contest.measured(contest.against)
        side = "wins" if contest.wins else "loses"
        if contest.predictions != "exact":
            side += f", predictions: {contest.predictions}"
        ratio = own.median / other.median if other.median else float("inf" if own.median else "nan")
        what = f"{contest.policy} {side}, against {contest.against}, {contest.traffic.name}"
        # More of a good thing wins, less of a bad one.
        check = Check(
            f"{what}: {contest.figure.name}",
            ratio,
            0.999 if contest.wins != contest.figure.more_is_better else 1.001,
            at_most=contest.wins != contest.figure.more_is_better,
        )
        report.checks.append(check)
        report.rows.append(
            {
                "policy": contest.policy,
                "side": side,
                "against": contest.against,
                "traffic": contest.traffic.name,
                "figure": contest.figure.name,
                "value": own,
                "other": other,
                "shown": f"{number(ratio)} times" + ("" if check.ok else ": NOT shown"),
            }
        )
    return report


def _run(policy: str, contest: Contest, seed: int) -> EngineRun:
    figure = contest.figure
    return _cached_run(policy, contest.traffic, contest.predictions, seed, figure.watch, figure is KV_SHARE)


@lru_cache(maxsize=64)
def _cached_run(
    policy: str, traffic: Traffic, predictions: str, seed: int, watch: bool, watch_running: bool
) -> EngineRun:
    return run_load(
        policy,
        _cached_arrivals(traffic, seed),
        traffic.machine,
        predictions=PREDICTIONS[predictions],
        seed=seed,
        watch=watch,
        watch_running=watch_running,
    )


@lru_cache(maxsize=64)
def _cached_arrivals(traffic: Traffic, seed: int) -> list[SimulatedRequest]:
    return traffic.arrivals(seed)
