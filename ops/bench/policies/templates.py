"""Benchmark of each policy template on the task that it is made for."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from engine.scheduling.policy import Policy, make_policy
from engine.scheduling.templates import TEMPLATES, template
from ops.bench.policies.figures import SEEDS, over_seeds
from ops.bench.policies.published_settings import A100_LLAMA_3_8B
from ops.reporting import Check, Report, Spread, number, quantile
from ops.simulate.engine_run import EngineRun, run_load
from ops.simulate.traffic.arrivals import (
    all_at_once,
    even_times,
    fixed,
    merged,
    poisson_times,
    stream,
    uniform,
)
from ops.simulate.traffic.requests import SimulatedRequest

SHORT_UNHURT_S = 0.5
"""A long prompt's time counts only where the short ones' P99 TTFT stays below it."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one template, and its figure."""

    template: str
    traffic: str
    draw: Callable[[int], list[SimulatedRequest]]
    figure: str
    measure: Callable[[EngineRun], float]
    more_is_better: bool


def _short_among_long(seed: int) -> list[SimulatedRequest]:
    rng = random.Random(seed)
    return merged(
        [
            stream(poisson_times(rng, 8.0, 150), "short", uniform(64, 256), rng),
            stream(even_times(rng, 0.1, 150), "long", fixed(8000, 64), rng),
        ]
    )


def _documents_at_once(seed: int) -> list[SimulatedRequest]:
    rng = random.Random(seed)

    def lengths(rng: random.Random) -> tuple[int, int]:
        return rng.randint(6000, 10_000), rng.randint(16, 48)

    return all_at_once(stream(range(120), "long", lengths, rng))


def _long_among_short(seed: int) -> list[SimulatedRequest]:
    rng = random.Random(seed)
    return merged(
        [
            stream(poisson_times(rng, 4.0, 200), "short", uniform(64, 256), rng),
            stream(even_times(rng, 0.2, 200), "long", fixed(12_000, 64), rng),
        ]
    )


def _short_ttft_p99_s(run: EngineRun) -> float:
    return quantile((each.ttft_s for each in run.of("short")), 0.99)


def _long_ttft_p99_s(run: EngineRun) -> float:
    return quantile((each.ttft_s for each in run.of("long")), 0.99)


def _long_ttft_short_unhurt_s(run: EngineRun) -> float:
    return _long_ttft_p99_s(run) if _short_ttft_p99_s(run) <= SHORT_UNHURT_S else float("inf")


TASKS = (
    Task(
        "interactive",
        "an 8k prompt every 10 s among 8 short ones a second",
        _short_among_long,
        "short TTFT p99, s",
        _short_ttft_p99_s,
        more_is_better=False,
    ),
    Task(
        "throughput",
        "120 documents of 6k to 10k with answers of 16 to 48, all at once",
        _documents_at_once,
        "tokens/s",
        lambda run: run.tokens_per_s,
        more_is_better=True,
    ),
    Task(
        "long-context",
        "a 12k prompt every 5 s among 4 short ones a second",
        _long_among_short,
        f"long TTFT p99, s, where that of short ones is below {SHORT_UNHURT_S:g} s",
        _long_ttft_short_unhurt_s,
        more_is_better=False,
    ),
)

COLUMNS = (
    ("traffic", "traffic"),
    ("figure", "figure"),
    ("template", "template"),
    ("value", "value"),
    ("short_ttft_p99_s", "short TTFT p99, s"),
    ("long_ttft_p99_s", "long TTFT p99, s"),
    ("tokens_per_s", "tokens/s"),
)


def templates(policies: Collection[str]) -> Report:
    """Each template on each task."""
    report = Report("each template on its own task and on the others'", COLUMNS)
    report.notes.append(
        f"{A100_LLAMA_3_8B.name}, {number(A100_LLAMA_3_8B.context_tokens)} tokens of context; the"
        " template sets prompts in progress, long threshold and tokens a step, the policy is the template's"
    )
    for task in TASKS:
        found: dict[str, Spread] = {}
        arrivals = {seed: task.draw(seed) for seed in SEEDS}
        for name in TEMPLATES:
            figures = over_seeds(SEEDS, lambda seed: _figures(name, task, arrivals[seed]))  # noqa: B023
            found[name] = figures["value"]
            report.rows.append({"traffic": task.traffic, "figure": task.figure, "template": name, **figures})
        own = found.pop(task.template)
        for name, other in found.items():
            # By more than the seeds differ: its worst run against the other's best.
            ratio = own.least / other.most if task.more_is_better else own.most / other.least
            report.checks.append(
                Check(
                    f"{task.template}'s worst seed over {name}'s best, {task.figure}",
                    ratio,
                    1.0,
                    at_most=not task.more_is_better,
                )
            )
    return report


def _figures(name: str, task: Task, arrivals: Sequence[SimulatedRequest]) -> dict[str, float]:
    settings = template(name, A100_LLAMA_3_8B.context_tokens)
    machine = replace(
        A100_LLAMA_3_8B,
        max_batched_tokens=settings.max_batched_tokens,
        max_sequences=settings.max_sequences,
    )

    def policy() -> Policy:
        return make_policy(settings.policy, settings.options)

    run = run_load(policy, arrivals, machine)
    return {
        "value": task.measure(run),
        "short_ttft_p99_s": _short_ttft_p99_s(run),
        "long_ttft_p99_s": _long_ttft_p99_s(run),
        "tokens_per_s": run.tokens_per_s,
    }
