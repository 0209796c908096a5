"""Guarantees of the queue in front of real engine cores, on virtual time.

The scenarios of `fairgate bench fairness --virtual`, and what a jump does to an engine full of batch.
"""

from __future__ import annotations

import random

import pytest

from ops.bench.fairness import virtual as fairness_virtual
from ops.reporting import jain_index
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.predictions import Exact
from ops.simulate.traffic.requests import SimulatedRequest

pytestmark = pytest.mark.long

INTERACTIVE, STANDARD, BATCH = 0, 1, 2


def test_a_flood_hardly_touches_who_stays_below_its_share() -> None:
    report = fairness_virtual.flood(quiet_requests=700)
    assert report["rows"]["flood"]["requests"] == 630
    flood = report["rows"]["flood"]
    assert flood["refused_of_other"] > 5_000, "no flood"
    assert flood["places_given_up"] > 50, "no place was owed"
    assert flood["most_of_one_request"] <= 3
    assert report["ratios"]["equal half"] <= 1.2
    assert report["ratios"]["fair share"] <= 1.2
    assert report["ok"]


def test_without_fairness_a_flood_drowns_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness_virtual, "POLICY", "fcfs")
    report = fairness_virtual.flood(quiet_requests=200)
    assert min(report["ratios"].values()) > 5
    assert not report["ok"]


def test_nor_does_it_where_an_engine_has_few_places() -> None:
    """With each moment without a request counted as idleness it was 1.6 to 2 times."""
    report = fairness_virtual.few_places(quiet_requests=700)
    assert report["rows"]["flood"]["requests"] == 630
    assert report["rows"]["flood"]["refused_of_other"] > 1_000, "no flood"
    assert report["ratio"] <= 1.2
    assert report["ok"]


@pytest.mark.parametrize("scenario", ["weights", "tiers", "reservations"])
def test_the_scenario_keeps_its_limits(scenario: str) -> None:
    report = fairness_virtual.SCENARIOS[scenario](1)
    assert report["ok"], report


def test_jain_index_is_one_for_all_alike_and_one_nth_for_one_who_has_all() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) is None


def full_of_batch(watch: PoolObserver | None = None) -> SimulatedPool:
    """An engine all of whose places decode batch streams, and more of them wait."""
    pool = fairness_virtual.fair_pool("vtc", fairness_virtual.MACHINE, Exact(), watch=watch)
    requests = [SimulatedRequest(0.0, "night", 40, 150 + number, tier=BATCH) for number in range(60)]
    pool.run(requests, until_s=1.0)
    assert pool.flow.num_in_flight == pool.machine.max_sequences + 2
    return pool


def test_an_interactive_request_starts_within_two_steps_of_an_engine_full_of_batch() -> None:
    observer = PoolObserver()
    pool = full_of_batch(observer)
    engine = pool.members[0].engine
    preemptions = engine.core.table.preemptions
    at_s = pool.now_s + 1e-6
    records, day = pool.records, len(pool.records)
    steps: list[int] = []

    def watch(pool: SimulatedPool) -> None:
        if len(records) > day and records.first_s[day] < 0:
            steps.append(engine.core.snapshot("").step)

    observer.on_event = watch
    pool.run([SimulatedRequest(at_s, "day", 40, 20, tier=INTERACTIVE)], until_s=at_s + 60.0)
    # The step under way when it came, and the one that computes its prompt.
    assert len(set(steps)) <= 2
    assert 0 < records.ttft_s(day) < 0.1
    assert records.displaced_tokens[day] > 0
    assert engine.core.table.preemptions == preemptions, "paused, and no block freed"
    assert all(last_s > 0 for last_s in records.last_s), "the displaced ones went on"


def test_a_jump_changes_nobodys_service() -> None:
    """The displaced streams have the same tokens and the same charge as without the jump."""
    costs: dict[bool, dict[str, int]] = {}
    for jumps in (True, False):
        pool = full_of_batch()
        rng = random.Random(3)
        requests = [
            SimulatedRequest(1.5 + rng.random() * 3, "day", 40, 20, tier=INTERACTIVE)
            for _ in range(40 if jumps else 0)
        ]
        pool.run(sorted(requests, key=lambda each: each.arrival_s))
        costs[jumps] = {flow.tenant_id: flow.service_cost for flow in pool.flow.tenants()}
        assert sum(tokens > 0 for tokens in pool.records.displaced_tokens) == len(requests)
    assert costs[True]["night"] == costs[False]["night"] == sum(40 + 2 * (150 + n) for n in range(60))
    assert costs[True]["day"] == 40 * (40 + 2 * 20)
