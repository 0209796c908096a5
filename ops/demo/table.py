"""Live table of the running demo on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class TenantRow:
    """One tenant now. Shares are of its tier's service so far."""

    tenant: str
    tier: str
    weight: float
    queued: int
    running: int
    tokens_per_s: float
    share: float | None
    fair_share: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    budget_left: float | None
    """Part of its limit that is left; None: no limit."""
    refused: int


@dataclass(frozen=True)
class View:
    elapsed_s: float
    sent: int
    planned: int
    answered: int
    refused: int
    queued: int
    running: int
    tokens_per_s: float
    phase: str
    rows: Sequence[TenantRow]

    def headline(self) -> str:
        return (
            f"{self.elapsed_s:5.0f} s  {self.phase}: sent {self.sent}/{self.planned}, queued {self.queued}, "
            f"running {self.running}, answered {self.answered}, refused {self.refused}, "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [column for column in _COLUMNS if options.max_width >= WIDE or not column.only_wide]
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for column in columns:
            grid.add_column(column.title, justify="left" if column.title in _TEXTS else "right", no_wrap=True)
        # What does not fit the screen would be cut in the middle: show the busiest.
        room = max(5, (options.max_height or 40) - 5)
        rows = sorted(self.rows, key=lambda row: (TIERS.index(row.tier), row.tenant))
        shown = rows if len(rows) <= room else _busiest(rows, room)
        for row in shown:
            grid.add_row(*(column.cell(row) for column in columns))
        parts: list[Text | Table] = [Text(self.headline(), style="bold"), grid]
        if len(shown) < len(rows):
            parts.append(Text(f"… and {len(rows) - len(shown)} tenants more", style="dim"))
        yield Group(*parts)


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[TenantRow], str | Text]
    only_wide: bool = False


TIERS = ("interactive", "standard", "batch")
WIDE = 100
_TEXTS = ("tenant", "tier")


def _busiest(rows: Sequence[TenantRow], room: int) -> list[TenantRow]:
    kept = {row.tenant for row in sorted(rows, key=lambda row: -(row.queued + row.running))[:room]}
    return [row for row in rows if row.tenant in kept]


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


_COLUMNS: Sequence[_Column] = (
    _Column("tenant", lambda row: row.tenant),
    _Column("tier", lambda row: row.tier),
    _Column("weight", lambda row: f"{row.weight:g}", only_wide=True),
    _Column("queued", lambda row: str(row.queued or "")),
    _Column("runs", lambda row: str(row.running or "")),
    _Column("tok/s", lambda row: f"{row.tokens_per_s:,.0f}" if row.tokens_per_s >= 0.5 else ""),
    _Column("share", lambda row: percent(row.share)),
    _Column("fair", lambda row: percent(row.fair_share)),
    _Column("TTFT p50", lambda row: seconds(row.ttft_p50_s)),
    _Column("p99", lambda row: seconds(row.ttft_p99_s)),
    _Column(
        "budget",
        lambda row: Text(percent(row.budget_left), style="red" if (row.budget_left or 1) < 0.1 else ""),
    ),
    _Column("refused", lambda row: Text(str(row.refused or ""), style="yellow"), only_wide=True),
)
