"""Order decision: which waiting entry is next.

An order ranks waiting entries and nothing else: whether the next one fits is the admission's question.
The same objects run in front of one engine (inside it) and in front of many (in the gateway).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal, Protocol

from engine.entry import QueueEntry

SizeKey = Literal["prompt", "cost"]
"""What decides how long a newcomer waits in its line: its prompt tokens, or its predicted cost tokens."""


class Order(Protocol):
    """Contract (each line a test, run for every order):

    - `peek` of an empty order is None, `pop` raises IndexError;
    - every entry is popped exactly once, and `pop` returns what `peek` named;
    - `peek` changes nothing;
    - with `front`, an entry returns to the head of its line (a preempted one keeps its place); an order that
      ranks by a key ranks it by that, before its equals and with the wait that it had;
    - a removed entry never surfaces; removing what `peek` named is the same as `pop`;
    - `clone` is independent of the original, and continues identically.

    Ranks are tuples of numbers, the smaller the earlier; they are for people and for logs.
    """

    @property
    def name(self) -> str: ...

    @property
    def claims(self) -> frozenset[str]:
        """See `engine.scheduling.claims`."""
        ...

    @property
    def interrupts(self) -> bool:
        """Whether `outranks` can ever be true."""
        ...

    @property
    def size_key(self) -> SizeKey:
        """The size by which forecasts distinguish newcomers."""
        ...

    @property
    def operations(self) -> int:
        """Work done so far: heads compared and heap levels passed. What is bounded instead of time."""
        ...

    def add(self, entry: QueueEntry, *, front: bool = False) -> None: ...

    def peek(self, now_s: float) -> QueueEntry | None: ...

    def pop(self, now_s: float) -> QueueEntry: ...

    def remove(self, entry_id: str) -> QueueEntry | None: ...

    def entries(self) -> Iterator[QueueEntry]:
        """All waiting entries, in no particular order."""
        ...

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """The numbers that rank `entry`, waiting or not, now."""
        ...

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        """Whether `waiting` may interrupt `running`, of the same tier. Never true both ways at one time."""
        ...

    def clone(self, counters: ServiceCountersLike) -> Order:
        """A copy that ranks by `counters` (a clone of the original's), for replays."""
        ...

    def __len__(self) -> int: ...


class NeverInterrupts:
    """Base of orders that never take a running entry's place, unless a subclass says otherwise."""

    interrupts = False
    size_key: SizeKey = "cost"

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        return False


class ServiceCountersLike(Protocol):
    """The service counters of all tenants; one owner, shared by the orders of all tiers."""

    left_last: str | None
    """The tenant whose line emptied most recently; a later order of the same entries goes on from it."""

    def value(self, tenant_id: str) -> int: ...

    def charge(self, tenant_id: str, weight: float, cost: int) -> None:
        """Adds `cost` tokens (negative: a correction) at `weight`."""
        ...

    def lift(self, tenant_id: str, to: int, other_id: str = "") -> None:
        """Raises a returning tenant's counter to where another stands; never lowers it."""
        ...

    @property
    def served_cost(self) -> int:
        """Cost tokens charged so far, of all tenants: a clock that stands still when nothing is served."""
        ...

    def lowered_reader(self) -> Callable[[], Collection[str] | None]:
        """A reader of tenants whose counter fell since its last call; None: look at all. For lazy heaps."""
        ...
