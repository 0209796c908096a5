"""Does the batch-or-wait table beat the best fixed batch size and window, on its own objective?

A batch queue on a virtual clock: requests arrive, the server runs what waits, up to `max_batch`, to
completion, in the time that the step-time model says. Before each batch the policy says how long to wait; it
is asked again at each arrival. The fixed policies run when `size` wait or the first has waited `window`. All
sizes and a fine grid of windows are tried, in order of arrival and of length, on the very arrivals on which
the table is measured, and the table is compared with the best of them.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from engine.messages import StepTime
from engine.scheduling.batch_model import BatchModel, Lengths
from engine.scheduling.batch_or_wait import BatchOrWaitTable, solve_table
from engine.scheduling.smdp import Grid, Objective
from ops.cli.base import table as print_table

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
    short=Lengths(prompt_tokens=96, output_tokens=16),
    long=Lengths(prompt_tokens=512, output_tokens=128),
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
WARM_UP = 200
"""Requests at the start that are not measured."""
MARGIN = 0.05
LOADS_TO_WIN = 3
_NEVER = float("inf")


def run(
    *, requests: int, seeds: int, short_first: bool, progress: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Solves one table and measures it at each load against the best fixed policy there."""
    tell = progress or (lambda done: None)
    capacity = MODEL.capacity_per_s(MAX_BATCH)
    rates = [capacity * 0.1 ** (1 - step / (RATES - 1)) for step in range(RATES)]
    grid = Grid(MAX_BATCH, 2 * OBJECTIVE.slo_s, WAIT_BUCKETS, short_first=short_first)
    table = solve_table(MODEL, rates, OBJECTIVE, grid, progress=lambda done: tell(0.3 * done))
    streams = {
        name: [Arrivals.poisson(load * capacity, MODEL.long_share, requests, seed) for seed in range(seeds)]
        for name, load in LOADS.items()
    }
    phases = [(load * capacity, mean_s) for load, mean_s in BURSTY]
    streams["bursty"] = [Arrivals.bursty(phases, MODEL.long_share, requests, seed) for seed in range(seeds)]
    rows = []
    for number, (name, arrivals) in enumerate(streams.items(), 1):
        rows.append({"load": name} | _compare(table, arrivals))
        tell(0.3 + 0.7 * number / len(streams))
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
                f"{row['table']['cost']:.4f}",
                f"{best['cost']:.4f}",
                f"{best['size']}, {window}, up to {best['most']}, by {best['line']}",
                f"{100 * row['gain']:+.1f} %",
                f"{100 * row['least_gain']:+.1f} %",
                f"{row['table']['latency_s']:.2f} / {best['latency_s']:.2f}",
                f"{row['table']['watts']:.0f} / {best['watts']:.0f}",
                f"{100 * row['table']['late']:.1f} / {100 * best['late']:.1f}",
            )
        )
    columns = (
        "load",
        "per s",
        "table",
        "best fixed",
        "its size, window, batch, line",
        "gain",
        "worst seed",
        "latency s",
        "W",
        "late %",
    )
    print_table(f"cost of the table (line by {report['line']}) and of the best fixed policy", columns, rows)
    print(
        f"at least {100 * MARGIN:.0f} % better at: {', '.join(report['won']) or 'no load'};"
        f" not at: {', '.join(report['not_won']) or 'none'}: {'ok' if report['ok'] else 'NOT ok'}"
    )


def _compare(table: BatchOrWaitTable, streams: list[Arrivals]) -> dict[str, Any]:
    """The table and the best fixed policy on the same streams."""
    objective, slo_s = table.objective, table.objective.slo_s
    ours = [by_table(table.model, stream, table) for stream in streams]
    best: tuple[float, Fixed, list[Outcome]] | None = None
    for policy in _candidates(table.grid):
        outcomes = [by_fixed(table.model, stream, slo_s, policy) for stream in streams]
        cost = statistics.fmean(outcome.cost(objective) for outcome in outcomes)
        if best is None or cost < best[0]:
            best = cost, policy, outcomes
    assert best is not None
    _, policy, theirs = best
    gains = [1 - our.cost(objective) / their.cost(objective) for our, their in zip(ours, theirs, strict=True)]
    our_figures, their_figures = _figures(ours, objective), _figures(theirs, objective)
    return {
        "rate_per_s": statistics.fmean(len(stream.times_s) / stream.times_s[-1] for stream in streams),
        "table": our_figures,
        "best_fixed": {
            "size": policy.size,
            "window_s": policy.window_s if policy.window_s < _NEVER else None,
            "most": policy.most,
            "line": "length" if policy.short_first else "arrival",
        }
        | their_figures,
        "gain": 1 - our_figures["cost"] / their_figures["cost"],
        "least_gain": min(gains),
    }


def _candidates(grid: Grid) -> Iterator[Fixed]:
    windows = [grid.longest_wait_s * step / (WINDOWS - 1) for step in range(WINDOWS)]
    for size in range(1, grid.max_batch + 1):
        for window_s in (*windows, _NEVER):
            # With one enough, nobody is ever held up, however long the window.
            if size == 1 and window_s > 0:
                continue
            for most in sorted({size, grid.max_batch}):
                # A table for a line by arrival is not compared with those that reorder it.
                for short_first in (False, True) if grid.short_first else (False,):
                    yield Fixed(size, window_s, most, short_first)


def _figures(outcomes: list[Outcome], objective: Objective) -> dict[str, float]:
    return {
        "cost": statistics.fmean(outcome.cost(objective) for outcome in outcomes),
        "latency_s": statistics.fmean(outcome.mean_latency_s for outcome in outcomes),
        "watts": statistics.fmean(outcome.mean_watts for outcome in outcomes),
        "late": statistics.fmean(outcome.late_share for outcome in outcomes),
        "batch": statistics.fmean(outcome.mean_batch for outcome in outcomes),
    }


@dataclass(frozen=True)
class Arrivals:
    """A recorded or drawn stream of requests."""

    times_s: list[float]
    longs: list[bool]

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if len(self.times_s) != len(self.longs):
            raise ValueError("each arrival is short or long: the lists must be equally long")

    @cached_property
    def longs_before(self) -> list[int]:
        """Long ones among the first 0, 1, 2, ... requests."""
        return [0, *accumulate(int(long) for long in self.longs)]

    @cached_property
    def by_kind(self) -> list[list[float]]:
        """Times of the short ones, and of the long ones."""
        pairs = list(zip(self.times_s, self.longs, strict=True))
        return [[time_s for time_s, long in pairs if long is kind] for kind in (False, True)]

    @cached_property
    def sums_by_kind(self) -> list[list[float]]:
        """Sums of the first 0, 1, 2, ... of these times."""
        return [[0.0, *accumulate(times_s)] for times_s in self.by_kind]

    @staticmethod
    def poisson(rate_per_s: float, long_share: float, count: int, seed: int) -> Arrivals:
        """At one rate."""
        return Arrivals.bursty([(rate_per_s, _NEVER)], long_share, count, seed)

    @staticmethod
    def bursty(phases: list[tuple[float, float]], long_share: float, count: int, seed: int) -> Arrivals:
        """Poisson in phases of (rate, mean seconds), in turn, each of exponentially distributed length."""
        rng = random.Random(seed)
        now_s, phase = 0.0, 0
        times_s: list[float] = []
        ends_s = rng.expovariate(1 / phases[0][1]) if phases[0][1] < _NEVER else _NEVER
        while len(times_s) < count:
            gap_s = rng.expovariate(phases[phase][0])
            if now_s + gap_s < ends_s:
                now_s += gap_s
                times_s.append(now_s)
            else:
                now_s = ends_s
                phase = (phase + 1) % len(phases)
                ends_s = now_s + rng.expovariate(1 / phases[phase][1])
        return Arrivals(times_s, [rng.random() < long_share for _ in times_s])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy did with a stream."""

    mean_latency_s: float
    mean_watts: float
    late_share: float
    mean_batch: float

    def cost(self, objective: Objective) -> float:
        """In the objective's unit."""
        return (
            objective.alpha * self.mean_latency_s
            + objective.beta * self.mean_watts
            + objective.gamma * self.late_share
        )


class Queue:
    """The line before the server and what was run from it: short and long ones, each in order of arrival."""

    def __init__(self, model: BatchModel, arrivals: Arrivals, slo_s: float) -> None:
        self._model, self._slo_s = model, slo_s
        self.times_s = arrivals.times_s
        self._longs_before = arrivals.longs_before
        self._of_kind, self._sums = arrivals.by_kind, arrivals.sums_by_kind
        self._served = [0, 0]
        self._arrived = 0
        self._latency_s = self._joules = 0.0
        self._late = self._requests = self._batches = 0
        self._began_s = self._ended_s = 0.0

    @property
    def served(self) -> int:
        """Requests run so far."""
        return self._served[0] + self._served[1]

    @property
    def first_s(self) -> float:
        """When the first of those not yet run arrives or arrived."""
        shorts, longs = self._of_kind
        short, long = self._served
        return min(
            shorts[short] if short < len(shorts) else _NEVER, longs[long] if long < len(longs) else _NEVER
        )

    def see(self, now_s: float) -> tuple[int, int]:
        """Short and long ones that wait at `now_s`."""
        self._arrived = arrived = bisect_right(self.times_s, now_s, self._arrived)
        longs = self._longs_before[arrived]
        return arrived - longs - self._served[0], longs - self._served[1]

    @property
    def next_s(self) -> float:
        """When the next one arrives, of those not yet seen."""
        return self.times_s[self._arrived] if self._arrived < len(self.times_s) else _NEVER

    def first_of_line(self, size: int, waiting: tuple[int, int], *, short_first: bool) -> tuple[int, int]:
        """Short and long ones among the first `size` of those that wait."""
        batch = min(size, sum(waiting))
        if short_first:
            shorts = min(waiting[0], batch)
            return shorts, batch - shorts
        longs = self._longs_before[self.served + batch] - self._served[1]
        return batch - longs, longs

    def run(self, batch: tuple[int, int], start_s: float) -> float:
        """Runs so many short and long ones; when the batch ends."""
        end_s = start_s + self._model.service_s(*batch)
        measured = self.served >= WARM_UP
        if measured and self._requests == 0:
            self._began_s = self._ended_s
        for kind, count in enumerate(batch):
            first = self._served[kind]
            last = self._served[kind] = first + count
            if measured and count:
                self._latency_s += end_s * count - (self._sums[kind][last] - self._sums[kind][first])
                # Started exactly at the target is in time; rounding must not decide.
                due_s = start_s - self._slo_s - 1e-9
                self._late += bisect_left(self._of_kind[kind], due_s, first, last) - first
        if measured:
            self._requests += sum(batch)
            self._batches += 1
            self._joules += self._model.energy_j(*batch)
        self._ended_s = end_s
        return end_s

    def outcome(self) -> Outcome:
        """Means over the measured requests."""
        return Outcome(
            self._latency_s / self._requests,
            self._joules / (self._ended_s - self._began_s),
            self._late / self._requests,
            self._requests / self._batches,
        )


@dataclass(frozen=True, slots=True)
class Fixed:
    """A batch runs when `size` wait or the first has waited `window_s`."""

    size: int
    window_s: float
    most: int
    """The batch takes up to so many: `size`, as dynamic batching has it, or more."""
    short_first: bool
    """The line is in order of length, or of arrival."""


def by_fixed(model: BatchModel, arrivals: Arrivals, slo_s: float, policy: Fixed) -> Outcome:
    """The queue under a fixed policy."""
    queue = Queue(model, arrivals, slo_s)
    count, free_s = len(arrivals.times_s), 0.0
    while (served := queue.served) < count:
        full = served + policy.size - 1
        full_s = queue.times_s[full] if full < count else _NEVER
        start_s = max(free_s, min(full_s, queue.first_s + policy.window_s))
        if start_s == _NEVER:
            # No more will come: what is left of an endless window runs with the last arrival.
            start_s = max(free_s, queue.times_s[-1])
        waiting = queue.see(start_s)
        batch = queue.first_of_line(policy.most, waiting, short_first=policy.short_first)
        free_s = queue.run(batch, start_s)
    return queue.outcome()


def by_table(model: BatchModel, arrivals: Arrivals, table: BatchOrWaitTable) -> Outcome:
    """The queue under the table, which sees each arrival as it happens and is asked after each."""
    table.reset()
    queue = Queue(model, arrivals, table.objective.slo_s)
    count, free_s, noted = len(arrivals.times_s), 0.0, 0
    while queue.served < count:
        now_s = max(free_s, queue.first_s)
        while True:
            waiting = queue.see(now_s)
            for arrived_s in queue.times_s[noted : queue.served + sum(waiting)]:
                table.note_arrival(arrived_s)
                noted += 1
            decision = table.decide(
                num_waiting=sum(waiting),
                oldest_wait_s=now_s - queue.first_s,
                has_long=waiting[1] > 0,
                remaining_tokens=waiting[0] * model.short.total_tokens + waiting[1] * model.long.total_tokens,
                kv_pressure=0.0,
            )
            if decision.wait_s <= 0:
                break
            now_s = min(now_s + decision.wait_s, queue.next_s)
        batch = queue.first_of_line(decision.batch, waiting, short_first=table.grid.short_first)
        free_s = queue.run(batch, now_s)
    return queue.outcome()
