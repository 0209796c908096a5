"""Estimates in bursts: each request is told of those before it, and a burst says little of what comes later.

The real queue, engine and estimator on virtual time, with the ledger's group commit between estimate and
queue; seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from engine.forecast.calibration import load_of
from ops.bench.estimates.calibration_pool import EstimateOutcome
from tests.support.burst_pool import STEADY, TOGETHER, idle_bursts, steady_after, warm_bursts
from tests.support.virtual_gateway import share_within

pytestmark = pytest.mark.long

FACTOR, NEAR_ENOUGH_S = 2.0, 0.05
WANTED = 0.85
BURSTS = 48
LEARNED_FROM = 16
"""Bursts that are not judged: before, neither lengths nor steps are known."""
MANY = 500


@cache
def warm() -> list[EstimateOutcome]:
    outcomes = warm_bursts(BURSTS, seed=2)
    start = next(index for index, each in enumerate(outcomes) if each.kind.split()[-1] == str(LEARNED_FROM))
    return outcomes[start:]


def waited_s(each: EstimateOutcome) -> float:
    assert each.times.wait_s is not None
    return each.times.wait_s


def within(outcomes: Sequence[EstimateOutcome]) -> float:
    return share_within(
        [(each.estimate.wait_s[0], waited_s(each)) for each in outcomes], FACTOR, NEAR_ENOUGH_S
    )


def test_sixteen_at_once_into_an_idle_engine_are_told_their_waits() -> None:
    outcomes = idle_bursts(30, seed=7)
    assert len(outcomes) == 30 * TOGETHER
    assert within(outcomes[TOGETHER:]) >= 0.9, "of the first burst neither lengths nor steps are known"
    behind = [each for each in outcomes[TOGETHER:] if waited_s(each) > 0.1]
    assert len(behind) >= 29 * (TOGETHER - 4)
    assert all(each.estimate.wait_s[0] > 0 < each.estimate.tokens_ahead["own"] for each in behind)


def test_waits_in_and_after_bursts_are_told_and_covered_whatever_the_told_wait() -> None:
    by_told: dict[int, list[EstimateOutcome]] = {}
    for each in warm():
        by_told.setdefault(load_of(each.estimate.wait_s[0]), []).append(each)
    large = {load: group for load, group in by_told.items() if len(group) >= MANY}
    assert len(large) >= 3, {load: len(group) for load, group in by_told.items()}
    for load, group in large.items():
        covered = sum(waited_s(each) <= each.estimate.wait_s[1] for each in group) / len(group)
        assert within(group) >= WANTED, (load, within(group))
        # Where next to no wait was told most have none.
        assert 0.85 <= covered <= (0.96 if load else 1.0), (load, covered)


def test_twenty_requests_after_a_burst_estimates_are_right_again() -> None:
    after = steady_after(warm(), skipped=20)
    assert len(after) >= 300
    assert within(after) >= 0.95
    assert within([each for each in warm() if each.kind == STEADY]) >= 0.95
