"""Solves batch-or-wait as a semi-Markov decision process by relative value iteration.

Whenever the server is free it runs what waits, up to `max_batch`, or waits for the next arrival, but at most
a while. As in Xu, Sun, Zhou and Niu, "SMDP-based dynamic batching for efficient inference on GPU-based
platforms" (ICC 2023), the queue is cut off at an overflow state that carries an abstract cost for what it
hides, the process is turned into one of equal steps (Schweitzer's transformation), and that is solved by
relative value iteration, which gives bounds on the optimal cost at every sweep. A full batch always runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.launches import Launches, mixed
from engine.scheduling.batch_or_wait.objective import Objective
from engine.scheduling.batch_or_wait.states import LONG_LEVELS, WAIT, Grid, Places

MOST_SWEEPS = 20_000
SATURATED = 0.98
"""Utilisation by full batches above which no queue of any length is enough."""
STEP_SHARE = 0.95
"""Of the shortest stay anywhere: the transformed process's step. Below 1, so that it is aperiodic."""
_NEVER = float("inf")

_Rows = tuple[str, ...]
"""By number waiting - 1: a letter for each point of time waited."""


class NotSolved(RuntimeError):
    """The iteration did not come near enough to the optimum; the message says how near."""


@dataclass(frozen=True, slots=True)
class Solution:
    rate_per_s: float
    cost: float
    """Its average cost: alpha x mean latency + beta x power + gamma x share late."""
    least_cost: float
    most_cost: float
    """Certain bounds on the optimum of this discretised process."""
    actions: tuple[tuple[_Rows, ...], ...]
    """By KV pressure, level of long ones and number waiting - 1: a letter for each point of time waited,
    `RUN`, `SHORT_ONES`, `WAIT` or one of `SIZES`."""
    saturated: bool
    """Even the fullest batches that memory allows cannot keep up: the cost is that of a cut-off queue."""


def solve(
    model: BatchModel,
    rate_per_s: float,
    objective: Objective,
    grid: Grid,
    pool: KvMemory | None = None,
    *,
    tolerance: float = 1e-3,
) -> Solution:
    """The best policy at `rate_per_s`, within `tolerance` of its cost. Raises ValueError and `NotSolved`."""
    if not 0 < rate_per_s < float("inf"):
        raise ValueError(f"rate_per_s {rate_per_s} must be positive")
    pool = pool or KvMemory()
    kind, largest = ("long", model.long) if model.long_share > 0 else ("short", model.short)
    if 0 < pool.tokens < largest.total_tokens:
        raise ValueError(
            f"pool tokens {pool.tokens} hold no {kind} request of {largest.total_tokens} tokens:"
            " take a larger pool, or 0 for one that never limits a batch"
        )
    grid.check_states(pool.levels)
    return _DecisionProcess(model, rate_per_s, objective, grid, pool).solve(tolerance)


class _DecisionProcess:
    """The decision process of one arrival rate, and its value by KV pressure and place."""

    def __init__(
        self, model: BatchModel, rate_per_s: float, objective: Objective, grid: Grid, pool: KvMemory
    ) -> None:
        self._model, self._rate, self._objective = model, rate_per_s, objective
        self._grid, self._pool = grid, pool
        self._places = places = Places(grid, LONG_LEVELS + 1 if model.long_share > 0 else 1)
        bucket_s = grid.bucket_s
        self._quiet = exp(-rate_per_s * bucket_s)
        """Probability of no arrival within a bucket."""
        self._wait_s = (1 - self._quiet) / rate_per_s
        # Where in its bucket an arrival falls on average, if there is one.
        arrival_s = 1 / rate_per_s - bucket_s * self._quiet / max(1e-300, 1 - self._quiet)
        self._late_part = min(1.0, max(0.0, arrival_s / bucket_s))
        pressures = range(pool.levels)
        self._wait_odds = [pool.odds(pressure, self._wait_s) for pressure in pressures]
        launches = Launches(model, rate_per_s, objective, grid, pool, places)
        self._options = [
            [
                [
                    [
                        (letter, launch, pool.odds(pressure, launch.service_s))
                        for letter, launch in launches.options(count, level, pressure).items()
                    ]
                    for count in range(1, places.most + 1)
                ]
                for level in range(places.levels)
            ]
            for pressure in pressures
        ]
        """By KV pressure, level, number waiting - 1: letter, launch, odds of each pressure afterwards."""
        self._launches = list(launches.known.values())
        shortest_s = min(launch.service_s for launch in self._launches)
        self._step_s = STEP_SHARE * min(1 / (rate_per_s + pool.changes_per_s), self._wait_s, shortest_s)

    def solve(self, tolerance: float) -> Solution:
        """Relative value iteration until the bounds on the optimal cost meet."""
        values = [[0.0] * self._places.size for _ in range(self._pool.levels)]
        gap = float("inf")
        for _ in range(MOST_SWEEPS):
            new, _ = self._sweep(values, choices=False)
            changes = [
                after - before
                for now, last in zip(new, values, strict=True)
                for after, before in zip(now, last, strict=True)
            ]
            least, most = min(changes) / self._step_s, max(changes) / self._step_s
            base = new[0][0]
            values = [[value - base for value in now] for now in new]
            gap = (most - least) / max(abs(least + most) / 2, 1e-12)
            if gap <= tolerance:
                _, actions = self._sweep(values, choices=True)
                cost = (least + most) / 2
                return Solution(self._rate, cost, least, most, actions, self._saturated)
        raise NotSolved(
            f"at {self._rate:g} arrivals/s the bounds are still {100 * gap:.2g} % apart after"
            f" {MOST_SWEEPS:,} sweeps: take fewer wait_buckets or a shorter queue_cap"
        )

    @property
    def _saturated(self) -> bool:
        most, model = self._grid.max_batch, self._model
        fits = self._pool.fits(model, most, round(most * model.long_share), 0, short_first=False)
        return self._rate >= SATURATED * model.capacity_per_s(fits)

    def _sweep(
        self, values: list[list[float]], *, choices: bool
    ) -> tuple[list[list[float]], tuple[tuple[_Rows, ...], ...]]:
        """All values after one more step; with `choices`, the best action everywhere."""
        for launch in self._launches:
            launch.expect(values)
        swept = [self._sweep_one(values, pressure, choices=choices) for pressure in range(self._pool.levels)]
        return [new for new, _ in swept], tuple(levels for _, levels in swept)

    def _sweep_one(
        self, values: list[list[float]], pressure: int, *, choices: bool
    ) -> tuple[list[float], tuple[_Rows, ...]]:
        step, places = self._step_s, self._places
        known = values[pressure]
        waited = mixed(self._wait_odds[pressure], values)
        new = [known[0] + step * self._empty_rate(values, pressure)]
        levels = []
        for level in range(places.levels):
            rows = []
            for count in range(1, places.most + 1):
                start = places.at(count, level, 0)
                now = known[start : start + places.points]
                options = {
                    letter: launch.rates(odds, now)
                    for letter, launch, odds in self._options[pressure][level][count - 1]
                }
                if count < self._grid.max_batch:
                    # Once the first one has waited longest, none waits any more.
                    options[WAIT] = [*self._wait_rates(waited, now, count, level), _NEVER]
                best = list(map(min, *options.values())) if len(options) > 1 else next(iter(options.values()))
                if choices:
                    rows.append(_letters(options, best))
                new += [value + step * rate for value, rate in zip(now, best, strict=True)]
            levels.append(tuple(rows))
        # Where no long ones are expected, one that comes is treated like the others.
        return new, tuple(levels[min(level, places.levels - 1)] for level in range(LONG_LEVELS + 1))

    def _empty_rate(self, values: list[list[float]], pressure: int) -> float:
        """Change of value per second with an empty queue: a request arrives, or the pressure changes."""
        known, share, places = values[pressure], self._model.long_share, self._places
        long = places.at(1, min(1, places.levels - 1), 0)
        after = (1 - share) * known[places.at(1, 0, 0)] + share * known[long]
        change = self._rate * (after - known[0])
        if self._pool.levels > 1:
            other = sum(
                chance * by_pressure[0]
                for chance, by_pressure in zip(self._pool.next_levels(pressure), values, strict=True)
            )
            change += self._pool.changes_per_s * (other - known[0])
        return change

    def _wait_rates(self, waited: list[float], now: list[float], count: int, level: int) -> list[float]:
        """Cost and change of value per second of waiting, by time waited but the last. `waited`: values when
        the wait is over, over the KV pressures of then."""
        share, late, quiet = self._model.long_share, self._late_part, self._quiet
        places = self._places
        points = places.points
        alone = places.at(count, level, 0)
        short = places.at(count + 1, level, 0)
        long = places.at(count + 1, min(level + 1, places.levels - 1), 0)
        joined = [
            (1 - share) * left + share * right
            for left, right in zip(waited[short : short + points], waited[long : long + points], strict=True)
        ]
        cost = self._objective.alpha / self._rate * count
        busy, wait_s = 1 - quiet, self._wait_s
        older_ones = waited[alone + 1 : alone + points]
        return [
            cost + (quiet * older + busy * (early + late * (after - early)) - value) / wait_s
            for older, early, after, value in zip(older_ones, joined, joined[1:], now, strict=False)
        ]


def _letters(options: dict[str, list[float]], best: list[float]) -> str:
    """The best of the options at each point; the first of those that are equal."""
    return "".join(
        next(letter for letter, values in options.items() if values[point] <= value)
        for point, value in enumerate(best)
    )
