"""Coverage and plot of the calibration benchmark."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any
from xml.etree import ElementTree

import pytest

from ops.bench.estimates.calibration import HELD_TO, NOMINAL, coverage, holds, reliability_charts
from ops.pages.page import svg


def lognormal_truths(count: int, scale: float = 1.0) -> list[tuple[tuple[float, float], float]]:
    """Told a median of 1 and its own p90; the truth is `scale` times as long."""
    normal = NormalDist()
    told = (1.0, math.exp(normal.inv_cdf(0.9)))
    return [(told, scale * math.exp(normal.inv_cdf((number + 0.5) / count))) for number in range(count)]


def test_of_a_right_forecast_every_share_is_its_quantile() -> None:
    found = coverage(lognormal_truths(1000))
    assert (found["p50"], found["p90"]) == (0.5, 0.9)
    for nominal, actual in found["curve"]:
        assert actual == pytest.approx(nominal, abs=0.002)
    late = coverage(lognormal_truths(1000, scale=3.0))
    assert late["p90"] < 0.6
    assert late["pinball_p90"] > 2 * found["pinball_p90"]


def figures(p90: float, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {what: {"p50": 0.5, "p90": p90} for what in (*HELD_TO, "output_tokens", "cost")}
    return made | {"above_max_cost": 0} | changes


def test_a_run_holds_only_within_both_bounds_and_below_every_maximum() -> None:
    assert holds(figures(0.9))
    assert not holds(figures(0.87))
    assert not holds(figures(0.93))
    assert not holds(figures(0.9, above_max_cost=1))
    assert not holds(figures(0.9, output_tokens={"p90": 0.86}))
    assert holds(figures(0.9, cost={"p90": 0.97})), "lengths are whole: more than nine in ten may be under"


def test_the_plot_has_a_line_for_each_group_and_figure() -> None:
    curve = [(nominal, nominal) for nominal in NOMINAL]
    group = {what: {"curve": curve} for what in HELD_TO}
    report = {"scenarios": [{"name": "load 0.5", "groups": {"plain": group, "binding": group}}]}
    root = ElementTree.fromstring(svg(reliability_charts(report)))
    lines = [
        each
        for each in root.iter("{http://www.w3.org/2000/svg}polyline")
        if (each.get("class") or "").startswith("line-")
    ]
    assert len(lines) == 2 * len(HELD_TO)
    assert all(len((line.get("points") or "").split()) == len(NOMINAL) for line in lines)
