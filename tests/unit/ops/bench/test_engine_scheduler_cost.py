"""Steady states of the scheduler benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduling.policy import UnknownPolicy
from ops.bench.engine.scheduler_cost import SchedulerCase, SteadyState, growth, measure_case, run


def test_the_state_stays_what_it_is() -> None:
    case = SchedulerCase("vtc", running=16, waiting=40, tenants=5)
    state = SteadyState(case)
    state.settle()
    admitted = 0
    for _ in range(100):
        admitted += state.step().admitted
        table = state.table
        assert case.running - 4 <= len(table.running) <= case.running
        assert len(table.running) + len(table.waiting) == case.running + case.waiting
    assert admitted > 5, "sequences end and others begin"
    assert state.table.preemptions == 0
    assert len({entry.tenant_id for entry in state.table.waiting.entries()}) == case.tenants
    state.table.check()


def test_a_case_is_measured_as_often_as_asked() -> None:
    found = measure_case(SchedulerCase("fcfs", running=8, waiting=10, tenants=1), steps=150)
    assert found["steps"] == 150
    assert found["admissions"] > 0
    for part in ("schedule_us", "books_us", "step_us", "cpu_us"):
        assert 0 < found[part]["p50"] <= found[part]["p99"] <= found[part]["most"]


def test_all_combinations_are_measured() -> None:
    report = run(running=[4], waiting=[8, 2], tenants=[1, 2], policies=["fcfs"], steps=100)
    cases = [(case["tenants"], case["waiting"]) for case in report["cases"]]
    assert cases == [(1, 2), (1, 8), (2, 2), (2, 8)]
    assert [(each["tenants"], each["waiting"]) for each in report["growth"]] == [(1, [2, 8]), (2, [2, 8])]


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    with pytest.raises(UnknownPolicy, match="nonsense"):
        run(running=[4], waiting=[2], tenants=[1], policies=["fcfs", "nonsense"], steps=100)


def _case(policy: str, waiting: int, p50: float) -> dict[str, Any]:
    return {"policy": policy, "running": 8, "tenants": 1, "waiting": waiting, "step_us": {"p50": p50}}


def test_growth_is_that_from_the_least_to_the_most_waiting() -> None:
    cases = [_case("a", 100, 3.0), _case("a", 10, 2.0), _case("a", 50, 9.0), _case("b", 10, 1.0)]
    found = growth(cases)
    assert [(each["policy"], each["waiting"], each["ratio"]) for each in found] == [("a", [10, 100], 1.5)]
