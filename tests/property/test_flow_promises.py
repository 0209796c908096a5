"""Guarantees of the queue to each tenant, whatever the others send.

The real controller in front of an ideal engine (`tests/support/flow_pool.py`), on virtual time. Each promise
is shown beside what happens without it, so that a test in which nothing was at stake fails.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.entry import OUTPUT_TOKEN_COST
from gateway.flow.lanes import LaneRule
from tests.support.flow_pool import FlowPool, Party

pytestmark = pytest.mark.long

AGEING_S = (math.inf, 20.0, 30.0)
INTERACTIVE, STANDARD, BATCH = 0, 1, 2


def random_sizes(seed: int, longest: int) -> Any:
    """Sizes by request number, the same in every run."""
    return lambda number: (
        random.Random(f"{seed} {number}").randint(1, longest),
        random.Random(f"{seed} {number} out").randint(1, longest),
    )


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
def test_weights_are_kept_within_a_percent(policy: str) -> None:
    pool = FlowPool(policy=policy)
    pool.parties = [
        Party("light", 100, weight=1.0, size=random_sizes(1, 60)),
        Party("heavy", 10, weight=3.0, size=random_sizes(2, 60)),
    ]
    pool.run(1000.0)
    assert pool.served("heavy") / pool.served("light") == pytest.approx(3.0, rel=0.01)


@given(
    seed=st.integers(0, 10_000),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 0.5]), st.sampled_from([1.0, 3.0])),
    longest=st.integers(2, 80),
    tier=st.integers(0, 2),
)
@settings(max_examples=12, deadline=None)
def test_two_backlogged_tenants_stay_within_the_bound_of_the_paper(
    seed: int, weights: tuple[float, float], longest: int, tier: int
) -> None:
    """|W_f / w_f - W_g / w_g| <= 2U / min(w), U = max(longest input, 2 x tokens in the running batch)."""
    pool = FlowPool(places=4)
    pool.parties = [
        Party("f", 3, tier=tier, weight=weights[0], size=random_sizes(seed, longest)),
        Party("g", 40, tier=tier, weight=weights[1], size=random_sizes(seed + 1, max(2, longest // 4))),
    ]
    bound = 2 * max(longest, 2 * 4 * 2 * longest) / min(weights)
    worst = 0.0
    for step in range(1, 150):
        pool.run(step * 1.0)
        worst = max(worst, abs(pool.served("f") / weights[0] - pool.served("g") / weights[1]))
    assert worst <= bound
    assert pool.served("f") > bound, "too short a run to say anything"


def test_a_tenant_gains_nothing_by_more_connections_or_smaller_requests() -> None:
    pool = FlowPool()
    pool.parties = [
        Party("plain", 5, size=lambda number: (40, 40)),
        Party("split", 500, size=lambda number: (4, 4)),
    ]
    pool.run(600.0)
    assert pool.served("split") / pool.served("plain") == pytest.approx(1.0, rel=0.01)


def test_a_tenant_gains_nothing_by_splitting_its_work_over_two_lanes() -> None:
    pool = FlowPool(options={"lanes": LaneRule(long_tokens=100)})
    pool.parties = [
        Party("plain", 20, size=lambda number: (40, 40)),
        Party("both", 20, size=lambda number: (150, 100) if number % 2 else (20, 20)),
    ]
    pool.run(1500.0)
    assert pool.served("both") / pool.served("plain") == pytest.approx(1.0, rel=0.02)


def test_an_idle_tenant_gets_no_credit() -> None:
    pool = FlowPool()
    pool.parties = [Party("busy", 20)]
    pool.run(500.0)
    pool.parties.append(Party("late", 20))
    before = pool.served("busy")
    pool.run(600.0)
    assert pool.served("late") / (pool.served("busy") - before) == pytest.approx(1.0, rel=0.02)


def test_a_tenant_that_always_has_one_request_under_way_saves_up_no_more_than_the_bound() -> None:
    """A trickle for long, and then a flood: what it had less is its own loss, but for the lag's bound."""
    pool = FlowPool()
    pool.parties = [Party("busy", 20)]
    for number in range(10):
        pool.arrive("sly", 10, 2000)
        pool.run(40.0 * (number + 1))
        assert any(each.turn.ticket.entry.tenant_id == "sly" for each in pool.running), "it was idle"
    bound = OUTPUT_TOKEN_COST * sum(each.turn.ticket.kv_tokens for each in pool.running)
    before = dict(pool.service)
    assert pool.served("busy") - pool.served("sly") > 10 * bound, "there was nothing to save up"
    pool.parties.append(Party("sly", 20))
    pool.run(pool.now_s + 100.0)
    gained = {tenant: pool.served(tenant) - before[tenant] for tenant in ("sly", "busy")}
    # Besides, what its long request was charged and had not been served yet.
    assert 0 < gained["sly"] - gained["busy"] <= bound + 2 * 2010


@pytest.mark.parametrize("burst", [3, 8, 20])
def test_a_tenant_that_comes_and_goes_gets_no_more_than_its_share_and_the_bound(burst: int) -> None:
    """Bursts at moments at which the one before has just ended: it is never away for long, and asks for more
    than its half whenever it is there."""
    pool = FlowPool()
    pool.parties = [Party("busy", 20)]
    pool.run(100.0)
    before = pool.served("busy")
    worst = 0.0
    for _ in range(120):
        sent = [pool.arrive("sly", 20, 20) for _ in range(burst)]
        pool.run(math.inf, while_=lambda sent=sent: any(pool.flow.ticket(each) for each in sent))
        under_way = OUTPUT_TOKEN_COST * sum(each.turn.ticket.kv_tokens for each in pool.running)
        worst = max(worst, pool.served("sly") - (pool.served("busy") - before) - under_way)
    assert pool.served("sly") > 100 * burst * 60, "it hardly sent anything"
    assert worst <= 2 * 60


# ---------------------------------------------------------------- no starvation


@pytest.mark.parametrize("floods", [1, 3])
def test_batch_is_served_within_its_ageing_under_an_endless_interactive_flood(floods: int) -> None:
    """Even of a tenant that used all idle capacity for a night: its debt does not follow it upwards."""
    waits: dict[bool, float] = {}
    for ages in (True, False):
        pool = FlowPool(options={"ageing_s": AGEING_S} if ages else {})
        pool.parties = [Party("night", 4, tier=BATCH)]
        pool.run(400.0)
        pool.parties = [Party(f"day {number}", 10, tier=INTERACTIVE) for number in range(floods)]
        pool.run(410.0)
        entry_id = pool.arrive("night", tier=BATCH)
        while pool.flow.cancel(next(iter(_others(pool, "night", entry_id)), ""), pool.now_s):
            pass
        pool.run(700.0, while_=lambda pool=pool, entry_id=entry_id: entry_id not in pool.started_s)
        waits[ages] = pool.started_s.get(entry_id, math.inf) - 410.0
    # Two tiers up, then at most the turn of each tenant of the band and the end of what runs.
    longest_s = 50 / 100.0
    assert waits[True] <= 2 * AGEING_S[BATCH] + (floods + 2) * longest_s
    assert waits[False] == math.inf, "without ageing it would have been served all the same"


def test_aged_work_gets_one_share_of_the_band_above_and_not_each_turn() -> None:
    """A flood of batch that ages does not starve the tier that it comes up to."""
    pool = FlowPool(options={"ageing_s": AGEING_S})
    pool.parties = [Party("day", 10, tier=INTERACTIVE), Party("night", 400, tier=BATCH)]
    pool.run(100.0)
    before = dict(pool.service)
    pool.run(400.0)
    day = pool.served("day") - before["day"]
    assert day >= 0.49 * (pool.served("day") + pool.served("night") - sum(before.values()))
    assert pool.served("night") > 0


def test_aged_work_that_comes_one_by_one_does_not_take_every_turn() -> None:
    """Each batch request comes up just when the one before has gone, so that its tenant never waits above."""
    pool = FlowPool(places=1, options={"ageing_s": AGEING_S})
    pool.parties = [Party("day", 10, tier=INTERACTIVE)]
    before = 0.0
    for number in range(220):
        pool.arrive("night", tier=BATCH)
        if number == 120:
            before = pool.served("day")
            assert pool.served("night") == 0, "nothing had come up yet"
        pool.run(pool.now_s + 0.5)
    assert pool.served("day") - before == pytest.approx(0.5 * pool.capacity * 50.0, rel=0.04)


# ---------------------------------------------------------------- reservations


@pytest.mark.parametrize("floods", [1, 10])
@pytest.mark.parametrize("tier", [INTERACTIVE, STANDARD, BATCH])
def test_a_reservation_is_honoured_under_an_interactive_flood(floods: int, tier: int) -> None:
    served: dict[bool, float] = {}
    for is_reserved in (True, False):
        pool = FlowPool(lookahead=2)
        rate = 0.3 * pool.capacity
        pool.parties = [
            Party("paid", 4, tier=tier, reserved=rate if is_reserved else 0.0, size=random_sizes(5, 40)),
            *(Party(f"flood {number}", 20, tier=INTERACTIVE) for number in range(floods)),
        ]
        pool.run(400.0)
        served[is_reserved] = pool.served("paid") / (rate * 400.0)
    assert served[True] >= 0.98
    if tier != INTERACTIVE:
        assert served[False] == 0.0, "nothing was at stake"
    elif floods == 10:
        assert served[False] < 0.5, "nothing was at stake"


def test_a_reservation_does_not_eat_the_share_by_weight() -> None:
    """mClock: what a tenant gets by its weight does not count as reserved service, and the other way round
    the counter sees all: with weights 1:1 a reservation below the half changes nothing."""
    pool = FlowPool()
    pool.parties = [Party("paid", 10, reserved=0.2 * pool.capacity), Party("plain", 10)]
    pool.run(400.0)
    assert pool.served("paid") / pool.served("plain") == pytest.approx(1.0, rel=0.02)


def test_reservations_of_two_tenants_go_by_the_oldest_tag() -> None:
    pool = FlowPool()
    pool.parties = [
        Party("one", 10, reserved=0.4 * pool.capacity, tier=BATCH),
        Party("two", 10, reserved=0.2 * pool.capacity, tier=STANDARD),
        Party("flood", 50, tier=INTERACTIVE),
    ]
    pool.run(400.0)
    assert pool.served("one") >= 0.98 * 0.4 * pool.capacity * 400.0
    assert pool.served("two") >= 0.98 * 0.2 * pool.capacity * 400.0
    assert pool.served("flood") >= 0.38 * pool.capacity * 400.0


@pytest.mark.parametrize("burst_s", [0.0, 5.0])
def test_idle_time_earns_no_reserved_service_beyond_the_burst(burst_s: float) -> None:
    pool = FlowPool(options={"reservation_burst_s": burst_s})
    rate = 0.2 * pool.capacity
    pool.parties = [Party("flood", 50, tier=INTERACTIVE)]
    paid = Party("paid", 20, tier=STANDARD, reserved=rate)
    pool.parties.append(paid)
    pool.run(50.0)
    pool.parties.remove(paid)
    pool.run(1000.0)
    before = pool.served("paid")
    pool.parties.append(paid)
    pool.run(1050.0)
    one_request = 50
    assert pool.served("paid") - before <= rate * (50.0 + burst_s) + one_request
    # Without any burst it loses the time that a due request waits for a place.
    assert pool.served("paid") - before >= (0.95 if burst_s else 0.6) * rate * 50.0


def test_a_tenant_that_was_held_back_is_owed_no_more_than_the_burst() -> None:
    """Its first request is as large as the whole replica: until it fits, nothing of it runs."""
    pool = FlowPool(options={"reservation_burst_s": 5.0}, kv_tokens=1000)
    rate = 0.5 * pool.capacity
    pool.parties = [Party("flood", 50, tier=INTERACTIVE)]
    pool.run(10.0)
    pool.replicas = []
    pool.arrive("paid", reserved=rate)
    pool.run(500.0)
    pool.replicas = FlowPool(kv_tokens=1000).replicas
    pool.parties.append(Party("paid", 100, reserved=rate))
    before = pool.served("paid")
    pool.run(520.0)
    assert pool.served("paid") - before <= rate * (20.0 + 5.0) + 100


# ---------------------------------------------------------------- lanes


def test_a_full_long_lane_never_blocks_the_ordinary_one() -> None:
    pool = FlowPool(places=4, options={"lanes": LaneRule(100, share_sequences=0.5)})
    pool.parties = [Party("long", 30, size=lambda number: (5000, 500))]
    pool.run(1.0)
    assert len(pool.running) == 2, "the lane's share"
    # Of the same tenant: the request that came first, the long one, is looked at first.
    entry_id = pool.arrive("long", 10, 10)
    pool.run(1.0 + 1e-6)
    assert entry_id in pool.started_s


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_long_request_gets_its_turn_under_an_endless_flood_of_short_ones(by_itself: bool) -> None:
    """It needs more memory than ever comes free in one step, so the room is kept for it."""
    pool = FlowPool(
        places=8, kv_tokens=240, options={"lanes": LaneRule(100, share_sequences=0.5, share_kv=0.6)}
    )
    # Of unlike lengths: where all ended together, all of the memory would come free in one step.
    pool.parties = [Party("short", 50, size=lambda number: (10, 15 + number * 7 % 11))]
    pool.run(50.0)
    entry_id = pool.arrive("short" if by_itself else "other", 100, 30)
    pool.run(200.0, while_=lambda: entry_id not in pool.started_s)
    waiting_before = 50 * 50 / pool.capacity if by_itself else 0.0
    assert pool.started_s.get(entry_id, math.inf) <= 50.0 + waiting_before + 2.0


def test_a_lane_full_of_batch_keeps_no_long_interactive_request_out() -> None:
    pool = FlowPool(places=4, options={"lanes": LaneRule(100, share_sequences=0.25)})
    pool.parties = [Party("night", 30, tier=BATCH, size=lambda number: (5000, 500))]
    pool.run(1.0)
    assert len(pool.running) == 4, "batch may use idle capacity"
    entry_id = pool.arrive("day", 500, 50, tier=INTERACTIVE)
    pool.run(1.0 + 1e-6)
    assert entry_id in pool.started_s


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "hybrid"])
def test_no_place_is_empty_while_something_waits(policy: str) -> None:
    pool = FlowPool(policy=policy, options={"ageing_s": AGEING_S})
    pool.parties = [
        Party("a", 5, tier=INTERACTIVE, size=random_sizes(1, 30)),
        Party("b", 5, tier=STANDARD, size=random_sizes(2, 90), reserved=50.0),
        Party("c", 5, tier=BATCH, size=random_sizes(3, 200)),
    ]
    pool.run(300.0)
    assert sum(pool.service.values()) == pytest.approx(pool.capacity * 300.0)


def _others(pool: FlowPool, tenant: str, kept: str) -> list[str]:
    return [
        ticket.entry.entry_id
        for ticket in pool.flow.queue.tickets()
        if ticket.entry.tenant_id == tenant and ticket.entry.entry_id != kept
    ]
