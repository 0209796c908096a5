"""Keeps the rows of a live table in their places, so that nothing moves under the reader. Pure.

What is there when a reader begins to look stays where it is, also when it is over; what comes later is
counted, and shown when the page is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeldRow(Generic[T]):
    """A row in its place."""

    shown: T
    """As it is; of one that is over, as it was at first."""
    is_over: bool


@dataclass(frozen=True, slots=True)
class HeldRows(Generic[T]):
    """A table as one reader sees it."""

    rows: tuple[HeldRow[T], ...]
    new: int
    """Rows that the reader does not see yet."""


def held(first: Iterable[T], now: Iterable[T], id_of: Callable[[T], str]) -> HeldRows[T]:
    """`first`: the rows that the reader saw first, in their order."""
    current_rows = {id_of(row): row for row in now}
    rows = []
    for row in first:
        current = current_rows.pop(id_of(row), None)
        rows.append(HeldRow(row if current is None else current, current is None))
    return HeldRows(tuple(rows), len(current_rows))
