"""The fair order lifts, keeps debt, gives no credit, and counts tenants, not connections."""

from __future__ import annotations

import pytest

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.counters import ServiceCounters, scaled
from engine.scheduling.order.fcfs import Fcfs
from engine.scheduling.order.vtc import Vtc
from engine.scheduling.tiers import TieredQueue


def entry(number: int, tenant: str, tier: int = 1, weight: float = 1.0) -> QueueEntry:
    return QueueEntry(f"e{number}", tenant, float(number), 10, 10, tier=tier, weight=weight)


def fair_order() -> tuple[Vtc, ServiceCounters]:
    counters = ServiceCounters()
    return Vtc(counters), counters


def fair_queue() -> tuple[TieredQueue, ServiceCounters]:
    counters = ServiceCounters()
    return TieredQueue("vtc", counters), counters


def test_a_charge_and_its_correction_cancel_exactly() -> None:
    counters = ServiceCounters()
    for weight in (0.3, 1.0, 3.0, 7.0):
        for cost in (1, 17, 99_999):
            counters.charge("t", weight, cost)
            counters.charge("t", weight, -cost)
    assert counters.value("t") == 0


def test_a_charge_counts_less_for_a_heavier_tenant() -> None:
    counters = ServiceCounters()
    counters.charge("light", 1.0, 30)
    counters.charge("heavy", 3.0, 30)
    assert counters.values() == {"light": 30 * COUNTER_SCALE, "heavy": 10 * COUNTER_SCALE}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_makes_no_sense_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be greater than 0"):
        scaled(1, weight)


def test_counters_are_bounded_and_forgetting_gives_nobody_credit() -> None:
    counters = ServiceCounters(max_tenants=8)
    spent = {f"t{number}": (number * 37) % 101 + 1 for number in range(100)}
    for tenant, value in spent.items():
        counters.set(tenant, value)
        assert len(counters) <= 8
    assert all(counters.value(tenant) >= value for tenant, value in spent.items()), "a debt was forgiven"
    largest = max(spent, key=lambda tenant: spent[tenant])
    assert counters.value(largest) == spent[largest], "the largest debts are kept by name"
    assert counters.value("never seen") == counters.floor > 0


def test_a_lift_only_raises() -> None:
    counters = ServiceCounters()
    counters.set("t", 50)
    counters.lift("t", 20)
    assert counters.value("t") == 50
    counters.lift("t", 70)
    assert counters.value("t") == 70


def test_the_backlogged_tenant_with_the_least_service_goes_next() -> None:
    order, counters = fair_order()
    order.add(entry(0, "a"))
    order.add(entry(1, "b"))
    counters.charge("a", 1.0, 5)
    assert order.pop(0.0).tenant_id == "b"


def test_equal_tenants_are_served_by_arrival() -> None:
    order = Vtc(ServiceCounters())
    order.add(entry(1, "late"))
    order.add(entry(0, "early"))
    assert order.pop(0.0).tenant_id == "early"


def test_a_returning_tenant_is_lifted_to_the_least_of_those_who_wait() -> None:
    order, counters = fair_order()
    counters.set("a", 900)
    counters.set("b", 700)
    order.add(entry(0, "a", weight=1.0))
    counters.set("b", 950)
    order.add(entry(1, "b"))
    assert counters.value("b") == 950, "above the least waiting one: debt is kept"
    order.add(entry(2, "idle"))
    assert counters.value("idle") == 900, "no credit for the time it was idle"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_into_an_empty_queue_the_lift_goes_to_the_tenant_that_left_last(is_cancelled: bool) -> None:
    order, counters = fair_order()
    counters.set("a", 100)
    order.add(entry(0, "a"))
    order.remove("e0") if is_cancelled else order.pop(0.0)
    counters.charge("a", 1.0, 40)
    order.add(entry(1, "b"))
    assert counters.value("b") == counters.value("a") == 100 + 40 * COUNTER_SCALE


def test_a_tenant_that_still_waits_is_not_lifted_again() -> None:
    order, counters = fair_order()
    order.add(entry(0, "a"))
    order.add(entry(1, "b"))
    counters.charge("b", 1.0, 100)
    order.add(entry(2, "a"))
    assert counters.value("a") == 0


def test_a_preempted_entry_lifts_nothing() -> None:
    order, counters = fair_order()
    order.add(entry(0, "a"))
    preempted = order.pop(0.0)
    counters.set("b", 500)
    order.add(entry(1, "b"))
    order.add(preempted, front=True)
    assert counters.value("a") == 0
    assert order.peek(0.0) is preempted


@pytest.mark.parametrize(
    ("waiting", "weight", "turns"), [((50, 10), 1.0, (10, 10)), ((40, 40), 3.0, (10, 30))]
)
def test_turns_go_by_weight_and_not_by_connections(
    waiting: tuple[int, int], weight: float, turns: tuple[int, int]
) -> None:
    order, counters = fair_order()
    for number in range(sum(waiting)):
        tenant = ("one", 1.0) if number < waiting[0] else ("other", weight)
        order.add(entry(number, tenant[0], weight=tenant[1]))
    served = []
    for _ in range(sum(turns)):
        head = order.pop(0.0)
        counters.charge(head.tenant_id, head.weight, 9)
        served.append(head.tenant_id)
    assert (served.count("one"), served.count("other")) == turns


def test_first_come_first_served_heeds_no_counter() -> None:
    counters = ServiceCounters()
    order = Fcfs(counters)
    for number in range(6):
        order.add(entry(number, "ab"[number % 2]))
        counters.charge("a", 1.0, 1000)
    assert [order.pop(0.0).entry_id for _ in range(6)] == [f"e{number}" for number in range(6)]


def test_a_higher_tier_goes_first_whatever_its_tenant_has_had() -> None:
    queue, counters = fair_queue()
    counters.set("rich", 10**9)
    queue.add(entry(0, "poor", tier=2))
    queue.add(entry(1, "poor", tier=1))
    queue.add(entry(2, "rich", tier=0))
    assert queue.waiting_tiers() == [0, 1, 2]
    assert [queue.pop(0.0).tier for _ in range(3)] == [0, 1, 2]


def test_tiers_can_be_asked_for() -> None:
    queue = TieredQueue("vtc", ServiceCounters())
    queue.add(entry(0, "a", tier=0))
    queue.add(entry(1, "a", tier=2))
    head = queue.peek(0.0, tiers={1, 2})
    assert head is not None
    assert head.entry_id == "e1"
    assert queue.pop(0.0, tiers={2}).entry_id == "e1"
    assert queue.peek(0.0, tiers={1, 2}) is None
    with pytest.raises(IndexError):
        queue.pop(0.0, tiers={1, 2})
    assert "e0" in queue
    assert "e1" not in queue


def test_service_in_one_tier_counts_in_every_tier() -> None:
    queue, counters = fair_queue()
    for tier in (1, 2):
        queue.add(entry(tier * 10, "a", tier))
        queue.add(entry(tier * 10 + 1, "b", tier))
    counters.charge("a", 1.0, 50)
    assert queue.pop(0.0).tenant_id == "b"
    queue.remove("e10")
    assert queue.pop(0.0).tenant_id == "b"


def test_a_lift_in_one_tier_is_not_carried_into_another() -> None:
    """Batch work has used idle capacity all night; who sends one batch request must not starve in the
    interactive tier for it."""
    queue, counters = fair_queue()
    counters.set("night", 10**12)
    queue.add(entry(0, "night", tier=2))
    queue.add(entry(1, "mixed", tier=2))
    assert queue.counter("mixed", 2) == 10**12, "no credit among those who worked all night"
    counters.set("daily", 1000)
    queue.add(entry(2, "daily", tier=0))
    queue.add(entry(3, "mixed", tier=0))
    assert queue.counter("mixed", 0) == 1000
    assert [queue.counter(tenant, 0) for tenant in ("daily", "mixed")] == [1000, 1000]


def test_what_an_owner_elsewhere_says_replaces_counter_and_lift() -> None:
    queue, counters = fair_queue()
    counters.set("a", 500)
    queue.add(entry(0, "a"))
    queue.add(entry(1, "b"))
    assert queue.counter("b", 1) == 500
    counters.set("b", 40)
    queue.unlift("b")
    assert queue.counter("b", 1) == 40
    assert queue.pop(0.0).tenant_id == "b"


def test_a_change_of_order_lifts_nobody_and_keeps_arrivals() -> None:
    counters = ServiceCounters()
    queue = TieredQueue("fcfs", counters)
    counters.set("a", 100)
    for number in range(4):
        queue.add(entry(number, "ab"[number % 2]))
    queue.set_order("vtc")
    assert [queue.counter(tenant, 1) for tenant in "ab"] == [100, 0]
    assert [queue.pop(0.0).entry_id for _ in range(4)] == ["e1", "e3", "e0", "e2"]


def test_a_preempted_entry_keeps_its_place_through_a_change_of_order() -> None:
    queue = TieredQueue("vtc", ServiceCounters())
    for number in range(3):
        queue.add(entry(number, "a"))
    queue.add(queue.pop(0.0), front=True)
    queue.set_order("fcfs")
    assert [queue.pop(0.0).entry_id for _ in range(3)] == ["e0", "e1", "e2"]


@pytest.mark.parametrize("between", ["hybrid", "fcfs"])
def test_a_change_of_order_forgives_no_idle_time(between: str) -> None:
    queue, counters = fair_queue()
    queue.add(entry(0, "old"))
    queue.pop(0.0)
    counters.charge("old", 1.0, 500)
    queue.set_order(between)
    queue.set_order("vtc")
    queue.add(entry(1, "new"))
    assert queue.counter("new", 1) == counters.value("old"), "as before the change"
