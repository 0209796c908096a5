"""Requests that the demo sends: a slice of a real trace (`data/ATTRIBUTION.md`), scaled to this machine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ops.simulate.traffic.generate import ARENA
from ops.simulate.traffic.requests import SimulatedRequest
from ops.simulate.traffic.trace import TraceFile

LENGTH_FACTOR = 0.29
"""Lengths of the trace times this: its longest answer (1,024 tokens) becomes 297."""
MAX_OUTPUT_TOKENS = 300
MIN_INPUT_TOKENS = 16
"""Tokens of a chat template and a few words."""
SPAN_S = 600.0
MAX_PASSES = 40


@dataclass(frozen=True, slots=True)
class TraceRequest(SimulatedRequest):
    place: int = 0


@dataclass(frozen=True)
class ReplayPlan:
    """A plan: the requests in order of arrival, and every factor that made them from the trace."""

    requests: tuple[TraceRequest, ...]
    length_factor: float
    time_compression: float
    """Seconds of the trace in one second of the replay."""
    passes: int
    kept_share: float
    """Share of the slice's requests that each pass sends."""
    span_s: float
    offered_load: float
    """Offered cost tokens per second over the capacity they were planned for."""


def load_slice() -> list[TraceRequest]:
    return [
        TraceRequest(row.arrival_s, row.tenant, row.input_tokens, row.output_tokens, place=place)
        for place, row in enumerate(TraceFile(ARENA))
    ]


def scale_lengths(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    return [
        replace(
            request,
            input_tokens=max(MIN_INPUT_TOKENS, round(request.input_tokens * factor)),
            output_tokens=min(MAX_OUTPUT_TOKENS, max(2, round(request.output_tokens * factor))),
        )
        for request in requests
    ]


def thin(requests: Sequence[TraceRequest], share: float) -> list[TraceRequest]:
    """Keeps `share` of each tenant's requests, evenly spread over its own, at least one of each tenant."""
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for request in requests:
        place = seen[request.tenant]
        seen[request.tenant] += 1
        if place == 0 or math.floor((place + 1) * share) > math.floor(place * share):
            kept.append(request)
    return kept


def plan(
    trace: Sequence[TraceRequest], *, capacity_cost_per_s: float, overload: float, span_s: float
) -> ReplayPlan:
    """Requests whose cost over `span_s` is `overload` times what the engine can serve in that time."""
    scaled = scale_lengths(trace, LENGTH_FACTOR)
    wanted = capacity_cost_per_s * overload * span_s
    one_pass = sum(request.cost for request in scaled)
    passes = min(MAX_PASSES, max(1, math.ceil(wanted / one_pass)))
    kept_share = min(1.0, wanted / (one_pass * passes))
    kept = thin(scaled, kept_share)
    compression = SPAN_S * passes / span_s
    requests = tuple(
        replace(request, arrival_s=(request.arrival_s + SPAN_S * number) / compression)
        for number in range(passes)
        for request in kept
    )
    offered = sum(request.cost for request in requests)
    return ReplayPlan(
        requests=requests,
        length_factor=LENGTH_FACTOR,
        time_compression=compression,
        passes=passes,
        kept_share=len(kept) / len(scaled),
        span_s=span_s,
        offered_load=offered / (capacity_cost_per_s * span_s),
    )
