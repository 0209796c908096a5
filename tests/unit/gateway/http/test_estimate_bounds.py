"""Bounds on an estimate, from headers."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.http.estimate_bounds import max_cost_nanousd, max_wait_s


def test_without_the_headers_nothing_is_bounded() -> None:
    assert max_wait_s(None) is None
    assert max_cost_nanousd(None) is None


@pytest.mark.parametrize(
    ("text", "nanousd"),
    [
        ("0", 0),
        ("0.05", 50_000_000),
        (" 1e-9 ", 1),
        # Never more than was said.
        ("0.0000000019", 1),
        ("0.1", 100_000_000),
        ("1e30", 10**18),
        ("99999999999999999999", 10**18),
    ],
)
def test_dollars_become_nano_dollars_exactly(text: str, nanousd: int) -> None:
    assert max_cost_nanousd(text) == nanousd


def test_a_wait_is_seconds_and_may_be_none() -> None:
    assert (max_wait_s("0"), max_wait_s("2.5"), max_wait_s(".5")) == (0.0, 2.5, 0.5)


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "nan", "1,5", "-0.01", "sNaN", "1_0", "inf", "Infinity", "+1", "."]
)
def test_what_is_no_bound_is_refused_by_its_headers_name(text: str) -> None:
    parsers = {"X-Fairgate-Max-Wait-S": max_wait_s, "X-Fairgate-Max-Cost-Usd": max_cost_nanousd}
    for header, parse in parsers.items():
        with pytest.raises(ApiError) as refused:
            parse(text)
        error = refused.value
        assert (error.status, error.code, error.param) == (400, "invalid_header", header)
