"""Requests between their estimate and the queue: their budget is being held and made durable.

They count in later estimates as if they were queued, in the order of their estimates. One that its tenant's
own rate holds back is not on its way: it may be a while. Pure; one writer: the estimator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.entry import QueueEntry
from engine.messages import TIER_RANKS
from gateway.flow.types import Ticket

MAX_ON_THE_WAY = 4096
MEMORY = 0.05
"""Weight of the newest request in the measured time."""


@dataclass(frozen=True, slots=True)
class _Passage:
    ticket: Ticket
    among_others: bool
    """Others were on their way when it came: the ledger commits in groups, so it waits for theirs."""


class OnTheWay:
    def __init__(self) -> None:
        self._passages: dict[str, _Passage] = {}
        self._by_rank = [0] * len(TIER_RANKS)
        self._took_s = [0.0, 0.0]
        """Alone, and among others."""

    def __len__(self) -> int:
        return len(self._passages)

    def add(self, ticket: Ticket) -> bool:
        """False: there are too many."""
        if len(self._passages) >= MAX_ON_THE_WAY:
            return False
        self._by_rank[ticket.entry.tier] += 1
        self._passages[ticket.entry.entry_id] = _Passage(ticket, bool(self._passages))
        return True

    def remove(self, entry_id: str) -> bool:
        """False: it was not on its way."""
        passage = self._passages.pop(entry_id, None)
        if passage is None:
            return False
        self._by_rank[passage.ticket.entry.tier] -= 1
        return True

    def queued(self, entry: QueueEntry) -> bool:
        """False: it was not on its way."""
        passage = self._passages.get(entry.entry_id)
        if passage is None:
            return False
        took_s = entry.arrived_s - passage.ticket.entry.arrived_s
        self._took_s[passage.among_others] += MEMORY * (took_s - self._took_s[passage.among_others])
        return self.remove(entry.entry_id)

    def ticket(self, entry_id: str) -> Ticket | None:
        passage = self._passages.get(entry_id)
        return None if passage is None else passage.ticket

    def tickets(self) -> Iterator[Ticket]:
        """In the order of their estimates."""
        return (passage.ticket for passage in self._passages.values())

    def up_to(self, rank: int) -> int:
        return sum(self._by_rank[: rank + 1]) if self._passages else 0

    def expected_s(self, *, among_others: bool = False) -> float:
        """How long one that comes now will probably take; `among_others`: together with others."""
        return self._took_s[among_others or bool(self._passages)]
