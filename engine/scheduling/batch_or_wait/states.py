"""States and actions of the batch-or-wait table; more than `most_waiting` requests are one overflow state."""

from __future__ import annotations

from dataclasses import dataclass

LONG_LEVELS = 5
"""The states distinguish 0, 1, 2, 3, 4 and "5 or more" long requests."""
MOST_STATES = 50_000
RUN, SHORT_ONES, WAIT = "rsw"
"""Run the first that wait, up to a full batch; run the short ones of them; wait."""
SIZES = {"1": 1, "2": 2, "3": 3, "4": 4, "6": 6, "8": 8, "C": 12, "G": 16, "O": 24, "W": 32}
"""Letters of actions that run this number only."""


@dataclass(frozen=True, slots=True)
class Grid:
    max_batch: int = 16
    longest_wait_s: float = 2.0
    """Longest wait of the first request before the server runs a batch."""
    wait_buckets: int = 16
    queue_cap: int = 0
    """More waiting than this are one state; 0: three times `max_batch`."""
    short_first: bool = True
    """Whether short requests precede long ones in the line; else by order of arrival."""
    overflow_cost: float = -1.0
    """Abstract cost a second of service begun in that state; negative: as if ten queues as long waited. Too
    little, and it pays to be overrun: what the cut-off queue drops costs nothing."""

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, its limit and the way out."""
        if self.max_batch < 1:
            raise ValueError(f"max_batch {self.max_batch} must be at least 1")
        if not 0 < self.longest_wait_s < float("inf"):
            raise ValueError(f"longest_wait_s {self.longest_wait_s} must be positive")
        if self.wait_buckets < 1:
            raise ValueError(f"wait_buckets {self.wait_buckets} must be at least 1")
        if self.queue_cap and self.queue_cap <= self.max_batch:
            raise ValueError(f"queue_cap {self.queue_cap} must be more than max_batch {self.max_batch}, or 0")
        self.check_states(1)

    def check_states(self, pressures: int) -> None:
        """Raises ValueError when there are too many states at this number of KV pressures."""
        states = pressures * (1 + self.most_waiting * (LONG_LEVELS + 1) * self.points)
        if states > MOST_STATES:
            raise ValueError(
                f"{states:,} states are more than {MOST_STATES:,}: take a smaller max_batch, fewer"
                " wait_buckets, a smaller queue_cap or fewer KV pressures"
            )

    @property
    def most_waiting(self) -> int:
        return (self.queue_cap or max(8, 3 * self.max_batch)) + 1

    @property
    def bucket_s(self) -> float:
        return self.longest_wait_s / self.wait_buckets

    @property
    def points(self) -> int:
        """Points of time waited: 0, `bucket_s`, ... `longest_wait_s`."""
        return self.wait_buckets + 1


class Places:
    """Flat index of a situation, a list a KV pressure: 0 is empty, then by long ones, number and time."""

    def __init__(self, grid: Grid, levels: int) -> None:
        """`levels`: how many counts of long ones are distinguished; 1 without long ones."""
        self.levels, self.most, self.points = levels, grid.most_waiting, grid.points
        self.size = 1 + levels * self.most * self.points

    def at(self, count: int, level: int, point: int) -> int:
        """Index of a situation; the overflow state's beyond `most_waiting`."""
        if count == 0:
            return 0
        return 1 + (level * self.most + min(count, self.most) - 1) * self.points + point
