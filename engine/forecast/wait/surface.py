"""Wait surface: forecast of any tenant, tier and size from one replay (`probing.py`).

A request's own forecast is read off between the points of its line by its own cost, in tens of microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, expm1, hypot, log, sqrt
from typing import Any

import msgspec

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.forecast.wait.forecast import LENGTH_INFLATION, REPLAY_ERROR, Z90, Forecast
from engine.forecast.wait.places import EnginePlaces
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.forecast.wait.since import NOTHING_SINCE, Since
from engine.scheduling.order.base import SizeKey
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import predict_step_s

NEWCOMER = "\0newcomer"
"""The tenant of probes that stand for tenants which had nothing to do."""
LENGTH_SPREAD = 0.7
"""Standard deviation of the logarithm of an answer's length, for what goes first."""
LENGTH_VARIANCE = expm1(LENGTH_SPREAD * LENGTH_SPREAD)
"""Of one lognormal length over its mean; of n of them 1/n of it."""
SMALLEST_ERROR = 0.1
WAY_P90 = 2.3
"""Of the time until a request is queued, the 90th percentile over the mean: that of an exponential."""
FUTURES_BASIS = ", sampled futures"
MIXED = (
    "wait_s", "late_s", "place_s", "tpot_s",
    "completed", "must_serve", "prompt_tokens_ahead", "ahead_own", "ahead_others", "ahead_higher",
)  # fmt: skip
"""Fields of a point between two others that lie between theirs."""
NOTHING_AHEAD = {"own": 0, "others": 0, "higher_tier": 0}
"""Shared by the forecasts of all requests that go at once: never changed."""


class Line(msgspec.Struct, frozen=True):
    tenant_id: str
    tier: int
    weight: float = 1.0


@dataclass(slots=True)
class Point:
    """What one probe saw at its turn."""

    size: int
    wait_s: float = 0.0
    late_s: float = 0.0
    """The longest wait in any of the futures that were replayed."""
    completed: int = 0
    must_serve: int = 0
    """Cost tokens that the engines serve until its turn, of what is there already."""
    place_s: float = 0.0
    """From its turn until the engine has a place for it."""
    prompt_tokens_ahead: int = 0
    """Prompts that the engine computes before its own."""
    decodes: int = 0
    undecoded: int = 0
    """Sequences before it there that have not had their first token: they decode beside it."""
    context_tokens: int = 0
    tpot_s: float = 0.0
    ahead_own: int = 0
    ahead_others: int = 0
    ahead_higher: int = 0
    is_reached: bool = False
    engine: int = -1


@dataclass(slots=True)
class Surface:
    """The answer of one replay. Read-only."""

    at_s: float
    points: Mapping[tuple[str, int], Sequence[Point]]
    """By (tenant, tier), in order of size."""
    loads: Sequence[EngineLoad]
    error: float
    """Relative error of the step-time model."""
    samples: int
    is_extrapolated: bool
    dispatch_gap_s: Mapping[int, float]
    """By tier, while requests of it waited: mean time between two turns of it and of the tiers above."""
    free_places: Mapping[int, int]
    places: Mapping[int, EnginePlaces]
    """By tier: those that engines have for it."""
    size_key: SizeKey = "cost"
    basis: str = field(init=False)
    _flat: dict[tuple[str, int], Point | None] = field(default_factory=dict, init=False, repr=False)
    """What every probe of a line saw, where all saw the same: the case with an empty queue."""
    off_alone: float = field(init=False, repr=False)
    """Relative distance from p50 to p90 of what an engine does for one request."""

    def __post_init__(self) -> None:
        self.basis = "replay, extrapolated" if self.is_extrapolated else "replay"
        if not self.samples:
            self.basis += ", step time not measured yet"
        self.off_alone = Z90 * max(SMALLEST_ERROR, self.error)

    def widen(self, other: Surface) -> None:
        """Takes in another future of the same moment: a wait may be as long as there."""
        self._has_futures()
        for line, points in self.points.items():
            for point, there in zip(points, other.points.get(line, ()), strict=False):
                point.late_s = max(point.late_s, there.wait_s)

    def spread_as(self, earlier: Surface) -> None:
        """Takes over by how much waits may be longer, from a surface with futures of a moment before."""
        self._has_futures()
        for (tenant_id, tier), points in self.points.items():
            there = earlier._points_of((tenant_id, tier))
            for point in points:
                then = _between(there, point.size)
                point.late_s = point.wait_s + max(0.0, then.late_s - then.wait_s)

    def _has_futures(self) -> None:
        if FUTURES_BASIS not in self.basis:
            self.basis += FUTURES_BASIS

    def read(
        self,
        tenant_id: str,
        tier: int,
        input_tokens: int,
        sequences: int,
        output_tokens: tuple[int, int],
        since: Since = NOTHING_SINCE,
        way_s: float = 0.0,
    ) -> Forecast:
        """The forecast of a request. `output_tokens` (p50, p90) are of its longest sequence; `since`: what
        came and left after the replay; `way_s`: until it is queued. A line without probes is answered as a
        newcomer's. Raises KeyError for a tier of which nothing is known."""
        p50, p90 = output_tokens
        line = (tenant_id, tier)
        seen = self._point_of_all(tenant_id, tier)
        if seen is None:
            size = input_tokens
            if self.size_key == "cost":
                size = input_tokens * INPUT_TOKEN_COST + p50 * sequences * OUTPUT_TOKEN_COST
            seen = _between(self._points_of(line), size)
        wait_s, place_s, completed = seen.wait_s, seen.place_s, seen.completed
        late_s = max(0.0, seen.late_s - wait_s)
        prompts_ahead = seen.prompt_tokens_ahead
        if since is not NOTHING_SINCE:
            prompts_ahead += since.input_tokens
            gap_s = self.dispatch_gap_s.get(tier, 0.0)
            if gap_s and wait_s > 0:
                wait_s = max(0.0, wait_s + since.ahead * gap_s)
            else:
                behind, until_turn_s, until_place_s = self._behind(tier, since, output_tokens)
                wait_s = max(wait_s, until_turn_s)
                place_s = max(0.0, until_place_s - wait_s) if behind else max(place_s, until_place_s)
                completed += behind
                if until_place_s > 0:
                    # Those before it have been computed by then.
                    prompts_ahead = seen.prompt_tokens_ahead
        start_up_s = self._start_up_s(seen, input_tokens, sequences, prompts_ahead) + place_s
        tpot_s, off_alone = seen.tpot_s, self.off_alone
        if since.quoted:
            tpot_s += self._beside_s(seen, since)
        ahead = NOTHING_AHEAD
        waits = wait_s > 0
        # Of a burst since the replay it is not known how much of it the engines have taken already.
        must_serve = round(seen.must_serve * wait_s / seen.wait_s) if seen.wait_s > 0 else 0
        if wait_s < way_s:
            wait_s = way_s
        ttft_s = wait_s + start_up_s
        ttft_off_s = start_up_s * off_alone
        wait_p90_s = max(wait_s, WAY_P90 * way_s)
        ttft_off_s = hypot(ttft_off_s, wait_p90_s - wait_s)
        if waits:
            own = LENGTH_VARIANCE / (completed or 1)
            off_s = wait_s * Z90 * sqrt(LENGTH_INFLATION * own + REPLAY_ERROR**2 + self.error**2)
            off_s = max(off_s, late_s)
            wait_p90_s += off_s
            ttft_off_s = hypot(off_s, ttft_off_s)
            ahead = {
                "own": seen.ahead_own + since.own_cost,
                "others": seen.ahead_others + since.others_cost,
                "higher_tier": seen.ahead_higher + since.higher_cost,
            }
        rest_s = tpot_s * (p50 - 1)
        e2e_s = ttft_s + rest_s
        e2e_off_s = hypot(ttft_off_s, tpot_s * (p90 - p50), rest_s * off_alone)
        return Forecast(
            wait_s=(wait_s, wait_p90_s),
            ttft_s=(ttft_s, ttft_s + ttft_off_s),
            tpot_s=(tpot_s, tpot_s * (1 + off_alone)),
            e2e_s=(e2e_s, e2e_s + e2e_off_s),
            output_tokens=output_tokens,
            tokens_ahead=ahead,
            basis=self.basis,
            samples=self.samples,
            saturated=not seen.is_reached,
            must_serve=must_serve,
        )

    def _points_of(self, line: tuple[str, int]) -> Sequence[Point]:
        return self.points.get(line) or self.points[NEWCOMER, line[1]]

    def _point_of_all(self, tenant_id: str, tier: int) -> Point | None:
        """What every probe of a line saw; None: they saw different things. Raises as `read`."""
        line = (tenant_id, tier)
        return self._flat[line] if line in self._flat else self._look_along(line)

    def _look_along(self, line: tuple[str, int]) -> Point | None:
        """Once for each line that is asked about."""
        first, *others = self._points_of(line)
        is_flat = all(replace(point, size=first.size) == first for point in others)
        seen = self._flat[line] = first if is_flat else None
        return seen

    def _start_up_s(self, point: Point, input_tokens: int, sequences: int, ahead_tokens: int) -> float:
        """From its place to its first token: the step under way, then prompts in chunks."""
        if not self.loads:
            return 0.0
        load = self.loads[point.engine if point.engine > 0 else 0]
        decoded = DECODE_TOKENS * point.decodes
        room = load.max_batched_tokens - decoded
        tokens = ahead_tokens + input_tokens
        steps = -(-tokens // room) if room > 1 else tokens
        attended = input_tokens * (input_tokens + 1) // (2 * (sequences or 1))
        context = DECODE_TOKENS * steps * point.context_tokens + attended
        rows = steps * point.decodes + (steps if steps > sequences else sequences)
        prefill_s = predict_step_s(load.step_time, tokens + steps * decoded, context, rows)
        under_way_s = point.tpot_s / 2 if point.decodes or ahead_tokens else 0.0
        return prefill_s + (steps - 1) * load.step_time.base_s + under_way_s

    def _beside_s(self, point: Point, since: Since) -> float:
        """What outstanding quotes add to each step, if they are redeemed together with this one."""
        if not self.loads:
            return 0.0
        load = self.loads[max(0, point.engine)]
        count = max(0, min(since.quoted, load.max_sequences - 1 - point.decodes))
        context = since.mean_input_tokens + since.mean_output_tokens[0] // 2
        of_each_s = DECODE_TOKENS * load.step_time.per_token_s + load.step_time.per_sequence_s
        return count * (of_each_s + DECODE_TOKENS * context * load.step_time.per_context_token_s)

    def _behind(self, tier: int, since: Since, output_tokens: tuple[int, int]) -> tuple[int, float, float]:
        """Where nothing waited at the replay: how many ends a request waits for, and the seconds until it is
        dispatched and until it has a place."""
        places = self.places.get(tier)
        over = since.more + 1 - self.free_places.get(tier, 0)
        if places is None:
            return 0, 0.0, 0.0
        # Of those that found no room some go after it.
        share = min(1.0, max(0.0, since.ahead) / since.more) if since.more > 0 else 1.0
        behind = 1 + ceil((over - 1) * share) if over > 0 else 0
        busy = places.dispatched + max(0, since.more) + 1
        over_places = busy - places.count
        for_place = behind + max(0, over_places - over) if behind else over_places
        outputs = since.mean_output_tokens if since.mean_output_tokens[0] else output_tokens
        inputs = since.mean_input_tokens
        wait_s = places.free_after_s(behind, busy, inputs, outputs)
        return behind, wait_s, max(wait_s, places.free_after_s(for_place, busy, inputs, outputs))


def _between(points: Sequence[Point], size: int) -> Point:
    """The point at a size: one that was seen, or what lies between two, by the logarithm of the size."""
    index = bisect_left(points, size, key=_size)
    if index == 0:
        return points[0]
    if index == len(points):
        return points[-1]
    low, high = points[index - 1], points[index]
    part = log(size / low.size) / log(high.size / low.size)
    changes: dict[str, Any] = {"size": size, "is_reached": low.is_reached and high.is_reached}
    for name in MIXED:
        first = getattr(low, name)
        mixed = first + part * (getattr(high, name) - first)
        changes[name] = mixed if name.endswith("_s") else round(mixed)
    return replace(low, **changes)


def _size(point: Point) -> int:
    return point.size
