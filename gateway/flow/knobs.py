"""Settings of a queue, and the knobs of scheduling with their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from engine.scheduling.brakes import NO_BRAKES, Brakes
from gateway.flow.deadline_check import STRICT
from gateway.flow.lanes import LaneRule
from gateway.flow.window import NUM_RANKS, WindowRule

NEVER_S = (math.inf,) * NUM_RANKS
RESERVATION_BURST_S = 10.0


@dataclass(frozen=True, slots=True)
class Bounds:
    lowest: float
    rest: float
    """The operator's position, to which it returns."""
    highest: float
    step: float
    """Of one move."""

    def __post_init__(self) -> None:
        if not (self.lowest <= self.rest <= self.highest and self.step > 0 and math.isfinite(self.step)):
            raise ValueError(
                f"a knob needs lowest <= rest <= highest and a positive step, not {self.lowest} <="
                f" {self.rest} <= {self.highest} by {self.step}"
            )

    def within(self, value: float) -> float:
        """The nearest valid position; the resting one for NaN."""
        return self.rest if math.isnan(value) else min(self.highest, max(self.lowest, value))


class Knob(StrEnum):
    """Numbers of scheduling that the control loop turns."""

    BATCH_CAP = "batch_cap"
    """Share of an engine's sequences that may run."""
    TOKEN_BUDGET = "token_budget"
    """Share of the tokens of a step."""
    LOOKAHEAD = "lookahead"
    """Sequences sent beyond the engine's places."""
    AGEING = "ageing"
    """Factor on the times after which requests move up. What has moved up stays."""
    ADMISSION = "admission"
    """Factor on the expected time (p90); a request that would then miss its target is refused; 0: none is."""
    EARLY_REFUSAL = "early_refusal"
    """Factor on the expected wait that admission compares with a deadline: above 1 it refuses earlier."""
    BATCH_SHARE = "batch_share"
    """Share of an engine's sequences and KV cache that the batch tier may hold."""
    RESERVE_QUANTILE = "reserve_quantile"
    """Of the predicted output, held before a request runs."""
    PREFIX_WEIGHT = "prefix_weight"
    """How much routing goes by what is cached."""
    QUOTA = "quota"
    """How far batch token buckets refill above the set rate, as a share of the way to their ceiling."""
    SLOTS = "slots"
    """Share of an engine's sequences that a step gives decode tokens to; 1: all that its tokens allow."""
    PARTIAL_PREFILLS = "partial_prefills"
    """Prompts of a tenant that may be unfinished."""
    LONG_SHARE = "long_share"
    """Share of an engine's sequences and KV cache that the long lane of a tier may hold."""
    RESERVE_PERMILLE = "reserve_permille"
    """Thousandths of the predicted remaining output for which memory is set aside at admission."""


DEFAULT_BOUNDS: Mapping[Knob, Bounds] = {
    # In order of rank: only one may turn back in a minute.
    Knob.ADMISSION: Bounds(0.0, 0.0, STRICT, STRICT),
    Knob.BATCH_CAP: Bounds(0.25, 1.0, 1.0, 0.125),
    Knob.TOKEN_BUDGET: Bounds(0.25, 1.0, 1.0, 0.125),
    Knob.LOOKAHEAD: Bounds(0.0, 2.0, 8.0, 1.0),
    Knob.AGEING: Bounds(0.25, 1.0, 1.0, 0.25),
    Knob.EARLY_REFUSAL: Bounds(1.0, 1.0, 2.0, 0.25),
    Knob.BATCH_SHARE: Bounds(0.1, 1.0, 1.0, 0.15),
    Knob.RESERVE_QUANTILE: Bounds(0.5, 0.9, 0.99, 0.1),
    Knob.PREFIX_WEIGHT: Bounds(0.0, 1.0, 4.0, 0.5),
    Knob.QUOTA: Bounds(0.0, 0.0, 1.0, 0.25),
    # No rule moves these: a learned table says where they rest.
    Knob.SLOTS: Bounds(0.25, 1.0, 1.0, 0.25),
    Knob.PARTIAL_PREFILLS: Bounds(1.0, 4.0, 16.0, 1.0),
    Knob.LONG_SHARE: Bounds(0.1, 0.5, 1.0, 0.1),
    Knob.RESERVE_PERMILLE: Bounds(0.0, 500.0, 1000.0, 125.0),
}
"""Where the settings say nothing else."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """An operator's settings of a queue; times by tier rank."""

    max_queued: int
    max_queued_per_tenant: int
    queue_ttl_s: Sequence[float]
    window: WindowRule
    log_records: int
    ageing_s: Sequence[float] = NEVER_S
    lanes: LaneRule = field(default_factory=LaneRule)
    reservation_burst_s: float = RESERVATION_BURST_S

    @property
    def rests(self) -> QueueKnobs:
        """Where the knobs rest, without brakes."""
        window, lanes = self.window, self.lanes
        return QueueKnobs(
            window.batch_cap, window.lookahead_sequences, lanes.batch_share, lanes.share_sequences
        )


@dataclass(frozen=True, slots=True)
class QueueKnobs:
    """Where a queue's knobs stand, named as in `Knob`, and its brakes."""

    batch_cap: float
    lookahead: float
    batch_share: float
    long_share: float
    ageing: float = 1.0
    prefix_weight: float = 1.0
    brakes: Brakes = NO_BRAKES

    @property
    def positions(self) -> dict[Knob, float]:
        return {knob: getattr(self, knob) for knob in QUEUE_KNOBS}

    def turned(self, knob: Knob, value: float) -> QueueKnobs:
        position: dict[str, Any] = {knob.value: value}
        return replace(self, **position)

    def applied(self, own: QueueSettings) -> QueueSettings:
        """The operator's settings with these knobs. A braked tier does not age; the operator's share of
        sequences for the long lane brings the one of the KV cache back with it."""
        kv = own.lanes.share_kv if self.long_share == own.lanes.share_sequences else self.long_share
        ageing_s = [
            math.inf if tier in self.brakes.shares else seconds * self.ageing
            for tier, seconds in enumerate(own.ageing_s)
        ]
        return replace(
            own,
            window=replace(own.window, lookahead_sequences=round(self.lookahead), batch_cap=self.batch_cap),
            lanes=replace(
                own.lanes, batch_share=self.batch_share, share_sequences=self.long_share, share_kv=kv
            ),
            ageing_s=ageing_s,
        )


QUEUE_KNOBS = tuple(Knob(name.name) for name in fields(QueueKnobs) if name.name != "brakes")
"""What a queue goes by, also a shared one in Redis; each gateway turns the others at home."""
