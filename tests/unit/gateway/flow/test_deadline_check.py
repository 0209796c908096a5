"""Refusal of requests that cannot be in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from gateway.flow.deadline_check import TooLate, early_refusal, out_of_reach


@dataclass(frozen=True)
class Ahead:
    wait_s: tuple[float, float]
    e2e_s: tuple[float, float]
    ttft_s: tuple[float, float] = (11.0, 32.0)


AHEAD = Ahead((10.0, 30.0), (20.0, 60.0))


def test_it_is_the_median_that_refuses_or_a_factor_of_it() -> None:
    assert early_refusal(AHEAD, now_s=100.0, expires_s=110.0, deadline_s=120.0) is None
    assert early_refusal(AHEAD, now_s=100.0, expires_s=109.0) == TooLate("wait", 9.0, 10.0, 1.0)
    assert early_refusal(AHEAD, now_s=100.0, deadline_s=115.0) == TooLate("answer", 15.0, 20.0, 5.0)
    assert early_refusal(AHEAD, now_s=100.0, expires_s=112.0) is None
    assert early_refusal(AHEAD, now_s=100.0, expires_s=112.0, factor=1.5) == TooLate("wait", 12.0, 15.0, 3.0)


def test_the_wait_is_looked_at_before_the_answer() -> None:
    refused = early_refusal(AHEAD, now_s=0.0, expires_s=1.0, deadline_s=1.0)
    assert refused is not None
    assert refused.what == "wait"
    assert refused.retry_after_s == 9.0


@pytest.mark.parametrize("ahead", [None, AHEAD, Ahead((0.0, 0.0), (0.0, 0.0))])
def test_an_instant_that_has_passed_refuses_by_itself(ahead: Ahead | None) -> None:
    for limits in ({"expires_s": 99.0}, {"deadline_s": 100.0}):
        refused = early_refusal(ahead, now_s=100.0, **limits)
        assert refused is not None
        assert refused.allowed_s == 0.0
        assert refused.retry_after_s >= 1.0


def test_without_a_forecast_or_a_limit_nobody_is_refused() -> None:
    assert early_refusal(None, now_s=0.0, expires_s=1e-3, deadline_s=1e-3) is None
    assert early_refusal(Ahead((1e9, 1e9), (1e9, 1e9)), now_s=0.0, expires_s=math.inf) is None


def test_a_target_is_out_of_reach_when_so_many_times_the_p90_is_beyond_it() -> None:
    assert out_of_reach(AHEAD, {"ttft": 32.0, "e2e": 60.0}, 1.0) is None
    assert out_of_reach(AHEAD, {"ttft": 31.5}, 1.0) == TooLate("first token", 31.5, 32.0, 1.0)
    assert out_of_reach(AHEAD, {"ttft": 40.0, "e2e": 15.0}, 1.0) == TooLate("answer", 15.0, 60.0, 45.0)
    assert out_of_reach(AHEAD, {"ttft": 8.0}, 0.25) is None
    assert out_of_reach(AHEAD, {"ttft": 5.0}, 0.25) == TooLate("first token", 5.0, 32.0, 12.0)


def test_no_target_no_forecast_no_strictness_no_refusal() -> None:
    assert out_of_reach(None, {"ttft": 1e-3}, 1.0) is None
    assert out_of_reach(AHEAD, {}, 1.0) is None
    assert out_of_reach(AHEAD, {"tpot": 1e-9}, 1.0) is None
    assert out_of_reach(AHEAD, {"ttft": 1e-9}, 0.0) is None
