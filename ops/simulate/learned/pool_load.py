"""The load of a simulated pool, as the macro-states of a learned policy see it."""

from __future__ import annotations

from gateway.flow.lanes import LONG, LOWEST_RANK
from gateway.flow.learned.macro_state import Situation
from gateway.flow.learned.switch import ArrivalTrend
from ops.simulate.pool import SimulatedPool


class PoolLoad:
    """Of one run. Refused requests count as arrivals."""

    def __init__(self) -> None:
        self._trend = ArrivalTrend()
        self._rows = 0
        """Of the records, counted as arrivals."""

    def situation(self, pool: SimulatedPool) -> Situation:
        """Now."""
        records = pool.records
        for row in range(self._rows, len(records)):
            self._trend.arrived(records.arrival_s[row])
        self._rows = len(records)
        return Situation(
            queued_per_place=len(pool.flow) / (pool.machine.max_sequences * len(pool.members)),
            long_at_head=_is_long_at_head(pool),
            kv_share=kv_share(pool),
            trend=self._trend.value(pool.now_s),
        )


def kv_share(pool: SimulatedPool) -> float:
    """Of the KV cache of all replicas, referenced by sequences."""
    tables = [member.engine.table for member in pool.members]
    return sum(each.pool.num_referenced for each in tables) / sum(each.pool.num_blocks for each in tables)


def _is_long_at_head(pool: SimulatedPool) -> bool:
    """The lowest tier waits in the long lane whatever its length, and does not count."""
    if not len(pool.flow):
        return False
    return any(
        lane == LONG for tier in range(LOWEST_RANK) for lane, _ in pool.flow.queue.heads(tier, pool.now_s)
    )
