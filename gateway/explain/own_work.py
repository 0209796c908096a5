"""Computes the time of a request that went to its tenant's own later work.

For redeemed quotes: what their tenant sent or was quoted later is not in their figures, and its time is no
fault of ours. Time until the request is queued is divided by the requests under way together; from then on by
cost tokens computed meanwhile, each request's evenly over its engine time. Pure; seconds on one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST

SHORTEST_S = 1e-6


@dataclass(slots=True)
class LoggedRequest:
    """One request, with its size predicted, later counted. `ended_s` None: it still waits or runs."""

    tenant_id: str
    tier: int
    weight: float
    since_s: float
    input_tokens: int
    output_tokens: int
    sequences: int
    came_s: float
    known_s: float
    """Unix time of its quote if it redeems one, else of its arrival."""
    dispatched_s: float | None = None
    cached_tokens: int = 0
    ended_s: float | None = None
    is_complete: bool = False


def own_time_s(
    request: LoggedRequest,
    others: Iterable[LoggedRequest],
    until_s: float,
    *,
    limited_s: float = 0.0,
    rested_s: float = 0.0,
) -> float:
    """Of the time from the arrival of `request` to `until_s`, what its tenant's own later requests took.
    `limited_s` before it was queued and `rested_s` afterwards are counted elsewhere already."""
    queued_s = min(request.since_s, until_s)
    before = [_overlap_s(request.came_s, request.since_s, request.came_s, queued_s), 0.0]
    after = [_work(request, queued_s, until_s), 0.0]
    for other in others:
        if other.ended_s is not None and other.ended_s <= request.came_s:
            continue
        is_late = other.tenant_id == request.tenant_id and other.known_s > request.known_s
        before[is_late] += _overlap_s(other.came_s, other.since_s, request.came_s, queued_s)
        after[is_late] += _work(other, queued_s, until_s)
    return (
        _late_share(before) * max(0.0, queued_s - request.came_s - limited_s)
        + _late_share(after) * max(0.0, until_s - queued_s - rested_s)
    )  # fmt: skip


def _overlap_s(begun_s: float, ended_s: float, from_s: float, until_s: float) -> float:
    return max(0.0, min(ended_s, until_s) - max(begun_s, from_s))


def _work(request: LoggedRequest, from_s: float, until_s: float) -> float:
    """Cost tokens that engines computed for it meanwhile; of one that runs, as if it ended at `until_s`."""
    if request.dispatched_s is None:
        return 0.0
    ended_s = until_s if request.ended_s is None else request.ended_s
    cost = request.input_tokens * INPUT_TOKEN_COST + request.output_tokens * OUTPUT_TOKEN_COST
    took_s = max(SHORTEST_S, ended_s - request.dispatched_s)
    return cost * _overlap_s(request.dispatched_s, ended_s, from_s, until_s) / took_s


def _late_share(parts: list[float]) -> float:
    all_of_it = sum(parts)
    return parts[True] / all_of_it if all_of_it > 0 else 0.0
