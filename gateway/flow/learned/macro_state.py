"""Macro-states: what a scheduler's load looks like, in at most 12 kinds.

Four features: requests waiting per place of the engines, whether the next one of a line is long, how full the
KV cache is, and whether arrivals increase. Without a notable queue its head does not matter: 2 x 2 states
(KV, trend) without a queue and 2 x 2 x 2 with one. Pure, O(1).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

NUM_STATES = 12


class Situation(Struct, frozen=True):
    queued_per_place: float
    """Waiting requests over the engines' sequences."""
    long_at_head: bool
    """A request that is next in its tier's line is long."""
    kv_share: float
    """0 to 1."""
    trend: float
    """Arrivals a second of the last few seconds over those of the last minute; 1: steady."""


class Borders(Struct, frozen=True, forbid_unknown_fields=True):
    queued_per_place: Annotated[float, Meta(gt=0)] = 0.1
    kv_share: Annotated[float, Meta(gt=0, lt=1)] = 0.75
    trend: Annotated[float, Meta(gt=0)] = 1.25


class SeenRange(Struct, frozen=True, forbid_unknown_fields=True):
    """The highest value of each feature in the fit; a table does not apply beyond."""

    queued_per_place: Annotated[float, Meta(ge=0)]
    kv_share: Annotated[float, Meta(ge=0, le=1)]
    trend: Annotated[float, Meta(ge=0)]

    def covers(self, situation: Situation) -> bool:
        return (
            situation.queued_per_place <= self.queued_per_place
            and situation.kv_share <= self.kv_share
            and situation.trend <= self.trend
        )


def state_of(situation: Situation, borders: Borders) -> int:
    """The number of the macro-state, 0 to `NUM_STATES` - 1."""
    pressed, rising = situation.kv_share >= borders.kv_share, situation.trend >= borders.trend
    if situation.queued_per_place < borders.queued_per_place:
        return 2 * pressed + rising
    return 4 + 4 * situation.long_at_head + 2 * pressed + rising


def words(state: int) -> str:
    """Raises ValueError for an unknown number."""
    if not 0 <= state < NUM_STATES:
        raise ValueError(f"macro-states are numbered 0 to {NUM_STATES - 1}, not {state}")
    line = "no queue" if state < 4 else "a queue, a long request at its head" if state >= 8 else "a queue"
    memory = "KV cache pressed" if state & 2 else "KV cache free"
    return f"{line}; {memory}; arrivals {'rising' if state & 1 else 'steady'}"
