"""The waterfall of a request fits its width."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ops.cli.inspect.waterfall import BAR_CELLS, COLOURS, bar


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_bar_is_seen_and_stays_within_its_width(one: float, other: float, beyond: float) -> None:
    start_s, end_s = min(one, other), max(one, other)
    before, cells = bar(start_s, end_s, end_s + beyond)

    assert cells >= 1
    assert before >= 0
    assert before + cells <= BAR_CELLS


def test_every_stage_has_its_colour() -> None:
    stages = "limits store queue engine prefill decode gateway settle paused reader budget read"
    assert set(COLOURS) == set(stages.split())
