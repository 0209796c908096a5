"""Figures and plot of the calibration benchmark."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any
from xml.etree import ElementTree

import pytest

from engine.forecast.calibration import bucket_of
from engine.forecast.wait.forecast import Forecast
from gateway.domain.estimate import Estimate, Promise, Times
from ops.bench.estimates.calibration import (
    NOMINAL,
    TIMES,
    curve,
    holds,
    reliability_charts,
    wait_figures,
)
from ops.bench.estimates.calibration_pool import EstimateOutcome
from ops.pages.page import svg


def outcome(
    *,
    waited_s: float | None,
    told_s: tuple[float, float] = (4.0, 8.0),
    came_s: float = 30.0,
    cut_s: float = 0.0,
) -> EstimateOutcome:
    """Of a batch request that was told `told_s`, corrected from half of it; without a wait it was cut."""
    raw = Forecast(
        wait_s=(told_s[0] / 2, told_s[1] / 2), ttft_s=told_s, tpot_s=(0.1, 0.1), e2e_s=told_s,
        output_tokens=(5, 9), tokens_ahead={}, basis="", samples=1, saturated=False,
    )  # fmt: skip
    promise = Promise(bucket_of(raw, 2, is_exact=False, kind="plain"), raw)
    estimate = Estimate(
        told_s, told_s, (0.1, 0.1), told_s, (5, 9), (1, 1), 1, {}, "", 1, saturated=False, promise=promise
    )
    if waited_s is None:
        times, emitted = Times(came_s, ended_s=came_s + cut_s), 0
    else:
        times, emitted = Times(came_s, came_s + waited_s, came_s + waited_s, came_s + 99, came_s + 99), 5
    return EstimateOutcome(estimate, times, emitted, 0, False, "", 2)


def test_waits_count_by_tier_and_by_when_they_came() -> None:
    found = wait_figures(
        [
            outcome(waited_s=7.9, came_s=24.9),
            outcome(waited_s=8.1, came_s=25.0),
            outcome(waited_s=0.02, told_s=(0.0, 0.0), came_s=50.0),
        ]
    )
    named = {name: (figures["requests"], figures["within_2x"]) for name, figures in found.items()}
    assert named["all"] == named["batch"] == (3, 2 / 3)
    assert named["batch, before 25 s"] == named["batch, later"] == (1, 1.0)
    assert named["batch, before 50 s"] == (1, 0.0)
    assert named["standard"] == (0, 0.0)
    assert found["all"]["under_p90"] == pytest.approx(1 / 3)
    assert (found["all"]["raw_within_2x"], found["batch, before 25 s"]["raw_within_2x"]) == (1 / 3, 0.0)


def test_what_was_cut_while_it_waited_is_a_miss_where_it_waited_longer_than_told() -> None:
    def shares(cut_s: float) -> tuple[float, float]:
        found = wait_figures([outcome(waited_s=4.0), outcome(waited_s=None, cut_s=cut_s)])["batch"]
        return found["within_2x"], found["under_p90"]

    assert shares(3.9) == (1.0, 1.0), "it says nothing"
    assert shares(7.9) == (0.5, 1.0), "its wait is above the median, how far nobody knows"
    assert shares(8.1) == (0.5, 0.5)


def test_of_a_right_forecast_every_share_is_its_quantile() -> None:
    normal = NormalDist()
    told = (1.0, math.exp(normal.inv_cdf(0.9)))
    truths = [math.exp(normal.inv_cdf((number + 0.5) / 1000)) for number in range(1000)]
    for nominal, actual in curve([(told, truth) for truth in truths]):
        assert actual == pytest.approx(nominal, abs=0.002)
    assert dict(curve([(told, 3 * truth) for truth in truths]))[0.9] < 0.6


def figures(p90: float, **changes: Any) -> dict[str, Any]:
    return dict.fromkeys((*TIMES, "output_tokens", "cost"), p90) | {"above_max_cost": 0} | changes


def test_quotes_hold_only_within_both_bounds_and_below_every_maximum() -> None:
    assert holds(figures(0.9))
    assert not holds(figures(0.87))
    assert not holds(figures(0.93))
    assert not holds(figures(0.9, above_max_cost=1))
    assert not holds(figures(0.9, output_tokens=0.86))
    assert holds(figures(0.9, cost=0.97)), "lengths are whole: more than nine in ten may be under"


def test_the_plot_has_a_line_for_each_load_and_time() -> None:
    curves = {what: [(nominal, nominal) for nominal in NOMINAL] for what in TIMES}
    report = {"scenarios": [{"name": name, "curves": curves} for name in ("load 1.8", "load 0.95")]}
    root = ElementTree.fromstring(svg(reliability_charts(report)))
    lines = [
        each
        for each in root.iter("{http://www.w3.org/2000/svg}polyline")
        if (each.get("class") or "").startswith("line-")
    ]
    assert len(lines) == 2 * len(TIMES)
    assert all(len((line.get("points") or "").split()) == len(NOMINAL) for line in lines)
