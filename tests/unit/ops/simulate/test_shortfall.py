"""Shortfalls are measured request by request, and added without nonsense."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from ops.simulate.figures.shortfall import NEIGHBOURS, Residual, Shortfall
from ops.simulate.records import Records
from ops.simulate.run import Scenario, simulate
from tests.unit.ops.simulate.test_figures import Listed, machine, request

TIMES = [(1.0, 0.02, 0.10), (1.5, 0.03, 0.20), (2.0, 0.02, 0.15)]
"""Arrival, time to the first token, to the last."""


def records_of(times: list[tuple[float, float, float]]) -> Records:
    records = Records()
    for at_s, ttft_s, e2e_s in times:
        row = records.arrive(request(at_s))
        if e2e_s:
            records.first_s[row], records.last_s[row] = at_s + ttft_s, at_s + e2e_s
    return records


def test_it_is_what_real_requests_took_longer() -> None:
    real = [(at_s, ttft_s + 0.005, e2e_s + 0.05) for at_s, ttft_s, e2e_s in TIMES]
    shortfall = Shortfall.of(records_of(real), records_of(TIMES))
    expected = [(0.02, 0.08, 0.005, 0.045), (0.02, 0.13, 0.005, 0.045), (0.03, 0.17, 0.005, 0.045)]
    assert [tuple(each) for each in sorted(shortfall.residuals)] == [pytest.approx(each) for each in expected]
    again = records_of(TIMES)
    shortfall.add_to(again, "fcfs")
    assert [again.ttft_s(row) for row in range(3)] == pytest.approx([0.025, 0.035, 0.025])
    assert [again.e2e_s(row) for row in range(3)] == pytest.approx([0.15, 0.25, 0.20])


def test_what_never_ended_is_not_compared_and_gets_nothing() -> None:
    with_refused = [*TIMES, (3.0, 0.0, 0.0)]
    assert len(Shortfall.of(records_of(with_refused), records_of(with_refused)).residuals) == 3
    records = records_of(with_refused)
    Shortfall((Residual(0.02, 0.1, 1.0, 1.0),)).add_to(records, "fcfs")
    assert records.e2e_s(3) == float("inf")


def test_no_token_comes_before_its_request_or_out_of_order() -> None:
    records = records_of(TIMES)
    Shortfall((Residual(0.02, 0.1, -9.0, -9.0),)).add_to(records, "fcfs")
    for row in range(3):
        assert 0 == records.ttft_s(row) <= records.e2e_s(row)
    records = records_of(TIMES)
    Shortfall((Residual(0.02, 0.1, 0.5, -9.0),)).add_to(records, "fcfs")
    assert all(records.ttft_s(row) <= records.e2e_s(row) for row in range(3))


def test_it_is_drawn_among_those_that_waited_about_as_long_in_their_simulation() -> None:
    """A request without a wait never gets the shortfall of those behind a long queue, nor they too little."""
    prompt, late = [Residual(0.02, 0.1, 0.001, 0.0)] * NEIGHBOURS, [Residual(2.0, 0.1, 0.5, 0.0)] * NEIGHBOURS
    records = records_of([(1.0, 0.01, 0.1), (2.0, 0.02, 0.1), (3.0, 2.5, 3.5), (4.0, 9.0, 9.5)])
    Shortfall((*late, *prompt)).add_to(records, "fcfs")
    assert [records.ttft_s(row) for row in range(4)] == pytest.approx([0.011, 0.021, 3.0, 9.5])
    # Few are all of one kind.
    records = records_of([(1.0, 0.01, 0.1)] * 200)
    Shortfall((Residual(0.02, 0.1, 0.0, 0.0), Residual(2.0, 0.1, 1.0, 0.0))).add_to(records, "fcfs")
    assert {round(records.ttft_s(row), 6) for row in range(200)} == {0.01, 1.01}


def test_long_answers_fall_short_of_what_long_answers_did() -> None:
    brief, long = [Residual(0.02, 0.1, 0.0, 0.01)] * NEIGHBOURS, [Residual(0.02, 5.0, 0.0, 1.0)] * NEIGHBOURS
    records = records_of([(1.0, 0.02, 0.12), (2.0, 0.02, 5.02)])
    Shortfall((*long, *brief)).add_to(records, "fcfs")
    assert [records.e2e_s(row) for row in range(2)] == pytest.approx([0.13, 6.02])


def test_of_equal_ones_any_is_drawn() -> None:
    """Prompts and answers of one length are simulated alike: what they fell short of is told by nothing."""
    residuals = tuple(Residual(0.02, 0.1, number / 1000, 0.0) for number in range(1000))
    records = records_of([(1.0, 0.02, 0.12)] * 2000)
    Shortfall(residuals).add_to(records, "fcfs")
    drawn = [records.ttft_s(row) - 0.02 for row in range(2000)]
    assert statistics.fmean(drawn) == pytest.approx(0.5, abs=0.03)
    assert min(drawn) < 0.05
    assert max(drawn) > 0.95


@pytest.mark.parametrize(
    ("real", "simulated", "why"),
    [
        (TIMES[:2], TIMES, "2 requests were served and 3 simulated"),
        ([(1.0, 0.0, 0.0)], [(1.0, 0.0, 0.0)], "no request was both"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    real: list[tuple[float, float, float]], simulated: list[tuple[float, float, float]], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Shortfall.of(records_of(real), records_of(simulated))


def test_a_simulation_with_it_has_the_same_service_and_later_times_the_same_each_time() -> None:
    scenario = Scenario(Listed([request(0.1 * number) for number in range(200)]), machine())
    [plain] = simulate(scenario, ["fcfs"])["policies"]
    short = replace(
        scenario,
        shortfall=Shortfall(
            tuple(Residual(0.0, 0.0, 0.001 * number, 0.001 * number) for number in range(20))
        ),
    )
    report = simulate(short, ["fcfs"])
    assert report["compared_requests"] == 20
    [later] = report["policies"]
    assert later["busy_share"] == plain["busy_share"]
    mean_s = statistics.fmean(0.001 * number for number in range(20))
    assert later["ttft_s"]["mean"] - plain["ttft_s"]["mean"] == pytest.approx(mean_s, rel=0.15)
    assert later["ttft_s"]["p99"] > plain["ttft_s"]["p99"] + 0.01
    assert simulate(short, ["fcfs"]) == report
