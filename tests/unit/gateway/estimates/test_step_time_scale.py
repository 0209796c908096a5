"""Measured step time of an engine, from its snapshots."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.messages import RunningSequence, Snapshot, TenantService
from engine.step_time.model import PRIOR, predict_step_s
from gateway.estimates.step_time_scale import StepTimeScale


def snapshot(step: int, at_s: float, *running: str, emitted: int | None = None) -> Snapshot:
    sequences = [RunningSequence(name, name, "t", 1, "running", 10, 60, 50, 500, 100) for name in running]
    service = {"t": TenantService(0, step if emitted is None else emitted)}
    return Snapshot("e", step, at_s, sequences, [], 1, 0, 1, 2, PRIOR, service)


def one_step_s() -> float:
    return predict_step_s(PRIOR, 1, 60, 1)


def test_an_engine_that_takes_three_times_as_long_has_a_factor_of_three() -> None:
    pace = StepTimeScale()
    for tick in range(800):
        pace.see(snapshot(20 * tick, 20 * tick * 3 * one_step_s(), "a"))
    assert pace.factor == pytest.approx(3.0, rel=0.01)
    adjusted = pace.adjust(snapshot(0, 0.0))
    assert adjusted.base_s == pytest.approx(3 * PRIOR.base_s, rel=0.01)
    assert adjusted.per_context_token_s == pytest.approx(3 * PRIOR.per_context_token_s, rel=0.01)


def test_a_moment_in_a_burst_is_no_pace_to_go_on_with() -> None:
    """The first ones of a burst cost the machine so much that its engine takes one step in a second."""
    pace = StepTimeScale()
    pace.see(snapshot(0, 0.0, "a"))
    pace.see(snapshot(1, 1.0, "a"))
    assert 1.0 < pace.factor < 1.5


def test_waits_are_reckoned_with_the_mean_step_which_slow_ones_are_in() -> None:
    pace = StepTimeScale()
    mean = StepTimeScale(_elapsed_s=2.0, _predicted_s=1.0).adjust(snapshot(0, 0.0))
    for tick in range(40):
        seen = replace(snapshot(20 * tick, 20 * tick * 2 * one_step_s(), "a"), mean_step_time=mean)
        pace.see(seen)
    assert pace.factor == pytest.approx(1.0)
    assert pace.adjust(seen).base_s == pytest.approx(2 * PRIOR.base_s)


def test_time_in_which_nothing_ran_throughout_does_not_count() -> None:
    pace = StepTimeScale()
    pace.see(snapshot(0, 0.0, "a"))
    pace.see(snapshot(20, 0.9, "b"))  # "a" ended and "b" came: it may have been idle in between
    pace.see(snapshot(20, 0.95))
    pace.see(snapshot(20, 1.2))
    pace.see(None)
    pace.see(snapshot(5, 1.3, "b"))  # another engine, counting anew
    pace.see(snapshot(25, 30.0, "b"))  # a gap too long to say anything
    assert pace.factor == 1.0


def test_the_last_seconds_count_and_madness_is_bounded() -> None:
    pace = StepTimeScale()
    at_s, step = 0.0, 0
    for slowness in (1.0, 5.0):
        for _ in range(1000):
            pace.see(snapshot(step, at_s, "a"))
            step, at_s = step + 10, at_s + 10 * slowness * one_step_s()
    assert pace.factor == pytest.approx(5.0, rel=0.1)
    for _ in range(80):
        pace.see(snapshot(step, at_s, "a"))
        step, at_s = step + 1, at_s + 0.9
    assert pace.factor == 20.0
