"""What does the control loop see of one pool, and which of its moves can be made?

The edge of `flow/control.py`: every `EVERY_S` it puts what the engines and the queue say into an
`Observation`, and applies the moves that are to be made. There are setters for the knobs in `SETTERS` only:
acting, the loop has no others; with advice it has all of them. Every move is logged with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log

from engine.forecast.length import LengthForecast
from engine.forecast.step_time import predict_step_s
from engine.messages import Snapshot
from gateway.flow.control import DEFAULT_BOUNDS, Bounds, Control, Knob, Mode, Move, Observation
from gateway.flow.controller import FlowController
from gateway.upstream.base import Upstream

EVERY_S = 5.0
NOBODY = "\0nobody"
"""A tenant without answers of its own: lengths are its model's."""
Z90 = 1.2816

logger = logging.getLogger("fairgate.gateway.control")


def _set_lookahead(flow: FlowController, value: float) -> None:
    flow.window = replace(flow.window, lookahead_sequences=round(value))


SETTERS: Mapping[Knob, Callable[[FlowController, float], None]] = {Knob.LOOKAHEAD: _set_lookahead}


class Controlling:
    """One pool's control loop at work. Use from one event loop."""

    def __init__(
        self,
        mode: Mode,
        model: str,
        flow: FlowController,
        upstreams: Sequence[Upstream],
        lengths: LengthForecast,
        *,
        arrivals_per_s: Callable[[float], float] = lambda now_s: 0.0,
        attainment: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`attainment`: the share of the last requests that met their targets; None: nobody knows."""
        self.control = Control(mode, _bounds(mode, flow))
        self._model = model
        self._flow = flow
        self._upstreams = upstreams
        self._lengths = lengths
        self._arrivals_per_s = arrivals_per_s
        self._attainment = attainment
        self._preemptions = 0

    def look(self, now_s: float) -> list[Move]:
        """One look at the traffic, and what came of it."""
        if self.control.mode is Mode.OFF:
            return []
        moves = self.control.look(self._observe(now_s), now_s)
        for move in moves:
            if move.is_made:
                SETTERS[move.knob](self._flow, move.after)
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

    def _observe(self, now_s: float) -> Observation:
        snapshots = [each.snapshot for each in self._upstreams if each.is_up and each.snapshot is not None]
        blocks = sum(each.num_blocks for each in snapshots)
        preemptions = sum(each.preemptions for each in snapshots)
        evictions, self._preemptions = max(0, preemptions - self._preemptions), preemptions
        p50, p90 = (self._lengths.quantile(NOBODY, self._model, quantile) for quantile in (0.5, 0.9))
        return Observation(
            arrivals_per_s=self._arrivals_per_s(now_s),
            length_spread=log(max(1, p90) / max(1, p50)) / Z90,
            kv_share=sum(each.referenced_blocks for each in snapshots) / blocks if blocks else 0.0,
            # Snapshots do not tell it: the third rule waits for that.
            prefix_hit_share=0.0,
            step_s=max(map(_step_s, snapshots), default=0.0),
            attainment=self._attainment(),
            queued=len(self._flow),
            evictions=evictions,
        )


def _step_s(snapshot: Snapshot) -> float:
    """A decode step of everything that runs."""
    running = len(snapshot.running)
    return predict_step_s(snapshot.step_time, running, 0, running)


def _bounds(mode: Mode, flow: FlowController) -> dict[Knob, Bounds]:
    """Of the knobs that this mode has; each rests where the operator put it."""
    lookahead = float(flow.window.lookahead_sequences)
    default = DEFAULT_BOUNDS[Knob.LOOKAHEAD]
    bounds = {**DEFAULT_BOUNDS, Knob.LOOKAHEAD: replace(
        default, rest=lookahead, highest=max(default.highest, lookahead)
    )}  # fmt: skip
    return {knob: each for knob, each in bounds.items() if mode is not Mode.ACTING or knob in SETTERS}
