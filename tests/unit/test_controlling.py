"""Does the control loop see what engines say, and move only what it may?"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest

from engine.forecast.length import LengthForecast
from engine.forecast.step_time import PRIOR
from engine.messages import Snapshot
from engine.scheduling.counters import ServiceCounters
from gateway.controlling import SETTERS, Controlling
from gateway.flow.control import Knob, Mode
from gateway.flow.controller import FlowController
from gateway.flow.window import WindowRule


@dataclass
class Engine:
    """Says how full its cache is."""

    snapshot: Snapshot
    is_up: bool = True


def made(mode: Mode, referenced: int, preemptions: int = 0) -> tuple[Controlling, FlowController, Any]:
    flow = FlowController(
        "vtc", ServiceCounters(), max_queued=9, max_queued_per_tenant=9, queue_ttl_s=[1e9] * 3,
        window=WindowRule(2, 1.0), log_records=10,
    )  # fmt: skip
    snapshot = Snapshot("a", 1, 1.0, [], [], 100 - referenced, 0, referenced, 100, PRIOR, {}, preemptions)
    engine: Any = Engine(snapshot)
    lengths = LengthForecast()
    for _ in range(300):
        lengths.observe("t", "m", 20)
    return Controlling(mode, "m", flow, [engine], lengths), flow, engine


def test_acting_moves_what_has_a_setter_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    controlling, flow, engine = made(Mode.ACTING, referenced=95)
    with caplog.at_level(logging.INFO, "fairgate.gateway.control"):
        [move] = controlling.look(0.0)
    assert (move.knob, move.is_made) == (Knob.LOOKAHEAD, True)
    assert flow.window.lookahead_sequences == 1
    assert "control of m: moves lookahead 2 -> 1, because: KV nearly full (0.95)" in caplog.text
    engine.snapshot = Snapshot("a", 2, 2.0, [], [], 99, 0, 1, 100, PRIOR)
    assert controlling.look(5.0) == [], "it turns back a minute later"
    controlling.look(65.0)
    assert flow.window.lookahead_sequences == 2


def test_advice_has_all_knobs_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    controlling, flow, _ = made(Mode.ADVICE, referenced=95)
    with caplog.at_level(logging.INFO, "fairgate.gateway.control"):
        moves = controlling.look(0.0)
    assert {move.knob for move in moves} > set(SETTERS)
    assert not any(move.is_made for move in moves)
    assert flow.window == WindowRule(2, 1.0)
    assert caplog.text.count("advises to move") == len(moves)


def test_off_does_not_even_look() -> None:
    controlling, flow, _ = made(Mode.OFF, referenced=100)
    assert controlling.look(0.0) == []
    assert flow.window == WindowRule(2, 1.0)


def test_evictions_count_once() -> None:
    controlling, _, engine = made(Mode.ACTING, referenced=10, preemptions=3)
    assert controlling.look(0.0)
    engine.snapshot = Snapshot("a", 2, 2.0, [], [], 90, 0, 10, 100, PRIOR, {}, 3)
    controlling.look(60.0)
    assert controlling.control.values[Knob.LOOKAHEAD] == 2, "nothing was evicted since"
