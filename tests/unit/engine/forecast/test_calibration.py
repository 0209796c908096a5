"""Corrected forecasts hold as often as they say, however wrong the raw ones are."""

from __future__ import annotations

import json
import random
from math import exp

import pytest
from msgspec.structs import replace

from engine.forecast.calibration import (
    BURST_S,
    FLOOR_S,
    NARROWING,
    NUM_LOADS,
    SHRINKAGE,
    WARM_UP,
    Bucket,
    Calibration,
    Miss,
    bucket_of,
    load_of,
    longest_wait_s,
)
from engine.forecast.wait.forecast import Figures, Forecast

RAW = Forecast(
    wait_s=(1.0, 2.0),
    ttft_s=(1.2, 2.4),
    tpot_s=(0.02, 0.03),
    e2e_s=(3.0, 6.0),
    output_tokens=(50, 90),
    tokens_ahead={"own": 1, "others": 2, "higher_tier": 3},
    basis="replay",
    samples=9,
    saturated=False,
)
AS_IT_CAME = Figures(RAW.wait_s, RAW.ttft_s, RAW.tpot_s, RAW.e2e_s)
HERE = Bucket("plain", False, 1, 4)
MISSES: tuple[Miss, Miss] = (("wait", 0), ("wait", 1))


def told_share(
    calibration: Calibration, bucket: Bucket, factor: float, spread: float, count: int, seed: int = 1
) -> tuple[float, float]:
    """Shares under p50 and p90 of E2E where the truth is `factor` times the forecast, lognormal."""
    rng = random.Random(seed)
    under = [0, 0]
    for _ in range(count):
        scale = rng.uniform(0.5, 2.0)
        raw = replace(RAW, wait_s=(0.0, 0.0), ttft_s=(0.01, 0.02), e2e_s=(3.0 * scale, 6.0 * scale))
        told = calibration.correct(raw, bucket)
        actual = raw.e2e_s[0] * factor * exp(rng.gauss(0, spread))
        under[0] += actual <= told.e2e_s[0]
        under[1] += actual <= told.e2e_s[1]
        calibration.observe(bucket, raw, told, {"e2e": actual})
    return under[0] / count, under[1] / count


@pytest.mark.parametrize(("factor", "spread"), [(0.2, 0.4), (1.0, 0.7), (6.0, 0.4)])
def test_the_quantiles_are_met_whatever_the_forecast_s_error(factor: float, spread: float) -> None:
    calibration = Calibration()
    told_share(calibration, HERE, factor, spread, 4_000)
    p50, p90 = told_share(calibration, HERE, factor, spread, 4_000, seed=2)
    assert 0.48 <= p50 <= 0.52
    assert p90 >= 0.885
    assert p90 <= 0.915 or factor < 1


def test_the_fewer_answers_the_less_is_changed_but_a_p90_is_raised_at_once() -> None:
    higher, lower = Calibration(), Calibration()
    for count in range(1, 201):
        higher.observe(HERE, RAW, RAW, {"e2e": 24.0})
        lower.observe(HERE, RAW, RAW, {"e2e": 1.5})
        if count in (WARM_UP, SHRINKAGE, 200):
            trust = count / (count + SHRINKAGE)
            told = (3.0 * 8**trust, 24.0)
            assert higher.correct(RAW, HERE).e2e_s == pytest.approx(told, rel=0.05)
            told = (3.0 * 0.5**trust, 6.0 * 0.25 ** (count / (count + NARROWING)))
            assert lower.correct(RAW, HERE).e2e_s == pytest.approx(told, rel=0.05)


def test_it_follows_a_change_of_the_load() -> None:
    calibration = Calibration()
    told_share(calibration, HERE, 1.0, 0.3, 1_000)
    told_share(calibration, HERE, 4.0, 0.3, 400)
    _, p90 = told_share(calibration, HERE, 4.0, 0.3, 2_000)
    assert 0.88 <= p90 <= 0.92


def test_loads_kinds_and_tiers_are_corrected_apart_and_a_new_load_goes_on_from_its_tier() -> None:
    calibration = Calibration()
    idle, busy = replace(HERE, load=0), replace(HERE, load=6)
    told_share(calibration, idle, 0.5, 0.1, 500)
    told_share(calibration, busy, 5.0, 0.1, 500)
    assert calibration.correct(RAW, idle).e2e_s[0] < 2.0
    assert calibration.correct(RAW, busy).e2e_s[0] > 12.0
    assert calibration.correct(RAW, replace(busy, load=5)).e2e_s[0] > 8.0, "another load of its tier"
    assert calibration.correct(RAW, replace(busy, tier=0)) == AS_IT_CAME, "its own tier's or none"
    binding = busy.of_kind("binding")
    before = calibration.correct(RAW, binding)
    assert before.e2e_s[0] > 12.0, "without binding ones of its own it is corrected like a plain one"
    told_share(calibration, binding, 1.0, 0.1, 500)
    assert calibration.correct(RAW, binding).e2e_s[0] < 4.0
    assert calibration.correct(RAW, busy).e2e_s[0] > 12.0, "binding requests say nothing of plain ones"
    shares = {kind: calibration.coverage[kind, "e2e", 0.9].judged for kind in ("plain", "binding")}
    assert shares == {"plain": 1000, "binding": 500}


def test_before_there_are_enough_answers_nothing_is_changed() -> None:
    calibration = Calibration()
    told_share(calibration, HERE, 3.0, 0.1, WARM_UP - 1)
    assert calibration.correct(RAW, HERE) == AS_IT_CAME
    told_share(calibration, HERE, 3.0, 0.1, 2)
    assert calibration.correct(RAW, HERE) != AS_IT_CAME


def test_what_is_told_makes_sense_in_itself() -> None:
    calibration = Calibration()
    rng = random.Random(5)
    for _ in range(500):
        actual = {"wait": rng.uniform(0, 20), "ttft": rng.uniform(0, 2), "e2e": rng.uniform(0, 2)}
        calibration.observe(HERE, RAW, RAW, actual)  # type: ignore[arg-type]
        told = calibration.correct(RAW, HERE)
        assert 0 <= told.wait_s[0] <= told.wait_s[1]
        assert told.wait_s[0] <= told.ttft_s[0] <= told.e2e_s[0]
        assert told.wait_s[1] <= told.ttft_s[1] <= told.e2e_s[1]


def test_who_was_refused_is_a_miss_only_where_that_is_certain() -> None:
    calibration = Calibration()
    told = calibration.correct(RAW, HERE)
    for _ in range(200):
        calibration.observe(HERE, RAW, told, {"wait": 0.5}, never=["wait"])
    assert calibration.correct(RAW, HERE) == AS_IT_CAME, "of a wait that was cut short nothing is known"
    for _ in range(200):
        calibration.observe(HERE, RAW, told, {"wait": 30.0}, never=["wait"])
    assert calibration.correct(RAW, HERE).wait_s[1] > 2.5
    counted = {key: (coverage.judged, coverage.within) for key, coverage in calibration.coverage.items()}
    assert counted == {("plain", "wait", 0.5): (200, 0), ("plain", "wait", 0.9): (200, 0)}


def test_who_waits_longer_than_told_teaches_then_and_the_quantiles_are_met_all_the_same() -> None:
    calibration, rng = Calibration(), random.Random(3)
    under = [0, 0]
    for number in range(4_400):
        actual_s = 1.5 * exp(rng.gauss(0, 0.5))
        told = calibration.correct(RAW, HERE)
        under = [each + (number >= 400 and actual_s <= told.wait_s[q]) for q, each in enumerate(under)]
        taught: set[Miss] = set()
        for miss in MISSES:
            if actual_s > told.wait_s[miss[1]] and calibration.overdue(
                HERE, RAW, miss, told.wait_s[miss[1]] + 1e-6
            ):
                taught.add(miss)
        calibration.observe(HERE, RAW, told, {"wait": actual_s}, taught=taught)
    assert under[0] / 4_000 == pytest.approx(0.5, abs=0.02)
    assert under[1] / 4_000 == pytest.approx(0.9, abs=0.015)


def shifts_of_the_wait(calibration: Calibration) -> list[float]:
    [shifts] = [each[5] for each in calibration.to_dict()["shifts"] if each[3:5] == [HERE.load, "wait"]]
    return list(shifts)


def test_what_was_taught_while_it_waited_is_not_taught_again_at_its_end() -> None:
    calibration = Calibration()
    for _ in range(WARM_UP):
        calibration.observe(HERE, RAW, RAW, {"wait": 1.0})
    before = shifts_of_the_wait(calibration)
    assert not calibration.overdue(HERE, RAW, ("wait", 0), 0.9), "that is none of its misses"
    assert calibration.overdue(HERE, RAW, ("wait", 0), 1.2)
    then = shifts_of_the_wait(calibration)
    assert (then[0] > before[0], then[1]) == (True, before[1])
    calibration.observe(HERE, RAW, RAW, {"wait": 9.0}, taught={("wait", 0)})
    after = shifts_of_the_wait(calibration)
    assert (after[0], after[1] > then[1]) == (then[0], True)


def test_a_crowd_that_waits_together_moves_a_quantile_no_further_than_it_has_waited() -> None:
    calibration = Calibration()
    for _ in range(WARM_UP):
        calibration.observe(HERE, RAW, RAW, {"wait": 1.0})
    taught = [calibration.overdue(HERE, RAW, ("wait", 0), 1.2) for _ in range(2_000)]
    assert 0 < sum(taught) < 2_000
    moved_to_s = (RAW.wait_s[0] + FLOOR_S["wait"]) * exp(shifts_of_the_wait(calibration)[0])
    assert 1.2 <= moved_to_s - FLOOR_S["wait"] < 1.3


def test_what_was_cut_after_its_turn_is_a_miss_where_it_had_taken_longer() -> None:
    calibration = Calibration()
    calibration.observe(HERE, RAW, RAW, {"ttft": 4.0, "e2e": 4.0}, never=["ttft", "e2e"])
    judged = {key[1:]: (each.judged, each.within) for key, each in calibration.coverage.items()}
    assert judged == {("ttft", 0.5): (1, 0), ("ttft", 0.9): (1, 0), ("e2e", 0.5): (1, 0)}


def test_quotes_of_a_tier_bind_after_some_dozen_answers_whatever_those_waited() -> None:
    calibration = Calibration()
    idle, busy = (replace(HERE, kind="binding", load=load) for load in (0, 6))
    for number in range(WARM_UP):
        assert not calibration.has_learned(idle)
        answered = replace(HERE, load=1 + number % 5)
        calibration.observe(answered, RAW, RAW, {"ttft": 1.0, "e2e": 4.0})
    assert calibration.has_learned(busy)
    assert calibration.has_learned(idle)
    assert not calibration.has_learned(replace(busy, tier=2)), "another tier's say nothing"
    at_once = Calibration()
    for _ in range(WARM_UP):
        at_once.observe(replace(HERE, load=0), RAW, RAW, {"ttft": 1.0, "e2e": 4.0})
    assert at_once.has_learned(idle)
    assert not at_once.has_learned(busy), "they did not wait"


def test_what_was_learned_survives_a_restart() -> None:
    calibration = Calibration()
    told_share(calibration, HERE, 3.0, 0.3, 300)
    again = Calibration.from_dict(json.loads(json.dumps(calibration.to_dict())))
    assert again.correct(RAW, HERE) == calibration.correct(RAW, HERE)
    for damage in ({}, {"version": 2, "shifts": []}, {"version": 1, "shifts": [["plain"]]}):
        with pytest.raises(ValueError):  # noqa: PT011
            Calibration.from_dict(damage)


def test_a_load_is_told_by_the_wait() -> None:
    loads = [
        bucket_of(replace(RAW, wait_s=(wait_s, wait_s)), 1, is_exact=False).load
        for wait_s in (0.0, 0.01, 0.05, 0.1, 1.0, 10.0, 100.0, 1_000.0, 1e6)
    ]
    assert loads == sorted(loads)
    assert loads[:2] == [0, 0]
    assert loads[-1] == NUM_LOADS - 1
    assert len(set(loads[1:-1])) == len(loads) - 2, "each of ten times the wait before is another"


def test_of_a_burst_few_are_learned_from_and_later_ones_are_told_as_before() -> None:
    calibration = Calibration()
    told_share(calibration, HERE, 1.0, 0.2, 400)
    before = calibration.correct(RAW, HERE)
    learned = 0
    for _ in range(200):
        is_tracked = calibration.is_tracked(HERE, 100.0)
        learned += is_tracked
        actual = {"wait": 400.0, "e2e": 400.0}
        calibration.observe(HERE, RAW, before, actual, is_tracked=is_tracked)  # type: ignore[arg-type]
    after = calibration.correct(RAW, HERE)
    assert learned == 8, "the 1st, 2nd, 4th and so on to the 128th"
    assert after.e2e_s[0] < 1.5 * before.e2e_s[0], "an error of a factor of a hundred, in one burst"
    told_share(calibration, HERE, 1.0, 0.2, 20)
    assert 0.5 <= calibration.correct(RAW, HERE).e2e_s[0] / before.e2e_s[0] <= 2.0
    assert calibration.coverage["plain", "wait", 0.9].judged == 200, "all of them are counted"


def test_bursts_are_told_apart_by_time_and_by_bucket() -> None:
    calibration = Calibration()
    other = replace(HERE, load=2)
    assert [calibration.is_tracked(HERE, 0.01 * number) for number in range(5)] == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert calibration.is_tracked(other, 0.05)
    assert calibration.is_tracked(HERE, 0.0 + BURST_S)


def test_what_was_told_to_go_at_once_says_nothing_of_longer_waits() -> None:
    """An unforeseen burst: told nothing, waited 6 s. Longer waits were once told fifty times as long."""
    calibration = Calibration()
    idle = replace(HERE, load=0)
    none = replace(RAW, wait_s=(0.0, 0.0))
    for _ in range(100):
        calibration.observe(idle, none, none, {"wait": 6.0})
    assert calibration.correct(RAW, replace(HERE, load=5)).wait_s == RAW.wait_s
    assert calibration.correct(none, replace(idle, tier=2)).wait_s == (0.0, 0.0), "nor of another tier"


def test_waits_are_covered_by_tier_and_by_the_wait_that_was_told() -> None:
    calibration = Calibration()
    short, long = (replace(RAW, wait_s=wait_s) for wait_s in ((0.01, 0.02), (2.0, 4.0)))
    for tier, told, waited_s in ((0, short, 0.005), (0, long, 5.0), (1, long, 3.0)):
        calibration.observe(replace(HERE, tier=tier), told, told, {"wait": waited_s})
    found = {key: coverage.within for key, coverage in calibration.wait_coverage.items()}
    load = load_of(2.0)
    assert found == {
        ("plain", 0, 0, 0.5): 1, ("plain", 0, 0, 0.9): 1, ("plain", 0, load, 0.5): 0,
        ("plain", 0, load, 0.9): 0, ("plain", 1, load, 0.5): 0, ("plain", 1, load, 0.9): 1,
    }  # fmt: skip
    assert longest_wait_s(load - 1) < 2.0 <= longest_wait_s(load)


def test_what_became_of_single_requests_teaches_nothing_of_many_together() -> None:
    calibration = Calibration()
    together, binding = HERE.of_kind("together"), HERE.of_kind("binding")
    actual = {"ttft": 1.0, "e2e": 4.0}
    for _ in range(WARM_UP - 1):
        calibration.observe(HERE, RAW, RAW, actual)  # type: ignore[arg-type]
        assert not calibration.has_learned(binding)
    calibration.observe(HERE, RAW, RAW, {"ttft": 1.0})
    assert not calibration.has_learned(binding), "nothing of whole answers"
    calibration.observe(HERE, RAW, RAW, {"e2e": 4.0})
    assert calibration.has_learned(binding)
    assert not calibration.has_learned(together)
    for _ in range(WARM_UP):
        calibration.observe(together, RAW, RAW, actual)  # type: ignore[arg-type]
    assert calibration.has_learned(together)
    assert not calibration.has_learned(replace(together, load=0)), "nor of an idle engine"
