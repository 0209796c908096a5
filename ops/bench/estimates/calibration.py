"""Benchmark of estimates on arrival: how often times stay below their p50 and p90 under stationary load.

Poisson streams of unlike tenants; in the last scenario groups of `TOGETHER` quote together and all redeem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import NormalDist
from typing import Any, cast

from engine.messages import StepTime
from ops.bench.estimates.calibration_pool import CalibratedPool, EstimateOutcome
from ops.pages.charts import ChartLine, LineChart
from ops.reporting import table
from ops.simulate.machines.machines import profile_machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.predictions import Exact
from ops.simulate.traffic.requests import SimulatedRequest

MACHINE = profile_machine(
    "8B",
    # About a model of 8B on one GPU of 2023: 20 ms a step, 10,000 prompt tokens a second.
    StepTime(20e-3, 100e-6, 2e-9, 200e-6, samples=1000, relative_error=0.02),
    max_sequences=32,
    max_batched_tokens=512,
    kv_tokens=131_072,
    context_tokens=8192,
)
LOADS = (0.5, 0.8, 0.95)
REQUESTS = 5_000
WARM_UP = 1_500
TOGETHER = 50
QUOTED_EVERY_S = 10.0
QUOTING_BESIDE = 0.15
"""Load of the requests that come without a quote meanwhile."""
REDEEM_WITHIN_S = 1.0
MAX_TOKENS = 512
LENGTH_SPREAD = 0.6
NOMINAL = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
LOWEST, HIGHEST = 0.88, 0.92
WHATS = ("wait", "ttft", "tpot", "e2e")
HELD_TO = ("ttft", "e2e")
"""Times whose p90 must cover `LOWEST` to `HIGHEST`; waits are often exactly nothing."""

CHART_TITLES = {"ttft": "Time to the first token", "e2e": "Time to the last token"}
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sender:
    tenant: str
    tier: int
    share: float
    median_output: int
    longest_input: int
    weight: float = 1.0


SENDERS = (
    Sender("chat", 0, 0.25, 40, 200),
    Sender("search", 1, 0.20, 20, 600),
    Sender("code", 1, 0.20, 90, 400, weight=2.0),
    Sender("letters", 1, 0.15, 150, 100),
    Sender("reports", 2, 0.10, 200, 800),
    Sender("tags", 2, 0.10, 5, 300),
)


def run(
    *,
    seed: int = 1,
    requests: int = REQUESTS,
    loads: Sequence[float] = LOADS,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Every load, then the quotes; `ok` says whether each kept its limits."""
    per_s, rows = capacity(seed), []
    for name, load, quotes in [
        *((f"load {load:g}", load, False) for load in loads),
        (f"{TOGETHER} quote together", QUOTING_BESIDE, True),
    ]:
        progress(name)
        rows.append({"name": name, **scenario(seed, load * per_s, requests, quotes=quotes)})
    ok = all(row["ok"] for row in rows)
    about = {"seed": seed, "requests": requests, "capacity_requests_per_s": round(per_s, 2)}
    return about | {"scenarios": rows, "ok": ok}


def capacity(seed: int) -> float:
    """Requests a second that keep every place taken, by the work that they are."""
    rng = random.Random(f"{seed} capacity")
    requests = [_request(rng, 0.0) for _ in range(1500)]
    pool = SimulatedPool(
        "vtc", MACHINE, predictions=Exact(), prefix_caching=False, stepwise=True, declared_tokens=0
    )
    pool.run([replace(request, tier=1) for request in requests], until_s=60.0)
    mean_cost = sum(request.cost for request in requests) / len(requests)
    return sum(pool.service.values()) / pool.now_s / mean_cost


def scenario(
    seed: int, per_s: float, requests: int, *, quotes: bool = False, warm_up: int = WARM_UP
) -> Report:
    """One load, until `requests` were judged after the first `warm_up`; with `quotes` as many binding."""
    ended: list[EstimateOutcome] = []
    counted = 0

    def note(outcome: EstimateOutcome) -> None:
        nonlocal counted
        ended.append(outcome)
        counted += len(ended) > warm_up and outcome.binding == quotes

    pool = CalibratedPool(MACHINE, max_tokens=MAX_TOKENS, on_end=note)
    rng = random.Random(f"{seed} {per_s}")
    stream = _quoting(pool, rng, per_s) if quotes else _poisson(rng, per_s)

    def until_enough() -> Iterator[SimulatedRequest]:
        for request in stream:
            if counted >= requests:
                return
            yield request

    pool.pool.run(until_enough())
    judged = ended[warm_up:]
    groups = {"plain": _figures([outcome for outcome in judged if not outcome.binding])}
    if quotes:
        groups["binding"] = _figures([outcome for outcome in judged if outcome.binding])
    return {
        "requests_per_s": round(per_s, 2),
        "replays": pool.estimates.forecast_cache.replays,
        "groups": groups,
        "ok": all(map(holds, groups.values())),
    }


def _figures(judged: Sequence[EstimateOutcome]) -> Report:
    """Coverage at both quantiles and pinball loss of every figure."""
    figures: Report = {"requests": len(judged)}
    for what in WHATS:
        pairs = [
            (getattr(outcome.estimate, f"{what}_s"), actual)
            for outcome in judged
            if (actual := _actual(outcome, what)) is not None
        ]
        figures[what] = coverage(pairs)
    figures["output_tokens"] = coverage([(one.estimate.output_tokens, one.emitted_tokens) for one in judged])
    figures["cost"] = coverage([(one.estimate.cost_nanousd, one.cost_nanousd) for one in judged])
    figures["above_max_cost"] = sum(one.cost_nanousd > one.estimate.max_cost_nanousd for one in judged)
    return figures


def _curve(pairs: Sequence[tuple[tuple[float, float], float]]) -> list[tuple[float, float]]:
    """Nominal share, and the share of truths below that quantile of a lognormal through p50 and p90."""
    normal = NormalDist()
    curve: list[tuple[float, float]] = []
    for nominal in NOMINAL:
        z = normal.inv_cdf(nominal) / normal.inv_cdf(0.9)
        below = sum(actual <= p50 * (p90 / p50) ** z for (p50, p90), actual in pairs if p50 > 0 < p90)
        curve.append((nominal, round(below / max(1, len(pairs)), 4)))
    return curve


def coverage(pairs: Sequence[tuple[tuple[float, float], float]]) -> Report:
    """Of (p50 and p90, actual) pairs: shares at or under each, pinball losses, and the whole curve."""
    if not pairs:
        return {"p50": None, "p90": None}
    count = len(pairs)
    return {
        "p50": round(sum(actual <= estimate[0] for estimate, actual in pairs) / count, 4),
        "p90": round(sum(actual <= estimate[1] for estimate, actual in pairs) / count, 4),
        "pinball_p50": round(sum(pinball(estimate[0], actual, 0.5) for estimate, actual in pairs) / count, 5),
        "pinball_p90": round(sum(pinball(estimate[1], actual, 0.9) for estimate, actual in pairs) / count, 5),
        "mean_actual": round(sum(actual for _, actual in pairs) / count, 5),
        "curve": _curve(pairs),
    }


def pinball(estimate: float, actual: float, quantile: float) -> float:
    """The loss that a true quantile minimises."""
    return max(quantile * (actual - estimate), (quantile - 1) * (actual - estimate))


def holds(figures: Report) -> bool:
    """Whether one group of requests keeps the limits."""
    times = all(LOWEST <= figures[what]["p90"] <= HIGHEST for what in HELD_TO)
    counts = all(figures[what]["p90"] >= LOWEST for what in ("output_tokens", "cost"))
    return times and counts and figures["above_max_cost"] == 0


def _actual(outcome: EstimateOutcome, what: str) -> float | None:
    if what == "tpot":
        return outcome.times.tpot_s(outcome.emitted_tokens)
    return cast("float | None", getattr(outcome.times, f"{what}_s"))


def _poisson(rng: random.Random, per_s: float) -> Iterator[SimulatedRequest]:
    at_s = 0.0
    while True:
        at_s += rng.expovariate(per_s)
        yield _request(rng, at_s)


def _quoting(pool: CalibratedPool, rng: random.Random, per_s: float) -> Iterator[SimulatedRequest]:
    """Beside a steady stream, groups that quote at one instant and all come within a second."""
    plain = _poisson(rng, per_s)
    coming = next(plain)
    group_s = QUOTED_EVERY_S
    while True:
        while coming.arrival_s < group_s:
            yield coming
            coming = next(plain)
        group = sorted(
            (_request(rng, group_s + rng.uniform(0, REDEEM_WITHIN_S)) for _ in range(TOGETHER)),
            key=lambda request: request.arrival_s,
        )
        for request in group:
            pool.quote(request)
        for request in group:
            while coming.arrival_s < request.arrival_s:
                yield coming
                coming = next(plain)
            yield request
        group_s += QUOTED_EVERY_S


def _request(rng: random.Random, at_s: float) -> SimulatedRequest:
    sender = rng.choices(SENDERS, [sender.share for sender in SENDERS])[0]
    output = round(sender.median_output * exp(rng.gauss(0.0, LENGTH_SPREAD)))
    return SimulatedRequest(
        at_s,
        sender.tenant,
        rng.randint(10, sender.longest_input),
        min(MAX_TOKENS, max(1, output)),
        tier=sender.tier,
        weight=sender.weight,
    )


def show(report: Report) -> None:
    rows = [
        (
            f"{scenario['name']}, {group}",
            figures["requests"],
            what,
            *(f"{100 * figures[what][key]:.1f} %" for key in ("p50", "p90")),
            *(f"{figures[what][key]:.4g}" for key in ("pinball_p50", "pinball_p90", "mean_actual")),
        )
        for scenario in report["scenarios"]
        for group, figures in scenario["groups"].items()
        for what in (*WHATS, "output_tokens", "cost")
        if figures[what]["p90"] is not None
    ]
    columns = ("scenario", "requests", "what", "under p50", "under p90", "pinball p50", "p90", "mean actual")
    table("what was told on arrival against what happened", columns, rows)
    print(
        f"wanted: {100 * LOWEST:.0f}-{100 * HIGHEST:.0f} % of the times to the first and to the last token"
        f" under their p90, at least {100 * LOWEST:.0f} % of lengths and costs, no cost above its most:"
        f" {'ok' if report['ok'] else 'NOT ok'}"
    )


def reliability_charts(report: dict[str, Any]) -> list[LineChart]:
    """For each time the told quantile across, the share of requests at or under it up."""
    return [
        LineChart(
            CHART_TITLES[what],
            "told quantile",
            "share at or under it",
            [
                ChartLine(f"{scenario['name']}, {group}", [tuple(point) for point in figures[what]["curve"]])
                for scenario in report["scenarios"]
                for group, figures in scenario["groups"].items()
            ],
            y_most=1.0,
            has_diagonal=True,
        )
        for what in HELD_TO
    ]
