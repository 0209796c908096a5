"""Run this batch now, or wait for more? The optimal answer, worked out in advance.

A server runs batches to completion; requests arrive at random (Poisson). Whenever the server is free it runs
what waits, up to `max_batch`, or waits: for the next arrival, but at most a while. Waiting makes batches
larger, which costs less energy and less time a request, and keeps those who wait waiting. What is minimised,

    alpha x mean latency [s] + beta x mean power [W] + gamma x share of requests that started too late,

is minimised over all policies that look at how many wait, how long the first has waited and how many of them
are long: a semi-Markov decision process, as of Xu, Sun, Zhou and Niu, "SMDP-based dynamic batching for
efficient inference on GPU-based platforms" (ICC 2023), who look at the number alone. As there, the queue is
cut off at an overflow state that carries an abstract cost for what it hides, the process is turned into one
of equal steps (Schweitzer's transformation), and that is solved by relative value iteration, which gives
bounds on the optimal cost at every sweep. Once a full batch waits something runs: nothing can make it better.

A batch takes as long as its longest member, and nobody leaves it early. So less than a full batch may be
better even where more wait: the first few of the line only, or, where short ones stand before long ones
(`short_first`), the short ones only.

The time waited is a grid, `bucket_s` apart; what falls between two points is split over both so that the mean
is kept. Among requests that wait, all but the first are spread evenly over the time the first has waited,
as Poisson arrivals are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, comb, exp, sqrt
from operator import itemgetter, mul

from engine.scheduling.batch_model import BatchModel

LONG_LEVELS = 5
"""The states tell 0, 1, 2, 3, 4 and "5 or more" long requests apart."""
_NEVER = float("inf")
NEGLIGIBLE = 1e-6
"""Transitions less likely than this are left out, and the rest scaled up."""
KNOT_POINTS = 4
"""Where more wait than fit, what follows a batch is worked out at every so many points of time waited, and
interpolated between."""
MOST_STATES = 50_000
MOST_SWEEPS = 20_000
HIDDEN_QUEUES = 10
SATURATED = 0.98
"""Utilisation by full batches above which no queue of any length is enough."""
RUN, SHORT_ONES, WAIT = "rsw"
"""Run the first that wait, up to a full batch; run the short ones of them; wait."""
SIZES = {"1": 1, "2": 2, "3": 3, "4": 4, "6": 6, "8": 8, "C": 12, "G": 16, "O": 24, "W": 32}
"""Run so many only."""
STEP_SHARE = 0.95
"""Of the shortest stay anywhere: the transformed process's step. Below 1, so that it is aperiodic."""


class NotSolved(RuntimeError):
    """The iteration did not come near enough to the optimum; the message says how near."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a second, a watt and a late start are worth, in any one unit."""

    alpha: float = 1.0
    """Of a second of mean latency, from arrival to the end of its batch."""
    beta: float = 0.01
    """Of a watt of mean power."""
    gamma: float = 1.0
    """Of all requests starting later than `slo_s` after their arrival."""
    slo_s: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field."""
        for name in ("alpha", "beta", "gamma"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)} must be a number, not negative")
        if self.alpha == 0 and self.gamma == 0:
            raise ValueError("alpha or gamma must be positive: else never running anything would be best")
        if not 0 < self.slo_s < float("inf"):
            raise ValueError(f"slo_s {self.slo_s} must be positive")


@dataclass(frozen=True, slots=True)
class Grid:
    """How finely the state is told apart."""

    max_batch: int = 16
    longest_wait_s: float = 2.0
    """The server never waits when the first one has waited so long."""
    wait_buckets: int = 16
    queue_cap: int = 0
    """More waiting than this are one state; 0: three times `max_batch`."""
    short_first: bool = True
    """Whether short ones stand before long ones in the line; else it is in order of arrival."""
    overflow_cost: float = -1.0
    """Abstract cost a second of service begun in that state; negative: as if `HIDDEN_QUEUES` times as many
    waited. Too little, and it pays to be overrun: what the cut-off queue drops costs nothing."""

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, its limit and the way out."""
        if self.max_batch < 1:
            raise ValueError(f"max_batch {self.max_batch} must be at least 1")
        if not 0 < self.longest_wait_s < float("inf"):
            raise ValueError(f"longest_wait_s {self.longest_wait_s} must be positive")
        if self.wait_buckets < 1:
            raise ValueError(f"wait_buckets {self.wait_buckets} must be at least 1")
        if self.queue_cap and self.queue_cap <= self.max_batch:
            raise ValueError(f"queue_cap {self.queue_cap} must be more than max_batch {self.max_batch}, or 0")
        if self.states > MOST_STATES:
            raise ValueError(
                f"{self.states:,} states are more than {MOST_STATES:,}: take a smaller max_batch, fewer"
                " wait_buckets or a smaller queue_cap"
            )

    @property
    def most_waiting(self) -> int:
        """The overflow state's number of requests."""
        return (self.queue_cap or max(8, 3 * self.max_batch)) + 1

    @property
    def bucket_s(self) -> float:
        """Distance between two points of time waited."""
        return self.longest_wait_s / self.wait_buckets

    @property
    def points(self) -> int:
        """Points of time waited: 0, `bucket_s`, ... `longest_wait_s`."""
        return self.wait_buckets + 1

    @property
    def states(self) -> int:
        """All states: the empty queue, and each number, level of long ones and time waited."""
        return 1 + self.most_waiting * (LONG_LEVELS + 1) * self.points


@dataclass(frozen=True, slots=True)
class Solution:
    """The optimal policy for one arrival rate."""

    rate_per_s: float
    cost: float
    """Its average cost: alpha x mean latency + beta x power + gamma x share late."""
    least_cost: float
    most_cost: float
    """Certain bounds on the optimum of this discretised process."""
    sweeps: int
    actions: tuple[tuple[str, ...], ...]
    """By level of long ones and number waiting - 1: a letter for each point of time waited, `RUN`,
    `SHORT_ONES`, `WAIT` or one of `SIZES`."""
    saturated: bool
    """Even full batches cannot keep up with this rate: the cost is that of a queue cut off."""


def solve(
    model: BatchModel,
    rate_per_s: float,
    objective: Objective,
    grid: Grid,
    *,
    tolerance: float = 1e-3,
    progress: Callable[[float], None] | None = None,
) -> Solution:
    """The best policy at `rate_per_s` arrivals a second, to within `tolerance` of its cost.

    `progress` is told the relative gap between the bounds now and then. Raises ValueError for a rate that is
    not positive, `NotSolved` when the bounds stay apart.
    """
    if not 0 < rate_per_s < float("inf"):
        raise ValueError(f"rate_per_s {rate_per_s} must be positive")
    return _Process(model, rate_per_s, objective, grid).solve(tolerance, progress)


_Outcome = dict[int, float]
"""Probability by state."""
_Batch = tuple[float, int, int]
"""Probability, short and long ones of a batch."""


class _Process:
    """The decision process of one arrival rate, and its value by state.

    A state is a place in one flat list: 0 the empty queue, then by level of long ones, number waiting, time
    waited.
    """

    def __init__(self, model: BatchModel, rate_per_s: float, objective: Objective, grid: Grid) -> None:
        self._model, self._rate, self._objective, self._grid = model, rate_per_s, objective, grid
        self._points = grid.points
        self._levels = LONG_LEVELS + 1 if model.long_share > 0 else 1
        self._most = grid.most_waiting
        bucket_s = grid.bucket_s
        self._quiet = exp(-rate_per_s * bucket_s)
        """Probability of no arrival within a bucket."""
        self._wait_s = (1 - self._quiet) / rate_per_s
        # Where in its bucket an arrival falls on average, if there is one.
        arrival_s = 1 / rate_per_s - bucket_s * self._quiet / max(1e-300, 1 - self._quiet)
        self._late_part = min(1.0, max(0.0, arrival_s / bucket_s))
        self._runs = [
            [self._launch(self._whole(count, level), count, level) for count in range(1, self._most + 1)]
            for level in range(self._levels)
        ]
        self._parts = [
            [
                [(letter, self._launch(part, count, level)) for letter, part in self._smaller(count, level)]
                for count in range(1, self._most + 1)
            ]
            for level in range(self._levels)
        ]
        """By letter, batches that leave somebody behind though there is a place."""
        shortest_s = min(
            launch.service_s
            for level in range(self._levels)
            for whole, parts in zip(self._runs[level], self._parts[level], strict=True)
            for launch in (whole, *(part for _, part in parts))
        )
        self._step_s = STEP_SHARE * min(1 / rate_per_s, self._wait_s, shortest_s)

    def solve(self, tolerance: float, progress: Callable[[float], None] | None) -> Solution:
        """Relative value iteration until the bounds on the optimal cost meet."""
        values = [0.0] * self._place(self._most, self._levels - 1, self._points)
        gap = float("inf")
        for sweep in range(1, MOST_SWEEPS + 1):
            new, _ = self._sweep(values, choices=False)
            changes = [after - before for after, before in zip(new, values, strict=True)]
            least, most = min(changes) / self._step_s, max(changes) / self._step_s
            base = new[0]
            values = [value - base for value in new]
            gap = (most - least) / max(abs(least + most) / 2, 1e-12)
            if progress is not None and sweep % 20 == 0:
                progress(gap)
            if gap <= tolerance:
                _, runs = self._sweep(values, choices=True)
                return Solution(self._rate, (least + most) / 2, least, most, sweep, runs, self._saturated)
        raise NotSolved(
            f"at {self._rate:g} arrivals/s the bounds are still {100 * gap:.2g} % apart after"
            f" {MOST_SWEEPS:,} sweeps: take fewer wait_buckets or a shorter queue_cap"
        )

    @property
    def _saturated(self) -> bool:
        return self._rate >= SATURATED * self._model.capacity_per_s(self._grid.max_batch)

    def _sweep(
        self, values: list[float], *, choices: bool
    ) -> tuple[list[float], tuple[tuple[str, ...], ...]]:
        """All values after one more step; with `choices`, the better action everywhere."""
        step, points = self._step_s, self._points
        new = [values[0] + step * self._rate * (self._after_empty(values) - values[0])]
        levels = []
        for level in range(self._levels):
            rows = []
            for count in range(1, self._most + 1):
                start = self._place(count, level, 0)
                now = values[start : start + points]
                run = self._runs[level][count - 1].rates(values, now)
                options = {RUN: run}
                for letter, launch in self._parts[level][count - 1]:
                    options[letter] = launch.rates(values, now)
                if count < self._grid.max_batch:
                    # Once the first one has waited longest nobody waits any more.
                    options[WAIT] = [*self._wait_rates(values, now, count, level), _NEVER]
                best = run if len(options) == 1 else list(map(min, *options.values()))
                if choices:
                    rows.append(_letters(options, best))
                new += [value + step * rate for value, rate in zip(now, best, strict=True)]
            levels.append(tuple(rows))
        # Where no long ones are expected, one that comes is treated like the others.
        return new, tuple(levels[min(level, self._levels - 1)] for level in range(LONG_LEVELS + 1))

    def _after_empty(self, values: list[float]) -> float:
        share = self._model.long_share
        long = self._place(1, min(1, self._levels - 1), 0)
        return (1 - share) * values[self._place(1, 0, 0)] + share * values[long]

    def _wait_rates(self, values: list[float], now: list[float], count: int, level: int) -> list[float]:
        """Cost and change of value per second of waiting, by time waited but the last."""
        share, late, quiet, points = self._model.long_share, self._late_part, self._quiet, self._points
        short = self._place(count + 1, level, 0)
        long = self._place(count + 1, min(level + 1, self._levels - 1), 0)
        joined = [
            (1 - share) * left + share * right
            for left, right in zip(values[short : short + points], values[long : long + points], strict=True)
        ]
        cost = self._objective.alpha / self._rate * count
        busy, wait_s = 1 - quiet, self._wait_s
        return [
            cost + (quiet * older + busy * (early + late * (after - early)) - value) / wait_s
            for older, early, after, value in zip(now[1:], joined, joined[1:], now, strict=False)
        ]

    def _place(self, count: int, level: int, point: int) -> int:
        if count == 0:
            return 0
        return 1 + (level * self._most + min(count, self._most) - 1) * self._points + point

    def _whole(self, count: int, level: int) -> list[_Batch]:
        """The batch that takes as many as it holds."""
        return self._first(min(count, self._grid.max_batch), count, level)

    def _smaller(self, count: int, level: int) -> list[tuple[str, list[_Batch]]]:
        """Batches of fewer, by letter; none twice."""
        whole = min(count, self._grid.max_batch)
        # A few only, while less than a full batch waits: beyond, throughput is what matters, and the queue
        # that is cut off would hide what is lost.
        sizes = {
            letter: size for letter, size in SIZES.items() if size < whole and count < self._grid.max_batch
        }
        shorts = count - self._typical_longs(count, level)
        if self._grid.short_first and 0 < shorts < whole:
            sizes = {SHORT_ONES: shorts} | {letter: size for letter, size in sizes.items() if size != shorts}
        return [(letter, self._first(size, count, level)) for letter, size in sizes.items()]

    def _first(self, batch: int, count: int, level: int) -> list[_Batch]:
        """What the first `batch` of `count` may be."""
        longs = self._typical_longs(count, level)
        if self._grid.short_first:
            shorts = min(batch, count - longs)
            return [(1.0, shorts, batch - shorts)]
        return [(chance, batch - inside, inside) for chance, inside in _drawn(count, longs, batch)]

    def _launch(self, batches: list[_Batch], count: int, level: int) -> _Launch:
        """Running one of `batches` when `count` wait, `level` of them long."""
        grid, objective, rate = self._grid, self._objective, self._rate
        longs = self._typical_longs(count, level)
        batch = sum(batches[0][1:])
        left = count - batch
        parts = []
        service_s = fixed = 0.0
        for chance, shorts_in, longs_in in batches:
            part_s = self._model.service_s(shorts_in, longs_in)
            service_s += chance * part_s
            fixed += chance * (
                objective.alpha * (count * part_s / rate + part_s * part_s / 2)
                + objective.beta * self._model.energy_j(shorts_in, longs_in)
            )
            parts.append((chance, part_s, longs - longs_in))
        if count == self._most:
            fixed += service_s * self._overflow_cost
        waits_s = [point * grid.bucket_s for point in range(self._points)]
        costs = [fixed + objective.gamma / rate * self._late(count, batch, wait_s) for wait_s in waits_s]
        knots = [0] if left == 0 else [*range(0, self._points - 1, KNOT_POINTS), self._points - 1]
        outcomes = [
            self._outcome(
                (chance, part_s, left, left_longs, self._left_wait_s(count, left, waits_s[knot]))
                for chance, part_s, left_longs in parts
            )
            for knot in knots
        ]
        return _Launch(service_s, costs, knots, outcomes)

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
        return HIDDEN_QUEUES * self._objective.alpha / self._rate * self._most

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
        self,
        outcome: _Outcome,
        probability: float,
        count: int,
        left_longs: int,
        arrivals: int,
        waits_s: list[float],
    ) -> None:
        highest = self._levels - 1
        levels = [0.0] * self._levels
        for longs in range(min(arrivals, highest) + 1):
            levels[min(highest, left_longs + longs)] += _binomial(arrivals, longs, self._model.long_share)
        levels[highest] += max(0.0, 1 - sum(levels))
        if count == 0:
            outcome[0] = outcome.get(0, 0.0) + probability
            return
        for level, level_chance in enumerate(levels):
            if level_chance * probability < NEGLIGIBLE:
                continue
            for wait_s in waits_s:
                share = probability * level_chance / len(waits_s)
                exact = min(wait_s / self._grid.bucket_s, self._points - 1)
                point = min(int(exact), self._points - 2)
                for place, part in (
                    (self._place(count, level, point), 1 - (exact - point)),
                    (self._place(count, level, point + 1), exact - point),
                ):
                    if part * share > 0:
                        outcome[place] = outcome.get(place, 0.0) + part * share


class _Launch:
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

    def rates(self, values: list[float], now: list[float]) -> list[float]:
        """Cost and change of value per second of service, by time waited."""
        service_s = self.service_s
        known = [expectation.of(values) for expectation in self._expectations]
        if len(known) == 1:
            after = known * len(now)
        else:
            after = [known[knot] + part * (known[knot + 1] - known[knot]) for knot, part in self._between]
        return [
            (cost + mean - value) / service_s
            for cost, mean, value in zip(self._costs, after, now, strict=True)
        ]


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


def _letters(options: dict[str, list[float]], best: list[float]) -> str:
    """The best of the options at each point; the first of those that are equal."""
    return "".join(
        next(letter for letter, values in options.items() if values[point] <= value)
        for point, value in enumerate(best)
    )


def late_starts(count: int, batch: int, oldest_wait_s: float, slo_s: float) -> float:
    """Of the first `batch` of `count` requests, how many have waited longer than `slo_s`, on average."""
    if oldest_wait_s <= slo_s:
        return 0.0
    return min(float(batch), 1 + (count - 1) * (oldest_wait_s - slo_s) / oldest_wait_s)


def _first_waits_s(arrivals: int, service_s: float) -> list[float]:
    """How long the first of `arrivals` has waited at the end of a service: three equally likely values.

    P(at most x) = (x / service_s) ** arrivals.
    """
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
