"""Estimates hold as often as they say, with the real queue, engine and estimator.

A short run of `fairgate bench calibration`: fewer requests, wider bounds.
"""

from __future__ import annotations

import pytest

from ops.bench.estimates.calibration import pinball, scenario

pytestmark = pytest.mark.long

PER_S = 7.0
"""About two thirds of what the virtual engine can do."""


@pytest.mark.parametrize("quotes", [False, True])
def test_a_p90_is_exceeded_about_once_in_ten_times(quotes: bool) -> None:
    found = scenario(3, 1.5 if quotes else PER_S, 1_000, quotes=quotes, warm_up=400)
    figures = found["groups"]["binding" if quotes else "plain"]
    assert figures["requests"] >= 1_000
    for what in ("ttft", "tpot", "e2e"):
        assert 0.85 <= figures[what]["p90"] <= 0.94, (what, figures[what])
        assert 0.40 <= figures[what]["p50"] <= 0.60, (what, figures[what])
    assert figures["output_tokens"]["p90"] >= 0.85
    assert figures["above_max_cost"] == 0


def test_the_pinball_loss_is_least_at_the_quantile() -> None:
    truth = [float(number) for number in range(1, 101)]
    losses = {told: sum(pinball(told, actual, 0.9) for actual in truth) for told in (50.0, 90.0, 99.0)}
    assert min(losses, key=lambda told: losses[told]) == 90.0
