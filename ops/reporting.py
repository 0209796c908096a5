"""Tables, checks and figures of reports."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table; at full width where stdout is no terminal."""
    from rich.console import Console
    from rich.table import Table

    recording = _PARTS.get()
    if recording is not None:
        texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
        recording.add(TablePart(title, columns, texts))
        return
    if not rows:
        click.echo(f"{title}: none")
        return
    console = Console(width=None if os.isatty(1) else 200, highlight=False)
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*("" if cell is None else str(cell) for cell in row))
    console.print(grid)


@dataclass(frozen=True)
class TablePart:
    """A table of a page, its cells as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def table_part(grid: Table) -> TablePart:
    columns = [str(column.header) for column in grid.columns]
    cells = [[getattr(cell, "plain", cell) for cell in column.cells] for column in grid.columns]
    rows = [[str(cell) for cell in row] for row in zip(*cells, strict=True)]
    return TablePart(str(grid.title or ""), columns, rows)


Part = TablePart | str


class PartRecording(io.TextIOBase):
    """What a command would print, as parts of a page."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._text = ""

    def write(self, text: str, /) -> int:
        self._text += text
        return len(text)

    def add(self, part: TablePart) -> None:
        self.end_text()
        self.parts.append(part)

    def end_text(self) -> None:
        if self._text.strip():
            self.parts.append(self._text.strip("\n"))
        self._text = ""


_PARTS: ContextVar[PartRecording | None] = ContextVar("recording", default=None)


def recorded(show: Callable[[], None]) -> list[Part]:
    """What `show` prints, instead of printing it."""
    recording = PartRecording()
    token = _PARTS.set(recording)
    try:
        with redirect_stdout(recording):
            show()
    finally:
        _PARTS.reset(token)
    recording.end_text()
    return recording.parts


@dataclass(frozen=True, slots=True)
class Check:
    """A limit that a figure has to keep."""

    what: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def ok(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        wanted = f"{'at most' if self.at_most else 'at least'} {number(self.limit)}"
        return f"{self.what}: {number(self.value)}, {wanted} wanted: {verdict({'ok': self.ok})}"

    def as_json(self) -> dict[str, Any]:
        wanted = "at_most" if self.at_most else "at_least"
        return {"what": self.what, "value": plain(self.value), wanted: self.limit, "ok": self.ok}


@dataclass(slots=True)
class Report:
    """One table, its checks and notes."""

    title: str
    columns: Sequence[tuple[str, ...]]
    """(key of the row, heading[, format specification])."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def cells(self) -> list[tuple[str, ...]]:
        return [tuple(cell(row.get(key, ""), *spec) for key, _, *spec in self.columns) for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "rows": plain(self.rows),
            "checks": [check.as_json() for check in self.checks],
            "notes": self.notes,
            "ok": self.ok,
        }

    def show(self) -> None:
        table(self.title, [heading for _, heading, *_ in self.columns], self.cells())
        for line in (*self.notes, *self.checks):
            click.echo(f"  {line}")


def cell(value: Any, spec: str = "") -> str:
    """One figure as text: by `spec`, or three digits of a float."""
    if value is None:
        return "-"
    if spec:
        return format(value, spec)
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def verdict(found: Mapping[str, Any]) -> str:
    """`ok`, `NOT ok`, or why the run is invalid."""
    if found.get("invalid"):
        return f"invalid: {found['invalid']}"
    return "ok" if found["ok"] else "NOT ok"


def all_ok(parts: Iterable[Mapping[str, Any]]) -> bool | None:
    """False where a part is not ok; else None where one is invalid; else True."""
    found = {part["ok"] for part in parts}
    return False if False in found else None if None in found else True


def quantile(values: Iterable[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` (0 to 1) of them do not exceed; NaN for none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def jain_index(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (n x sum x^2), 1: all alike (Jain, Chiu and Hawe, 1984). None without a value above 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "never"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def plain(value: Any) -> Any:
    """For JSON, which has no infinities or NaN."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
