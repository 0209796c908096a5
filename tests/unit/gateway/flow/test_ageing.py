"""Ageing: when a request moves up a tier, and its place there."""

from __future__ import annotations

import math

import pytest

from engine.entry import QueueEntry
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue
from gateway.flow.ageing import Ageing, effective_tier

AGEING_S = (math.inf, 10.0, 25.0)


def entry(name: str, tenant: str, arrived_s: float, tier: int = 1) -> QueueEntry:
    return QueueEntry(name, tenant, arrived_s, 10, 10, tier)


def fair_queue() -> tuple[TieredQueue, ServiceCounters]:
    counters = ServiceCounters()
    return TieredQueue("vtc", counters), counters


@pytest.mark.parametrize(
    ("tier", "waited_s", "expected"),
    [(0, 1e9, 0), (1, 9.99, 1), (1, 10.0, 0), (1, 1e9, 0), (2, 24.9, 2), (2, 25.0, 1), (2, 50.0, 0)],
)
def test_one_tier_up_for_every_full_time_of_its_own_tier(tier: int, waited_s: float, expected: int) -> None:
    assert effective_tier(tier, 100.0, 100.0 + waited_s, AGEING_S) == expected


def test_who_moves_up_is_told_once_and_at_the_instant_that_the_rule_says() -> None:
    ageing = Ageing(AGEING_S)
    ageing.add("standard", 1, 1, 0.1)
    ageing.add("batch", 2, 2, 0.0)
    ageing.add("gone", 2, 2, 0.0)
    ageing.add("top", 0, 0, 0.0)
    ageing.remove("gone")
    assert ageing.due(10.0999) == []
    assert ageing.due(30.0) == ["standard", "batch"]
    assert ageing.due(1e9) == []
    ageing.add("batch", 2, 1, 0.0)
    assert ageing.due(49.99) == []
    assert ageing.due(50.0) == ["batch"]


def test_many_changes_of_mind_do_not_grow_it() -> None:
    ageing = Ageing(AGEING_S)
    for _ in range(5000):
        ageing.add("same", 2, 2, 0.0)
    assert len(ageing._heap) < 200
    assert ageing.due(25.0) == ["same"]


def test_an_ageing_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="ageing_s must be greater than 0"):
        Ageing((math.inf, 0.0, 1.0))


@pytest.mark.parametrize("order", ["vtc", "fcfs"])
def test_who_moves_stands_by_its_arrival_and_of_equals_by_its_number(order: str) -> None:
    queue = TieredQueue(order, ServiceCounters())
    for name, arrived_s, tier in (("b", 2.0, 0), ("d", 4.0, 0), ("a", 1.0, 1), ("c", 3.0, 1), ("e", 5.0, 1)):
        queue.add(entry(name, "same", arrived_s, tier))
    queue.move(["c", "a"], 0, 0)
    assert [queue.pop(9.0).entry_id for _ in range(5)] == ["a", "b", "c", "d", "e"]
    for number, tier in enumerate((1, 0, 1, 0)):
        queue.add(entry(str(number), "same", 1.0, tier))
    queue.move(["2", "0"], 0, 0)
    assert [queue.pop(9.0).entry_id for _ in range(4)] == ["0", "1", "2", "3"]


def test_an_owners_move_lifts_as_an_arrival_does_and_never_lowers() -> None:
    queue, counters = fair_queue()
    counters.set("day", 100)
    counters.set("night", 900)
    queue.add(entry("day", "day", 0.0, 0))
    queue.add(entry("night", "night", 0.0, 2))
    queue.add(entry("new", "new", 0.0, 2))
    queue.move(["night", "new"], 0, 0)
    assert [queue.counter(tenant, 0) for tenant in ("day", "new", "night")] == [100, 100, 900]


def test_who_aged_stands_with_the_lowest_and_keeps_what_it_got_there_since() -> None:
    queue, counters = fair_queue()
    counters.set("day", 100)
    counters.set("night", 10**9)
    queue.add(entry("day", "day", 0.0, 0))
    for name in ("one", "two", "three"):
        queue.add(entry(name, "night", -1.0, 2))
    queue.move(["one"], 0, 0, aged=True)
    assert queue.counter("night", 0) == 100
    assert queue.pop(0.0).entry_id == "one", "of equals the one that waited longer"
    counters.set("night", 10**9 + 50)
    queue.had_turn("night", 0)
    queue.move(["two"], 0, 0, aged=True)
    assert queue.counter("night", 0) == 150, "it had a turn here"
    assert queue.pop(0.0).entry_id == "day"
    queue.remove("two")
    counters.set("day", 400)
    queue.add(entry("day again", "day", 0.0, 0))
    counters.set("night", 2 * 10**9)
    queue.move(["three"], 0, 0, aged=True)
    assert queue.counter("night", 0) == 400, "what it got elsewhere does not count here"


def test_who_comes_into_an_empty_lane_is_lifted_to_the_other_one() -> None:
    queue, counters = fair_queue()
    counters.set("busy", 500)
    queue.add(entry("busy", "busy", 0.0))
    queue.add(entry("idle", "idle", 0.0), lane=1)
    assert queue.counter("idle", 1, 1) == 500
    assert [lane for lane, _ in queue.heads(1, 0.0)] == [0, 1]


def test_a_lane_that_is_held_back_does_not_lower_the_lift_of_the_other() -> None:
    queue, counters = fair_queue()
    queue.add(entry("stuck", "stuck", 0.0), lane=1)
    queue.add(entry("busy", "busy", 0.0))
    counters.set("busy", 500)
    queue.add(entry("new", "new", 0.0))
    assert queue.counter("new", 1, 0) == 500
    assert queue.heads(1, 0.0)[0][1].entry_id == "stuck"


def test_lanes_and_their_lifts_survive_a_clone_and_a_change_of_order() -> None:
    queue, counters = fair_queue()
    counters.set("busy", 500)
    queue.add(entry("busy", "busy", 0.0))
    queue.add(entry("long", "long", 1.0), lane=1)
    copy = queue.clone(counters.clone())
    copy.set_order("fcfs")
    assert [copy.pop(0.0).entry_id for _ in range(2)] == ["busy", "long"]
    assert queue.counter("long", 1, 1) == 500
    assert len(queue) == 2
    assert queue.remove("long") is not None
