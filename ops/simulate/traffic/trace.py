"""Reads trace files lazily; the columns are in `docs/simulating.md`.

Other columns are ignored. Instants count from the first row where they are dates. A file without arrivals
(the column absent, or empty throughout) has only lengths: with a rate the arrivals are drawn.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NoReturn, TextIO, cast

from ops.simulate.traffic.requests import (
    MOST_REQUESTS,
    MOST_TOKENS,
    PREFIX_BLOCK_TOKENS,
    BadTrace,
    SimulatedRequest,
)

OTHER_NAMES = {"TIMESTAMP": "arrival_s", "ContextTokens": "input_tokens", "GeneratedTokens": "output_tokens"}
COLUMNS = ("arrival_s", "tenant", "input_tokens", "output_tokens", "prefix_blocks")
REQUIRED = ("input_tokens", "output_tokens")
MOST_BYTES = 8 << 30
"""Of a file's text, unpacked."""
MOST_LINE = 4 << 20
MOST_BLOCK_ID = 2**31 - 1
EVERYBODY = "all"
"""The tenant where a trace names none."""


@dataclass(frozen=True, slots=True)
class _Row:
    path: Path
    line: int
    fields: dict[str, str]

    def bad(self, column: str, why: str) -> NoReturn:
        shown = self.fields.get(column, "")
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise BadTrace(f"{self.path}, line {self.line}, column {column}: {why}, not {shown!r}")

    def tokens(self, column: str) -> int:
        text = self.fields[column]
        try:
            tokens = int(text)
        except ValueError:
            self.bad(column, "must be a whole number of tokens")
        if not 1 <= tokens <= MOST_TOKENS:
            self.bad(column, f"must be between 1 and {MOST_TOKENS:,} tokens")
        return tokens

    def blocks(self, input_tokens: int) -> tuple[int, ...]:
        text = self.fields.get("prefix_blocks", "")
        if not text:
            return ()
        try:
            blocks = tuple(map(int, text.split()))
        except ValueError:
            self.bad("prefix_blocks", "must be whole numbers separated by spaces")
        if min(blocks) < 0 or max(blocks) > MOST_BLOCK_ID:
            self.bad("prefix_blocks", f"ids must lie between 0 and {MOST_BLOCK_ID:,}")
        if len(blocks) > math.ceil(input_tokens / PREFIX_BLOCK_TOKENS):
            self.bad(
                "prefix_blocks",
                f"{input_tokens:,} input tokens have at most "
                f"{math.ceil(input_tokens / PREFIX_BLOCK_TOKENS):,} blocks of {PREFIX_BLOCK_TOKENS}",
            )
        return blocks


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file with arrivals; with `rate`, its lengths at Poisson arrivals. Implements `Source`. Raises
    ValueError for the rate and `BadTrace` where the file cannot be read: immediately, or line by line."""

    path: Path
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        columns = header(self.path)
        if self.rate is None and "arrival_s" not in columns:
            raise BadTrace(
                f"{self.path}, line 1: there is no column arrival_s (or TIMESTAMP); for a file of lengths "
                "alone, say how many requests arrive a second: --rate"
            )
        if self.rate is not None and not 0 < self.rate <= 1e6:
            raise ValueError(
                f"rate must be above 0 and at most 1,000,000 requests a second, not {self.rate:g}"
            )

    @property
    def name(self) -> str:
        return self.path.name if self.rate is None else f"{self.path.name} at {self.rate:g}/s"

    @property
    def has_prefixes(self) -> bool:
        return "prefix_blocks" in header(self.path)

    def __iter__(self) -> Iterator[SimulatedRequest]:
        arrivals = self._recorded() if self.rate is None else self._drawn(self.rate)
        for at_s, row in arrivals:
            tokens = row.tokens("input_tokens")
            tenant, output_tokens = row.fields.get("tenant") or EVERYBODY, row.tokens("output_tokens")
            yield SimulatedRequest(at_s, tenant, tokens, output_tokens, row.blocks(tokens))

    def _recorded(self) -> Iterator[tuple[float, _Row]]:
        first_s: float | None = None
        last_s = 0.0
        for row in _rows(self.path):
            at_s = _instant_s(row)
            first_s = at_s if first_s is None else first_s
            if at_s < last_s:
                row.bad("arrival_s", f"rows must be in order of arrival; the one before is at {last_s:.6f} s")
            last_s = at_s
            # A trace of dates begins with its first row; one of seconds keeps its zero.
            yield at_s - first_s if first_s > 1e8 else at_s, row

    def _drawn(self, rate: float) -> Iterator[tuple[float, _Row]]:
        rng = random.Random(f"arrivals {self.seed}")
        at_s = 0.0
        for row in _rows(self.path):
            at_s += rng.expovariate(rate)
            yield at_s, row


def header(path: Path) -> list[str]:
    """The columns by our names. Raises `BadTrace` when one is missing or the file cannot be read."""
    try:
        with _opened(path) as file:
            return _columns(path, next(csv.reader(_bounded(path, file)), []))
    except (csv.Error, UnicodeDecodeError, OSError, EOFError) as error:
        raise BadTrace(f"{path}, line 1: neither CSV nor gzip of CSV in UTF-8 ({error})") from None


def _columns(path: Path, names: list[str]) -> list[str]:
    columns = [OTHER_NAMES.get(name.strip(), name.strip()) for name in names]
    if columns:
        columns[0] = columns[0].removeprefix("\ufeff")
    for column in REQUIRED:
        if column not in columns:
            others = [other for other, own in OTHER_NAMES.items() if own == column]
            raise BadTrace(
                f"{path}, line 1: there is no column {column} (or {', '.join(others)}); "
                f"the columns are {', '.join(columns) or 'none'}"
            )
    for column in COLUMNS:
        if columns.count(column) > 1:
            raise BadTrace(f"{path}, line 1: column {column} stands there twice")
    return columns


def _rows(path: Path) -> Iterator[_Row]:
    with _opened(path) as file:
        lines = _bounded(path, file)
        reader = csv.reader(lines)
        try:
            columns = _columns(path, next(reader, []))
            wanted = [(column, columns.index(column)) for column in COLUMNS if column in columns]
            count = 0
            for cells in reader:
                if not cells:
                    continue
                count += 1
                if count > MOST_REQUESTS:
                    raise BadTrace(
                        f"{path}, line {reader.line_num}: more than {MOST_REQUESTS:,} rows; "
                        "cut it, or read the first ones alone: --limit"
                    )
                if len(cells) != len(columns):
                    raise BadTrace(
                        f"{path}, line {reader.line_num}: {len(cells)} columns where the header has "
                        f"{len(columns)}"
                    )
                yield _Row(path, reader.line_num, {column: cells[index] for column, index in wanted})
        except csv.Error as error:
            raise BadTrace(f"{path}, line {reader.line_num}: no CSV ({error})") from None
        except UnicodeDecodeError as error:
            raise BadTrace(f"{path}, after line {reader.line_num}: not UTF-8 ({error.reason})") from None
        except (OSError, EOFError) as error:
            raise BadTrace(f"{path}, after line {reader.line_num}: cannot be read on ({error})") from None
    if not count:
        raise BadTrace(f"{path}: there are no rows")


def _bounded(path: Path, file: TextIO) -> Iterator[str]:
    read = 0
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        read += len(line)
        if len(line) > MOST_LINE:
            raise BadTrace(f"{path}, line {number}: longer than {MOST_LINE:,} characters")
        if read > MOST_BYTES:
            raise BadTrace(f"{path}, line {number}: more than {MOST_BYTES:,} characters of text")
        yield line


def _opened(path: Path) -> TextIO:
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        opener = cast("Callable[..., TextIO]", gzip.open if is_gzip else open)
        return opener(path, "rt", encoding="utf-8", newline="")
    except OSError as error:
        raise BadTrace(f"{path}: cannot be opened ({error.strerror or error})") from None


def _instant_s(row: _Row) -> float:
    text = row.fields["arrival_s"]
    try:
        at_s = float(text)
    except ValueError:
        at_s = _date_s(row, text)
    if not math.isfinite(at_s) or at_s < 0:
        row.bad("arrival_s", "must be a number of seconds of at least 0")
    return at_s


def _date_s(row: _Row, text: str) -> float:
    if not text:
        row.bad(
            "arrival_s",
            "is needed; for a file of lengths alone, say how many requests arrive a second (--rate)",
        )
    try:
        # Azure writes seven digits of a second, Python reads six.
        whole, _, fraction = text.partition(".")
        digits = len(fraction) - len(fraction.lstrip("0123456789"))
        moment = datetime.fromisoformat(whole + fraction[digits:])
        # Not `timestamp()`: a trace without a zone must not depend on where it is read.
        since = moment.replace(tzinfo=None) - datetime(1970, 1, 1)
        return since.total_seconds() + float(f"0.{fraction[:digits] or 0}")
    except ValueError:
        row.bad("arrival_s", "must be seconds, or a date such as 2023-11-16 18:17:03")
