"""The load of a simulated pool, as the macro-states of a learned policy see it."""

from __future__ import annotations

from gateway.flow.learned.macro_state import Situation
from gateway.flow.window import NUM_RANKS
from ops.simulate.pool import SimulatedPool


def situation_of(pool: SimulatedPool) -> Situation:
    """Now; what a gateway takes of its pool (`gateway/pools/learned_actions.py`)."""
    flow, now_s = pool.flow, pool.now_s
    return Situation(
        queued_per_place=flow.queued_up_to(NUM_RANKS - 1) / (pool.machine.max_sequences * len(pool.members)),
        long_at_head=flow.is_long_at_head(now_s),
        kv_share=kv_share(pool),
        trend=flow.arrivals.value(now_s),
    )


def kv_share(pool: SimulatedPool) -> float:
    """Of the KV cache of all replicas, referenced by sequences."""
    tables = [member.engine.table for member in pool.members]
    return sum(each.pool.num_referenced for each in tables) / sum(each.pool.num_blocks for each in tables)
