"""Comparison of a simulation with a real run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.domain.server_description import RequestTerms
from ops.bench.estimates.fidelity import (
    PARTIES,
    FidelityOptions,
    Pair,
    ServedReplay,
    compared,
    drawn,
    judge,
    run,
)
from ops.simulate.machines.machines import profile_machine
from ops.simulate.recorded import Recorded, RecordedAnswer
from ops.simulate.run import run_policy
from tests.unit.engine.step_time.test_model import SLOW_CPU


def pair(
    p50_s: float = 0.1, p99_s: float = 1.0, *, simulated: float = 1.0, tail: float = 1.0, rate: float = 1.0
) -> Pair:
    """A real run, and a simulation that is slower by a factor."""
    real = {"requests": 10, "output_tokens_per_s": 100.0, "ttft_s": {"p50": p50_s, "p99": p99_s}}
    other = {
        "requests": 10,
        "output_tokens_per_s": 100.0 * rate,
        "ttft_s": {"p50": p50_s * simulated, "p99": p99_s * tail},
    }
    return Pair(real, other, 10)


def broken(**runs: list[Pair]) -> list[str]:
    report = judge(runs)
    failed = [check["what"] for check in report["checks"] if not check["ok"]]
    assert report["ok"] == (not failed)
    return failed


def test_what_is_near_enough_is_faithful() -> None:
    assert (
        broken(vtc=[pair(simulated=1.14, tail=1.24, rate=1.04)], fcfs=[pair(simulated=0.86, tail=0.76)]) == []
    )


def test_each_figure_has_its_limit() -> None:
    assert broken(vtc=[pair(rate=0.94)]) == ["vtc, output tokens/s"]
    assert broken(vtc=[pair(simulated=1.16)]) == ["vtc, TTFT p50"]
    assert broken(vtc=[pair(tail=0.74)]) == ["vtc, TTFT p99"]


def test_real_runs_that_differ_allow_as_much_to_the_simulation() -> None:
    runs = [pair(p99_s=p99_s, tail=1.4) for p99_s in (0.9, 1.0, 1.2)]
    assert broken(vtc=runs) == [], "0.3 of the median apart: 45 % are allowed"
    assert broken(vtc=[pair(p99_s=1.0, tail=1.4)] * 3) == ["vtc, TTFT p99"]


def test_the_median_of_the_repetitions_counts() -> None:
    assert broken(vtc=[pair(), pair(simulated=9.0), pair()]) == []


def test_policies_must_come_in_the_order_of_reality_where_reality_tells_them_apart() -> None:
    slow, fast = pair(p99_s=1.2, tail=0.8), pair(p99_s=1.0, tail=1.2)
    assert broken(fcfs=[slow], vtc=[fast]) == ["order of policies by TTFT p99"]
    uncertain = [pair(p99_s=0.9, tail=1.2), pair(p99_s=1.0, tail=1.2), pair(p99_s=1.2, tail=1.2)]
    assert broken(fcfs=[slow], vtc=uncertain) == [], "the runs of one are as far apart as the two"


def test_requests_that_the_record_lacks_are_noticed() -> None:
    one = pair()
    assert broken(vtc=[Pair(one.real, one.simulated, 11)]) == ["vtc, requests that the record has"]


def test_the_same_seed_draws_the_same_requests() -> None:
    asks = drawn(20.0, 30.0, "1 0")
    assert asks == drawn(20.0, 30.0, "1 0")
    assert asks != drawn(20.0, 30.0, "1 1")
    assert 500 <= len(asks) <= 700
    assert [each.at_s for each in asks] == sorted(each.at_s for each in asks)
    assert {each.party for each in asks} == {party.name for party in PARTIES}


def replay(late_s: float) -> ServedReplay:
    """Twenty requests, each token of which came so much later than simulated."""
    machine = profile_machine(
        "p", SLOW_CPU, kv_tokens=4096, context_tokens=512, max_sequences=4, max_batched_tokens=64
    )
    served = tuple(
        RecordedAnswer("a", RequestTerms(1.0), 0, 1, 30, 10, us, us, us, us, 0)
        for us in range(0, 20 * 50_000, 50_000)
    )
    one = ServedReplay(Recorded("vtc", served, 0), machine, 20)
    pool, _ = run_policy(one.scenario, "vtc")
    first_s, last_s = pool.records.first_s, pool.records.last_s
    real = tuple(
        replace(
            each, first_us=round((first_s[row] + late_s) * 1e6), last_us=round((last_s[row] + late_s) * 1e6)
        )
        for row, each in enumerate(served)
    )
    return ServedReplay(Recorded("vtc", real, 0), machine, 20)


def test_what_a_simulation_falls_short_of_is_taken_from_the_other_replays() -> None:
    on_time, late = compared("vtc", [replay(0.0), replay(1.0)])
    assert late.real["ttft_s"]["p50"] == pytest.approx(on_time.real["ttft_s"]["p50"] + 1.0, abs=1e-5)
    assert on_time.simulated["ttft_s"]["p50"] == pytest.approx(late.real["ttft_s"]["p50"], abs=1e-5)
    assert late.simulated["ttft_s"]["p50"] == pytest.approx(on_time.real["ttft_s"]["p50"], abs=1e-5)
    with pytest.raises(ValueError, match="at least 2 repetitions, not 1"):
        run(FidelityOptions(repetitions=1))
