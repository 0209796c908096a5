"""What one worker has of the others: whom it asks, and what is counted for all."""

from __future__ import annotations

from gateway.workers.keeper import Keeper
from gateway.workers.metric_pages import MetricPages
from gateway.workers.seat import Seat
from gateway.workers.siblings import Siblings
from gateway.workers.tally import ALONE, Counts, Tally


class Workers:
    """`close` it when done."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.siblings = Siblings(seat)
        self.keeper = Keeper(seat.keeper)
        self.metrics = MetricPages(seat, self.siblings)
        self.tally = Tally(seat.tally)

    def part(self, most: int) -> int:
        """This worker's part of what all may have at once."""
        return max(1, most // self.seat.count)

    def close(self) -> None:
        self.keeper.close()


def counts_of(workers: Workers | None, what: str) -> Counts:
    """What all workers have of one kind, by key."""
    return ALONE if workers is None else workers.tally.of(workers.seat.number, what)
