"""Benchmark of the batch-or-wait table against the best fixed batch size and window, on its own objective.

An engine on a virtual clock serves a stream of requests in batches that run to completion, once with the
admission `table`, once with the admission `dynamic` (a batch starts when `size` wait or the first has waited
`window`): the very objects that serve. The fixed policy is the best of all sizes and a fine grid of windows,
in order of arrival and of length, searched on the very arrivals on which the table is measured: the best
window of each size and line by the arithmetic of `ops.bench.policies.batch_queue` and none at all, then the
best of those in the engine itself, whose order by length ages, which the arithmetic leaves out.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.messages import StepTime
from engine.scheduling.batch_or_wait.batch_model import BatchModel, RequestLengths
from engine.scheduling.batch_or_wait.objective import Objective
from engine.scheduling.batch_or_wait.states import Grid
from engine.scheduling.batch_or_wait.table import BatchOrWaitTable, solve_table
from engine.scheduling.options import PolicyOptions
from ops.bench.policies.batch_queue import Arrivals, Fixed, by_fixed
from ops.bench.policies.batch_replica import StreamMeasured, serve
from ops.reporting import table as print_table

MODEL = BatchModel(
    # A model of some hundred million parameters on two cores.
    StepTime(
        base_s=12e-3,
        per_token_s=300e-6,
        per_context_token_s=150e-9,
        per_sequence_s=400e-6,
        samples=0,
        relative_error=0.0,
    ),
    short=RequestLengths(prompt_tokens=96, output_tokens=16),
    long=RequestLengths(prompt_tokens=512, output_tokens=128),
    long_share=0.2,
    busy_watts=200.0,
)
OBJECTIVE = Objective(alpha=1.0, beta=0.005, gamma=2.0, slo_s=1.5)
MAX_BATCH = 8
WAIT_BUCKETS = 12
RATES = 8
"""The table's arrival rates: from a tenth of what full batches can serve to all of it, in equal ratios."""
LOADS = {"very low": 0.02, "low": 0.2, "medium": 0.4, "high": 0.6, "very high": 0.8}
"""Arrivals, as a part of what full batches can serve."""
BURSTY = ((0.1, 60.0), (0.9, 20.0))
"""Load and mean seconds of each phase."""
WINDOWS = 25
"""Windows tried, from none to the table's longest wait; and to wait for the size however long it takes."""
ENDLESS_S = 3600.0
SCREENED = 800
"""Requests of the first stream with which the engine tries each size and line; and then with all streams"""
FINALISTS = 3
"""the best of those."""
MARGIN = 0.05
LOADS_TO_WIN = 3
LOOKUPS = 20_000


def run(
    *, requests: int, seeds: int, short_first: bool, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Solves one table and measures it at each load against the best fixed policy there."""
    tell = progress or (lambda done: None)
    capacity = MODEL.capacity_per_s(MAX_BATCH)
    rates = [capacity * 0.1 ** (1 - step / (RATES - 1)) for step in range(RATES)]
    grid = Grid(MAX_BATCH, 2 * OBJECTIVE.slo_s, WAIT_BUCKETS, short_first=short_first)
    table = solve_table(MODEL, rates, OBJECTIVE, grid, progress=lambda done: tell(0.1 * done))
    streams = {
        name: [Arrivals.poisson(load * capacity, MODEL.long_share, requests, seed) for seed in range(seeds)]
        for name, load in LOADS.items()
    }
    phases = [(load * capacity, mean_s) for load, mean_s in BURSTY]
    streams["bursty"] = [Arrivals.bursty(phases, MODEL.long_share, requests, seed) for seed in range(seeds)]
    rows = []
    for number, (name, arrivals) in enumerate(streams.items(), 1):
        rows.append({"load": name} | _compare(table, arrivals))
        tell(0.1 + 0.9 * number / len(streams))
    won = [row["load"] for row in rows if row["gain"] >= MARGIN]
    return {
        "line": "length" if short_first else "arrival",
        "capacity_per_s": capacity,
        "max_batch": MAX_BATCH,
        "requests": requests,
        "seeds": seeds,
        "loads": rows,
        "won": won,
        "not_won": [row["load"] for row in rows if row["load"] not in won],
        "lookup_us": _lookup_us(table),
        "ok": len(won) >= LOADS_TO_WIN,
    }


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    rows = []
    for row in report["loads"]:
        best = row["best_fixed"]
        window = "any" if best["window_s"] is None else f"{best['window_s']:.2f} s"
        rows.append(
            (
                row["load"],
                f"{row['rate_per_s']:.2f}",
                f"{row['table']['cost']:.3f}",
                f"{best['cost']:.3f}",
                f"{best['size']}, {window}, {best['line']}",
                f"{100 * row['gain']:+.1f} %",
                f"{100 * row['least_gain']:+.1f} %",
                f"{row['table']['latency_s']:.2f} / {best['latency_s']:.2f}",
                f"{row['table']['own_latency_s']:.2f} / {best['own_latency_s']:.2f}",
                f"{row['table']['watts']:.0f} / {best['watts']:.0f}",
                f"{100 * row['table']['late']:.1f} / {100 * best['late']:.1f}",
            )
        )
    columns = (
        "load",
        "per s",
        "table",
        "best fixed",
        "its size, window, line",
        "gain",
        "worst seed",
        "latency s",
        "own end s",
        "W",
        "late %",
    )
    print_table(f"cost of the table (line by {report['line']}) and of the best fixed policy", columns, rows)
    print(
        f"at least {100 * MARGIN:.0f} % better at: {', '.join(report['won']) or 'no load'};"
        f" not at: {', '.join(report['not_won']) or 'none'}: {'ok' if report['ok'] else 'NOT ok'};"
        f" a lookup takes {report['lookup_us']:.1f} us here"
    )


def serve_by_table(table: BatchOrWaitTable, arrivals: Arrivals) -> StreamMeasured:
    """The engine with the admission `table`."""
    options = PolicyOptions(admit="table", batch_or_wait_table=table, batch_size=table.grid.max_batch)
    order = "sjf" if table.grid.short_first else "fcfs"
    return serve(table.model, arrivals, table.objective.slo_s, order=order, options=options)


def serve_by_fixed(model: BatchModel, arrivals: Arrivals, slo_s: float, policy: Fixed) -> StreamMeasured:
    """The engine with the admission `dynamic`."""
    options = PolicyOptions(admit="dynamic", batch_size=policy.size, window_s=min(policy.window_s, ENDLESS_S))
    order = "sjf" if policy.short_first else "fcfs"
    return serve(model, arrivals, slo_s, order=order, options=options)


def _compare(table: BatchOrWaitTable, streams: list[Arrivals]) -> dict[str, Any]:
    """The table and the best fixed policy on the same streams."""
    model, objective, slo_s = table.model, table.objective, table.objective.slo_s

    def mean_cost(measured: list[StreamMeasured]) -> float:
        return statistics.fmean(each.outcome.cost(objective) for each in measured)

    ours = [serve_by_table(table, stream) for stream in streams]
    start = Arrivals(streams[0].times_s[:SCREENED], streams[0].longs[:SCREENED])
    finalists = heapq.nsmallest(
        FINALISTS,
        _promising(table, streams),
        key=lambda policy: serve_by_fixed(model, start, slo_s, policy).outcome.cost(objective),
    )
    served = [
        (policy, [serve_by_fixed(model, stream, slo_s, policy) for stream in streams]) for policy in finalists
    ]
    policy, theirs = min(served, key=lambda item: mean_cost(item[1]))
    gains = [
        1 - our.outcome.cost(objective) / their.outcome.cost(objective)
        for our, their in zip(ours, theirs, strict=True)
    ]
    our_figures, their_figures = _figures(ours, objective), _figures(theirs, objective)
    return {
        "rate_per_s": statistics.fmean(len(stream.times_s) / stream.times_s[-1] for stream in streams),
        "table": our_figures,
        "best_fixed": {
            "size": policy.size,
            "window_s": policy.window_s if policy.window_s < float("inf") else None,
            "line": "length" if policy.short_first else "arrival",
        }
        | their_figures,
        "gain": 1 - our_figures["cost"] / their_figures["cost"],
        "least_gain": min(gains),
    }


def _promising(table: BatchOrWaitTable, streams: list[Arrivals]) -> Iterator[Fixed]:
    """Of each size and line no window, and the one that is best by arithmetic."""
    grid, slo_s = table.grid, table.objective.slo_s
    windows_s = [grid.longest_wait_s * step / (WINDOWS - 1) for step in range(1, WINDOWS)]

    def cost(policy: Fixed) -> float:
        outcomes = [by_fixed(table.model, stream, slo_s, policy) for stream in streams]
        return statistics.fmean(outcome.cost(table.objective) for outcome in outcomes)

    # A table for a line by arrival is not compared with those that reorder it.
    for short_first in (False, True) if grid.short_first else (False,):
        for size in range(1, grid.max_batch + 1):
            yield Fixed(size, 0.0, short_first)
            # A size of one never holds a request up, however long the window.
            if size > 1:
                windows = (Fixed(size, window_s, short_first) for window_s in (*windows_s, float("inf")))
                yield min(windows, key=cost)


def _figures(measured: list[StreamMeasured], objective: Objective) -> dict[str, float]:
    outcomes = [each.outcome for each in measured]
    return {
        "cost": statistics.fmean(outcome.cost(objective) for outcome in outcomes),
        "latency_s": statistics.fmean(outcome.mean_latency_s for outcome in outcomes),
        "own_latency_s": statistics.fmean(each.own_latency_s for each in measured),
        "watts": statistics.fmean(outcome.mean_watts for outcome in outcomes),
        "late": statistics.fmean(outcome.late_share for outcome in outcomes),
        "batch": statistics.fmean(outcome.mean_batch for outcome in outcomes),
    }


def _lookup_us(table: BatchOrWaitTable) -> float:
    """Microseconds a decision, by this machine's clock, over all numbers waiting in turn."""
    began_s = time.perf_counter()
    for number in range(LOOKUPS):
        waiting = 1 + number % (2 * MAX_BATCH)
        table.decide(
            rate_per_s=2.0,
            num_waiting=waiting,
            oldest_wait_s=0.3,
            has_long=waiting > 2,
            remaining_tokens=200 * waiting,
            kv_pressure=0.0,
        )
    return 1e6 * (time.perf_counter() - began_s) / LOOKUPS
