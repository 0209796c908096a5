"""Bounded memory of entries that left an order and may return (preempted)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

MAX_REMEMBERED = 1024
"""More than run at a time in one engine: only who runs can be preempted."""

Fact = TypeVar("Fact")


class Recent(Generic[Fact]):
    """A fact by name, of the last `limit` names noted."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._facts: OrderedDict[str, Fact] = OrderedDict()

    def note(self, name: str, fact: Fact) -> None:
        self._facts[name] = fact
        self._facts.move_to_end(name)
        if len(self._facts) > self._limit:
            self._facts.popitem(last=False)

    def get(self, name: str) -> Fact | None:
        return self._facts.get(name)

    def forget(self, name: str) -> None:
        self._facts.pop(name, None)

    def copy(self) -> Recent[Fact]:
        copy: Recent[Fact] = Recent(self._limit)
        copy._facts = self._facts.copy()
        return copy

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)
