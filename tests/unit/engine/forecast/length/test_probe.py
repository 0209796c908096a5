"""Third layer of the length forecast: combined with the prior, judged, and bounded."""

from __future__ import annotations

import math
import random

import pytest

from engine.forecast.length.probe import (
    RANGES,
    TOPS,
    length_quantile,
    prior_of,
    prior_quantiles,
    range_of,
    remaining_quantiles,
)
from engine.forecast.length.probe_gate import ProbeGate
from engine.forecast.length.samples import MAX_READINGS, LengthSamples

SILENT = [0.0] * RANGES


def sure_of(remaining: int, odds: float = 8.0) -> list[float]:
    return [odds if index == range_of(remaining) else 0.0 for index in range(RANGES)]


def test_ranges_are_exact_for_short_lengths_and_cover_all() -> None:
    assert [range_of(length) for length in range(1, 9)] == list(range(8))
    assert all(range_of(top) == index and range_of(top + 1) == index + 1 for index, top in enumerate(TOPS))
    assert range_of(10**9) == RANGES - 1


@pytest.mark.parametrize(("median", "high"), [(1, 2), (20, 60), (300, 310), (50, 0), (1, 1)])
@pytest.mark.parametrize("generated", [0, 1, 40, 5000])
def test_a_prior_is_a_distribution_with_the_forecasts_quantiles(
    median: int, high: int, generated: int
) -> None:
    prior = prior_of(median, high, generated)
    assert sum(prior) == pytest.approx(1.0, abs=1e-6)
    assert min(prior) > 0
    if generated == 0:
        found = prior_quantiles(prior, (0.5, 0.9))
        assert found[0] == pytest.approx(median, rel=0.25, abs=1)
        assert found[1] == pytest.approx(max(high or 2 * median, median), rel=0.35, abs=1)


def test_a_probe_that_knows_nothing_changes_nothing() -> None:
    prior = prior_of(40, 90, 0)
    assert remaining_quantiles(SILENT, prior, (0.5, 0.9)) == prior_quantiles(prior, (0.5, 0.9))


def test_a_sure_probe_overrules_an_unsure_forecast_and_hardly_a_sure_one() -> None:
    unsure, sure = prior_of(40, 400, 0), prior_of(40, 42, 0)
    assert remaining_quantiles(sure_of(200), unsure, (0.5,))[0] == pytest.approx(200, rel=0.25)
    assert remaining_quantiles(sure_of(200, odds=2.0), sure, (0.5,))[0] == pytest.approx(40, rel=0.25)


def test_what_is_out_conditions_the_prior() -> None:
    assert prior_quantiles(prior_of(40, 90, 30), (0.5,))[0] < 40
    # A forecast that has failed says nothing: the rest is as open as the probe leaves it.
    outlived = prior_of(10, 12, 4000)
    assert remaining_quantiles(sure_of(3), outlived, (0.5,)) == [3]


@pytest.mark.parametrize(("median", "high"), [(1, 2), (20, 60), (300, 310), (50, 0)])
@pytest.mark.parametrize("generated", [0, 1, 19, 40, 5000])
def test_a_drawn_length_is_of_the_prior_given_what_is_out(median: int, high: int, generated: int) -> None:
    qs = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
    lengths = [length_quantile(median, high, generated, q) for q in qs]
    assert lengths == sorted(lengths)
    assert lengths[0] >= generated + 1
    if generated < median:
        prior = prior_of(median, high, generated)
        for q, length in zip(qs[1:4], lengths[1:4], strict=True):
            (rest,) = prior_quantiles(prior, (q,))
            assert length == pytest.approx(generated + rest, rel=0.3, abs=2)
    elif generated > 2 * median:
        # It outlived its forecast by far: what is left grows with what is out.
        assert lengths[2] == pytest.approx(generated * 2 ** scale_of(median, high), rel=0.01, abs=1)


def scale_of(median: float, high: float) -> float:
    return max(0.03, math.log((high or 2 * median) / median) / math.log(5))


def test_quantiles_rise_and_extremes_are_survived() -> None:
    rng = random.Random(1)
    for _ in range(200):
        logits = [rng.uniform(-60, 60) for _ in range(RANGES)]
        prior = prior_of(rng.randint(1, 9999), rng.randint(0, 9999), rng.randint(0, 9999))
        lengths = remaining_quantiles(logits, prior, (0.05, 0.5, 0.7, 0.9, 0.95, 1.0))
        assert lengths == sorted(lengths)
        assert lengths[0] >= 1
    with pytest.raises(ValueError, match="ranges"):
        remaining_quantiles([0.0], [0.0], (0.5,))


def read(watch: ProbeGate, number: int, actual: int, logits: list[float], forecast: int = 50) -> bool:
    """One sequence from its first reading to its end; whether its forecast was replaced."""
    foreseen = watch.read(
        f"s{number}", "t", forecast=(forecast, 0), generated=0, max_tokens=1000, logits=logits
    )
    watch.ended(f"s{number}", "t", actual)
    return foreseen is not None


def test_the_probe_is_used_once_it_has_shown_to_be_better() -> None:
    watch = ProbeGate()
    watch.took_over(300)
    rng = random.Random(2)
    used = []
    for number in range(100):
        actual = rng.choice((5, 500))
        used.append(read(watch, number, actual, sure_of(actual)))
    assert not any(used[:12])
    assert all(used[20:])
    told = watch.describe()
    assert told.is_used
    assert told.answers == 100
    assert told.forecast is not None
    assert told.probe is not None
    assert told.probe.pinball_tokens < 0.3 * told.forecast.pinball_tokens
    assert told.probe.rank_accuracy == 1.0

    watch.took_over(400)
    assert not watch.describe().is_used, "another one starts unjudged"
    assert (watch.describe().answers, watch.describe().trained_on) == (0, 400)
    assert not read(watch, 1000, 5, sure_of(5))


def test_a_probe_that_misleads_is_dropped() -> None:
    watch = ProbeGate()
    for number in range(60):
        read(watch, number, 50, sure_of(50), forecast=400)
    assert read(watch, 1000, 50, sure_of(50))
    for number in range(60, 400):
        read(watch, number, 50, sure_of(800), forecast=50)
    assert not read(watch, 2000, 50, sure_of(800), forecast=50)


def test_who_was_cut_off_is_not_judged_and_nothing_stays_behind() -> None:
    watch = ProbeGate()
    for number in range(50):
        watch.read(f"s{number}", "t", forecast=(9, 0), generated=0, max_tokens=99, logits=SILENT)
        watch.ended(f"s{number}", "t", None)
        watch.ended(f"s{number}", "t", 5)
    assert watch.describe().answers == 0


def test_a_later_reading_says_the_whole_length_within_the_maximum() -> None:
    watch = ProbeGate()
    for number in range(30):
        read(watch, number, 500, sure_of(500))
    foreseen = watch.read("s", "t", forecast=(50, 0), generated=90, max_tokens=100, logits=sure_of(700))
    assert foreseen is not None
    assert foreseen.median_tokens == foreseen.high_tokens == 100
    foreseen = watch.read("s", "t", forecast=(50, 0), generated=90, max_tokens=400, logits=sure_of(3))
    assert foreseen is not None
    assert foreseen.median_tokens == 93
    assert math.isclose(foreseen.high_tokens, 93, abs_tol=40)


def test_samples_are_readings_of_whole_answers_and_bounded() -> None:
    samples = LengthSamples(max_samples=10)
    samples.note("cut off", 0, b"x")
    samples.ended("cut off", None)
    for generated in range(0, 400, 32):
        samples.note("long", generated, bytes([generated // 32]))
    samples.ended("long", 400)
    kept = samples.kept()
    assert len(kept) == MAX_READINGS
    assert (kept[0].generated, kept[0].remaining) == (0, 400)
    assert (kept[-1].generated, kept[-1].remaining, kept[-1].state) == (384, 16, bytes([12]))
    for number in range(30):
        samples.note(f"s{number}", 0, b"y")
        samples.ended(f"s{number}", 1)
    assert len(samples.kept()) == 10
    assert samples.total == MAX_READINGS + 30
