"""Waits are what was told on arrival, on the demo's twin: real queue and estimator, virtual engine and time.

One seed of what `fairgate bench calibration` measures with ten, and what it measures of quotes.
"""

from __future__ import annotations

from functools import cache

import pytest

from ops.bench.estimates.calibration import quote_figures, wait_figures
from ops.bench.estimates.calibration_pool import EstimateOutcome
from ops.bench.estimates.demo_twin import quoted, served

OVERLOAD = 1.8
BOUNDS: dict[tuple[str, float], dict[str, tuple[float, float, float]]] = {
    # By policy and load: least share within 2x, least and most share under p90: this seed's less 0.04. Within
    # 2x, probes by cost have 0.44 of "standard, before 25 s", gaps of the waiting ones' turns alone 0.62,
    # another tier's correction 0.28 of "batch, before 25 s", and a future without arrivals 0.48.
    ("hybrid", OVERLOAD): {
        "all": (0.77, 0.87, 0.95),
        "interactive": (0.99, 0.99, 1.0),
        "standard": (0.72, 0.86, 0.93),
        "standard, before 25 s": (0.68, 0.83, 1.0),
        "standard, before 50 s": (0.76, 0.83, 1.0),
        "standard, later": (0.70, 0.89, 1.0),
        "batch": (0.79, 0.90, 1.0),
        "batch, before 25 s": (0.76, 0.82, 1.0),
        "batch, before 50 s": (0.95, 0.95, 1.0),
        "batch, later": (0.66, 0.95, 1.0),
    },
    ("vtc", OVERLOAD): {
        "all": (0.82, 0.89, 0.97),
        "interactive": (0.99, 0.99, 1.0),
        "standard": (0.77, 0.88, 0.96),
        "standard, before 25 s": (0.84, 0.89, 1.0),
        "standard, before 50 s": (0.83, 0.88, 1.0),
        "standard, later": (0.61, 0.88, 1.0),
        "batch": (0.82, 0.90, 1.0),
        "batch, before 25 s": (0.77, 0.81, 1.0),
        "batch, before 50 s": (0.95, 0.95, 1.0),
        "batch, later": (0.73, 0.95, 1.0),
    },
}


@cache
def outcomes(policy: str, load: float) -> list[EstimateOutcome]:
    return served(1, load, policy)


@pytest.mark.parametrize(("policy", "load"), BOUNDS)
def test_waits_are_within_2x_of_what_was_told_and_under_their_p90(policy: str, load: float) -> None:
    figures = wait_figures(outcomes(policy, load))
    wrong = {
        group: (found["within_2x"], found["under_p90"])
        for group, (least, least_p90, most_p90) in BOUNDS[policy, load].items()
        if not (found := figures[group])["within_2x"] >= least
        or not least_p90 <= found["under_p90"] <= most_p90
    }
    assert not wrong


def test_a_run_of_the_twin_is_the_same_each_time() -> None:
    assert served(1, OVERLOAD, "vtc") == outcomes("vtc", OVERLOAD)


@pytest.mark.long
def test_a_quoted_p90_is_exceeded_about_once_in_ten_times() -> None:
    figures = quote_figures([one for one in quoted("hybrid") if one.binding])
    assert figures["requests"] >= 1_000
    for what in ("ttft", "e2e"):
        assert 0.85 <= figures[what] <= 0.94, (what, figures[what])
    assert figures["output_tokens"] >= 0.85
    assert figures["above_max_cost"] == 0
