"""The length forecast learns, conditions on generated tokens, borrows, and stays bounded."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from engine.forecast.length.length import LONGEST, PRIOR, TOPS, LengthForecast


def learned(lengths: list[int], tenant: str = "t", model: str = "m") -> LengthForecast:
    forecast = LengthForecast()
    for length in lengths:
        forecast.observe(tenant, model, length)
    return forecast


def lognormal(seed: int, count: int, median: float = 60.0) -> list[int]:
    rng = random.Random(seed)
    return [max(1, round(median * rng.lognormvariate(0, 0.6))) for _ in range(count)]


def test_buckets_are_exact_for_short_answers_and_narrow_for_long_ones() -> None:
    assert TOPS[:16] == list(range(1, 17))
    assert TOPS[-1] >= LONGEST
    assert all(above <= below * 1.1 + 1 for below, above in itertools.pairwise(TOPS))
    assert sum(PRIOR) == pytest.approx(1.0)


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_quantiles_cover_what_they_say(q: float) -> None:
    forecast = learned(lognormal(1, 2000))
    fresh = lognormal(2, 2000)
    quantile = forecast.quantile("t", "m", q)
    covered = sum(length <= quantile for length in fresh) / len(fresh)
    assert covered == pytest.approx(q, abs=0.06)


@pytest.mark.parametrize("generated", [20, 60, 150])
def test_what_is_out_already_conditions_the_rest(generated: int) -> None:
    forecast = learned(lognormal(1, 3000))
    longer = [length for length in lognormal(2, 20_000) if length > generated]
    quantile = forecast.quantile("t", "m", 0.5, generated)
    assert quantile > generated
    assert sum(length <= quantile for length in longer) / len(longer) == pytest.approx(0.5, abs=0.12)


def test_a_length_beyond_all_that_was_seen_still_ends() -> None:
    forecast = learned([10] * 500)
    assert 401 <= forecast.quantile("t", "m", 0.5, generated=400) < 4000
    assert forecast.quantile("t", "m", 0.9, generated=LONGEST * 2) == LONGEST * 2 + 1


def test_quantiles_rise_with_q_and_respect_max_tokens() -> None:
    forecast = learned(lognormal(3, 300))
    quantiles = [forecast.quantile("t", "m", q / 20) for q in range(21)]
    assert quantiles == sorted(quantiles)
    assert min(quantiles) >= 1
    assert forecast.quantile("t", "m", 0.9, max_tokens=30) == 30
    assert forecast.quantile("t", "m", 0.9, generated=30, max_tokens=30) == 30
    with pytest.raises(ValueError, match="q must be between 0 and 1"):
        forecast.quantile("t", "m", 1.5)


def test_the_mean_is_the_mean() -> None:
    lengths = lognormal(4, 3000)
    forecast = learned(lengths)
    assert forecast.expected("t", "m") == pytest.approx(sum(lengths) / len(lengths), rel=0.08)
    capped = [min(length, 50) for length in lengths]
    assert forecast.expected("t", "m", max_tokens=50) == pytest.approx(sum(capped) / len(capped), rel=0.06)
    rest = [length for length in lengths if length > 80]
    assert forecast.expected("t", "m", generated=80) == pytest.approx(sum(rest) / len(rest), rel=0.15)
    assert learned([1] * 400).expected("t", "m") == pytest.approx(1.0, abs=0.7)


def test_a_new_tenant_borrows_from_its_model_and_a_new_model_from_the_prior() -> None:
    forecast = learned([200] * 400, tenant="old")
    assert forecast.quantile("new", "m", 0.5) == pytest.approx(200, rel=0.15)
    assert forecast.samples("new", "m") == 0
    assert forecast.quantile("new", "other model", 0.5) == pytest.approx(64, rel=0.25)


def test_a_tenants_own_answers_soon_outweigh_the_models() -> None:
    forecast = learned([200] * 400, tenant="old")
    for _ in range(20):
        forecast.observe("new", "m", 5)
    assert forecast.quantile("new", "m", 0.5) == 5
    assert forecast.quantile("old", "m", 0.5) == pytest.approx(200, rel=0.1)
    assert forecast.samples("new", "m") == 20


def test_it_follows_a_change() -> None:
    forecast = learned([300] * 2000 + [20] * 600)
    assert forecast.quantile("t", "m", 0.5) == pytest.approx(20, rel=0.1)


def test_an_answer_without_tokens_says_nothing() -> None:
    forecast = learned([0, -3])
    assert forecast.samples("t", "m") == 0


def test_it_survives_a_restart() -> None:
    forecast = learned(lognormal(5, 700))
    forecast.observe("u", "n", 7)
    restored = LengthForecast.from_dict(json.loads(json.dumps(forecast.to_dict())))
    for q in (0.1, 0.5, 0.9):
        assert restored.quantile("t", "m", q) == forecast.quantile("t", "m", q)
    assert restored.samples("t", "m") == 700
    for each in (forecast, restored):
        for _ in range(50):
            each.observe("t", "m", 9)
    assert restored.quantile("t", "m", 0.3) == forecast.quantile("t", "m", 0.3)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"version": 3, "models": [], "tenants": []},
        {"version": 1, "models": [["m"]], "tenants": []},
        {"version": 1, "models": [["m", {"samples": 1, "filled": [[9999, 1.0]]}]], "tenants": []},
        {"version": 1, "models": [["m", {"samples": 1, "filled": [[3, float("nan")]]}]], "tenants": []},
        {"version": 1, "models": None, "tenants": []},
    ],
)
def test_a_damaged_file_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"length forecast|not enough values"):
        LengthForecast.from_dict(data)


def test_long_use_neither_grows_nor_overflows() -> None:
    forecast = LengthForecast(max_sketches=5)
    for number in range(20_000):
        forecast.observe(f"t{number % 40}", "m", 1 + number % 50)
        if number % 50 == 0:
            forecast.quantile(f"t{number % 40}", "m", 0.5)
    kept = forecast.to_dict()["tenants"]
    assert [tenant for tenant, _, _ in kept] == ["t35", "t36", "t37", "t38", "t39"]
    assert 1 <= forecast.quantile("t39", "m", 0.5) <= 50
