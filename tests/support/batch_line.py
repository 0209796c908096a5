"""A line before a server that runs batches as a table says: plain arithmetic, independent of the solver.

It also plays what the solver takes for given of memory: a KV pressure that changes at random times, and a
batch that must fit into the rest.
"""

from __future__ import annotations

import random

from engine.scheduling.admit.table import ArrivalRate
from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.batch_or_wait.table import BatchOrWaitTable
from tests.support.batch_queue import Arrivals, Queue, StreamOutcome


class RandomPressure:
    """A level that lasts a random time and is followed by one next to it."""

    def __init__(self, pressures: tuple[float, ...], hold_s: float, seed: int) -> None:
        self._pressures, self._hold_s = pressures, hold_s
        self._rng = random.Random(seed)
        self._level = 0
        self.until_s = self._rng.expovariate(1 / hold_s)
        self.changes = 0

    def at(self, now_s: float) -> float:
        while now_s >= self.until_s:
            sides = [side for side in (self._level - 1, self._level + 1) if 0 <= side < len(self._pressures)]
            self._level = self._rng.choice(sides)
            self.until_s += self._rng.expovariate(1 / self._hold_s)
            self.changes += 1
        return self._pressures[self._level]


def by_table(
    model: BatchModel,
    arrivals: Arrivals,
    table: BatchOrWaitTable,
    *,
    pressure: RandomPressure | None = None,
    pool_tokens: int = 0,
) -> StreamOutcome:
    """The line under the table, which is told of each arrival as it happens and asked after each. A batch
    that does not fit into what the pressure leaves of `pool_tokens` loses those at its end."""
    queue, rate = Queue(model, arrivals, table.objective.slo_s), ArrivalRate()
    count, free_s, noted = len(arrivals.times_s), 0.0, 0
    while queue.served < count:
        now_s = max(free_s, queue.first_s)
        while True:
            held = pressure.at(now_s) if pressure else 0.0
            waiting = queue.see(now_s)
            for arrived_s in queue.times_s[noted : queue.served + sum(waiting)]:
                rate.note(arrived_s)
                noted += 1
            decision = table.decide(
                rate_per_s=rate.per_s,
                num_waiting=sum(waiting),
                oldest_wait_s=now_s - queue.first_s,
                has_long=waiting[1] > 0,
                remaining_tokens=waiting[0] * model.short.total_tokens + waiting[1] * model.long.total_tokens,
                kv_pressure=held,
            )
            if decision.wait_s <= 0:
                break
            now_s = min(now_s + decision.wait_s, queue.next_s)
        size = decision.batch
        batch = queue.first_of_line(size, waiting, short_first=table.grid.short_first)
        while pool_tokens and size > 1 and tokens(model, batch) > pool_tokens * (1 - held):
            size -= 1
            batch = queue.first_of_line(size, waiting, short_first=table.grid.short_first)
        free_s = queue.run(batch, now_s)
    return queue.outcome()


def tokens(model: BatchModel, batch: tuple[int, int]) -> int:
    """KV of a batch of so many short and long ones at its end."""
    return batch[0] * model.short.total_tokens + batch[1] * model.long.total_tokens
