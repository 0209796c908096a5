"""Order: who is next in the queue?

An order ranks waiting entries and nothing else: whether the next one fits is the admission's question.
The same objects run in front of one engine (inside it) and in front of many (in the gateway).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

INPUT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
"""Default cost of a request: computed input tokens + 2 x output tokens (VTC, OSDI 2024)."""

COUNTER_SCALE = 1_000_000
"""Counters are integers: cost x COUNTER_SCALE / weight, so that sums never drift."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What an order may know of a waiting request or sequence."""

    entry_id: str
    tenant_id: str
    arrived_s: float
    input_tokens: int
    predicted_output_tokens: int
    tier: int = 1
    weight: float = 1.0

    @property
    def predicted_cost(self) -> int:
        """Predicted service in cost tokens."""
        return self.input_tokens * INPUT_TOKEN_COST + self.predicted_output_tokens * OUTPUT_TOKEN_COST


class Order(Protocol):
    """Contract (each line a test, run for every order):

    - `peek` of an empty order is None, `pop` raises IndexError;
    - every entry is popped exactly once, and `pop` returns what `peek` named;
    - `peek` changes nothing;
    - with `front`, an entry returns to the head of its line (a preempted one keeps its place);
    - a removed entry never surfaces;
    - `clone` is independent of the original, and continues identically.
    """

    def add(self, entry: Entry, *, front: bool = False) -> None: ...

    def peek(self, now_s: float) -> Entry | None: ...

    def pop(self, now_s: float) -> Entry: ...

    def remove(self, entry_id: str) -> Entry | None: ...

    def entries(self) -> Iterator[Entry]:
        """All waiting entries, in no particular order."""
        ...

    def clone(self, counters: ServiceCountersLike) -> Order:
        """A copy that ranks by `counters` (a clone of the original's), for replays."""
        ...

    def __len__(self) -> int: ...


class ServiceCountersLike(Protocol):
    """The service counters of all tenants; one owner, shared by the orders of all tiers."""

    def value(self, tenant_id: str) -> int: ...

    def charge(self, tenant_id: str, weight: float, cost: int) -> None:
        """Adds `cost` tokens (negative: a correction) at `weight`."""
        ...

    def lift(self, tenant_id: str, to: int) -> None:
        """Raises a returning tenant's counter; never lowers it."""
        ...
