"""Requests that the demo sends: the slice of a real trace, scaled to this machine.

The trace is real (see `data/ATTRIBUTION.md`); this file only scales it. Lengths shrink by one stated
factor, so that no answer passes 300 tokens. Time is compressed by one stated factor, chosen from the
measured capacity, so that the offered load is a stated multiple of it. Where the machine is slow, requests
are thinned evenly within each tenant; where it is fast, the slice is replayed several times in a row.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST

SLICE_FILE = Path(__file__).parent / "data" / "arena_slice.csv"
LENGTH_FACTOR = 0.29
"""Lengths of the trace times this: its longest answer (1,024 tokens) becomes 297."""
MAX_OUTPUT_TOKENS = 300
MIN_INPUT_TOKENS = 16
"""Tokens of a chat template and a few words."""
SPAN_S = 600.0
"""Length of the slice: one pass."""
MAX_PASSES = 40


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it arrives, whose it is, how long its prompt and its answer are."""

    arrival_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    place: int = 0
    """Its line in the slice."""

    @property
    def cost(self) -> int:
        """Service it asks for, in cost tokens."""
        return self.input_tokens * INPUT_TOKEN_COST + self.output_tokens * OUTPUT_TOKEN_COST


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


def load_slice(path: Path = SLICE_FILE) -> list[TraceRequest]:
    """The slice as it was recorded, in order of arrival."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            TraceRequest(
                float(row["arrival_s"]),
                row["tenant"],
                int(row["input_tokens"]),
                int(row["output_tokens"]),
                place,
            )
            for place, row in enumerate(csv.DictReader(file))
        ]


def scale_lengths(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Lengths times `factor`, within what the demo's model can do."""
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
