"""Benchmarks of short requests among long ones, and of bad predictions."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import Policy, make_policy
from ops.bench.policies.capacity import at_load
from ops.bench.policies.figures import SEEDS, latency_figures, over_seeds
from ops.bench.policies.published_settings import A10G_LLAMA_2_7B, A100_LLAMA_3_8B, short_and_long
from ops.bench.policies.workloads import FEW_PLACES, heavy_tail
from ops.reporting import Check, Report, number, quantile
from ops.simulate.engine_run import run_load
from ops.simulate.machines.machines import Machine
from ops.simulate.traffic.arrivals import (
    PREDICTIONS,
    all_at_once,
    fixed,
    merged,
    poisson_times,
    stream,
    uniform,
)
from ops.simulate.traffic.requests import SimulatedRequest

MIXED_POLICIES = ("fcfs", "hrrn", "vtc", "hybrid")
INTERACTIVE = "hybrid, short ones in the interactive tier"
"""The same policy with tiers: the short ones' tier goes first, and prompts advance four at a
time in steps of a tenth of a second."""
INTERACTIVE_OPTIONS = PolicyOptions(max_num_partial_prefills=4, target_step_s=0.1)
BURST_REQUESTS = 300


@dataclass(frozen=True, slots=True)
class Mix:
    """Short requests with long ones among them."""

    name: str
    machine: Machine
    load: float
    draw: Callable[[random.Random], list[SimulatedRequest]]

    def arrivals(self, seed: int) -> list[SimulatedRequest]:
        """Drawn from `seed`, at the stated load."""
        return at_load(self.draw(random.Random(seed)), self.load, self.machine)


def _long_prompts(rng: random.Random) -> list[SimulatedRequest]:
    seconds = 150.0
    return merged(
        [
            stream(poisson_times(rng, 6.0, seconds), "short", uniform(64, 512), rng),
            stream(poisson_times(rng, 0.25, seconds), "long", fixed(8000, 128), rng),
        ]
    )


MIXES = (
    Mix("8k prompts among short ones", A100_LLAMA_3_8B, 0.7, _long_prompts),
    Mix("poisson_short_long", A10G_LLAMA_2_7B, 0.8, short_and_long((64, 64), (256, 256), 150.0)),
)

COLUMNS = (
    ("mix", "mix"),
    ("policy", "policy"),
    ("short_ttft_p50_s", "short TTFT p50, s"),
    ("short_ttft_p99_s", "p99, s"),
    ("long_ttft_p99_s", "long TTFT p99, s"),
    ("short_tpot_p99_s", "short TPOT p99, s"),
    ("tokens_per_s", "tokens/s"),
    ("burst_tokens_per_s", "tokens/s, all at once"),
)


def mixed(policies: Collection[str]) -> Report:
    """Each mix under each policy, and the short ones by themselves."""
    report = Report("short requests among long ones", COLUMNS)
    for mix in MIXES:
        arrivals = {seed: mix.arrivals(seed) for seed in SEEDS}
        per_s = len(arrivals[SEEDS[0]]) / arrivals[SEEDS[0]][-1].arrival_s
        report.notes.append(
            f"{mix.name}: {mix.machine.name}; load {number(mix.load)}, {number(per_s)} requests/s,"
            f" {number(sum(each.kind == 'short' for each in arrivals[SEEDS[0]]))} short ones a seed"
        )
        alone = over_seeds(SEEDS, lambda seed: _alone(mix, arrivals[seed]))  # noqa: B023
        report.rows.append({"mix": mix.name, "policy": "fcfs, short ones alone", **alone})
        found = {
            policy: over_seeds(SEEDS, lambda seed: _together(policy, mix, arrivals[seed]))  # noqa: B023
            for policy in [*policies, *([INTERACTIVE] if "hybrid" in policies else [])]
        }
        report.rows.extend({"mix": mix.name, "policy": name, **row} for name, row in found.items())
        if {"fcfs", "hybrid"} <= found.keys():
            fcfs, hybrid = found["fcfs"], found["hybrid"]
            p99 = hybrid["short_ttft_p99_s"].median
            checks = (
                Check("short P99 TTFT, hybrid / fcfs", p99 / fcfs["short_ttft_p99_s"].median, 1 / 3),
                Check("short P99 TTFT, hybrid / alone", p99 / alone["short_ttft_p99_s"].median, 1.5),
                Check(
                    "tokens/s, hybrid / fcfs",
                    hybrid["tokens_per_s"].median / fcfs["tokens_per_s"].median,
                    0.95,
                    at_most=False,
                ),
            )
            report.checks.extend(
                Check(f"{mix.name}: {check.what}", check.value, check.limit, check.at_most)
                for check in checks
            )
    return report


def _alone(mix: Mix, arrivals: Sequence[SimulatedRequest]) -> dict[str, float]:
    short = [arrival for arrival in arrivals if arrival.kind == "short"]
    run = run_load("fcfs", short, mix.machine)
    figures = latency_figures(run.served)
    return {
        "short_ttft_p50_s": figures["ttft_p50_s"],
        "short_ttft_p99_s": figures["ttft_p99_s"],
        "short_tpot_p99_s": figures["tpot_p99_s"],
        "tokens_per_s": run.tokens_per_s,
    }


def _together(name: str, mix: Mix, arrivals: Sequence[SimulatedRequest]) -> dict[str, float]:
    policy: str | Callable[[], Policy] = name
    if name == INTERACTIVE:
        policy = _interactive
        arrivals = [replace(arrival, tier=0 if arrival.kind == "short" else 1) for arrival in arrivals]
    run = run_load(policy, arrivals, mix.machine)
    burst = run_load(policy, all_at_once(arrivals[:BURST_REQUESTS]), mix.machine)
    return {
        "short_ttft_p50_s": quantile((each.ttft_s for each in run.of("short")), 0.5),
        "short_ttft_p99_s": quantile((each.ttft_s for each in run.of("short")), 0.99),
        "long_ttft_p99_s": quantile((each.ttft_s for each in run.of("long")), 0.99),
        "short_tpot_p99_s": quantile((each.tpot_s for each in run.of("short")), 0.99),
        "tokens_per_s": run.tokens_per_s,
        "burst_tokens_per_s": burst.tokens_per_s,
    }


def _interactive() -> Policy:
    return make_policy("hybrid", INTERACTIVE_OPTIONS)


PREDICTION_COLUMNS = (
    ("policy", "policy"),
    ("predictions", "predictions"),
    ("ttft_mean_s", "TTFT mean, s"),
    ("ttft_p99_s", "TTFT p99, s"),
    ("e2e_mean_s", "E2E mean, s"),
    ("e2e_p99_s", "E2E p99, s"),
)
PREDICTION_LOAD = 0.95
PREDICTED = ("sjf", "srpt", "las", "hybrid")


def with_predictions(policies: Collection[str]) -> Report:
    """Orders by predicted length, with predictions from exact to worthless."""
    report = Report("predictions from exact to worthless, heavy-tailed answers", PREDICTION_COLUMNS)
    machine = FEW_PLACES
    arrivals = {seed: at_load(heavy_tail(seed), PREDICTION_LOAD, machine) for seed in SEEDS}
    report.notes.append(
        f"load {number(PREDICTION_LOAD)} on {machine.name}, {len(arrivals[1])} requests a seed"
    )

    def figures(policy: str, predictions: str) -> Callable[[int], dict[str, float]]:
        return lambda seed: latency_figures(
            run_load(policy, arrivals[seed], machine, predictions=PREDICTIONS[predictions], seed=seed).served
        )

    baseline = over_seeds(SEEDS, figures("fcfs", "exact"))
    report.rows.append({"policy": "fcfs", "predictions": "not used for the order", **baseline})
    for policy in policies:
        for predictions in PREDICTIONS:
            found = over_seeds(SEEDS, figures(policy, predictions))
            report.rows.append({"policy": policy, "predictions": predictions, **found})
            if (policy, predictions) == ("sjf", "shuffled"):
                report.checks.append(
                    Check(
                        "P99 TTFT, sjf with shuffled predictions over fcfs",
                        found["ttft_p99_s"].median / baseline["ttft_p99_s"].median,
                        1.2,
                    )
                )
    return report
