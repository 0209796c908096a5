"""Report of a policy benchmark: rows for people and programs, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.reporting import Spread, number, plain

SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Check:
    """A limit that a figure had to keep."""

    what: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def ok(self) -> bool:
        """Whether it did."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        wanted = f"{'at most' if self.at_most else 'at least'} {number(self.limit)}"
        return f"{self.what}: {number(self.value)}, {wanted} wanted: {'ok' if self.ok else 'NOT ok'}"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        wanted = "at_most" if self.at_most else "at_least"
        return {"what": self.what, "value": plain(self.value), wanted: self.limit, "ok": self.ok}


@dataclass(slots=True)
class Report:
    """One table, what it says and what it had to say."""

    title: str
    columns: Sequence[tuple[str, str]]
    """(key of the row, heading)."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """All checks."""
        return all(check.ok for check in self.checks)

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return [tuple(cell(row.get(key, "")) for key, _ in self.columns) for row in self.rows]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "title": self.title,
            "rows": plain(self.rows),
            "checks": [check.as_json() for check in self.checks],
            "notes": self.notes,
            "ok": self.ok,
        }


def cell(value: Any) -> str:
    """One figure as people read it."""
    if isinstance(value, Spread | str):
        return str(value)
    return number(float(value))
