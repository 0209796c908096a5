"""Pictures of a queue before its engines, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import NOTHING_CAME
from engine.forecast.wait.forecast import Forecast
from engine.forecast.wait.picture import Picture
from engine.forecast.wait.probing import KNOTS, MAX_EVENTS
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.forecast.wait.surface import Line
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue


def one_lane(entry: QueueEntry) -> int:
    return 0


def picture(
    queue: TieredQueue, counters: ServiceCounters, engines: Sequence[EngineLoad], now_s: float, **fields: Any
) -> Picture:
    """Answers are as long as predicted, and nothing more comes."""
    rest: dict[str, Any] = {
        "lengths": {}, "sequences": {}, "kv_tokens": {}, "lane_of": one_lane, "promised": (),
        "arrivals": NOTHING_CAME, "lines": (), "tiers": (0, 1, 2), "knots": KNOTS, "most_events": MAX_EVENTS,
    }  # fmt: skip
    return Picture(now_s=now_s, queue=queue, counters=counters, engines=engines, **(rest | fields))


def forecast_of(
    candidate: QueueEntry, seen: Picture, output_tokens: tuple[int, int] | None = None
) -> Forecast:
    """To a request that comes now, by a probe of just its size."""
    inputs = candidate.input_tokens
    size = inputs if seen.queue.size_key == "prompt" else candidate.predicted_cost
    tenant_id, tier = candidate.tenant_id, candidate.tier
    own = replace(seen, lines=[Line(tenant_id, tier, candidate.weight)], knots=[size])
    output_tokens = output_tokens or (candidate.predicted_output_tokens,) * 2
    return own.surface().read(tenant_id, tier, inputs, 1, output_tokens)
