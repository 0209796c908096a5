"""The batch-or-wait table: run what waits now, or wait up to how long?

What `engine.scheduling.smdp` worked out for a grid of arrival rates and of batches that fit into memory,
stored as one small JSON file and looked up in constant time. The file says what it was solved for: a table
for another model, other lengths or another objective is another table.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, sqrt
from pathlib import Path
from typing import Self

import msgspec

from engine.scheduling.batch_model import BatchModel
from engine.scheduling.smdp import LONG_LEVELS, RUN, SHORT_ONES, SIZES, WAIT, Grid, Objective, Solution, solve

FORMAT = "fairgate batch-or-wait table"
VERSION = 1
MOST_RATES = 64
MOST_FILE_BYTES = 16 * 1024 * 1024
RATE_MEMORY_ARRIVALS = 32
"""The arrival rate is that of about so many last arrivals."""
_NEARLY = 1e-6
"""Of a bucket: a wait that ended where it should is not asked to wait for rounding's sake."""
_LETTERS = frozenset((RUN, SHORT_ONES, WAIT, *SIZES))


class BadTable(ValueError):
    """This is no table that can be used; the message says what is wrong with which part."""


class Pool(msgspec.Struct, frozen=True):
    """KV memory that a batch needs to fit into."""

    tokens: int = 0
    """0: memory never limits a batch."""
    pressures: tuple[float, ...] = (0.0, 0.5, 0.75)
    """Parts of the pool that may be taken by others; a policy is solved for each that changes the batch."""

    def batches(self, model: BatchModel, max_batch: int) -> list[int]:
        """The largest batch at each pressure, without repetition, in rising order. Raises ValueError."""
        if self.tokens < 0 or not all(0 <= pressure < 1 for pressure in self.pressures):
            raise ValueError("pool tokens must not be negative, and pressures lie in 0 <= p < 1")
        if self.tokens == 0:
            return [max_batch]
        return sorted({self.fits(model, max_batch, pressure) for pressure in (0.0, *self.pressures)})

    def fits(self, model: BatchModel, max_batch: int, pressure: float) -> int:
        """How many requests of mean length a batch holds at this pressure, at least 1."""
        if self.tokens == 0:
            return max_batch
        free = self.tokens * (1 - min(max(pressure, 0.0), 1.0))
        return max(1, min(max_batch, int(free / model.mean_tokens)))


class _Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do at one rate and largest batch."""

    max_batch: int
    cost: float
    least_cost: float
    most_cost: float
    saturated: bool
    actions: list[list[str]]
    """By level of long ones and number waiting: at each point of time waited `r`un, run the `s`hort ones
    only, run so many only (`SIZES`), or `w`ait."""


class _Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rate_per_s: float
    policies: list[_Policy]
    """Largest batches in rising order."""


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    format: str
    version: int
    model: BatchModel
    objective: Objective
    grid: Grid
    pool: Pool
    rates: list[_Rate]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the table says."""

    wait_s: float
    """Seconds to wait if nothing else arrives; 0: run now."""
    batch: int
    """The batch is to take so many of the line, no more; 0: wait."""


class BatchOrWaitTable:
    """The table in use: says what to do at the arrival rate that it keeps. Time is passed in."""

    def __init__(self, stored: _Stored) -> None:
        """Use `solve_table`, `load` or `decode`."""
        self._stored = stored
        self.model = stored.model
        self.objective = stored.objective
        self.grid = stored.grid
        rates = [item.rate_per_s for item in stored.rates]
        self._borders = [sqrt(low * high) for low, high in pairwise(rates)]
        self._batches = [policy.max_batch for policy in stored.rates[0].policies]
        # By rate, largest batch, level, number waiting, point: the next point at which it runs.
        self._next_run = [
            [[[_next_run(row) for row in level] for level in policy.actions] for policy in rate.policies]
            for rate in stored.rates
        ]
        self._short_tokens = stored.model.short.total_tokens
        self._more_tokens = max(1, stored.model.long.total_tokens - stored.model.short.total_tokens)
        self._last_arrival_s: float | None = None
        self._gap_s = 0.0
        self._gaps = 0

    @property
    def long_tokens(self) -> int:
        """From so many predicted tokens, prompt and output, a request counts as long."""
        return self.model.long_tokens

    @property
    def rates_per_s(self) -> list[float]:
        """The arrival rates it was solved for."""
        return [item.rate_per_s for item in self._stored.rates]

    @property
    def longest_wait_s(self) -> float:
        """Nobody is kept waiting longer than this once the server is free."""
        return self.grid.longest_wait_s

    def note_arrival(self, now_s: float) -> None:
        """A request arrived."""
        if self._last_arrival_s is not None:
            gap_s = max(0.0, now_s - self._last_arrival_s)
            self._gaps += 1
            self._gap_s += max(1 / RATE_MEMORY_ARRIVALS, 1 / self._gaps) * (gap_s - self._gap_s)
        self._last_arrival_s = now_s

    @property
    def rate_per_s(self) -> float:
        """Arrivals a second lately; the lowest rate of the table before there are two."""
        if self._gaps == 0:
            return self._stored.rates[0].rate_per_s
        return 1 / max(self._gap_s, 1e-9)

    def wait_s(
        self,
        *,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> float:
        """Seconds to wait, if nothing else arrives, before running what waits; 0: run it now.

        `has_long`: one of them, the head at least, has `long_tokens` or more to go. `remaining_tokens`:
        prompt and predicted output of all that wait, as far as known; tells how many are long.
        `kv_pressure`: the part of the KV pool that the next batch cannot have, 0 to 1. Ask again when a
        request arrives.
        """
        return self.decide(
            num_waiting=num_waiting,
            oldest_wait_s=oldest_wait_s,
            has_long=has_long,
            remaining_tokens=remaining_tokens,
            kv_pressure=kv_pressure,
        ).wait_s

    def decide(
        self,
        *,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> Decision:
        """The same as `wait_s`, and how many of the line the batch takes."""
        if num_waiting < 1:
            return Decision(0.0, 0)
        stored = self._stored
        fits = stored.pool.fits(self.model, self._batches[-1], kv_pressure)
        batch = max(0, bisect_right(self._batches, fits) - 1)
        longs = 0
        if has_long:
            more = (remaining_tokens - num_waiting * self._short_tokens) / self._more_tokens
            longs = min(num_waiting, max(1, round(more)))
        exact = max(0.0, oldest_wait_s) / self.grid.bucket_s
        point = min(self.grid.wait_buckets, int(exact + _NEARLY))
        rate = bisect_left(self._borders, self.rate_per_s)
        rows = self._stored.rates[rate].policies[batch].actions[min(longs, LONG_LEVELS)]
        row = min(num_waiting, len(rows)) - 1
        target = self._next_run[rate][batch][min(longs, LONG_LEVELS)][row][point]
        if target == point:
            letter = rows[row][point]
            whole = min(num_waiting, self._batches[batch])
            if letter == SHORT_ONES and longs < num_waiting:
                return Decision(0.0, min(whole, num_waiting - longs))
            return Decision(0.0, min(whole, SIZES.get(letter, whole)))
        return Decision(max(0.0, target * self.grid.bucket_s - oldest_wait_s), 0)

    def reset(self) -> None:
        """Forgets the arrival rate."""
        self._last_arrival_s, self._gap_s, self._gaps = None, 0.0, 0

    def summary(self) -> list[dict[str, object]]:
        """For people, by rate and largest batch: the cost, and from how many waiting a batch runs at once."""
        return [
            {
                "rate_per_s": rate.rate_per_s,
                "max_batch": policy.max_batch,
                "cost": policy.cost,
                "least_cost": policy.least_cost,
                "most_cost": policy.most_cost,
                "saturated": policy.saturated,
                "run_from": [
                    _control_limit(policy.actions[level], level)
                    for level in range(LONG_LEVELS + 1 if self.model.long_share else 1)
                ],
            }
            for rate in self._stored.rates
            for policy in rate.policies
        ]

    def encode(self) -> bytes:
        """The file's content."""
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
        try:
            head = msgspec.json.decode(content, type=_Head)
            if head.format != FORMAT:
                raise BadTable(f"the format is {head.format!r}, not {FORMAT!r}")
            if head.version != VERSION:
                raise BadTable(f"version {head.version}, and this program reads version {VERSION}")
            stored = msgspec.json.decode(content, type=_Stored)
            _check(stored)
            return cls(stored)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadTable(f"no batch-or-wait table: {error}") from None
        except ValueError as error:
            raise BadTable(str(error)) from None


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


def solve_table(
    model: BatchModel,
    rates_per_s: Sequence[float],
    objective: Objective,
    grid: Grid,
    pool: Pool | None = None,
    *,
    tolerance: float = 1e-3,
    progress: Callable[[float], None] | None = None,
) -> BatchOrWaitTable:
    """Solves each rate at each largest batch. `progress` is told how much is done, 0 to 1.

    Raises ValueError for rates that are not positive and rising, or too many of them; `smdp.NotSolved`.
    """
    pool = pool or Pool()
    _check_rates(rates_per_s)
    batches = pool.batches(model, grid.max_batch)
    done, total = 0, len(rates_per_s) * len(batches)
    rates = []
    for rate_per_s in rates_per_s:
        policies = []
        for max_batch in batches:
            smaller = replace(grid, max_batch=max_batch)
            solution = solve(model, rate_per_s, objective, smaller, tolerance=tolerance)
            policies.append(_policy(max_batch, solution))
            done += 1
            if progress is not None:
                progress(done / total)
        rates.append(_Rate(rate_per_s, policies))
    return BatchOrWaitTable(_Stored(FORMAT, VERSION, model, objective, grid, pool, rates))


def _policy(max_batch: int, solution: Solution) -> _Policy:
    return _Policy(
        max_batch,
        solution.cost,
        solution.least_cost,
        solution.most_cost,
        solution.saturated,
        [list(rows) for rows in solution.actions],
    )


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
    """The least number waiting, `level` of them long, of which some run at once."""
    return next(count for count in range(max(1, level), len(rows) + 1) if rows[count - 1][0] != WAIT)


def _check(stored: _Stored) -> None:
    """Raises ValueError for parts that do not fit together."""
    _check_rates([rate.rate_per_s for rate in stored.rates])
    batches = stored.pool.batches(stored.model, stored.grid.max_batch)
    for rate in stored.rates:
        name = f"rate {rate.rate_per_s:g}"
        if [policy.max_batch for policy in rate.policies] != batches:
            raise BadTable(f"{name}: there must be one policy for each largest batch {batches}")
        for policy in rate.policies:
            if not (isfinite(policy.cost) and policy.least_cost <= policy.cost <= policy.most_cost):
                raise BadTable(f"{name}: the cost {policy.cost} must lie within its bounds")
            if len(policy.actions) != LONG_LEVELS + 1:
                raise BadTable(f"{name}: actions must have {LONG_LEVELS + 1} levels of long requests")
            for level in policy.actions:
                most = replace(stored.grid, max_batch=policy.max_batch).most_waiting
                if len(level) != most:
                    raise BadTable(f"{name}: each level needs {most} rows")
                for count, row in enumerate(level, 1):
                    full = count >= policy.max_batch and WAIT in row
                    letters = _LETTERS.issuperset(row)
                    if len(row) != stored.grid.points or not letters or row[-1] == WAIT or full:
                        raise BadTable(
                            f"{name}, {count} waiting: the row {row[:80]!r} must be {stored.grid.points}"
                            f" letters of {''.join(sorted(_LETTERS))}, not {WAIT!r} at the end or where a"
                            " batch is full"
                        )


def _check_rates(rates_per_s: Sequence[float]) -> None:
    if not 1 <= len(rates_per_s) <= MOST_RATES:
        raise BadTable(f"{len(rates_per_s)} arrival rates: there must be 1 to {MOST_RATES}")
    if not all(isfinite(rate) and rate > 0 for rate in rates_per_s):
        raise BadTable("arrival rates must be positive numbers")
    if any(low >= high for low, high in pairwise(rates_per_s)):
        raise BadTable("arrival rates must rise")
