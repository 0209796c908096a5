"""The control loop of one pool: observes, decides, applies.

The edge of `flow/control_rules.py`, every `EVERY_S`. Acting loops have only knobs with setters
(`setters_of`), advising ones all. If gateways share a queue, one decides for all (`control_session.py`), each
sets its own knobs, and the queue's are also in Redis. Moves are logged where they are decided.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any

from engine.forecast.length.length import LengthForecast
from engine.messages import EngineKnobs, Snapshot
from engine.step_time.model import predict_decodes_s
from gateway.flow.control_rules import Control, ControlMode, Move, Observation
from gateway.flow.controller import FlowController
from gateway.flow.knobs import DEFAULT_BOUNDS, QUEUE_KNOBS, Bounds, Knob
from gateway.flow.shared.control_session import ControlSession
from gateway.flow.window import NUM_RANKS
from gateway.metrics.control import ControlFigures
from gateway.pools.engine_knobs import ENGINE_KNOBS, engine_setters
from gateway.pools.learned_actions import LearnedActions
from gateway.requests.lifecycle import Lifecycle
from gateway.upstream.base import Upstream

if TYPE_CHECKING:
    # Redis is an extra.
    from gateway.dispatch.control_feed import ControlFeed

EVERY_S = 2.0
NO_TENANT = "\0"
"""Of no tenant: lengths are the model's."""
LEAST_LENGTHS = 20
"""Fewer answers have no known spread."""
Z90 = 1.2816

logger = logging.getLogger("fairgate.gateway.control")


Setters = Mapping[Knob, Callable[[float], None]]


def queue_setters(flow: FlowController) -> Setters:
    """In a shared queue: for this one's forecasts and its own decisions without Redis."""
    return {knob: partial(flow.turn, knob) for knob in QUEUE_KNOBS}


def setters_of(
    flow: FlowController,
    lifecycle: Lifecycle,
    engines: Callable[[], Collection[Upstream]],
    *,
    has_engines: bool,
    is_foreign: bool = False,
    own_rests: Callable[[], Mapping[Knob, float]] = dict,
    quota: Callable[[float], None] | None = None,
) -> Setters:
    """All knobs that a gateway can set. `engines`: those with our scheduler, if any; `is_foreign`: some are
    other servers, with step sizes of their own; `own_rests`: the policy's engine numbers; `quota`: sets the
    spare capacity by which token buckets refill; None: no such knob."""

    def send(knobs: EngineKnobs) -> None:
        for engine in engines():
            engine.set_knobs(knobs)

    admission = lifecycle.admission
    own: Setters = {
        Knob.ADMISSION: partial(setattr, admission, "strictness"),
        Knob.EARLY_REFUSAL: partial(setattr, admission, "factor"),
        Knob.RESERVE_QUANTILE: partial(setattr, lifecycle, "reserve_quantile"),
    }
    if quota is not None:
        own = {**own, Knob.QUOTA: quota}
    of_engines = dict(engine_setters(send, own_rests)) if has_engines else {}
    if is_foreign:
        of_engines.pop(Knob.TOKEN_BUDGET, None)
    return {**queue_setters(flow), **of_engines, **own}


@dataclass(frozen=True, slots=True)
class Signals:
    """What a pool's requests say of its load; the rest is seen at queue and engines."""

    arrivals_per_s: float = 0.0
    attainment: float | None = None
    """Share of recent targets met; None: unknown."""
    prefix_hit_share: float | None = None
    """Of recent prompt tokens, those cached; None: unknown."""
    expected_late: float = 0.0
    """Of requests, those expected to miss their target."""
    in_good_time: float = 0.0
    """Of ended ones, those well within it."""
    may_lend: bool = True
    """A limit has a ceiling to lend up to."""


def _rests_of(flow: FlowController, rests: Callable[[], Mapping[Knob, float]]) -> Mapping[Knob, float]:
    return {**flow.settings.rests.positions, **rests()}


class ControlLoop:
    """Use from one event loop."""

    def __init__(
        self,
        mode: ControlMode,
        model: str,
        flow: FlowController,
        upstreams: Collection[Upstream],
        lengths: LengthForecast,
        setters: Setters,
        *,
        rests: Callable[[], Mapping[Knob, float]] = dict,
        signals: Callable[[float], Signals] = lambda now_s: Signals(),
        feed: ControlFeed | None = None,
        on_moves: Callable[[Control, Sequence[Move]], None] = lambda control, moves: None,
    ) -> None:
        """`rests`: the positions by settings and policy where not those of `DEFAULT_BOUNDS` or of the queue's
        settings, as of now. `feed` None: not shared. `on_moves` gets this gateway's moves once applied."""
        own = partial(_rests_of, flow, rests)
        self.control = Control(mode, bounds_of(mode, setters, own()))
        self.learned = LearnedActions(model, flow, upstreams, own)
        self.feed = feed
        self.session = (
            None if feed is None else ControlSession(self.control, feed.gateway_id, partial(_tell, model))
        )
        """Shared with other gateways; None: not shared."""
        self.moved: Counter[tuple[Knob, bool]] = Counter()
        """Moves decided by this gateway, by knob and whether made."""
        self.has_table = False
        """A policy's table sets where knobs rest, in every mode: gateways of one queue have to agree."""
        self._has_left = False
        self._stands = self.control.rests
        """The knobs' positions."""
        self._setters = setters
        self._model = model
        self._flow = flow
        self._upstreams = upstreams
        self._lengths = lengths
        self._signals = signals
        self._on_moves = on_moves
        self._preemptions = 0

    async def turn(self, now_s: float) -> list[Move]:
        """One observation, with other gateways that share the queue. Returns what this one decided."""
        if self._has_left:
            return []
        if self.feed is None or self.session is None or not self.is_shared:
            return self.look(now_s)
        with self._lending():
            seen = self._observe(now_s)
            look = self.session.look(seen, self._decide, now_s, alone=self.feed.is_alone())
            return self._done(await self.feed.carry(look))

    def look(self, now_s: float) -> list[Move]:
        """Observes once, and applies or reports the moves. A learned policy's table acts in every mode."""
        if self.control.mode is ControlMode.OFF and not self.learned.is_due:
            return []
        with self._lending():
            return self._done(self._decide(self._observe(now_s), now_s))

    async def leave(self) -> None:
        """Ends the loop and lets another gateway decide immediately."""
        self._has_left = True
        if self.feed is not None and self.session is not None and self.session.holder:
            await self.feed.leave(self.session)

    @property
    def is_shared(self) -> bool:
        """Other gateways set the same knobs: one decides for all. Advice is never shared."""
        acts = self.control.mode is ControlMode.ACTING or self.learned.is_wanted
        return self.feed is not None and acts

    def repeat(self) -> None:
        """Sends engines their knobs again, unless at rest: one has joined."""
        rests = self.control.rests
        for knob in ENGINE_KNOBS & self._setters.keys():
            if self._stands[knob] != rests[knob] or self.learned.is_wanted:
                self._setters[knob](self._stands[knob])

    def describe(self) -> dict[str, Any]:
        session = self.session if self.is_shared else None
        return {
            "mode": self.control.mode.value,
            "knobs": _by_name(self.control.values),
            "in_force": _by_name(self.control.in_force),
            "rests": _by_name(self.control.rests),
            "is_shared": session is not None,
            "holder": None if session is None else session.holder or None,
            "term": None if session is None else session.term,
        }

    def figures(self) -> ControlFigures:
        return ControlFigures(
            self.control.mode.value,
            _by_name(self.control.in_force),
            {(knob.value, is_made): count for (knob, is_made), count in self.moved.items()},
            decides=(self.control.mode is ControlMode.ACTING or self.learned.is_wanted)
            and (not self.is_shared or (self.session is not None and self.session.is_holder)),
        )

    def bound(self, knob: Knob, most: float) -> None:
        """Limits the knob to `most`, also now; no effect without such a knob."""
        if knob in self.control.values:
            self.control.bound(knob, most)
            self._apply()

    def _decide(self, seen: Observation, now_s: float) -> list[Move]:
        """First a learned table's resting positions, then the rules."""
        moves = self._rest(now_s)
        if self.control.mode is not ControlMode.OFF:
            moves += self.control.look(seen, now_s)
        return moves

    def _done(self, moves: list[Move]) -> list[Move]:
        """Sets the decided positions and reports why."""
        self._apply()
        for move in moves:
            self.moved[move.knob, move.is_made] += 1
            logger.info(
                "control of %s: %s %s %g -> %g, because: %s",
                self._model,
                "moves" if move.is_made else "advises to move",
                move.knob.value,
                move.before,
                move.after,
                move.reason,
            )
        if moves:
            self._on_moves(self.control, moves)
        return moves

    def _rest(self, now_s: float) -> list[Move]:
        wanted = self.learned.look(now_s)
        if wanted is None:
            return []
        rests, reason = wanted
        reachable = {knob: rest for knob, rest in rests.items() if knob in self._setters}
        return self.control.rest_at(reachable, reason, now_s)

    def _apply(self) -> None:
        """Sets displaced knobs; shared engines' always, unless at rest. Brakes only when acting."""
        is_acting = self.control.mode is ControlMode.ACTING
        rests = self.control.rests
        for knob, value in (self.control.in_force if is_acting else rests).items():
            # An engine forgets what it heard of a gateway that it lost: the others say it again.
            is_off_rest = value != rests[knob] or self.learned.is_wanted
            is_repeated = self.is_shared and knob in ENGINE_KNOBS and is_off_rest
            if (value != self._stands[knob] or is_repeated) and knob in self._setters:
                self._stands[knob] = value
                self._setters[knob](value)

    def _observe(self, now_s: float) -> Observation:
        snapshots = [
            upstream.snapshot
            for upstream in self._upstreams
            if upstream.is_up and upstream.snapshot is not None
        ]
        blocks = sum(snapshot.num_blocks for snapshot in snapshots)
        preemptions = sum(snapshot.preemptions for snapshot in snapshots)
        evictions, self._preemptions = max(0, preemptions - self._preemptions), preemptions
        kv_share = sum(snapshot.referenced_blocks for snapshot in snapshots) / blocks if blocks else 0.0
        signals = self._signals(now_s)
        return Observation(
            arrivals_per_s=signals.arrivals_per_s,
            length_spread=self._length_spread(),
            kv_share=kv_share,
            prefix_hit_share=signals.prefix_hit_share or 0.0,
            step_s=max(map(_step_s, snapshots), default=0.0),
            attainment=signals.attainment,
            queued=len(self._flow),
            evictions=evictions,
            expected_late=signals.expected_late,
            in_good_time=signals.in_good_time,
            spare_share=spare_share(
                sum(len(snapshot.running) + len(snapshot.waiting) for snapshot in snapshots),
                self._places(),
                kv_share,
            )
            if signals.may_lend
            else 0.0,
            higher_waits=self._flow.queued_up_to(NUM_RANKS - 2) > 0,
        )

    @contextmanager
    def _lending(self) -> Iterator[None]:
        """Stops lending spare capacity if an observation fails; the next one lends again."""
        try:
            yield
        except Exception:
            if Knob.QUOTA in self._setters:
                self._stands[Knob.QUOTA] = 0.0
                self._setters[Knob.QUOTA](0.0)
            raise

    def _length_spread(self) -> float:
        """Of the answers seen; 0 while they are few, as the prior is wide."""
        if self._lengths.model_samples(self._model) < LEAST_LENGTHS:
            return 0.0
        p50, p90 = (self._lengths.quantile(NO_TENANT, self._model, quantile) for quantile in (0.5, 0.9))
        return length_spread(p50, p90)

    def _places(self) -> int:
        """Of engines that report what they run."""
        ready = (
            upstream.ready for upstream in self._upstreams if upstream.is_up and upstream.snapshot is not None
        )
        return sum(engine.max_sequences for engine in ready if engine is not None)


def spare_share(running: int, places: int, kv_share: float) -> float:
    """Idle capacity of the engines: places or memory, whichever is less; 0: unknown."""
    return max(0.0, min(1 - running / places, 1 - kv_share)) if places else 0.0


def _tell(model: str, line: str) -> None:
    logger.warning("control of %s: %s", model, line)


def _by_name(values: Mapping[Knob, float]) -> dict[str, float]:
    return {knob.value: value for knob, value in values.items()}


def length_spread(p50: int, p90: int) -> float:
    """Standard deviation of the logarithm of lengths with these quantiles, if normal."""
    return log(max(1, p90) / max(1, p50)) / Z90


def _step_s(snapshot: Snapshot) -> float:
    """A decode step of everything that runs."""
    running = len(snapshot.running)
    return predict_decodes_s(snapshot.step_time, running, 0)


def bounds_of(mode: ControlMode, setters: Setters, rests: Mapping[Knob, float]) -> dict[Knob, Bounds]:
    bounds = {}
    for knob, default in DEFAULT_BOUNDS.items():
        if mode is ControlMode.ACTING and knob not in setters:
            continue
        rest = rests.get(knob, default.rest)
        lowest, highest = min(default.lowest, rest), max(default.highest, rest)
        bounds[knob] = replace(default, lowest=lowest, rest=rest, highest=highest)
    return bounds
