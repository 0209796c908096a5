"""Second layer of the length forecast: learns from the request, and is used where better."""

from __future__ import annotations

import json
import random

import pytest

from engine.forecast.length.features import (
    HEAD_CHARACTERS,
    PLACES,
    TAIL_CHARACTERS,
    Features,
    features_of,
    place_of,
)
from engine.forecast.length.length import LengthForecast
from engine.forecast.length.regression import LengthRegression
from engine.forecast.length.residuals import CELLS, Residuals
from engine.forecast.length.scores import QUANTILES, LayerScore, concordance, pinball_tokens


def asked(text: str, prompt_tokens: int = 30) -> Features:
    return features_of(text, prompt_tokens=prompt_tokens)


def task(rng: random.Random) -> tuple[Features, int]:
    """Two kinds of tasks whose lengths follow from what is asked, with some noise."""
    if rng.random() < 0.5:
        number = rng.randint(5, 200)
        return asked(f"List {number} names of rivers."), max(
            1, round(4 * number * rng.lognormvariate(0, 0.1))
        )
    return asked(f"Is {rng.randint(5, 200)} even?"), 2


def learned(answers: int, seed: int = 1, tenant: str = "t") -> LengthForecast:
    forecast = LengthForecast()
    rng = random.Random(seed)
    for _ in range(answers):
        features, length = task(rng)
        forecast.observe(tenant, "m", length, features)
    return forecast


@pytest.mark.parametrize("text", ["³¹cö", "① of ²", "٣٤ أسماء", "x" * 300 + "²", "7²", "\u0bf0"])
def test_a_digit_that_is_no_number_is_a_word(text: str) -> None:
    assert asked(text).places


def test_what_is_asked_makes_the_forecast() -> None:
    forecast = learned(1000)
    assert forecast.layer("t", "m") == "features"
    long = forecast.quantile("t", "m", 0.5, features=asked("List 100 names of rivers."))
    short = forecast.quantile("t", "m", 0.5, features=asked("List 10 names of rivers."))
    tiny = forecast.quantile("t", "m", 0.5, features=asked("Is 100 even?"))
    assert long == pytest.approx(400, rel=0.3)
    assert 20 < short < long / 3
    assert tiny <= 3
    # Without features, or for a model that it knows nothing of, the layer below answers.
    assert forecast.quantile("t", "m", 0.5) == forecast.sketches.quantile("t", "m", 0.5)
    unknown = forecast.quantile("t", "other", 0.5, features=asked("Is 100 even?"))
    assert unknown == forecast.sketches.quantile("t", "other", 0.5)


def test_its_loss_is_less_than_that_of_the_layer_below_and_its_quantiles_cover() -> None:
    forecast = learned(800)
    rng = random.Random(99)
    lower, upper = LayerScore(), LayerScore()
    for _ in range(400):
        features, length = task(rng)
        lower.observe(forecast.sketches.quantiles("t", "m", QUANTILES), length)
        upper.observe(forecast.by_features("t", "m", QUANTILES, features), length)
    below, above = lower.report(), upper.report()
    assert above["pinball_tokens"] < 0.3 * below["pinball_tokens"]
    assert above["p90_coverage"] >= 0.86
    assert above["rank_accuracy"] > 0.95 > below["rank_accuracy"]


def test_where_the_request_says_nothing_the_gate_stays_below() -> None:
    forecast = LengthForecast()
    rng = random.Random(3)
    for number in range(600):
        # Words that never come again: all the second layer could learn is noise.
        features = asked(f"{number:x} {rng.getrandbits(40):x}", prompt_tokens=rng.randint(1, 5000))
        forecast.observe("t", "m", 40 if rng.random() < 0.5 else 41, features)

    report = forecast.report()["m"]
    chosen = report["layers"][forecast.layer("t", "m")]["pinball_tokens"]
    assert chosen <= 1.02 * min(
        each["pinball_tokens"] for each in report["layers"].values() if each["samples"]
    )


def test_quantiles_rise_and_keep_to_what_is_out_and_to_the_maximum() -> None:
    forecast = learned(300)
    rng = random.Random(7)
    for _ in range(100):
        features, _ = task(rng)
        for generated in (0, 1, 17, 500, 100_000):
            lengths = forecast.by_features("t", "m", [index / 20 for index in range(20)], features, generated)
            assert lengths == sorted(lengths)
            assert lengths[0] > generated
    assert forecast.quantiles("t", "m", (0.5, 0.9), max_tokens=7, features=asked("List 90 names.")) == [7, 7]
    with pytest.raises(ValueError, match="q must be between 0 and 1"):
        forecast.quantiles("t", "m", (0.5, 1.5))


def test_the_gate_has_the_last_word() -> None:
    forecast = learned(300)
    features = asked("List 100 names of rivers.")
    assert forecast.quantile("t", "m", 0.5, features=features) > 1.2 * forecast.quantile("t", "m", 0.5)
    for _ in range(100):
        forecast.gate.observe(("t", "m"), "m", [1.0, 10_000.0, None, None])
    assert forecast.layer("t", "m") == "sketches"
    assert forecast.quantile("t", "m", 0.5, features=features) == forecast.quantile("t", "m", 0.5)


def test_what_is_out_already_conditions_the_rest() -> None:
    forecast = learned(2000)
    features = asked("List 100 names of rivers.")
    [median] = forecast.by_features("t", "m", (0.5,), features)
    later = forecast.by_features("t", "m", (0.5, 0.9), features, generated=2 * median)
    assert later[0] > 2 * median + 5
    assert later[1] > later[0] + 5


def test_half_of_those_that_go_on_beyond_the_60th_percentile_end_by_the_80th() -> None:
    forecast = learned(2000)
    features = asked("List 100 names of rivers.")
    p60, p80 = forecast.by_features("t", "m", (0.6, 0.8), features)
    [half] = forecast.by_features("t", "m", (0.5,), features, generated=p60)
    assert p80 - p60 > 4
    assert half == pytest.approx(p80, abs=(p80 - p60) / 4)


def test_an_untrained_second_layer_says_what_the_layer_below_says() -> None:
    regression = LengthRegression()
    located = regression.locate(asked("anything"), 80)
    assert regression.quantiles(located, (0.5,)) == [pytest.approx(80, abs=2)]


def test_it_survives_a_restart_and_reads_the_older_form() -> None:
    forecast = learned(400)
    restored = LengthForecast.from_dict(json.loads(json.dumps(forecast.to_dict())))
    features = asked("List 100 names of rivers.")
    assert restored.by_features("t", "m", QUANTILES, features) == pytest.approx(
        forecast.by_features("t", "m", QUANTILES, features), rel=0.02
    )
    older = {key: value for key, value in forecast.to_dict().items() if key in ("models", "tenants")}
    assert LengthForecast.from_dict({"version": 1, **older}).samples("t", "m") == 400


@pytest.mark.parametrize(
    "damage",
    [
        {"weights": "?"},
        {"weights": "AAAA"},
        {"residuals": [1.0]},
        {"residuals": [float("nan")] * CELLS},
        {"samples": "many"},
    ],
    ids=str,
)
def test_damaged_weights_are_refused(damage: dict[str, object]) -> None:
    data = learned(20).to_dict()
    data["regressions"] = [["m", {**data["regressions"][0][1], **damage}]]
    with pytest.raises(ValueError, match=r"length forecast|bytes of weights|histogram|invalid literal"):
        LengthForecast.from_dict(data)


def test_an_answer_without_features_is_counted_and_not_judged() -> None:
    forecast = LengthForecast()
    forecast.observe("t", "m", 2, asked("Is 3 even?"))
    forecast.observe("t", "m", 2)
    assert forecast.report()["m"]["layers"]["features"]["samples"] == 1
    assert forecast.samples("t", "m") == 2


def test_features_see_the_ends_of_a_long_text_and_have_a_place_each() -> None:
    filler = "word " * 10_000
    plain, with_task = asked(filler), asked(filler + "\nList 12 rivers.")
    assert place_of("number rivers") in with_task.places
    assert place_of("lead after list") in with_task.places
    assert place_of("number rivers") not in plain.places
    assert len(with_task.places) == len(set(with_task.places)) == len(with_task.values) < 60
    assert all(0 <= place < PLACES for place in with_task.places)
    middle = "x " * HEAD_CHARACTERS + "list 99 rivers " + "y " * TAIL_CHARACTERS
    assert place_of("number rivers") not in asked(middle).places
    assert asked("").places
    assert asked("123").places
    assert asked("\ud800 9" + "9" * 400).places


def test_features_know_the_difference_that_numbers_and_settings_make() -> None:
    assert asked("count from 3 to 57").values != asked("count from 3 to 58").values
    limited = features_of("hi", prompt_tokens=5, max_tokens=16, temperature=0.0, has_stop=True)
    for name in ("limited", "limit", "stop", "greedy"):
        assert place_of(name) in limited.places
        assert place_of(name) not in asked("hi").places


def test_residuals_become_their_own_distribution() -> None:
    residuals = Residuals()
    rng = random.Random(4)
    for _ in range(4000):
        residuals.observe(rng.gauss(1.0, 0.5))
    assert residuals.at(0.5) == pytest.approx(1.0, abs=0.1)
    assert residuals.at(0.1) == pytest.approx(1.64, abs=0.15)
    assert residuals.survival(1.0) == pytest.approx(0.5, abs=0.08)
    assert (residuals.survival(-99), residuals.survival(99)) == (1.0, 0.0)
    before, copy = residuals.at(0.3), Residuals.of(residuals.filled())
    for _ in range(1500):
        residuals.observe(-2.0)
    assert residuals.at(0.5) == pytest.approx(-2.0, abs=0.1), "what is long ago counts little"
    assert copy.at(0.3) == pytest.approx(before, abs=0.02)


def test_scores_are_what_they_say() -> None:
    assert pinball_tokens([10, 10, 10, 10], 10) == 0
    assert pinball_tokens([10, 10, 10, 10], 14) == pytest.approx(4 * (0.5 + 0.7 + 0.9 + 0.95) / 4)
    assert pinball_tokens([10, 10, 10, 10], 6) == pytest.approx(4 * (0.5 + 0.3 + 0.1 + 0.05) / 4)
    assert concordance([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert concordance([(3, 10), (2, 20), (1, 30)]) == 0.0
    assert concordance([(5, 10), (5, 20)]) == 0.5
    assert concordance([(5, 10), (6, 10)]) is None
