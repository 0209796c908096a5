"""File format of a batch-or-wait table, with its consistency checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import msgspec

from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.objective import Objective
from engine.scheduling.batch_or_wait.states import LONG_LEVELS, RUN, SHORT_ONES, SIZES, WAIT, Grid
from engine.scheduling.batch_or_wait.value_iteration import Solution

FORMAT = "fairgate batch-or-wait table"
VERSION = 2
"""2: the KV pressure is a part of the situation."""
MOST_RATES = 64
MOST_FILE_BYTES = 16 * 1024 * 1024
_LETTERS = frozenset((RUN, SHORT_ONES, WAIT, *SIZES))


class BadTable(ValueError):
    """This is no table that can be used; the message says what is wrong with which part."""


class StoredRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rate_per_s: float
    cost: float
    least_cost: float
    most_cost: float
    saturated: bool
    actions: list[list[list[str]]]
    """By KV pressure, level of long ones and number waiting: at each point of time waited `r`un, run the
    `s`hort ones only, run that number only (`SIZES`), or `w`ait."""

    @staticmethod
    def of(solution: Solution) -> StoredRate:
        return StoredRate(
            solution.rate_per_s,
            solution.cost,
            solution.least_cost,
            solution.most_cost,
            solution.saturated,
            [[list(rows) for rows in levels] for levels in solution.actions],
        )


class StoredTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    model: BatchModel
    objective: Objective
    grid: Grid
    pool: KvMemory
    rates: list[StoredRate]


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


def decode(content: bytes) -> StoredTable:
    """Raises `BadTable` for anything that is not a whole, consistent table of this version."""
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format != FORMAT:
            raise BadTable(f"the format is {head.format!r}, not {FORMAT!r}")
        if head.version != VERSION:
            age = "an older" if head.version < VERSION else "a newer"
            raise BadTable(
                f"version {head.version} is of {age} program, and this one reads version {VERSION} only:"
                " solve it again"
            )
        stored = msgspec.json.decode(content, type=StoredTable)
        _check(stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadTable(f"no batch-or-wait table: {error}") from None
    return stored


def check_rates(rates_per_s: Sequence[float]) -> None:
    """Raises `BadTable` for arrival rates that a table cannot have."""
    if not 1 <= len(rates_per_s) <= MOST_RATES:
        raise BadTable(f"{len(rates_per_s)} arrival rates: there must be 1 to {MOST_RATES}")
    if not all(isfinite(rate) and rate > 0 for rate in rates_per_s):
        raise BadTable("arrival rates must be positive numbers")
    if any(low >= high for low, high in pairwise(rates_per_s)):
        raise BadTable("arrival rates must rise")


def _check(stored: StoredTable) -> None:
    """Raises `BadTable` for parts that do not fit together."""
    check_rates([rate.rate_per_s for rate in stored.rates])
    for rate in stored.rates:
        name = f"rate {rate.rate_per_s:g}"
        if not (isfinite(rate.cost) and rate.least_cost <= rate.cost <= rate.most_cost):
            raise BadTable(f"{name}: the cost {rate.cost} must lie within its bounds")
        if len(rate.actions) != stored.pool.levels:
            raise BadTable(
                f"{name}: actions must have {stored.pool.levels} KV pressures, not {len(rate.actions)}"
            )
        for levels in rate.actions:
            if len(levels) != LONG_LEVELS + 1:
                raise BadTable(f"{name}: actions must have {LONG_LEVELS + 1} levels of long requests")
            for rows in levels:
                _check_rows(stored.grid, rows, name)


def _check_rows(grid: Grid, rows: list[str], name: str) -> None:
    if len(rows) != grid.most_waiting:
        raise BadTable(f"{name}: each level needs {grid.most_waiting} rows, not {len(rows)}")
    for count, row in enumerate(rows, 1):
        full = count >= grid.max_batch and WAIT in row
        if len(row) != grid.points or not _LETTERS.issuperset(row) or row[-1] == WAIT or full:
            raise BadTable(
                f"{name}, {count} waiting: the row {row[:80]!r} must be {grid.points} letters of"
                f" {''.join(sorted(_LETTERS))}, not {WAIT!r} at the end or where a batch is full"
            )
