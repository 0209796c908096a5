"""The control loop's view of the engines, and its setters."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.messages import EngineKnobs, Snapshot
from engine.step_time.model import PRIOR
from gateway.dispatch.admission import Admission
from gateway.flow.control_rules import RULES, Control, ControlMode, Move
from gateway.flow.controller import FlowController, Ticket
from gateway.flow.deadline_check import FIRM, LENIENT
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob
from gateway.flow.routing import PrefixRouter
from gateway.flow.window import Replica, WindowRule
from gateway.pools.control_loop import ControlLoop, Signals, bounds_of, queue_setters, setters_of
from gateway.statistics import FadingShare, RecentShare
from tests.support.builders import flow_controller

MOVED_BY_RULES = {knob for rule in RULES for knob, _ in rule.goals}
FULL = Replica("a", 1, 100)
"""The first one fills it."""


@dataclass
class Engine:
    """Says how full its cache is."""

    snapshot: Snapshot
    is_up: bool = True
    ready: Any = None


def snapshot_of(referenced: int, preemptions: int = 0) -> Snapshot:
    """So many of its hundred blocks are in use."""
    return Snapshot("a", 1, 1.0, [], [], 100 - referenced, 0, referenced, 100, PRIOR, {}, preemptions)


def queue(ageing_s: float = 100.0) -> FlowController:
    return flow_controller(lookahead=2, ageing_s=[ageing_s] * 3, scorer=PrefixRouter())


def made(
    mode: ControlMode, referenced: int, preemptions: int = 0, **told: Any
) -> tuple[ControlLoop, FlowController, Any]:
    flow = queue()
    engine: Any = Engine(snapshot_of(referenced, preemptions))
    lengths = LengthForecast()
    for _ in range(300):
        lengths.observe("t", "m", 20)
    return ControlLoop(mode, "m", flow, [engine], lengths, queue_setters(flow), **told), flow, engine


def test_acting_moves_what_has_a_setter_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    controlling, flow, engine = made(ControlMode.ACTING, referenced=95)
    with caplog.at_level(logging.INFO, "fairgate.gateway.control"):
        moves = controlling.look(0.0)
    assert {move.knob for move in moves if move.is_made} == {Knob.LOOKAHEAD, Knob.BATCH_CAP}
    assert (flow.placement.window.lookahead_sequences, flow.placement.window.batch_cap) == (1, 0.875)
    assert "control of m: moves lookahead 2 -> 1, because: KV nearly full (0.95)" in caplog.text
    engine.snapshot = Snapshot("a", 2, 2.0, [], [], 99, 0, 1, 100, PRIOR)
    assert controlling.look(5.0) == [], "it turns back a minute later"
    for now_s in (125.0, 185.0):
        controlling.look(now_s)
    assert flow.placement.window == WindowRule(2, 1.0), "one after the other"


def test_advice_has_all_knobs_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    controlling, flow, _ = made(ControlMode.ADVICE, referenced=95)
    with caplog.at_level(logging.INFO, "fairgate.gateway.control"):
        moves = controlling.look(0.0)
    assert {Knob.LOOKAHEAD, Knob.BATCH_CAP, Knob.TOKEN_BUDGET} <= {move.knob for move in moves}
    assert not any(move.is_made for move in moves)
    assert flow.placement.window == WindowRule(2, 1.0)
    assert caplog.text.count("advises to move") == len(moves)


@pytest.mark.parametrize("mode", [ControlMode.ACTING, ControlMode.ADVICE])
def test_every_move_is_told_once_it_is_applied(mode: ControlMode) -> None:
    told: list[tuple[int, list[Move]]] = []
    flows: list[FlowController] = []

    def on_moves(control: Control, moves: list[Move]) -> None:
        told.append((flows[0].placement.window.lookahead_sequences, list(moves)))

    controlling, flow, engine = made(mode, 95, on_moves=on_moves)
    flows.append(flow)
    moves = controlling.look(0.0)
    assert told == [(1 if mode is ControlMode.ACTING else 2, moves)]
    engine.snapshot = Snapshot("a", 2, 2.0, [], [], 99, 0, 1, 100, PRIOR)
    assert controlling.look(1.0) == []
    assert len(told) == 1, "no move, no word"


def test_off_does_not_even_look() -> None:
    controlling, flow, _ = made(ControlMode.OFF, referenced=100)
    assert controlling.look(0.0) == []
    assert flow.placement.window == WindowRule(2, 1.0)


def test_evictions_count_once() -> None:
    controlling, _, engine = made(ControlMode.ACTING, referenced=10, preemptions=3)
    assert controlling.look(0.0)
    engine.snapshot = Snapshot("a", 2, 2.0, [], [], 90, 0, 10, 100, PRIOR, {}, 3)
    for now_s in (120.0, 180.0):
        controlling.look(now_s)
    assert controlling.control.values[Knob.LOOKAHEAD] == 2, "nothing was evicted since"


def test_what_was_met_and_found_in_caches_is_seen() -> None:
    attainment, hits = RecentShare(), RecentShare()
    controlling, flow, _ = made(
        ControlMode.ACTING,
        10,
        signals=lambda now_s: Signals(attainment=attainment.value, prefix_hit_share=hits.value),
    )
    assert flow.enqueue(Ticket(QueueEntry("r", "t", 0.0, 10, 10, 1), 1, 20), 0.0) is None
    assert controlling.look(0.0) == [], "nothing is known"
    attainment.note(0.5)
    hits.note(0.9)
    assert {move.knob: move.after - move.before > 0 for move in controlling.look(5.0)} == {
        Knob.BATCH_SHARE: False,
        Knob.LOOKAHEAD: True,
        Knob.PREFIX_WEIGHT: True,
    }
    assert (flow.knobs.batch_share, flow.knobs.prefix_weight, flow.placement.window.lookahead_sequences) == (
        0.85,
        1.5,
        3,
    )


def test_who_is_expected_late_and_who_was_served_in_good_time_is_seen() -> None:
    late, good = FadingShare(1e9), FadingShare(1e9)
    controlling, _, _ = made(
        ControlMode.ADVICE,
        10,
        signals=lambda now_s: Signals(expected_late=late.at(now_s), in_good_time=good.at(now_s)),
    )
    assert controlling.look(0.0) == [], "nothing is known"
    late.note(1.0, 5.0)
    assert [(move.knob, move.after) for move in controlling.look(5.0)] == [(Knob.ADMISSION, FIRM)]
    for _ in range(20):
        good.note(1.0, 20.0)
    assert [(move.knob, move.after) for move in controlling.look(20.0)] == [(Knob.ADMISSION, LENIENT)]


@pytest.mark.parametrize("knob", queue_setters(queue()))
def test_every_knob_of_a_queue_turns_what_it_is_called(knob: Knob) -> None:
    flow = queue()
    before = knobs_of(flow)
    bounds = DEFAULT_BOUNDS[knob]
    for value in (bounds.lowest, bounds.highest):
        queue_setters(flow)[knob](value)
        assert knobs_of(flow) == before | {knob: value}


def knobs_of(flow: FlowController) -> dict[Knob, float]:
    return {
        Knob.BATCH_CAP: flow.placement.window.batch_cap,
        Knob.LOOKAHEAD: flow.placement.window.lookahead_sequences,
        Knob.AGEING: flow.knobs.ageing,
        Knob.BATCH_SHARE: flow.knobs.batch_share,
        Knob.PREFIX_WEIGHT: flow.knobs.prefix_weight,
        Knob.LONG_SHARE: flow.knobs.long_share,
    }


@dataclass
class Turned:
    """An engine whose knobs can be turned."""

    told: list[EngineKnobs] = field(default_factory=list)

    def set_knobs(self, knobs: EngineKnobs) -> None:
        self.told.append(knobs)


@dataclass
class Requests:
    """What a gateway's own knobs are turned on."""

    reserve_quantile: float = 0.9
    admission: Admission = field(default_factory=Admission)


def test_every_knob_of_a_gateway_and_its_engines_turns_what_it_is_called() -> None:
    flow, requests = queue(), Requests()
    lifecycle: Any = requests
    engine: Any = Turned()
    setters = setters_of(flow, lifecycle, lambda: [engine, engine], has_engines=True)
    setters[Knob.ADMISSION](0.25)
    setters[Knob.EARLY_REFUSAL](1.5)
    setters[Knob.RESERVE_QUANTILE](0.7)
    admission = requests.admission
    assert (admission.strictness, admission.factor, requests.reserve_quantile) == (0.25, 1.5, 0.7)
    assert set(setters) == set(DEFAULT_BOUNDS) - {Knob.QUOTA}, "all there are of a queue and its engines"
    lent: list[float] = []
    lending = setters_of(flow, lifecycle, list, has_engines=False, quota=lent.append)
    lending[Knob.QUOTA](0.25)
    assert lent == [0.25]
    assert Knob.TOKEN_BUDGET not in setters_of(flow, lifecycle, list, has_engines=False), "others' engines"
    foreign = setters_of(flow, lifecycle, lambda: [engine], has_engines=True, is_foreign=True)
    assert set(setters) - set(foreign) == {Knob.TOKEN_BUDGET}, "our plug-in has no tokens of a step to give"
    setters[Knob.TOKEN_BUDGET](0.5)
    assert engine.told == [EngineKnobs(token_share=0.5)] * 2, "every replica's"


def test_a_brake_bounds_batchs_share_and_lets_it_go_again() -> None:
    flow = queue()
    acting = ControlLoop(ControlMode.ACTING, "tiny", flow, [], LengthForecast(), queue_setters(flow))
    acting.bound(Knob.BATCH_SHARE, 0.25)
    assert flow.knobs.batch_share == acting.control.values[Knob.BATCH_SHARE] == 0.25
    acting.bound(Knob.BATCH_SHARE, 1.0)
    assert flow.knobs.batch_share == 1.0
    for mode, setters in ((ControlMode.ADVICE, queue_setters(flow)), (ControlMode.ACTING, {})):
        ControlLoop(mode, "tiny", flow, [], LengthForecast(), setters).bound(Knob.BATCH_SHARE, 0.25)
        assert flow.knobs.batch_share == 1.0, "it is not this loop's to move"


def test_a_knob_rests_where_the_operator_put_it_though_that_is_beyond_its_bounds() -> None:
    bounds = bounds_of(ControlMode.ADVICE, {}, {Knob.LOOKAHEAD: 12, Knob.BATCH_SHARE: 0.05})
    assert (bounds[Knob.LOOKAHEAD].rest, bounds[Knob.LOOKAHEAD].highest) == (12, 12)
    assert (bounds[Knob.BATCH_SHARE].lowest, bounds[Knob.BATCH_SHARE].rest) == (0.05, 0.05)
    assert set(bounds) == set(DEFAULT_BOUNDS)


def test_faster_ageing_counts_for_who_waits_and_slower_ageing_moves_nobody_down() -> None:
    flow = queue(ageing_s=100.0)
    for name, at_s in (("early", 0.0), ("late", 35.0)):
        assert flow.enqueue(Ticket(QueueEntry(name, "t", at_s, 10, 10, 2), 1, 20), at_s) is None

    def bands(now_s: float) -> list[int | None]:
        assert flow.dispatch(now_s, [FULL]) == []
        flow.check(now_s)
        return [flow.queue.place("early")[0], flow.queue.place("late")[0]]

    filler = Ticket(QueueEntry("filler", "t", 0.0, 10, 10, 0), 1, 10**6)
    assert flow.enqueue(filler, 0.0) is None
    assert len(flow.dispatch(0.0, [FULL])) == 1
    assert bands(40.0) == [2, 2]
    flow.turn(Knob.AGEING, 0.25)
    assert bands(41.0) == [1, 2], "25 s are enough"
    assert bands(51.0) == [0, 2]
    flow.turn(Knob.AGEING, 1.0)
    assert bands(61.0) == [0, 2]
    assert bands(136.0) == [0, 1]
