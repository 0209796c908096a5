"""Values of each action that a search tries, and the borders between macro-states. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gateway.flow.deadline_check import LENIENT, STRICT
from gateway.flow.learned.macro_state import Borders, SeenRange, Situation
from gateway.flow.window import NUM_RANKS
from ops.simulate.traffic.requests import SimulatedRequest

GRID: Mapping[str, tuple[float, ...]] = {
    # In the order of the search: what changed most comes first.
    "admission": (LENIENT, 1.0, STRICT, 0.0),
    "slots": (0.75, 0.5, 0.25, 1.0),
    "reserve_permille": (0, 250, 1000, 500),
    "token_budget": (0.5, 0.25, 1.0),
    "partial_prefills": (1, 16, 4),
    "long_share": (0.2, 1.0, 0.5),
    "ageing": (0.5, 0.25, 1.0),
}
"""By action; the last is that of `hybrid`."""
LEAST_QUEUE, MOST_QUEUE = 0.02, 1.0
LEAST_KV, MOST_KV = 0.3, 0.95
LEAST_TREND, MOST_TREND = 1.05, 2.0
QUEUE_QUANTILE, KV_QUANTILE, TREND_QUANTILE = 0.25, 0.67, 0.75


def actions_that_act(
    requests: Sequence[SimulatedRequest], long_tokens: int, ageing_s: Sequence[float]
) -> tuple[str, ...]:
    """Those of `GRID` that change anything on this traffic."""
    # Half of a lane's length, as what is predicted may be twice the answer that came.
    has_long = any(2 * (one.input_tokens + one.output_tokens) > long_tokens for one in requests)
    tiers = {request.tier for request in requests}
    ages = len(tiers) > 1 and any(math.isfinite(ageing_s[tier]) for tier in tiers if tier < NUM_RANKS)
    idle = {"long_share": not has_long, "ageing": not ages}
    return tuple(name for name in GRID if not idle.get(name, False))


def borders_of(seen: Sequence[Situation]) -> Borders:
    queued = [load.queued_per_place for load in seen if load.queued_per_place > 0]
    return Borders(
        queued_per_place=_quantile(queued, QUEUE_QUANTILE, LEAST_QUEUE, MOST_QUEUE),
        kv_share=_quantile([load.kv_share for load in seen], KV_QUANTILE, LEAST_KV, MOST_KV),
        trend=_quantile([load.trend for load in seen], TREND_QUANTILE, LEAST_TREND, MOST_TREND),
    )


def range_of(seen: Sequence[Situation]) -> SeenRange:
    return SeenRange(
        queued_per_place=max((load.queued_per_place for load in seen), default=0.0),
        kv_share=min(1.0, max((load.kv_share for load in seen), default=0.0)),
        trend=max((load.trend for load in seen), default=0.0),
    )


def _quantile(values: Sequence[float], share: float, least: float, most: float) -> float:
    """Nearest rank, three digits, within bounds: the fewer digits, the easier to read."""
    if not values:
        return least
    ordered = sorted(values)
    value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return min(most, max(least, float(f"{value:.3g}")))
