"""Keeps rows of a live table in place while it is being read. Pure.

Rows present when a reader starts stay, even when they are over; later rows are only counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldRow(Generic[T]):
    shown: T
    """Its current state; once it is over, its first one."""
    is_over: bool


@dataclass(frozen=True, slots=True)
class HeldRows(Generic[T]):
    rows: tuple[HeldRow[T], ...]
    new: int
    """Rows that are not shown yet."""


def held(first: Iterable[T], now: Iterable[T], id_of: Callable[[T], str]) -> HeldRows[T]:
    """`first`: the rows the reader saw first, in order."""
    current_rows = {id_of(row): row for row in now}
    rows = []
    for row in first:
        current = current_rows.pop(id_of(row), None)
        rows.append(HeldRow(row if current is None else current, current is None))
    return HeldRows(tuple(rows), len(current_rows))
