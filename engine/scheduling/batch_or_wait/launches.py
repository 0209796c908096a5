"""Cost, duration and end states of running a batch.

A batch takes as long as its longest member, so it may be better to run the first few of the line only, or,
where short ones stand first (`short_first`), the short ones only. Meanwhile others arrive (Poisson). What
falls between two points of time waited is split over both so that the mean is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import ceil, comb, exp, sqrt
from operator import itemgetter, mul

from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.objective import Objective, late_starts
from engine.scheduling.batch_or_wait.states import LONG_LEVELS, RUN, SHORT_ONES, SIZES, Grid, Places

NEGLIGIBLE = 1e-6
"""Transitions less likely than this are left out, and the rest scaled up."""
KNOT_POINTS = 4
"""Spacing of the points of time waited at which what follows a batch is worked out."""
HIDDEN_QUEUES = 10

_Outcome = dict[int, float]
"""Probability by place."""
_Batch = tuple[float, int, int]
"""Probability, short and long ones of a batch."""


class BatchLaunch:
    """Cost, duration and outcome of running a batch from one number and level, by time waited."""

    def __init__(
        self, service_s: float, costs: list[float], knots: list[int], outcomes: list[_Outcome]
    ) -> None:
        """An outcome for each of the points `knots`; with one, it is that of all points."""
        self.service_s = service_s
        self._costs = costs
        if all(outcome == outcomes[0] for outcome in outcomes):
            knots, outcomes = knots[:1], outcomes[:1]
        self._expectations = [_Expectation(outcome) for outcome in outcomes]
        self._between = [
            (knot, (point - low) / (high - low))
            for knot, (low, high) in enumerate(pairwise(knots))
            for point in range(low, high + (high == knots[-1]))
        ]
        self._after: list[list[float]] = []

    def expect(self, values: list[list[float]]) -> None:
        """Sets the mean value afterwards, by KV pressure then and time waited now, for `rates`."""
        self._after = [self._by_point(known) for known in values]

    def rates(self, odds: list[float], now: list[float]) -> list[float]:
        """Cost and change of value per second of service, by time waited. `odds`: of each KV pressure at the
        end of the batch; `now`: the values at its start."""
        after, service_s = mixed(odds, self._after), self.service_s
        return [
            (cost + mean - value) / service_s
            for cost, mean, value in zip(self._costs, after, now, strict=True)
        ]

    def _by_point(self, values: list[float]) -> list[float]:
        known = [expectation.of(values) for expectation in self._expectations]
        if len(known) == 1:
            return known * len(self._costs)
        return [known[knot] + part * (known[knot + 1] - known[knot]) for knot, part in self._between]


class Launches:
    def __init__(
        self,
        model: BatchModel,
        rate_per_s: float,
        objective: Objective,
        grid: Grid,
        pool: KvMemory,
        places: Places,
    ) -> None:
        self._model, self._rate, self._objective = model, rate_per_s, objective
        self._grid, self._pool, self._places = grid, pool, places
        self.known: dict[tuple[int, int, int], BatchLaunch] = {}
        """By size, number waiting and level: those that were asked for."""

    def options(self, count: int, level: int, pressure: int) -> dict[str, BatchLaunch]:
        """What may be run, by letter, when `count` wait, `level` of them long; none twice."""
        grid = self._grid
        longs = self._typical_longs(count, level)
        fits = self._pool.fits(self._model, count, longs, pressure, short_first=grid.short_first)
        whole = min(count, grid.max_batch, fits)
        sizes = {RUN: whole}
        shorts = count - longs
        if grid.short_first and 0 < shorts < whole:
            sizes[SHORT_ONES] = shorts
        if count < grid.max_batch:
            # A few only, while less than a full batch waits: beyond, throughput is what matters, and the
            # queue that is cut off would hide what is lost.
            taken = sizes.get(SHORT_ONES)
            sizes |= {letter: size for letter, size in SIZES.items() if size < whole and size != taken}
        return {letter: self._launch(size, count, level) for letter, size in sizes.items()}

    def _launch(self, batch: int, count: int, level: int) -> BatchLaunch:
        """Running the first `batch` when `count` wait, `level` of them long."""
        key = (batch, count, level)
        if key not in self.known:
            self.known[key] = self._worked_out(batch, count, level)
        return self.known[key]

    def _worked_out(self, batch: int, count: int, level: int) -> BatchLaunch:
        grid, objective, rate = self._grid, self._objective, self._rate
        longs = self._typical_longs(count, level)
        left = count - batch
        parts = []
        service_s = fixed = 0.0
        for chance, shorts_in, longs_in in self._first(batch, count, longs):
            part_s = self._model.service_s(shorts_in, longs_in)
            service_s += chance * part_s
            fixed += chance * (
                objective.alpha * (count * part_s / rate + part_s * part_s / 2)
                + objective.beta * self._model.energy_j(shorts_in, longs_in)
            )
            parts.append((chance, part_s, longs - longs_in))
        if count == self._places.most:
            fixed += service_s * self._overflow_cost
        points = self._places.points
        waits_s = [point * grid.bucket_s for point in range(points)]
        costs = [fixed + objective.gamma / rate * self._late(count, batch, wait_s) for wait_s in waits_s]
        knots = [0] if left == 0 else [*range(0, points - 1, KNOT_POINTS), points - 1]
        outcomes = [
            self._outcome(
                (chance, part_s, left, left_longs, self._left_wait_s(count, left, waits_s[knot]))
                for chance, part_s, left_longs in parts
            )
            for knot in knots
        ]
        return BatchLaunch(service_s, costs, knots, outcomes)

    def _first(self, batch: int, count: int, longs: int) -> list[_Batch]:
        """What the first `batch` of `count` may be, `longs` of all being long."""
        if self._grid.short_first:
            shorts = min(batch, count - longs)
            return [(1.0, shorts, batch - shorts)]
        return [(chance, batch - inside, inside) for chance, inside in _drawn(count, longs, batch)]

    def _late(self, count: int, batch: int, oldest_wait_s: float) -> float:
        slo_s = self._objective.slo_s
        if self._grid.short_first:
            # Late ones are among the short and the long ones alike.
            return late_starts(count, count, oldest_wait_s, slo_s) * batch / count
        return late_starts(count, batch, oldest_wait_s, slo_s)

    def _left_wait_s(self, count: int, left: int, oldest_wait_s: float) -> float:
        """How long the first of `left` out of `count` has waited: by its rank among even arrivals."""
        rank = (count + 1) / (left + 1) if self._grid.short_first else count - left + 1
        return oldest_wait_s * (count - rank + 1) / count

    @property
    def _overflow_cost(self) -> float:
        if self._grid.overflow_cost >= 0:
            return self._grid.overflow_cost
        return HIDDEN_QUEUES * self._objective.alpha / self._rate * self._places.most

    def _typical_longs(self, count: int, level: int) -> int:
        if level < LONG_LEVELS:
            return min(level, count)
        share = self._model.long_share
        chances = [_binomial(count, longs, share) for longs in range(count + 1)]
        tail = sum(chances[LONG_LEVELS:])
        if tail < NEGLIGIBLE:
            return min(LONG_LEVELS, count)
        mean = sum(longs * chance for longs, chance in enumerate(chances) if longs >= LONG_LEVELS) / tail
        return round(mean)

    def _outcome(self, parts: Iterable[tuple[float, float, int, int, float]]) -> _Outcome:
        """Where batches end: of (probability, service time, number left, long ones of them, first's wait)."""
        outcome: _Outcome = {}
        for chance, service_s, left, left_longs, left_wait_s in parts:
            mean = self._rate * service_s
            most = ceil(mean + 6 * sqrt(mean) + 6)
            probability = chance * exp(-mean)
            for arrivals in range(most + 1):
                if probability > NEGLIGIBLE:
                    waits_s = [left_wait_s + service_s] if left else _first_waits_s(arrivals, service_s)
                    self._add(outcome, probability, left + arrivals, left_longs, arrivals, waits_s)
                probability *= mean / (arrivals + 1)
        total = sum(outcome.values())
        return {place: probability / total for place, probability in outcome.items()}

    def _add(
        self, outcome: _Outcome, probability: float, count: int, left_longs: int, arrivals: int,
        waits_s: list[float],
    ) -> None:  # fmt: skip
        if count == 0:
            outcome[0] = outcome.get(0, 0.0) + probability
            return
        places = self._places
        highest = places.levels - 1
        levels = [0.0] * places.levels
        for longs in range(min(arrivals, highest) + 1):
            levels[min(highest, left_longs + longs)] += _binomial(arrivals, longs, self._model.long_share)
        levels[highest] += max(0.0, 1 - sum(levels))
        for level, level_chance in enumerate(levels):
            if level_chance * probability < NEGLIGIBLE:
                continue
            for wait_s in waits_s:
                share = probability * level_chance / len(waits_s)
                exact = min(wait_s / self._grid.bucket_s, places.points - 1)
                point = min(int(exact), places.points - 2)
                for place, part in (
                    (places.at(count, level, point), 1 - (exact - point)),
                    (places.at(count, level, point + 1), exact - point),
                ):
                    if part * share > 0:
                        outcome[place] = outcome.get(place, 0.0) + part * share


class _Expectation:
    """The mean of a value over an outcome; the inner loop of all, so it runs in C as far as Python allows."""

    def __init__(self, outcome: _Outcome) -> None:
        places = list(outcome)
        self._only = places[0] if len(places) == 1 else None
        self._pick = itemgetter(*places)
        self._chances = list(outcome.values())

    def of(self, values: list[float]) -> float:
        if self._only is not None:
            return values[self._only]
        mean: float = sum(map(mul, self._chances, self._pick(values)))
        return mean


def mixed(odds: list[float], by_pressure: list[list[float]]) -> list[float]:
    if len(odds) == 1:
        return by_pressure[0]
    return [sum(map(mul, odds, values)) for values in zip(*by_pressure, strict=True)]


def _first_waits_s(arrivals: int, service_s: float) -> list[float]:
    """How long the first of `arrivals` has waited at the end of a service: three equally likely values, of
    P(at most x) = (x / service_s) ** arrivals."""
    if arrivals == 0:
        return [0.0]
    return [service_s * quantile ** (1 / arrivals) for quantile in (1 / 6, 1 / 2, 5 / 6)]


def _drawn(count: int, longs: int, batch: int) -> list[tuple[float, int]]:
    """Probability of each number of long ones among the first `batch` of `count`, `longs` of them long."""
    total = comb(count, batch)
    return [
        (comb(longs, inside) * comb(count - longs, batch - inside) / total, inside)
        for inside in range(max(0, batch - (count - longs)), min(longs, batch) + 1)
    ]


def _binomial(count: int, successes: int, share: float) -> float:
    chance: float = comb(count, successes) * share**successes * (1 - share) ** (count - successes)
    return chance
