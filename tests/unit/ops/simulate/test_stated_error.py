"""A baseline is off only where chance does not explain it, and no request has a part in its own."""

from __future__ import annotations

import math
import random

import pytest

from ops.simulate.figures.stated_error import LEAST_ERROR, LEAST_REQUESTS, Baseline
from ops.simulate.records import Records
from tests.unit.ops.simulate.test_shortfall import records_of


def served(number: int, *, seed: int = 1, drift: float = 0.0) -> tuple[Records, Records]:
    """Real and simulated: real ones are later by a drawn part, and `drift` more with every request."""
    rng = random.Random(seed)
    simulated = [(float(row), rng.uniform(0.1, 0.2), rng.uniform(1.0, 3.0)) for row in range(number)]
    real = []
    for row, (at_s, ttft_s, e2e_s) in enumerate(simulated):
        late_s, longer_s = rng.expovariate(20.0) + drift * row, rng.expovariate(5.0)
        real.append((at_s, ttft_s + late_s, e2e_s + late_s + longer_s))
    return records_of(real), records_of(simulated)


def test_what_falls_short_by_chance_alone_is_within_its_error() -> None:
    within = 0
    for seed in range(20):
        baseline = Baseline.of(*served(400, seed=seed))
        within += not baseline.off
        for each in baseline.figures:
            assert each.error is not None
            assert LEAST_ERROR <= each.error < 0.2, each
    assert within >= 17, "19 of 20 are expected"
    assert [each.name for each in baseline.figures] == ["ttft_p50", "ttft_p90", "e2e_p50", "e2e_p90"]


def test_what_was_served_and_is_refused_in_its_simulation_is_off() -> None:
    real, simulated = served(400)
    for row in range(0, 400, 5):
        simulated.first_s[row] = simulated.last_s[row] = -1.0
    off = {each.name: each.simulated_s for each in Baseline.of(real, simulated).off}
    assert off["ttft_p90"] == off["e2e_p90"] == math.inf


def test_no_request_has_a_part_in_its_own_simulated_times() -> None:
    real, simulated = served(400)
    # The second of twenty stretches: simulated like no other, and a thousand seconds late.
    second = range(20, 40)
    for row in second:
        simulated.last_s[row] += 100.0
        real.first_s[row] += 1_000.0
        real.last_s[row] += 1_100.0
    baseline = Baseline.of(real, simulated)
    assert max(baseline.records.ttft_s(row) for row in second) < 1_000.0
    assert sum(each.ttft_s > 999.0 for each in baseline.shortfall.residuals) == len(second)
    assert max(simulated.ttft_s(row) for row in second) < 1.0, "what was simulated stays as it is"


def test_the_same_recording_has_the_same_error_and_few_requests_have_none() -> None:
    assert Baseline.of(*served(60)).figures == Baseline.of(*served(60)).figures
    few = Baseline.of(*served(LEAST_REQUESTS - 1))
    assert [each.error for each in few.figures] == [None] * 4
    assert few.off == []
    assert Baseline.of(*served(1)).figures[0].off == pytest.approx(0.0)
