"""Sums of the ledger's charges, by SQL and arithmetic of their own: what checks from outside go by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, text

from ops.sandbox.usage_check import DAY_US, charges

NAMES = ("Requests", "Input tokens", "Cached", "Output tokens", "Charged", "Credited", "Device time")
Amounts = dict[str, int]
Group = TypeVar("Group", str, int)


@dataclass(frozen=True)
class LedgerBooks:
    """The rows that charge, and who their ids are."""

    rows: Sequence[Mapping[str, Any]]
    tenants: Mapping[str, str]
    """Ids by name."""
    projects: Mapping[tuple[str, str], str]
    """Ids by tenant id and name."""

    def by(self, column: str, **of: str) -> dict[str, Amounts]:
        """Sums by a column, of the rows with these values; no group of nothing but zeros."""
        return _summed((row[column], row) for row in self.rows if _has(row, of))

    def by_day(self) -> dict[int, Amounts]:
        """By the UTC day: its start, seconds since 1970."""
        return _summed((row["at_us"] // DAY_US * DAY_US // 1_000_000, row) for row in self.rows)

    def total(self, **of: str) -> Amounts:
        """Of the rows with these values."""
        return _summed((0, row) for row in self.rows if _has(row, of)).get(0, dict.fromkeys(NAMES, 0))


def read_books(connection: Connection) -> LedgerBooks:
    tenants = connection.execute(text("SELECT name, id FROM tenants"))
    projects = connection.execute(text("SELECT tenant_id, name, id FROM projects"))
    return LedgerBooks(
        charges(connection),
        {each.name: each.id for each in tenants},
        {(each.tenant_id, each.name): each.id for each in projects},
    )


def _summed(rows: Iterable[tuple[Group, Mapping[str, Any]]]) -> dict[Group, Amounts]:
    found: dict[Group, Amounts] = {}
    for group, row in rows:
        sums = found.setdefault(group, dict.fromkeys(NAMES, 0))
        for name, amount in zip(NAMES, _amounts(row), strict=True):
            sums[name] += amount
    return {group: sums for group, sums in found.items() if any(sums.values())}


def _has(row: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    return all(row[name] == value for name, value in values.items())


def _amounts(row: Mapping[str, Any]) -> tuple[int, ...]:
    """In the order of `NAMES`."""
    detail = json.loads(row["detail"]) if isinstance(row["detail"], str) else row["detail"]
    cached = int(detail.get("cached_tokens") or 0) if row["kind"] == "settle" else 0
    is_credit = row["kind"] == "credit"
    return (
        int(row["kind"] == "settle"),
        row["input_tokens"],
        max(0, min(cached, row["input_tokens"])),
        row["output_tokens"],
        0 if is_credit else row["cost_nanousd"],
        -row["cost_nanousd"] if is_credit else 0,
        row["gpu_ms"],
    )
