"""Batch-or-wait table: run the waiting requests now, or wait up to how long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Self

import msgspec

from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.objective import Objective
from engine.scheduling.batch_or_wait.states import LONG_LEVELS, SHORT_ONES, SIZES, WAIT, Grid
from engine.scheduling.batch_or_wait.table_file import (
    FORMAT,
    MOST_FILE_BYTES,
    VERSION,
    BadTable,
    StoredRate,
    StoredTable,
    check_rates,
    decode,
)
from engine.scheduling.batch_or_wait.value_iteration import solve
from engine.scheduling.batch_or_wait.wait_table import TableAction

_NEARLY = 1e-6
"""Of a bucket: a wait that ended where it should is not asked to wait for rounding's sake."""


class BatchOrWaitTable:
    """What to do in each situation. Implements `engine.scheduling.batch_or_wait.wait_table.WaitTable`."""

    def __init__(self, stored: StoredTable) -> None:
        """Use `solve_table`, `load` or `decode`."""
        self._stored = stored
        self.model = stored.model
        self.objective = stored.objective
        self.grid = stored.grid
        self.pool = stored.pool
        self._borders = [sqrt(low * high) for low, high in pairwise(self.rates_per_s)]
        # By rate, KV pressure, level, number waiting, point: the next point at which it runs.
        self._next_run = [
            [[[_next_run(row) for row in rows] for rows in levels] for levels in rate.actions]
            for rate in stored.rates
        ]
        self._short_tokens = stored.model.short.total_tokens
        self._more_tokens = max(1, stored.model.long.total_tokens - stored.model.short.total_tokens)

    @property
    def long_tokens(self) -> int:
        return self.model.long_tokens

    @property
    def rates_per_s(self) -> list[float]:
        return [item.rate_per_s for item in self._stored.rates]

    @property
    def longest_wait_s(self) -> float:
        return self.grid.longest_wait_s

    def decide(
        self,
        *,
        rate_per_s: float,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> TableAction:
        """See `WaitTable`. The nearest solved rate (the lowest for 0) and the nearest KV level are taken."""
        if num_waiting < 1:
            return TableAction(0.0, 0)
        longs = 0
        if has_long:
            more = (remaining_tokens - num_waiting * self._short_tokens) / self._more_tokens
            longs = min(num_waiting, max(1, round(more)))
        grid = self.grid
        point = min(grid.wait_buckets, int(max(0.0, oldest_wait_s) / grid.bucket_s + _NEARLY))
        rate = bisect_left(self._borders, rate_per_s)
        pressure = self.pool.level(kv_pressure)
        level = min(longs, LONG_LEVELS)
        row = min(num_waiting, grid.most_waiting) - 1
        target = self._next_run[rate][pressure][level][row][point]
        if target > point:
            return TableAction(max(0.0, target * grid.bucket_s - oldest_wait_s), 0)
        letter = self._stored.rates[rate].actions[pressure][level][row][point]
        fits = self.pool.fits(self.model, num_waiting, longs, pressure, short_first=grid.short_first)
        whole = min(num_waiting, grid.max_batch, fits)
        if letter == SHORT_ONES and longs < num_waiting:
            return TableAction(0.0, min(whole, num_waiting - longs))
        return TableAction(0.0, min(whole, SIZES.get(letter, whole)))

    def summary(self) -> list[dict[str, object]]:
        """By rate and KV pressure: the cost, and from how many waiting a batch runs immediately."""
        return [
            {
                "rate_per_s": rate.rate_per_s,
                "kv_pressure": pressure,
                "cost": rate.cost,
                "least_cost": rate.least_cost,
                "most_cost": rate.most_cost,
                "saturated": rate.saturated,
                "run_from": [
                    _control_limit(levels[level], level)
                    for level in range(LONG_LEVELS + 1 if self.model.long_share else 1)
                ],
            }
            for rate in self._stored.rates
            for pressure, levels in zip(self.pool.pressures, rate.actions, strict=False)
        ]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self._stored), indent=1) + b"\n"

    def save(self, path: Path) -> None:
        """Writes the file. Raises OSError."""
        path.write_bytes(self.encode())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the file. Raises `BadTable`, OSError."""
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise BadTable(f"{path}: {size:,} bytes are more than a table's {MOST_FILE_BYTES:,}")
        try:
            return cls.decode(path.read_bytes())
        except BadTable as error:
            raise BadTable(f"{path}: {error}; make one with `fairgate policy solve`") from None

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Raises `BadTable` for anything that is not a whole, consistent table of this version."""
        return cls(decode(content))


def solve_table(
    model: BatchModel,
    rates_per_s: Sequence[float],
    objective: Objective,
    grid: Grid,
    pool: KvMemory | None = None,
    *,
    tolerance: float = 1e-3,
    progress: Callable[[float], None] | None = None,
) -> BatchOrWaitTable:
    """Solves each rate; `progress` gets the share done. Raises ValueError for rates, and `NotSolved`."""
    pool = pool or KvMemory()
    check_rates(rates_per_s)
    rates = []
    for done, rate_per_s in enumerate(rates_per_s, 1):
        solution = solve(model, rate_per_s, objective, grid, pool, tolerance=tolerance)
        rates.append(StoredRate.of(solution))
        if progress is not None:
            progress(done / len(rates_per_s))
    return BatchOrWaitTable(StoredTable(FORMAT, VERSION, model, objective, grid, pool, rates))


def _next_run(row: str) -> list[int]:
    """For each point of time waited the next one, itself included, at which the batch runs."""
    following = len(row) - 1
    targets = []
    for point in range(len(row) - 1, -1, -1):
        if row[point] != WAIT:
            following = point
        targets.append(following)
    return targets[::-1]


def _control_limit(rows: list[str], level: int) -> int:
    """The least number waiting, `level` of them long, from which a batch runs immediately."""
    return next(count for count in range(max(1, level), len(rows) + 1) if rows[count - 1][0] != WAIT)
