"""The control loop and the learned policy on a simulated pool, as often as on a real one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from engine.step_time.model import predict_decodes_s
from gateway.flow.control_rules import Control, ControlMode, Move, Observation
from gateway.flow.knobs import Knob
from gateway.flow.learned.actions import ACTION_BOUNDS
from gateway.flow.learned.macro_state import Situation
from gateway.flow.learned.switch import MacroStateSwitch
from gateway.flow.learned.table_file import LearnedTable
from gateway.flow.window import NUM_RANKS
from gateway.pools.control_loop import EVERY_S, Setters, bounds_of, length_spread, queue_setters, spare_share
from gateway.pools.engine_knobs import engine_setters
from gateway.statistics import RecentShare
from ops.simulate.control.admission import SimulatedAdmission
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.slo import SloLimits

KEPT_LENGTHS = 500
"""Last answers that the spread of lengths is taken of."""


class Steering:
    """For one run; `watch` goes to the pool."""

    def __init__(
        self,
        mode: ControlMode,
        slo: SloLimits,
        table: LearnedTable | None = None,
        *,
        on_situation: Callable[[Situation], None] | None = None,
    ) -> None:
        """`table`: where the knobs rest, in every mode; `on_situation` is called at each look."""
        self.admission = SimulatedAdmission(slo)
        self.switch = None if table is None else MacroStateSwitch(table)
        self._on_situation = on_situation
        self._mode = mode
        self._slo = slo
        self._control: Control | None = None
        self._setters: Setters = {}
        self._own_rests: dict[Knob, float] = {}
        """Resting values, by the run's options, of the knobs that a table moves."""
        self._look_s = EVERY_S
        self._rows = 0
        self._open: list[int] = []
        self._lengths: deque[int] = deque(maxlen=KEPT_LENGTHS)
        self._attainment = RecentShare()
        self._hits = RecentShare()
        self._preemptions = 0

    @property
    def watch(self) -> PoolObserver:
        """Hooks of the loop and, where something goes by forecasts, of admission."""
        if not self.foresees:
            return PoolObserver(self.look)
        return PoolObserver(self.look, admits=self.admission.admits, on_ended=self.admission.ended)

    @property
    def foresees(self) -> bool:
        """Whether forecasts refuse requests or change advice; else a faster run without them ends alike."""
        entries = () if self.switch is None else self.switch.table.entries
        return (
            self._mode is not ControlMode.OFF
            or self.admission.strictness > 0
            or any(entry.actions.admission for entry in entries)
        )

    @property
    def moves(self) -> list[Move]:
        return [] if self._control is None else list(self._control.moves)

    def look(self, pool: SimulatedPool) -> None:
        if pool.now_s < self._look_s:
            return
        self._look_s = pool.now_s + EVERY_S
        if self._control is None:
            self._setters = setters_of(pool, self.admission)
            own = rests_of(pool)
            bounds = bounds_of(self._mode, self._setters, own)
            self._own_rests = {knob: bounds[knob].rest for knob in map(Knob, ACTION_BOUNDS)}
            self._control = Control(self._mode, bounds)
        if self.switch is not None or self._on_situation is not None:
            self._look_up(pool, self._control)
        if self._mode is not ControlMode.OFF:
            self._apply(self._control.look(self._observe(pool), pool.now_s))

    def _look_up(self, pool: SimulatedPool, control: Control) -> None:
        situation = situation_of(pool)
        if self._on_situation is not None:
            self._on_situation(situation)
        entry = None if self.switch is None else self.switch.look(situation, pool.now_s)
        if self.switch is not None and entry is not None:
            actions, reason = entry
            rests = self._own_rests if self.switch.is_outside else actions.knobs()
            self._apply(control.rest_at(rests, reason, pool.now_s))

    def _apply(self, moves: list[Move]) -> None:
        for move in moves:
            if move.is_made and move.knob in self._setters:
                self._setters[move.knob](move.after)

    def owns(self, pool: SimulatedPool, row: int) -> bool:
        """Whether a request came in by this gateway."""
        return True

    def _observe(self, pool: SimulatedPool) -> Observation:
        records, tables = pool.records, [member.engine.table for member in pool.members]
        own = [row for row in range(self._rows, len(records)) if self.owns(pool, row)]
        self._open += own
        self._rows = len(records)
        # A refused request neither meets nor misses a target: attainment is of queued requests.
        ended = [row for row in self._open if records.last_s[row] >= 0]
        self._open = [row for row in self._open if records.last_s[row] < 0 and not records.refused[row]]
        for row in ended:
            self._attainment.note(self._slo.met(records, row))
            self._hits.note(records.cached_tokens[row] / records.input_tokens[row])
            self._lengths.append(records.output_tokens[row])
        preemptions = sum(table.preemptions for table in tables)
        evictions, self._preemptions = preemptions - self._preemptions, preemptions
        running = [len(table.running) for table in tables]
        width = max(running)
        share = kv_share(pool)
        return Observation(
            arrivals_per_s=len(own) / EVERY_S,
            length_spread=length_spread(*self._quantiles()),
            kv_share=share,
            prefix_hit_share=self._hits.value or 0.0,
            step_s=predict_decodes_s(pool.machine.step_time, width, 0),
            attainment=self._attainment.value,
            queued=len(pool.flow),
            evictions=evictions,
            expected_late=self.admission.expected_late.at(pool.now_s),
            in_good_time=self.admission.in_good_time.at(pool.now_s),
            spare_share=spare_share(
                sum(running), sum(member.size.max_sequences for member in pool.members), share
            ),
            higher_waits=pool.flow.queued_up_to(NUM_RANKS - 2) > 0,
        )

    def _quantiles(self) -> tuple[int, int]:
        """p50 and p90 of the last lengths; 1 of none."""
        ordered = sorted(self._lengths) or [1]
        return ordered[(len(ordered) - 1) // 2], ordered[int(0.9 * (len(ordered) - 1))]


def setters_of(pool: SimulatedPool, admission: SimulatedAdmission) -> Setters:
    lends: Setters = {} if pool.budget is None else {Knob.QUOTA: pool.budget.lend}
    return {
        **queue_setters(pool.flow),
        **lends,
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
        **engine_setters(pool.set_engine_knobs),
    }


def rests_of(pool: SimulatedPool) -> Mapping[Knob, float]:
    """Resting values, by the run's options, of knobs that do not rest where `DEFAULT_BOUNDS` puts them."""
    options = pool.members[0].engine.table.policy.options
    return {
        **pool.flow.settings.rests.positions,
        Knob.PARTIAL_PREFILLS: options.max_num_partial_prefills or 1,
        Knob.RESERVE_PERMILLE: options.reserve_permille,
    }


def situation_of(pool: SimulatedPool) -> Situation:
    """Now; what a gateway takes of its pool (`gateway/pools/learned_actions.py`)."""
    flow, now_s = pool.flow, pool.now_s
    return Situation(
        queued_per_place=flow.queued_up_to(NUM_RANKS - 1) / (pool.machine.max_sequences * len(pool.members)),
        long_at_head=flow.queue.is_long_at_head(now_s),
        kv_share=kv_share(pool),
        trend=flow.arrivals.value(now_s),
    )


def kv_share(pool: SimulatedPool) -> float:
    """Of the KV cache of all replicas, referenced by sequences."""
    tables = [member.engine.table for member in pool.members]
    return sum(table.pool.num_referenced for table in tables) / sum(table.pool.num_blocks for table in tables)
