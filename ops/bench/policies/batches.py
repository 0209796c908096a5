"""Benchmarks of static and dynamic batching, of padding, and of length buckets."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from ops.bench.policies.capacity import at_load, sustained_per_s
from ops.bench.policies.figures import SEEDS, LatencyTargets, latency_figures, over_seeds
from ops.bench.policies.published_settings import A10G_LLAMA_2_7B, ARENA_TRACE
from ops.reporting import Check, Report, number
from ops.simulate.engine_run import run_load
from ops.simulate.machines.machines import Machine
from ops.simulate.traffic.arrivals import all_at_once, from_trace, poisson_times, stream
from ops.simulate.traffic.requests import SimulatedRequest

REQUESTS = 300
UNPADDED = A10G_LLAMA_2_7B
PADDED = replace(UNPADDED, name=f"{UNPADDED.name}, padded shapes", padded=True)
KEEPS_ROWS = replace(UNPADDED, name=f"{UNPADDED.name}, padded batches", keeps_rows=True)
LOAD = 0.3


def arena_lengths(seed: int) -> list[SimulatedRequest]:
    """Lengths of real chat requests (input p50 40, p99 902; output p50 211, p99 785), Poisson arrivals."""
    rng = random.Random(seed)
    drawn = rng.sample(from_trace(ARENA_TRACE), REQUESTS)
    times = poisson_times(rng, 1.0, 2.0 * REQUESTS)[:REQUESTS]
    return [
        replace(arrival, arrival_s=at_s, tenant="one", kind="all")
        for arrival, at_s in zip(drawn, times, strict=True)
    ]


BATCHING_COLUMNS = (
    ("traffic", "traffic"),
    ("batching", "batching"),
    ("tokens_per_s", "tokens/s"),
    ("ttft_p50_s", "TTFT p50, s"),
    ("ttft_p99_s", "TTFT p99, s"),
    ("tpot_p50_s", "TPOT p50, s"),
    ("e2e_mean_s", "E2E mean, s"),
    ("padding", "padding / tokens computed"),
)

KINDS: tuple[tuple[str, str, Machine], ...] = (
    ("static, padded", "static", KEEPS_ROWS),
    ("static, unpadded", "static", UNPADDED),
    ("dynamic, padded", "dynamic", KEEPS_ROWS),
    ("dynamic, unpadded", "dynamic", UNPADDED),
    ("continuous (fcfs)", "fcfs", UNPADDED),
)


def batching(policies: Collection[str]) -> Report:
    """Static, dynamic and continuous batching of the same requests."""
    report = Report("static, dynamic and continuous batching", BATCHING_COLUMNS)
    report.notes.append(f"{UNPADDED.name}; lengths of the arena trace, {REQUESTS} requests a seed")

    def figures(policy: str, machine: Machine, arrivals: Sequence[SimulatedRequest]) -> dict[str, float]:
        run = run_load(policy, arrivals, machine)
        return {
            **latency_figures(run.served),
            "tokens_per_s": run.tokens_per_s,
            "padding": run.padded_tokens / run.computed_tokens,
        }

    for traffic in (f"load {number(LOAD)}", "all at once"):
        arrivals = {
            seed: all_at_once(arena_lengths(seed))
            if traffic == "all at once"
            else at_load(arena_lengths(seed), LOAD, UNPADDED)
            for seed in SEEDS
        }
        for name, policy, machine in KINDS:
            if policy in policies:
                found = over_seeds(SEEDS, lambda seed: figures(policy, machine, arrivals[seed]))  # noqa: B023
                report.rows.append({"traffic": traffic, "batching": name, **found})
    return report


def unlike_documents(seed: int) -> list[SimulatedRequest]:
    """Prompts from 16 to 2,048 tokens, as many of each doubling; answers of 8 to 32 tokens; Poisson."""
    rng = random.Random(seed)

    def lengths(rng: random.Random) -> tuple[int, int]:
        return round(2 ** rng.uniform(4, 11)), rng.randint(8, 32)

    return stream(poisson_times(rng, 1.0, float(REQUESTS)), "one", lengths, rng, kind="all")


BUCKET_COLUMNS = (
    ("traffic", "traffic"),
    ("shapes", "shapes"),
    ("policy", "policy"),
    ("sustained_per_s", "requests/s at 80 % attainment"),
    ("over_fcfs", "over fcfs"),
)
SLO = LatencyTargets(ttft_s=5.0, tpot_s=0.2)
WANTED = 0.8
PUBLISHED_RATIO = 1.93
UNLIKE = "prompts of 16 to 2,048 tokens, brief answers"
BUCKET_TRAFFIC = {UNLIKE: unlike_documents, "arena lengths": arena_lengths}


def buckets(policies: Collection[str]) -> Report:
    """The most load under which four of five requests meet the SLO, with and without padding."""
    report = Report("sustained load at 80 % attainment, buckets over fcfs", BUCKET_COLUMNS)
    report.notes.extend(
        [
            f"{UNPADDED.name}; about {REQUESTS} requests a seed, Poisson; attained:"
            f" TTFT <= {number(SLO.ttft_s)} s and TPOT <= {number(SLO.tpot_s)} s, of all submitted;"
            " bisected to 9 %",
            f"published: {PUBLISHED_RATIO} times the load at 80 % attainment (BucketServe, arXiv 2507.17120),"
            " against DistServe, two instances with prefill and decode apart, on a machine of its own: beside"
            " it, not like for like",
        ]
    )
    for traffic, draw in BUCKET_TRAFFIC.items():
        mixes = {seed: draw(seed) for seed in SEEDS}
        for shapes, machine in (("padded", PADDED), ("unpadded", UNPADDED)):
            baseline: dict[int, float] = {}
            for policy in ["fcfs", *(name for name in policies if name != "fcfs")]:
                rates = {
                    seed: sustained_per_s(policy, mixes[seed], machine, SLO, wanted=WANTED) for seed in SEEDS
                }
                baseline = baseline or rates
                found = over_seeds(
                    SEEDS,
                    lambda seed: {
                        "sustained_per_s": rates[seed],  # noqa: B023
                        "over_fcfs": rates[seed] / baseline[seed],  # noqa: B023
                    },
                )
                report.rows.append({"traffic": traffic, "shapes": shapes, "policy": policy, **found})
                if (traffic, shapes, policy) == (UNLIKE, "padded", "buckets"):
                    what = f"{UNLIKE}, padded: sustained load, buckets over fcfs"
                    report.checks.append(Check(what, found["over_fcfs"].least, 1.0, at_most=False))
    return report
