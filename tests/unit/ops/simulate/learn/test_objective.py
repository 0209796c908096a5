"""The sum that a table minimises, computed by hand."""

from __future__ import annotations

import math

import pytest

from ops.simulate.learn.objective import MOST_WAITS, LearningObjective, ServedSum, served_sum, wait_target_s
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import SimulatedRequest

SLO = SloLimits(ttft_s=2.0, tpot_s=0.1)


def records_of(*first_s: float | None) -> Records:
    """Requests that all came at once, with 11 tokens each, the last one a second after the first one."""
    records = Records()
    for at_s in first_s:
        row = records.arrive(SimulatedRequest(0.0, "one", 10, 11))
        if at_s is None:
            records.refused[row] = 1
        else:
            records.first_s[row], records.last_s[row] = at_s, at_s + 1.0
    return records


def test_waits_are_capped_and_a_refused_request_has_waited_longest_and_missed() -> None:
    served = served_sum(records_of(1.0, 2.0, 100.0, None), SLO, None)
    assert served.waits == pytest.approx((0.5 + 1.0 + MOST_WAITS + MOST_WAITS) / 4)
    assert served.missed == pytest.approx(0.5)
    assert served.refused == pytest.approx(0.25)
    assert LearningObjective(0.25, 1.0, 0.1).of(served, served) == pytest.approx(0.25 * 2.375 + 0.5)


def test_refusing_never_improves_the_sum_by_itself() -> None:
    late, refused = (served_sum(records_of(1.0, last), SLO, None) for last in (1000.0, None))
    objective = LearningObjective()
    assert objective.of(refused, late) == objective.of(late, late)


def test_energy_counts_against_hybrids_and_is_left_out_where_it_is_not_known() -> None:
    cheap, dear = (ServedSum(1, 0.0, 0.0, 0.0, joules) for joules in (1.0, 1.5))
    unknown = ServedSum(1, 0.0, 0.0, 0.0, 0.0)
    objective = LearningObjective(0.25, 1.0, 0.2)
    assert objective.of(dear, cheap) == pytest.approx(0.1)
    assert objective.of(cheap, cheap) == 0.0
    assert objective.of(unknown, unknown) == 0.0
    assert "energy of an output token" in objective.words(SLO, has_energy=True)
    assert "without energy" in objective.words(SLO, has_energy=False)


@pytest.mark.parametrize(
    ("slo", "target_s"),
    [
        (SLO, 2.0),
        (SloLimits(ttft_s=math.inf, tpot_s=math.inf, e2e_s=30.0), 30.0),
        (SloLimits(ttft_s=math.inf, tpot_s=0.1), 1.0),
    ],
)
def test_waits_are_measured_by_the_target_that_there_is(slo: SloLimits, target_s: float) -> None:
    assert wait_target_s(slo) == target_s


@pytest.mark.parametrize("weights", [(-1.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_weights_that_make_no_sum_are_refused(weights: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="weights of waits, misses and energy"):
        LearningObjective(*weights)
