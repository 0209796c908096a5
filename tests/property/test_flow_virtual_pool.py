"""Guarantees of the queue in front of real engine cores, on virtual time.

Floods, weights, tiers and reservations, and what a jump does to an engine full of batch.
"""

from __future__ import annotations

import math
import random

import pytest

from ops.reporting import jain_index
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.predictions import Exact
from ops.simulate.traffic.requests import SimulatedRequest
from tests.support import fair_queue

pytestmark = pytest.mark.long

INTERACTIVE, STANDARD, BATCH = 0, 1, 2


def test_a_flood_hardly_touches_who_stays_below_its_share() -> None:
    report = fair_queue.flood(quiet_requests=700)
    assert report["rows"]["flood"]["requests"] == 630
    flood = report["rows"]["flood"]
    assert flood["refused_of_other"] > 5_000, "no flood"
    assert flood["places_given_up"] > 50, "no place was owed"
    assert flood["most_of_one_request"] <= 3
    assert report["ratios"]["equal half"] <= 1.2
    assert report["ratios"]["fair share"] <= 1.2


def test_without_fairness_a_flood_drowns_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "POLICY", "fcfs")
    report = fair_queue.flood(quiet_requests=200)
    assert min(report["ratios"].values()) > 5


def test_nor_does_it_where_an_engine_has_few_places() -> None:
    """With each moment without a request counted as idleness it was 1.6 to 2 times."""
    report = fair_queue.few_places(quiet_requests=700)
    assert report["rows"]["flood"]["requests"] == 630
    assert report["rows"]["flood"]["refused_of_other"] > 1_000, "no flood"
    assert report["ratio"] <= 1.2


def test_two_that_always_wait_share_by_weight() -> None:
    """Weights of 1 and 3, both always waiting; the light one in ten times as many requests."""
    light, heavy = 1.0, 3.0
    gaps: list[float] = []

    def refill(pool: SimulatedPool) -> None:
        fair_queue.keep_waiting(pool, "light", 200, weight=light, seed=1)
        fair_queue.keep_waiting(pool, "heavy", 20, weight=heavy, seed=1)
        service = pool.service
        gaps.append(abs(service.get("light", 0) / light - service.get("heavy", 0) / heavy))

    pool = fair_queue.make_pool(refill)
    pool.run([fair_queue.request(0.0, "light", random.Random(1), weight=light)], until_s=240.0)
    ratio = pool.service["heavy"] / pool.service["light"]
    assert abs(ratio / (heavy / light) - 1) <= 0.01
    assert max(gaps) <= fair_queue.service_bound(min(light, heavy))


def test_interactive_requests_take_the_places_of_batch() -> None:
    """Interactive work that comes and goes over standard and batch that always wait."""
    per_s = fair_queue.capacity() / fair_queue.mean_cost(fair_queue.request)
    interactive = fair_queue.stream(
        "day", 0.5 * per_s, "1 day", seconds=90.0, tier=INTERACTIVE, draw=fair_queue.request
    )

    def refill(pool: SimulatedPool) -> None:
        fair_queue.keep_waiting(pool, "office", 20, tier=STANDARD, seed=1)
        fair_queue.keep_waiting(pool, "night", 20, tier=BATCH, seed=1)

    pool = fair_queue.make_pool(refill)
    pool.run(interactive, until_s=90.0)
    assert pool.service.get("night", 0) == 0
    assert any(pool.records.displaced_tokens)


def test_batch_has_its_turn_within_its_ageing_under_an_endless_flood() -> None:
    """Batch under an interactive flood without end, of a tenant with a night of service behind it."""

    def refill(pool: SimulatedPool) -> None:
        fair_queue.keep_waiting(pool, "day", 60, tier=INTERACTIVE, seed=1)

    ageing_s = (math.inf, 20.0, 30.0)
    pool = fair_queue.make_pool(refill, ageing_s=ageing_s)
    pool.flow.counters.charge("night", 1.0, 10**9)
    batch = [
        fair_queue.request(5.0 * number, "night", random.Random(f"1 {number}"), tier=BATCH)
        for number in range(10)
    ]
    pool.run(batch, until_s=150.0)
    # Up two tiers; then its share of the band, and the longest answer that runs.
    bound_s = 2 * ageing_s[BATCH] + 5.0
    assert max(pool.records.ttft_s(row) for row in pool.records.rows_of("night")) <= bound_s


def test_reservations_hold_under_interactive_floods() -> None:
    """Two standard tenants that paid for 30 % and 10 % of the capacity under four interactive floods."""
    shares = (0.3, 0.1)
    full = fair_queue.capacity()
    for is_reserved in (True, False):

        def refill(pool: SimulatedPool, is_reserved: bool = is_reserved) -> None:
            for number, share in enumerate(shares):
                reserved = share * full if is_reserved else 0.0
                fair_queue.keep_waiting(pool, f"paid {number}", 20, tier=STANDARD, seed=1, reserved=reserved)
            for number in range(4):
                fair_queue.keep_waiting(pool, f"flood {number}", 30, tier=INTERACTIVE, seed=1)

        pool = fair_queue.make_pool(refill)
        pool.run([fair_queue.request(0.0, "first", random.Random(1))], until_s=120.0)
        for number, share in enumerate(shares):
            of_reserved = pool.service.get(f"paid {number}", 0) / (share * full * 120.0)
            assert of_reserved >= 0.98 if is_reserved else of_reserved < 0.5


def test_jain_index_is_one_for_all_alike_and_one_nth_for_one_who_has_all() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0, 0.0]) is None


def full_of_batch(watch: PoolObserver | None = None) -> SimulatedPool:
    """An engine all of whose places decode batch streams, and more of them wait."""
    pool = fair_queue.fair_pool("vtc", fair_queue.MACHINE, Exact(), watch=watch)
    requests = [SimulatedRequest(0.0, "night", 40, 150 + number, tier=BATCH) for number in range(60)]
    pool.run(requests, until_s=1.0)
    assert len(pool.flow.in_flight) == pool.machine.max_sequences + 2
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
        pool.run(sorted(requests, key=lambda request: request.arrival_s))
        costs[jumps] = {flow.tenant_id: flow.service_cost for flow in pool.flow.tenants.all()}
        assert sum(tokens > 0 for tokens in pool.records.displaced_tokens) == len(requests)
    assert costs[True]["night"] == costs[False]["night"] == sum(40 + 2 * (150 + n) for n in range(60))
    assert costs[True]["day"] == 40 * (40 + 2 * 20)
