"""Tables and figures of reports."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A plain table on stdout, at full width where stdout is no terminal."""
    from rich.console import Console
    from rich.table import Table

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


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several seeds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.least)} to {number(self.most)})"

    def as_json(self) -> dict[str, float]:
        """For `--json`."""
        return {"median": self.median, "least": self.least, "most": self.most}


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "never"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def plain(value: Any) -> Any:
    """For JSON: spreads as objects, and no infinities or NaN, which JSON does not have."""
    if isinstance(value, Spread):
        return plain(value.as_json())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
