"""Borders from what was seen, and which actions a search tries."""

from __future__ import annotations

import math

import pytest

from gateway.flow.learned.actions import ACTION_BOUNDS, HYBRID
from gateway.flow.learned.macro_state import Borders, SeenRange, Situation
from ops.simulate.learn.grid import GRID, actions_that_act, borders_of, range_of
from ops.simulate.traffic.requests import SimulatedRequest

NEVER_S = (math.inf,) * 3
SHORT = SimulatedRequest(0.0, "one", 10, 10)


def test_every_value_is_within_its_bounds_and_hybrids_is_among_them() -> None:
    assert set(GRID) == set(ACTION_BOUNDS)
    for name, values in GRID.items():
        bounds = ACTION_BOUNDS[name]
        assert all(bounds.lowest <= value <= bounds.highest for value in values)
        assert values[-1] == getattr(HYBRID, name)
        assert len(set(values)) == len(values)


def test_borders_are_quantiles_of_what_was_seen() -> None:
    seen = [Situation(number / 100, False, number / 200, 1 + number / 100) for number in range(101)]
    # Of the queue, the first quarter of where there was one.
    assert borders_of(seen) == Borders(queued_per_place=0.26, kv_share=0.335, trend=1.75)
    assert range_of(seen) == SeenRange(queued_per_place=1.0, kv_share=0.5, trend=2.0)


def test_borders_of_an_idle_pool_are_the_least_ones() -> None:
    idle = [Situation(0.0, False, 0.0, 1.0)] * 3
    assert borders_of(idle) == borders_of([]) == Borders(queued_per_place=0.02, kv_share=0.3, trend=1.05)
    assert range_of([]) == SeenRange(queued_per_place=0.0, kv_share=0.0, trend=0.0)


@pytest.mark.parametrize(
    ("requests", "ageing_s", "idle"),
    [
        ([SHORT], NEVER_S, {"long_share", "ageing"}),
        ([SimulatedRequest(0.0, "one", 60, 10)], NEVER_S, {"ageing"}),
        ([SHORT, SimulatedRequest(0.0, "one", 1, 1, tier=2)], (math.inf, 5.0, math.inf), {"long_share"}),
        ([SHORT, SimulatedRequest(0.0, "one", 1, 1, tier=2)], NEVER_S, {"long_share", "ageing"}),
    ],
)
def test_actions_without_effect_on_the_traffic_are_left_alone(
    requests: list[SimulatedRequest], ageing_s: tuple[float, ...], idle: set[str]
) -> None:
    assert set(GRID) - set(actions_that_act(requests, 100, ageing_s)) == idle
