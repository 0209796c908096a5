"""The simulated gateway hears of service, and speaks of it, as one that serves does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.messages import StepTime
from engine.virtual.step_shapes import LinearTiming
from gateway.flow.window import WindowRule
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.predictions import PREDICTIONS
from ops.simulate.traffic.requests import SimulatedRequest

STEP_TIME = StepTime(5e-3, 50e-6, 30e-9, 100e-6, samples=1000, relative_error=0.0)
TENANTS = ("a", "b", "c")


def machine(places: int = 4) -> Machine:
    return Machine("small", LinearTiming(STEP_TIME), STEP_TIME, 800, 256, places, 24, block_tokens=4)


def requests(seed: int) -> list[SimulatedRequest]:
    rng = random.Random(seed)
    at_s = 0.0
    found = []
    for _ in range(60):
        at_s += rng.expovariate(30.0)
        tenant = rng.choice(TENANTS)
        weight = 1.0 + TENANTS.index(tenant)
        tokens = rng.choice([3, 30, 90])
        prompt = tuple(rng.randrange(1, 1000) for _ in range(tokens))
        found.append(
            SimulatedRequest(at_s, tenant, tokens, rng.choice([2, 40]), weight=weight, prompt=prompt)
        )
    return found


def what_was_heard(**asked: Any) -> tuple[list[Any], SimulatedPool]:
    """By decision: when it was taken, what each tenant had by then, and what it was charged ahead."""
    seen: list[Any] = []

    def look(pool: SimulatedPool) -> None:
        counters, ahead = pool.flow.counters, pool.flow.in_flight.ahead
        seen.append(
            (pool.now_s, [(counters.value(each) - ahead.of(each), ahead.of(each)) for each in TENANTS])
        )

    pool = SimulatedPool(
        "dlpm", machine(), replicas=2, predictions=PREDICTIONS["exact"](),
        watch=PoolObserver(on_decision=look), **asked,
    )  # fmt: skip
    pool.run(requests(3))
    return seen, pool


@pytest.mark.parametrize("ways", [{"runs": True}, {"runs": False}, {"stepwise": True}])
def test_the_gateway_knows_the_last_serial_of_each_engine(ways: dict[str, bool]) -> None:
    seen, pool = what_was_heard(**ways)
    for member in pool.members:
        standings = member.engine.table.standings
        for tenant in TENANTS:
            for tier in range(3):
                known = pool.flow.serials.of(member.replica_id, "", tenant, tier)
                assert known == standings.serial(tier, tenant) > 0
    between = [ahead for _, tenants in seen for had, ahead in tenants if had > 0 and ahead > 0]
    assert len(between) > 20, "what running requests had was known before their ends"


def test_steps_taken_in_runs_are_heard_of_at_the_same_instants() -> None:
    in_runs, pool = what_was_heard(runs=True)
    plain, _ = what_was_heard(runs=False)
    assert in_runs == plain
    assert sum(member.engine.work.steps_in_runs for member in pool.members) > 20


def test_a_step_under_way_is_not_heard_of() -> None:
    pool = SimulatedPool("vtc", machine(), predictions=PREDICTIONS["exact"](), runs=False)
    # 40 prompt tokens take two steps; the second request comes in the middle of the second one.
    pool.run([SimulatedRequest(0.0, "a", 40, 5), SimulatedRequest(0.008, "b", 1, 1)], until_s=0.009)
    assert pool.flow.serials.of("replica-0", "", "a", 1) == 24_000_000
    assert pool.members[0].engine.table.standings.service("a") == 42_000_000


def test_a_target_of_a_requests_slo_decides() -> None:
    late, soon = (
        SimulatedRequest(0.001, "a", 5, 5, e2e_target_s=9.0),
        SimulatedRequest(0.002, "b", 5, 5, e2e_target_s=1.0),
    )
    pool = SimulatedPool("edf", machine(places=1), flow={"window": WindowRule(0, 1.0)})
    pool.run([SimulatedRequest(0.0, "c", 5, 50), late, soon])
    assert pool.records.dispatched_s[2] < pool.records.dispatched_s[1]


@pytest.mark.parametrize(("reserved_tier", "is_first"), [(None, True), (2, True), (1, False)])
def test_a_reservation_for_a_tier_is_for_its_requests_alone(
    reserved_tier: int | None, is_first: bool
) -> None:
    batch = SimulatedRequest(
        0.002, "b", 5, 5, tier=2, reserved_cost_per_s=1000.0, reserved_tier=reserved_tier
    )
    pool = SimulatedPool("vtc", machine(places=1), flow={"window": WindowRule(0, 1.0)})
    pool.run([SimulatedRequest(0.0, "c", 5, 50), SimulatedRequest(0.001, "a", 5, 5), batch])
    assert (pool.records.dispatched_s[2] < pool.records.dispatched_s[1]) == is_first
