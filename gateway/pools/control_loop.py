"""The control loop of one pool: observes, decides, applies.

The edge of `flow/control_rules.py`: every `EVERY_S` it puts the state of the engines and the queue into an
`Observation`, and applies the moves that are to be made. Acting, the loop has the knobs with setters
(`setters_of`: those of this gateway, and those of its queue and its engines unless other gateways share them,
for all would have to turn them alike); with advice it has all of them. Every move is logged with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log

from engine.forecast.length.length import LengthForecast
from engine.messages import Snapshot
from engine.step_time.model import predict_step_s
from gateway.flow.control_rules import DEFAULT_BOUNDS, Bounds, Control, ControlMode, Knob, Move, Observation
from gateway.flow.controller import FlowController
from gateway.flow.window import NUM_RANKS
from gateway.requests.lifecycle import Lifecycle
from gateway.upstream.base import Upstream

EVERY_S = 2.0
NOBODY = "\0nobody"
"""A tenant without answers of its own: lengths are its model's."""
Z90 = 1.2816

logger = logging.getLogger("fairgate.gateway.control")


Setters = Mapping[Knob, Callable[[float], None]]


def queue_setters(flow: FlowController) -> Setters:
    """The knobs of a queue that is one gateway's own."""

    def lookahead(value: float) -> None:
        flow.window = replace(flow.window, lookahead_sequences=round(value))

    def batch_cap(value: float) -> None:
        flow.window = replace(flow.window, batch_cap=value)

    return {
        Knob.BATCH_CAP: batch_cap,
        Knob.LOOKAHEAD: lookahead,
        Knob.AGEING: partial(setattr, flow, "ageing_factor"),
        Knob.BATCH_SHARE: partial(setattr, flow, "batch_share"),
        Knob.PREFIX_WEIGHT: partial(setattr, flow, "prefix_weight"),
    }


def setters_of(
    flow: FlowController,
    lifecycle: Lifecycle,
    engines: Sequence[Upstream],
    *,
    is_shared: bool,
    quota: Callable[[float], None] | None = None,
) -> Setters:
    """All knobs that a gateway can move by itself. `engines`: our own ones; `quota`: says what share of spare
    capacity the model's token buckets refill by (None: there is no such knob)."""

    def token_budget(value: float) -> None:
        for engine in engines:
            engine.set_token_budget(value)

    admission = lifecycle.admission
    own: Setters = {
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
        Knob.EARLY_REFUSAL: partial(setattr, admission, "factor"),
        Knob.RESERVE_QUANTILE: partial(setattr, lifecycle, "reserve_quantile"),
    }
    if quota is not None:
        own = {**own, Knob.QUOTA: quota}
    if is_shared:
        return own
    of_engines: Setters = {Knob.TOKEN_BUDGET: token_budget} if engines else {}
    return {**queue_setters(flow), **of_engines, **own}


class ControlLoop:
    """One pool's control loop at work. Use from one event loop."""

    def __init__(
        self,
        mode: ControlMode,
        model: str,
        flow: FlowController,
        upstreams: Sequence[Upstream],
        lengths: LengthForecast,
        setters: Setters,
        *,
        rests: Mapping[Knob, float] | None = None,
        arrivals_per_s: Callable[[float], float] = lambda now_s: 0.0,
        attainment: Callable[[], float | None] = lambda: None,
        prefix_hits: Callable[[], float | None] = lambda: None,
        expected_late: Callable[[], float | None] = lambda: None,
        mistaken: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`rests`: where the operator put knobs that do not rest where `DEFAULT_BOUNDS` say; `attainment`:
        the share of the last targets that were met; `prefix_hits`: of the last prompt tokens, found in a
        cache; `expected_late`: of the last requests, expected to miss their target; `mistaken`: of those
        expected to keep it, that missed one; None: unknown."""
        self.control = Control(mode, bounds_of(mode, setters, rests or {}))
        self._setters = setters
        self._model = model
        self._flow = flow
        self._upstreams = upstreams
        self._lengths = lengths
        self._arrivals_per_s = arrivals_per_s
        self._attainment = attainment
        self._prefix_hits = prefix_hits
        self._expected_late = expected_late
        self._mistaken = mistaken
        self._preemptions = 0

    def look(self, now_s: float) -> list[Move]:
        """Observes once, and applies or reports the moves."""
        if self.control.mode is ControlMode.OFF:
            return []
        try:
            moves = self.control.look(self._observe(now_s), now_s)
        except Exception:
            # What no loop looks after is not lent; the next look lends it again.
            self._lend(0.0)
            raise
        self._lend(self.control.in_force.get(Knob.QUOTA, 0.0))
        for move in moves:
            if move.is_made:
                self._setters[move.knob](move.after)
            logger.info(
                "control of %s: %s %s %g -> %g, because: %s",
                self._model,
                "moves" if move.is_made else "advises to move",
                move.knob.value,
                move.before,
                move.after,
                move.reason,
            )
        return moves

    def bound(self, knob: Knob, most: float) -> None:
        """Lets the knob stand at `most` at most, also where it stands higher now; no effect where this loop
        has no such knob."""
        if knob not in self.control.values:
            return
        before = self.control.values[knob]
        self.control.bound(knob, most)
        if self.control.mode is ControlMode.ACTING and self.control.values[knob] != before:
            self._setters[knob](self.control.values[knob])

    def _observe(self, now_s: float) -> Observation:
        snapshots = [each.snapshot for each in self._upstreams if each.is_up and each.snapshot is not None]
        blocks = sum(each.num_blocks for each in snapshots)
        preemptions = sum(each.preemptions for each in snapshots)
        evictions, self._preemptions = max(0, preemptions - self._preemptions), preemptions
        kv_share = sum(each.referenced_blocks for each in snapshots) / blocks if blocks else 0.0
        p50, p90 = (self._lengths.quantile(NOBODY, self._model, quantile) for quantile in (0.5, 0.9))
        return Observation(
            arrivals_per_s=self._arrivals_per_s(now_s),
            length_spread=length_spread(p50, p90),
            kv_share=kv_share,
            prefix_hit_share=self._prefix_hits() or 0.0,
            step_s=max(map(_step_s, snapshots), default=0.0),
            attainment=self._attainment(),
            queued=len(self._flow),
            evictions=evictions,
            expected_late=self._expected_late() or 0.0,
            mistaken=self._mistaken() or 0.0,
            spare_share=spare_share(
                sum(len(each.running) + len(each.waiting) for each in snapshots), self._places(), kv_share
            ),
            higher_waits=self._flow.queued_up_to(NUM_RANKS - 2) > 0,
        )

    def _lend(self, share: float) -> None:
        if Knob.QUOTA in self._setters:
            self._setters[Knob.QUOTA](share)

    def _places(self) -> int:
        """Of the engines that tell what they run."""
        ready = (each.ready for each in self._upstreams if each.is_up and each.snapshot is not None)
        return sum(each.max_sequences for each in ready if each is not None)


def spare_share(running: int, places: int, kv_share: float) -> float:
    """Of the engines' capacity, what is idle: of places or of memory, whichever is less; 0 where it is not
    known."""
    return max(0.0, min(1 - running / places, 1 - kv_share)) if places else 0.0


def length_spread(p50: int, p90: int) -> float:
    """Standard deviation of the logarithm of lengths with these quantiles, were it normal."""
    return log(max(1, p90) / max(1, p50)) / Z90


def _step_s(snapshot: Snapshot) -> float:
    """A decode step of everything that runs."""
    running = len(snapshot.running)
    return predict_step_s(snapshot.step_time, running, 0, running)


def bounds_of(mode: ControlMode, setters: Setters, rests: Mapping[Knob, float]) -> dict[Knob, Bounds]:
    """Of the knobs that this mode has; each rests where the operator put it."""
    bounds = {}
    for knob, default in DEFAULT_BOUNDS.items():
        if mode is ControlMode.ACTING and knob not in setters:
            continue
        rest = rests.get(knob, default.rest)
        lowest, highest = min(default.lowest, rest), max(default.highest, rest)
        bounds[knob] = replace(default, lowest=lowest, rest=rest, highest=highest)
    return bounds
