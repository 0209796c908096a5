"""Even sampling: all events of a slow stream, the wanted rate of a fast one. Shares that fade."""

from __future__ import annotations

import itertools

from gateway.statistics import EvenSample, FadingShare


def taken(sample: EvenSample, per_s: float, start_s: float, seconds: float) -> list[float]:
    times = (start_s + number / per_s for number in range(round(per_s * seconds)))
    return [now_s for now_s in times if sample.takes(now_s)]


def test_all_of_few() -> None:
    assert len(taken(EvenSample(50), 49, 100, 10)) == 490


def test_of_many_so_many_a_second_and_evenly() -> None:
    sample = EvenSample(50)
    first = len(taken(sample, 1_000, 100, 1))
    assert 50 < first < 400, "until it is known to be a rush"
    found = taken(sample, 1_000, 101, 20)
    assert abs(len(found) - 1_000) <= 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert 0.0185 < min(gaps) <= max(gaps) < 0.0215


def test_after_a_rush_all_are_taken_again_and_a_clock_that_steps_back_does_no_harm() -> None:
    sample = EvenSample(50)
    taken(sample, 1_000, 100, 5)
    taken(sample, 10, 105, 10)
    assert len(taken(sample, 10, 115, 10)) == 100
    assert [sample.takes(now_s) for now_s in (50.0, 50.1)] == [True, True]


def test_a_share_is_of_the_last_seconds_and_fades_where_nothing_comes() -> None:
    share = FadingShare(10.0)
    assert share.at(5.0) == 0.0
    for number in range(100):
        share.note(1.0, 100.0 + number / 10)
    assert share.at(110.0) > 0.97
    for number in range(200):
        share.note(0.0, 110.0 + number / 10)
    assert 0.08 < share.at(130.0) < 0.1, "two memories later"
    before = share.at(130.0)
    assert share.at(230.0) < before / 10
    assert share.at(120.0) == share.at(230.0), "a clock that steps back does no harm"
