"""Protocol of a batch-or-wait table, and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TableAction:
    """Answer of a table: wait, or run a batch."""

    wait_s: float
    """Seconds to wait if nothing else arrives; 0: run now."""
    batch: int
    """Requests of the line that the batch takes at most; 0: wait."""


class WaitTable(Protocol):
    @property
    def long_tokens(self) -> int:
        """Remaining tokens from which a request counts as long."""
        ...

    @property
    def longest_wait_s(self) -> float:
        """The table never waits once the first request has waited this long."""
        ...

    def decide(
        self,
        *,
        rate_per_s: float,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> TableAction:
        """`rate_per_s` 0: not known yet. `has_long`: one of those that wait is long. `remaining_tokens`: of
        them all, prompt and predicted output. `kv_pressure`: 0 to 1, cache not free without eviction."""
        ...
