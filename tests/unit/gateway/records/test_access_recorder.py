"""Accesses that cannot be kept are counted on the metrics page."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry

from gateway.records.access_recorder import MOST_WRITTEN, AccessRecorder
from tenants.audit.accesses import MOST_WAITING
from tenants.people.way_in import LogIn
from tests.support.builders import site


def test_while_the_database_is_away_rows_pile_up_to_a_bound_and_the_rest_is_counted() -> None:
    registry, now_s = CollectorRegistry(), [6_000.0]
    recorder = AccessRecorder(site(None, lambda: now_s[0], registry), cast(Any, None))
    minutes = 120
    for _ in range(minutes):
        now_s[0] += 60
        for number in range(101):
            recorder.log_in(LogIn(f"name-{number}", "192.0.2.1", "password"))
    lost = registry.get_sample_value("fairgate_audit_accesses_dropped_total")
    assert lost == minutes * 101 - MOST_WAITING
    batch = recorder.take()
    assert batch is not None
    assert len(batch) == MOST_WRITTEN
