"""Figures of a simulated run: nearest-rank quantiles over *all* requests submitted.

One that was refused or never ended counts as infinitely slow (null in JSON) and as a miss (arXiv 2410.14257).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ops.reporting import quantile
from ops.simulate.figures.fairness import Fairness, service_bound
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import SimulatedPool, busy
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits

Figures = dict[str, Any]
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99))
TIMES = ("ttft_s", "tpot_s", "e2e_s")
MOST_TENANTS = 200
"""In a report: those with the most requests."""


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Nearest rank, and the mean; NaN for none."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else math.nan
    return {"mean": mean, **{name: quantile(ordered, share) for name, share in QUANTILES}}


def latencies(records: Records, rows: Sequence[int], slo: SloLimits, span_s: float) -> Figures:
    """Times of some requests, how many met the SLO, and how many of those a second."""
    met = sum(slo.met(records, row) for row in rows)
    of: dict[str, Callable[[int], float]] = {
        "ttft_s": records.ttft_s,
        "tpot_s": records.tpot_s,
        "e2e_s": records.e2e_s,
    }
    return {
        "requests": len(rows),
        "refused": sum(records.refused[row] for row in rows),
        **{name: quantiles(map(of[name], rows)) for name in TIMES},
        "attainment": met / len(rows) if rows else math.nan,
        "violation_rate": 1 - met / len(rows) if rows else math.nan,
        "goodput_per_s": met / span_s if span_s else math.nan,
    }


def figures(pool: SimulatedPool, fairness: Fairness, slo: SloLimits) -> Figures:
    records, machine = pool.records, pool.machine
    replicas = len(pool.members)
    span_s = max(pool.now_s, 1e-9)
    spent = busy(pool)
    rows = range(len(records))
    done = list(records.done())
    output_tokens = sum(records.output_tokens[row] for row in done)
    input_tokens = sum(records.input_tokens[row] for row in done)
    cached_tokens = sum(records.cached_tokens)
    last_s = max(records.arrival_s)
    bound = service_bound(
        longest_input=max(records.input_tokens, default=0),
        longest_output=max(records.output_tokens, default=0),
        kv_tokens=machine.kv_tokens * replicas,
        sequences=machine.max_sequences * replicas,
        least_weight=min(records.weights.values(), default=1.0),
    )
    by_tenant = sorted(records.rows_by_tenant().items(), key=lambda item: -len(item[1]))
    return {
        "policy": pool.policy,
        "span_s": span_s,
        "rate_per_s": len(records) / last_s if last_s else None,
        **latencies(records, rows, slo, span_s),
        "requests_per_s": len(done) / span_s,
        "input_tokens_per_s": input_tokens / span_s,
        "output_tokens_per_s": output_tokens / span_s,
        "jain_index": fairness.jain_index,
        "service_gap": fairness.widest_gap,
        "service_gap_bound": bound,
        "service_gap_over_bound": fairness.widest_gap / bound if bound else None,
        "preemptions": spent.preemptions,
        "recomputed_tokens": sum(records.recomputed_tokens),
        "busy_share": spent.busy_s / (span_s * replicas),
        "idle_gaps": spent.idle_gaps,
        "longest_idle_s": spent.longest_idle_s,
        "kv_use": spent.kv_use,
        "kv_use_most": spent.most_kv_use,
        "prefix_hit_rate": cached_tokens / input_tokens if input_tokens else None,
        "padding_share": spent.padded_tokens / max(1, spent.padded_tokens + spent.computed_tokens),
        "energy": energy(machine, replicas, spent.busy_s, span_s, output_tokens),
        "steps": spent.steps,
        "steps_in_runs": spent.steps_in_runs,
        "tenants": {tenant: latencies(records, its, slo, span_s) for tenant, its in by_tenant[:MOST_TENANTS]},
    }


def energy(
    machine: Machine, replicas: int, busy_s: float, span_s: float, output_tokens: int
) -> Figures | None:
    """Busy steps at the data sheet's maximum, all other time at idle power; None: the power is not known."""
    if not machine.watts:
        return None
    idle_s = span_s * replicas - busy_s
    joules = machine.gpus * (machine.watts * busy_s + machine.idle_watts * idle_s)
    return {
        "joules": joules,
        "joules_per_output_token": joules / output_tokens if output_tokens else None,
        "mean_watts": joules / span_s,
        "basis": f"{machine.watts:g} W busy, {machine.idle_watts:g} W idle, "
        f"{machine.gpus * replicas} devices",
    }


def within_factor(pairs: Sequence[tuple[float, float]], factor: float, floor: float) -> float | None:
    """Share of (estimate, actual) pairs within `factor` of each other; values below `floor` count as it."""
    if not pairs:
        return None
    good = 0
    for estimate, actual in pairs:
        low, high = sorted((max(estimate, floor), max(actual, floor)))
        good += high <= low * factor
    return good / len(pairs)


def covered(pairs: Sequence[tuple[float, float]]) -> float | None:
    if not pairs:
        return None
    return sum(actual <= estimate for estimate, actual in pairs) / len(pairs)
