"""The number of sequences that an engine may have, also in forecasts."""

from __future__ import annotations

import pytest

from engine.forecast.wait import replayed_engine
from gateway.flow.window import OWED_KV_PART, OWED_PART, Replica, ReplicaLoad, WindowRule


@pytest.mark.parametrize(
    ("rule", "places"),
    [
        (WindowRule(2, 1.0), 10),
        (WindowRule(0, 1.0), 8),
        (WindowRule(2, 1.0, batch_cap=0.5), 4),
        (WindowRule(2, 1.0, batch_cap=0.01), 1),
    ],
)
def test_a_cap_of_the_batch_leaves_places_empty(rule: WindowRule, places: int) -> None:
    assert rule.places(8) == places
    replica, load = Replica("a", 8, 10_000), ReplicaLoad()
    load.add(1, places - 1, 10)
    assert rule.has_room(replica, load, 1, 1, 10)
    load.add(1, 1, 10)
    assert not rule.has_room(replica, load, 1, 1, 10)
    assert rule.has_room(replica, load, 0, 1, 10), "who stands above it does not count what is below"


def test_forecasts_know_the_same_window() -> None:
    assert (replayed_engine.OWED_PART, replayed_engine.OWED_KV_PART) == (OWED_PART, OWED_KV_PART)
