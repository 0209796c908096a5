"""The stated error of a replay, from a simulation of what was really served.

The recording is cut into `PARTS` stretches of requests. The shortfall of each stretch's simulation
(`shortfall.py`) is drawn from the *other* stretches: no request has a part in its own simulated times. Chance
scatter of the figures is found by drawing whole stretches with replacement (block bootstrap, Kuensch 1989);
the stated error holds for all figures together in `CONFIDENCE` of the draws (the max-t band). A request that
was served and never ends in its simulation counts as infinitely late.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ops.reporting import quantile
from ops.simulate.figures.shortfall import Shortfall, residuals_of
from ops.simulate.records import Records

PARTS = 20
LEAST_REQUESTS = 2 * PARTS
MOST_REQUESTS = 20_000
"""Of more every n-th is looked at."""
DRAWS = 200
CONFIDENCE = 0.95
LEAST_ERROR = 0.01
"""Smaller differences count as equal."""
LEAST_S = 1e-6
"""Times are recorded in microseconds."""
FIGURES = (("ttft_s", 0.5), ("ttft_s", 0.9), ("e2e_s", 0.5), ("e2e_s", 0.9))


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    name: str
    served_s: float
    simulated_s: float
    """With the shortfall of others; infinite: never."""
    alone_s: float
    """Without it."""
    error: float | None
    """Stated, as a share of the served figure; None: too few requests."""

    @property
    def off(self) -> float:
        """The baseline's deviation as a share of the served figure; below 0: it is faster."""
        return self.simulated_s / self.served_s - 1 if self.served_s > 0 else 0.0

    @property
    def is_within(self) -> bool:
        return self.error is None or abs(self.off) <= self.error


@dataclass(frozen=True, slots=True)
class Baseline:
    records: Records
    """Its requests, with the shortfall of others added."""
    shortfall: Shortfall
    """Of all requests: for simulations of something else."""
    figures: tuple[ComparedFigure, ...]

    @staticmethod
    def of(real: Records, simulated: Records) -> Baseline:
        """The same requests in the same order. Raises ValueError where none can be compared."""
        residuals = residuals_of(real, simulated)
        shortfall = Shortfall(tuple(residuals.values()))
        records = copy.deepcopy(simulated)
        rows = list(real.done())
        parts = _parts(rows, min(PARTS, len(rows)))
        for number, part in enumerate(parts):
            own = set(part)
            others = tuple(residual for row, residual in residuals.items() if row not in own)
            compared = [row for row in part if row in residuals]
            (Shortfall(others) if others else shortfall).add_to(records, f"part {number}", compared)
        return Baseline(records, shortfall, _compared(real, simulated, records, parts))

    @property
    def off(self) -> list[ComparedFigure]:
        return [figure for figure in self.figures if not figure.is_within]


def _parts(rows: Sequence[int], count: int) -> list[Sequence[int]]:
    bounds = [len(rows) * number // count for number in range(count + 1)]
    return [rows[low:high] for low, high in pairwise(bounds)]


def _compared(
    real: Records, alone: Records, simulated: Records, parts: Sequence[Sequence[int]]
) -> tuple[ComparedFigure, ...]:
    every = 1 + sum(map(len, parts)) // MOST_REQUESTS
    looked_at = [part[::every] for part in parts]
    samples = {
        name: tuple(_Sample.of(getattr(records, name), looked_at) for records in (real, simulated, alone))
        for name in ("ttft_s", "e2e_s")
    }
    once = [1] * len(parts)
    values = [tuple(sample.quantile(share, once) for sample in samples[name]) for name, share in FIGURES]
    errors: Sequence[float | None] = [None] * len(FIGURES)
    if sum(map(len, parts)) >= LEAST_REQUESTS:
        errors = _errors(samples, [simulated_s / served_s for served_s, simulated_s, _ in values], len(parts))
    return tuple(
        ComparedFigure(f"{name.removesuffix('_s')}_p{share * 100:.0f}", served_s, simulated_s, alone_s, error)
        for (name, share), (served_s, simulated_s, alone_s), error in zip(
            FIGURES, values, errors, strict=True
        )
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Values in order, each with the number of its stretch."""

    ordered: list[tuple[float, int]]

    @staticmethod
    def of(value: Callable[[int], float], parts: Sequence[Sequence[int]]) -> _Sample:
        # Never 0: ratios are taken.
        pairs = [(max(LEAST_S, value(row)), number) for number, part in enumerate(parts) for row in part]
        return _Sample(sorted(pairs))

    def quantile(self, share: float, times: Sequence[int]) -> float:
        """Nearest rank, where the values of stretch `k` count `times[k]` times."""
        wanted = share * sum(times[number] for _, number in self.ordered)
        seen = 0
        for value, number in self.ordered:
            seen += times[number]
            if seen >= wanted and times[number]:
                return value
        return self.ordered[-1][0]


def _errors(samples: Mapping[str, tuple[_Sample, ...]], ratios: Sequence[float], parts: int) -> list[float]:
    """The stated error of each figure's ratio, simulated over served."""
    rng = random.Random("stated error")
    scatter: list[list[float]] = []
    for _ in range(DRAWS):
        times = [0] * parts
        for _ in range(parts):
            times[rng.randrange(parts)] += 1
        drawn = []
        for (name, share), ratio in zip(FIGURES, ratios, strict=True):
            served, simulated, _ = samples[name]
            off = simulated.quantile(share, times) / served.quantile(share, times)
            # Where it never ends at all, or not in this draw, chance cannot be judged.
            drawn.append(off / ratio - 1 if off < inf and ratio < inf else 0.0)
        scatter.append(drawn)
    spreads = [max(1e-9, statistics.pstdev(draws)) for draws in zip(*scatter, strict=True)]
    widest = [max(abs(off) / spread for off, spread in zip(drawn, spreads, strict=True)) for drawn in scatter]
    factor = quantile(widest, CONFIDENCE)
    return [max(LEAST_ERROR, factor * spread) for spread in spreads]
