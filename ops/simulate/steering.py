"""The control loop on a simulated pool.

The loop that serves (`gateway/flow/control_rules.py`), with the knobs of the queue and of admission, looks at
the simulated pool as often as at a real one. What engines and clients would report is read from the records
and the schedulers.
"""

from __future__ import annotations

from collections import deque

from engine.step_time.model import predict_step_s
from gateway.flow.control_rules import Control, ControlMode, Knob, Move, Observation
from gateway.pools.control_loop import EVERY_S, Setters, bounds_of, length_spread
from gateway.statistics import RecentShare
from ops.simulate.admission import SimulatedAdmission
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.slo import SloLimits
from ops.simulate.worth.knobs import knob_setters

KEPT_LENGTHS = 500
"""Last answers that the spread of lengths is taken of."""


class Steering:
    """For one run; `watch` goes to the pool."""

    def __init__(self, mode: ControlMode, slo: SloLimits) -> None:
        self.admission = SimulatedAdmission(slo)
        """Admission, which the loop makes stricter or looser."""
        self._mode = mode
        self._slo = slo
        self._control: Control | None = None
        self._setters: Setters = {}
        self._look_s = EVERY_S
        self._rows = 0
        """Of the records, seen."""
        self._open: list[int] = []
        """Of them, those that had not ended."""
        self._lengths: deque[int] = deque(maxlen=KEPT_LENGTHS)
        self._attainment = RecentShare()
        self._hits = RecentShare()
        self._preemptions = 0

    @property
    def watch(self) -> PoolObserver:
        """Hooks of the loop and of admission."""
        return PoolObserver(self.look, admits=self.admission.admits, on_ended=self.admission.ended)

    @property
    def moves(self) -> list[Move]:
        """The last thousand, the latest last."""
        return [] if self._control is None else list(self._control.moves)

    def look(self, pool: SimulatedPool) -> None:
        """After a decision of the pool: runs the loop, if `EVERY_S` have passed."""
        if pool.now_s < self._look_s or self._mode is ControlMode.OFF:
            return
        self._look_s = pool.now_s + EVERY_S
        if self._control is None:
            self._setters = knob_setters(pool, self.admission)
            rests = {Knob.LOOKAHEAD: pool.flow.window.lookahead_sequences}
            self._control = Control(self._mode, bounds_of(self._mode, self._setters, rests))
        for move in self._control.look(self._observe(pool), pool.now_s):
            if move.is_made:
                self._setters[move.knob](move.after)

    def _observe(self, pool: SimulatedPool) -> Observation:
        records, tables = pool.records, [member.engine.table for member in pool.members]
        arrived = len(records) - self._rows
        self._open += range(self._rows, len(records))
        self._rows = len(records)
        # A refused request neither meets nor misses a target: attainment is of queued requests.
        ended = [row for row in self._open if records.last_s[row] >= 0]
        self._open = [row for row in self._open if records.last_s[row] < 0 and not records.refused[row]]
        for row in ended:
            self._attainment.note(self._slo.met(records, row))
            self._hits.note(records.cached_tokens[row] / records.input_tokens[row])
            self._lengths.append(records.output_tokens[row])
        preemptions = sum(each.preemptions for each in tables)
        evictions, self._preemptions = preemptions - self._preemptions, preemptions
        running = max(len(each.running) for each in tables)
        return Observation(
            arrivals_per_s=arrived / EVERY_S,
            length_spread=length_spread(*self._quantiles()),
            kv_share=sum(each.pool.num_referenced for each in tables)
            / sum(each.pool.num_blocks for each in tables),
            prefix_hit_share=self._hits.value or 0.0,
            step_s=predict_step_s(pool.machine.step_time, running, 0, running),
            attainment=self._attainment.value,
            queued=len(pool.flow),
            evictions=evictions,
            expected_late=self.admission.expected_late.value or 0.0,
            mistaken=self.admission.mistaken.value or 0.0,
        )

    def _quantiles(self) -> tuple[int, int]:
        """p50 and p90 of the last lengths; 1 of none."""
        ordered = sorted(self._lengths) or [1]
        return ordered[(len(ordered) - 1) // 2], ordered[int(0.9 * (len(ordered) - 1))]
