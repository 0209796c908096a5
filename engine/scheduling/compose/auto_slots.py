"""Decode slots chosen by the measured step time: few enough that weights act, enough for the throughput.

Where rows of a step cost time, a step of fewer rows is shorter: what sits out a step lets the others go on
sooner, and weights decide who that is. Where rows are free nobody gains by another's sitting out. So the
number is the smallest with which a full batch has `KEPT` of the tokens per second that it has with all rows,
and all rows where leaving some out makes a step hardly shorter. It is never below half of the places, so that
in a half-empty batch no stream sits out, nor below `FEWEST`. Where steps are padded it is the next size that
is captured: rows up to that cost nothing. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from engine.messages import StepTime
from engine.sizes import DECODE_TOKENS, padded

KEPT = 0.9
"""Of the throughput with all rows."""
KEPT_BEFORE_MORE = 0.89
FEWEST = 8
"""On fewer places a stream that sits out holds too large a part of them: newcomers wait for it."""
FEWER_BY = 1 / 8
"""A smaller number is taken where it is smaller by that part of the present one."""
FREE, FREE_ONCE_FEWER = 0.95, 0.97
"""Of a step of all rows: rows are free where a step of fewer takes longer, and where all have rows is not yet
or already given up."""
RENEWED_EVERY = 256
"""Steps. The step itself has all rows, so that what they cost stays known."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Time of a step of decoding sequences."""

    fixed_s: float
    row_s: float
    sizes: tuple[int, ...] = ()
    """Rows that a step is padded to."""

    @staticmethod
    def of(step_time: StepTime, context_tokens: float) -> RowCost:
        """With contexts of that mean length."""
        per_token_s = DECODE_TOKENS * step_time.per_token_s
        per_context_s = DECODE_TOKENS * step_time.per_context_token_s * context_tokens
        row_s = per_token_s + step_time.per_sequence_s + per_context_s
        return RowCost(step_time.base_s, row_s, step_time.graph_sizes)

    def step_s(self, rows: int) -> float:
        return self.fixed_s + self.row_s * padded(self.sizes, rows)

    def tokens_per_s(self, rows: int) -> float:
        return rows / self.step_s(rows)


@dataclass(slots=True)
class AutoSlots:
    """The number for one engine, with hysteresis."""

    rows: int = 0
    """0: all."""
    _was_full: bool = False
    """A batch that was more than half full was seen before, so that its steps were learned from."""

    def renew(self, cost: RowCost, running: int, places: int) -> None:
        """Call every `RENEWED_EVERY` steps. A half-empty batch tells nothing: its streams all have a slot."""
        if 2 * running <= places:
            return
        if self._was_full:
            self.rows = slots_for(cost, places, self.rows)
        self._was_full = True


def slots_for(cost: RowCost, places: int, before: int = 0) -> int:
    """Slots of a step, given the number so far; 0: all."""
    now = before or places
    full_s, full_rate = cost.step_s(places), cost.tokens_per_s(places)
    fewest = KEPT * places * cost.fixed_s / (cost.fixed_s + (1 - KEPT) * places * cost.row_s)
    # Rounded first: 22.000000000000004 rows are 22.
    rows = max(ceil(round(fewest, 6)), (places + 1) // 2, min(places, FEWEST))
    rows = padded(cost.sizes, rows)
    if cost.step_s(rows) > (FREE_ONCE_FEWER if before else FREE) * full_s:
        return 0
    if before and rows > now * (1 - FEWER_BY) and cost.tokens_per_s(now) >= KEPT_BEFORE_MORE * full_rate:
        return before
    return rows


def fair_pair(light_streams: int, heavy_streams: int, weight: float, slots: float) -> tuple[float, float]:
    """Tokens a step of two tenants of weights 1 and `weight` by max-min sharing: one a stream at most."""
    heavy = min(float(heavy_streams), slots * weight / (1.0 + weight))
    light = min(float(light_streams), slots - heavy)
    return light, min(float(heavy_streams), slots - light)
