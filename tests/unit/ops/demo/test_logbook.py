"""Tests of the dispatch log as audit events: reservations are not unfair, other dispatches may be."""

from __future__ import annotations

import pytest

from engine.scheduling.counters import COUNTER_SCALE
from gateway.flow.dispatch_log import LogRecord, Waiting
from ops.demo.audit import audit
from ops.demo.logbook import events_of


@pytest.mark.parametrize(("rule", "unfair"), [("reservation", 0), ("", 1)])
def test_a_turn_by_reservation_is_no_unfair_one(rule: str, unfair: int) -> None:
    """Two tenants wait; the one that ranks higher, and came later, is dispatched."""
    backlog = [Waiting("low", 0, 1.0, 1), Waiting("high", 100 * COUNTER_SCALE, 2.0, 1)]
    log = [
        LogRecord("arrive", 1.0, "a", "low", 1, 1.0, 1.0, 0, 10),
        LogRecord("arrive", 2.0, "b", "high", 1, 2.0, 1.0, 100 * COUNTER_SCALE, 10),
        LogRecord(
            "dispatch", 3.0, "b", "high", 1, 2.0, 1.0, 100 * COUNTER_SCALE, 10, backlog=backlog, rule=rule
        ),
    ]
    report = audit(events_of(log))
    assert report.dispatches == 1
    assert (report.inversions, report.unfair_dispatches) == (unfair, unfair)
