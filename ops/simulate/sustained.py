"""Sustained load of each policy on each trace: goodput as in DistServe (OSDI 2024), by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ops.simulate.run import Scenario, run_policy
from ops.simulate.traffic.requests import Source, Sped

WANTED = 0.9
BISECTIONS = 4
PRECISION = 2 ** (1 / 2**BISECTIONS)
"""Largest factor by which the found rate is below the true one, if attainment falls with the rate."""
MOST_DOUBLINGS = 10
LEAST_SPAN_S = 5.0
"""Requests within a shorter span are one burst, and show no rate that can be sustained."""
BASELINES = ("static-padded", "static", "dynamic", "fcfs", "hybrid")
PUBLISHED = (
    "Orca (OSDI 2022): 36.9 x FasterTransformer's throughput (static batches, padded; GPT-3 175B, at equal"
    " median latency)",
    "BucketServe (arXiv 2507.17120): 1.93 x the load of DistServe at 80 % attainment, 3.58 x UELLM's"
    " throughput",
    "ARES (2025): P99 TPOT -74.77 %, goodput up to 2.24 x, by decode rescheduling on predicted lengths",
)


@dataclass(frozen=True, slots=True)
class Sustained:
    policy: str
    rate_per_s: float
    """0: not even the slowest rate tried met the SLO often enough."""
    attainment: float
    runs: int
    is_least: bool = False
    """It may sustain more: the source is too short to tell."""
    speed: float = 1.0
    """That rate, in the source's own."""


def sustained(
    scenario: Scenario,
    policy: str,
    *,
    wanted: float = WANTED,
    limit: int | None = None,
    start_speed: float = 1.0,
) -> Sustained:
    """Of one policy; `start_speed`: the first that is tried. Raises as `run_policy` does."""
    attained: dict[float, float] = {}
    rates: dict[float, float] = {}
    span_s = 0.0

    def holds(speed: float) -> bool:
        nonlocal span_s
        pool, _ = run_policy(replace(scenario, source=Sped(scenario.source, speed, limit)), policy)
        records = pool.records
        attained[speed] = sum(scenario.slo.met(records, row) for row in range(len(records))) / len(records)
        span_s = max(max(records.arrival_s), 1e-9)
        rates[speed] = len(records) / span_s
        return attained[speed] >= wanted

    good = bad = None
    speed = start_speed
    for _ in range(MOST_DOUBLINGS):
        if holds(speed):
            good = speed
            if bad is not None or span_s / 2 < LEAST_SPAN_S:
                break
            speed *= 2
        else:
            bad = speed
            if good is not None:
                break
            speed /= 2
    if good is None:
        return Sustained(policy, 0.0, attained[min(attained)], len(attained), speed=start_speed)
    for _ in range(BISECTIONS if bad is not None else 0):
        assert bad is not None
        middle = (good * bad) ** 0.5
        if holds(middle):
            good = middle
        else:
            bad = middle
    return Sustained(policy, rates[good], attained[good], len(attained), bad is None, good)


def compare(
    scenarios: Sequence[tuple[str, Scenario]],
    policies: Sequence[str],
    *,
    wanted: float = WANTED,
    limit: int | None = None,
    on_policy: Callable[[str, str], None] = lambda trace, policy: None,
) -> list[dict[str, Any]]:
    """A row a trace, with every policy's rate, the best of them, and ratios to the slowest baseline."""
    rows: list[dict[str, Any]] = []
    for name, scenario in scenarios:
        results: dict[str, Sustained] = {}
        speed = 1.0
        for policy in policies:
            on_policy(name, policy)
            results[policy] = sustained(scenario, policy, wanted=wanted, limit=limit, start_speed=speed)
            speed = results[policy].speed
        rates = {policy: result.rate_per_s for policy, result in results.items()}
        best = max(rates, key=lambda policy: rates[policy])
        rows.append(
            {
                "trace": name,
                "machine": scenario.machine.name,
                "replicas": scenario.replicas,
                "slo": str(scenario.slo),
                "wanted": wanted,
                "limit": limit,
                "rate_per_s": rates,
                "attainment": {policy: result.attainment for policy, result in results.items()},
                "runs": {policy: result.runs for policy, result in results.items()},
                "at_least": [policy for policy, result in results.items() if result.is_least],
                "best": best,
                "hybrid_is_best": "hybrid" not in rates or rates["hybrid"] * PRECISION >= rates[best],
                "ratios": ratios(rates),
            }
        )
    return rows


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Over `static`, or where it did not run the first baseline that did."""
    base = next((rates[policy] for policy in ("static", *BASELINES) if rates.get(policy)), 0.0)
    if not base:
        return {}
    return {policy: rates[policy] / base for policy in BASELINES if policy in rates}


def named(source: Source) -> str:
    return source.name.removesuffix(".csv.gz").removesuffix(".csv")
