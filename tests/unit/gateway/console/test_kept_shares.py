"""Shares of kept figures: Wilson's interval, and too few."""

from __future__ import annotations

import math

import pytest

from gateway.console.pages.requests.quotes import FEWEST, Z_95, kept_figure, wilson


@pytest.mark.parametrize(
    ("within", "requests", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I: method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_intervals_are_those_of_the_literature(within: int, requests: int, low: float, high: float) -> None:
    assert wilson(within, requests) == pytest.approx((low, high), abs=5e-5)


def test_an_intervals_ends_are_where_the_share_is_just_not_surprising() -> None:
    for within, requests in ((27, 30), (450, 500), (1, 1)):
        share = within / requests
        for end in wilson(within, requests):
            if 0 < end < 1:
                deviation = math.sqrt(end * (1 - end) / requests)
                assert abs(share - end) / deviation == pytest.approx(Z_95)


def test_a_share_is_marked_where_it_is_surely_off() -> None:
    right = kept_figure({"requests": FEWEST, "within_p50": 15, "within_p90": 27})
    assert (right.p50.is_off, right.p90.is_off) == (False, False)
    off = kept_figure({"requests": 100, "within_p50": 0, "within_p90": 3})
    assert (off.p50.is_off, off.p90.is_off) == (True, True)
    few = kept_figure({"requests": FEWEST - 1, "within_p50": 0, "within_p90": 0})
    assert (few.p90.is_enough, few.p90.is_off) == (False, False)
