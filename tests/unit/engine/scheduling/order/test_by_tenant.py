"""Rounds, credit, locality and the heap of tenants."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.counters import MAX_LOWERED, LoweredLog, ServiceCounters
from engine.scheduling.order.base import Order
from engine.scheduling.order.dlpm import Dlpm
from engine.scheduling.order.drr import Drr
from engine.scheduling.order.hybrid import PATIENCE, Hybrid
from engine.scheduling.order.lazy_heap import LazyHeap, TenantHeap
from engine.scheduling.order.locality import MAX_PASSES, Locality
from engine.scheduling.order.vtc import Vtc
from engine.scheduling.tiers import TieredQueue


def entry(
    name: str, tenant: str = "a", *, prompt: int = 10, cached: int = 0, locality: int = 0, weight: float = 1.0
) -> QueueEntry:
    return QueueEntry(name, tenant, 0.0, prompt, 10, cached_tokens=cached, locality=locality, weight=weight)


def serve(order: Order, counters: ServiceCounters, cost: int, turns: int) -> str:
    """Tenants in the order of their turns, each of `cost`."""
    served = ""
    for _ in range(turns):
        each = order.pop(0.0)
        counters.charge(each.tenant_id, each.weight, cost)
        served += each.tenant_id
    return served


def names(order: Order) -> list[str]:
    return [order.pop(0.0).entry_id for _ in range(len(order))]


def small(order: type[Drr], quantum: int) -> type[Drr]:
    """The order, with another quantum."""
    return type(f"Small{order.__name__}", (order,), {"quantum_cost": quantum})


def filled(quantum_cost: int, **weights: float) -> tuple[Drr, ServiceCounters]:
    counters = ServiceCounters()
    order = small(Drr, quantum_cost)(counters)
    for number in range(40):
        for tenant, weight in weights.items():
            order.add(entry(f"{tenant}{number}", tenant, weight=weight))
    return order, counters


def test_a_tenant_is_served_until_its_quantum_is_spent_then_the_next() -> None:
    order, counters = filled(100, a=1.0, b=1.0)
    # The last of a turn may pass the quantum; that is taken off the next one.
    assert serve(order, counters, 40, 15) == "aaabbbaabbaaabb"[:15]


def test_a_quantum_is_per_weight() -> None:
    order, counters = filled(100, a=1.0, b=3.0)
    served = serve(order, counters, 50, 40)
    assert (served.count("a"), served.count("b")) == (10, 30)


def test_many_rounds_may_pass_until_somebody_is_out_of_debt() -> None:
    order, counters = filled(10, a=1.0, b=1.0)
    counters.charge("a", 1.0, 5000)
    counters.charge("b", 1.0, 4000)
    assert serve(order, counters, 10, 3) == "bbb"
    assert order.credit_cost("b") <= 10
    assert order.credit_cost("a") < -900


def test_debt_is_kept_while_a_tenant_does_not_wait_and_credit_does_not_grow() -> None:
    counters = ServiceCounters()
    order = small(Drr, 100)(counters)
    order.add(entry("a1", "a"))
    assert serve(order, counters, 350, 1) == "a"
    order.add(entry("a2", "a"))
    assert order.credit_cost("a") == -250
    for number in range(20):
        order.add(entry(f"b{number}", "b"))
    assert serve(order, counters, 50, 2) == "bb"
    order.remove("a2")
    # Eight rounds without it.
    assert serve(order, counters, 50, 17) == "b" * 17
    order.add(entry("a3", "a"))
    assert 0 < order.credit_cost("a") <= 100, "as a round gives, however long it was away"


def test_a_correction_gives_credit_back() -> None:
    order, counters = filled(100, a=1.0, b=1.0)
    assert serve(order, counters, 100, 1) == "a"
    named = order.peek(0.0)
    assert named is not None
    assert named.tenant_id == "b"
    counters.charge("a", 1.0, -30)
    named = order.peek(0.0)
    assert named is not None
    assert named.tenant_id == "a"


def test_the_most_cached_goes_first_then_its_group_then_the_oldest() -> None:
    order = Locality(ServiceCounters())
    order.add(entry("plain"))
    order.add(entry("two 1", locality=2))
    order.add(entry("one 1", locality=1, cached=4))
    order.add(entry("two 2", locality=2, cached=9))
    order.add(entry("two 3", locality=2))
    assert names(order) == ["two 2", "two 1", "two 3", "one 1", "plain"]


def test_the_oldest_is_passed_over_a_bounded_number_of_times() -> None:
    order = Locality(ServiceCounters())
    order.add(entry("oldest"))
    for number in range(2 * MAX_PASSES):
        order.add(entry(f"e{number}", locality=5))
    order.add(entry("hot", cached=9, locality=5))
    served = names(order)
    assert served[0] == "hot"
    assert served.index("oldest") == MAX_PASSES


def test_who_comes_back_to_the_front_goes_before_all_and_in_order() -> None:
    order = Locality(ServiceCounters())
    order.add(entry("hot", cached=9))
    order.add(entry("first back"), front=True)
    order.add(entry("last back"), front=True)
    assert names(order) == ["last back", "first back", "hot"]


def test_dlpm_has_locality_inside_a_tenant_and_credit_between_tenants() -> None:
    counters = ServiceCounters()
    order = small(Dlpm, 100)(counters)
    order.add(entry("a plain", "a"))
    order.add(entry("a hot", "a", cached=8))
    order.add(entry("b hot", "b", cached=9))
    counters.charge("b", 1.0, 150)
    assert names(order) == ["a hot", "a plain", "b hot"]


def test_hybrid_is_fair_between_tenants_and_short_first_inside_one() -> None:
    counters = ServiceCounters()
    order = Hybrid(counters)
    order.add(entry("a long", "a", prompt=2000))
    order.add(entry("a short", "a", prompt=5))
    order.add(entry("b long", "b", prompt=2000))
    counters.charge("a", 1.0, 500)
    assert order.pop(0.0).entry_id == "b long"
    assert order.pop(0.0).entry_id == "a short"


def test_hybrid_lifts_as_vtc_does() -> None:
    for make in (Vtc, Hybrid):
        counters = ServiceCounters()
        order = make(counters)
        counters.set("a", 700)
        order.add(entry("a", "a"))
        order.add(entry("b", "b"))
        assert counters.value("b") == 700
        order.pop(0.0)
        order.pop(0.0)
        counters.set("b", 900)
        order.add(entry("c", "c"))
        assert counters.value("c") == 900, "to the tenant that left last"


def test_a_preempted_entry_of_hybrid_keeps_its_wait_though_its_line_was_gone() -> None:
    counters = ServiceCounters()
    order = Hybrid(counters)
    order.add(entry("old", "a", prompt=100))
    counters.charge("other", 1.0, 1000)
    old = order.pop(0.0)
    order.add(entry("new", "a", prompt=10))
    order.add(old, front=True)
    counters.charge("other", 1.0, 50)
    # (1050 + 100) / 100 against (50 + 10) / 10.
    assert names(order) == ["old", "new"]


def test_a_heap_forgets_what_was_dropped_and_heeds_the_last_key() -> None:
    heap = LazyHeap()
    for name, key in (("a", 5.0), ("b", 1.0), ("c", 3.0)):
        heap.put(name, (key,))
    heap.put("b", (9.0,))
    assert heap.top() == "c"
    heap.drop("c")
    assert heap.top() == "a"
    heap.put("c", (3.0,))
    assert heap.top() == "c"
    with pytest.raises(KeyError):
        heap.drop("nobody")


def test_a_heap_does_not_grow_with_what_is_stale() -> None:
    heap = LazyHeap()
    for number in range(10_000):
        heap.put("a", (float(-number),))
        heap.put("b", (float(number),))
    assert len(heap._heap) <= 2 * len(heap) + 64
    assert heap.top() == "a"


def test_a_tenant_heap_sees_rises_and_falls_that_nobody_reported() -> None:
    counters = ServiceCounters()
    heap = TenantHeap(counters)

    def standing(tenant_id: str) -> tuple[float, ...]:
        return (counters.value(tenant_id),)

    for number, tenant_id in enumerate("abc"):
        counters.set(tenant_id, 10 * (number + 1))
        heap.put(tenant_id, standing)
    assert heap.lowest(standing) == "a"
    counters.set("a", 25)
    assert heap.lowest(standing) == "b"
    counters.set("c", 5)
    assert heap.lowest(standing) == "c"
    heap.drop("c")
    assert heap.lowest(standing) == "b"


def test_the_log_of_falls_tells_each_reader_once_and_is_bounded() -> None:
    log = LoweredLog()
    log.note("before")
    one, other = log.reader(), log.reader()
    log.note("a")
    assert list(one() or ()) == ["a"]
    assert list(one() or ()) == []
    log.note("b")
    assert list(one() or ()) == ["b"]
    assert list(other() or ()) == ["a", "b"]
    for number in range(5 * MAX_LOWERED):
        log.note(str(number))
    assert one() is None, "too far behind to be told"
    assert list(one() or ()) == []
    assert len(log._tenants) < 2 * MAX_LOWERED


@pytest.mark.parametrize("order_name", ["vtc", "hybrid", "drr", "dlpm"])
def test_a_band_sees_that_a_counter_was_replaced_by_a_lower_one(order_name: str) -> None:
    counters = ServiceCounters()
    queue = TieredQueue(order_name, counters)
    for name, tenant in (("a1", "a"), ("b1", "b"), ("b2", "b")):
        queue.add(entry(name, tenant))
    counters.set("a", 900_000 * COUNTER_SCALE)
    assert queue.pop(0.0).entry_id == "b1"
    counters.set("b", 999_000 * COUNTER_SCALE)
    counters.set("a", 0)
    queue.unlift("a")
    assert queue.pop(0.0).entry_id == "a1"


@pytest.mark.parametrize("order_name", ["hybrid", "dlpm", "hrrn", "mlfq", "buckets", "drr"])
def test_a_change_of_order_lifts_nobody_and_takes_nobody_out_of_turn(order_name: str) -> None:
    counters = ServiceCounters()
    queue = TieredQueue("fcfs", counters)
    counters.set("a", 3)
    for number in range(6):
        queue.add(entry(f"e{number}", "ab"[number % 2]))
    queue.set_order(order_name)
    assert [queue.counter(tenant, 1) for tenant in "ab"] == [3, 0]
    served = names(queue)
    assert [name for name in served if int(name[1]) % 2] == ["e1", "e3", "e5"]
    assert [name for name in served if not int(name[1]) % 2] == ["e0", "e2", "e4"]
    queue.add(entry("late", "c"))
    queue.add(entry("later", "c"))
    assert names(queue) == ["late", "later"]


def test_lifts_act_again_after_a_change_of_order() -> None:
    counters = ServiceCounters()
    queue = TieredQueue("fcfs", counters)
    counters.set("a", 500)
    queue.add(entry("e0", "a"))
    queue.set_order("vtc")
    queue.add(entry("e1", "b"))
    assert queue.counter("b", 1) == 500


def test_the_same_order_again_changes_nothing() -> None:
    counters = ServiceCounters()
    queue = TieredQueue("hrrn", counters)
    queue.add(entry("old", prompt=1000))
    counters.charge("other", 1.0, 5000)
    queue.set_order("hrrn")
    queue.add(entry("new", prompt=10))
    counters.charge("other", 1.0, 20)
    assert names(queue) == ["old", "new"]


def large(name: str, tenant: str, *, yields: int = 1000, weight: float = 1.0) -> QueueEntry:
    return replace(entry(name, tenant, prompt=100), yields_cost=yields, weight=weight)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_a_small_one_goes_first_until_its_tenant_is_so_far_ahead(weight: float) -> None:
    counters = ServiceCounters()
    order = Hybrid(counters)
    order.add(large("large", "a", weight=weight))
    order.add(entry("small", "b", prompt=100))
    counters.set("b", round(1000 * COUNTER_SCALE / weight))
    assert names(order.clone(counters.clone())) == ["small", "large"]
    counters.set("b", round(1001 * COUNTER_SCALE / weight))
    assert names(order) == ["large", "small"]


def test_a_large_one_that_has_waited_goes_by_the_rules_of_one_lane() -> None:
    for tenant, first in (("a", "small"), ("b", "large")):
        counters = ServiceCounters()
        order = Hybrid(counters)
        order.add(large("large", "a"))
        # Of its own tenant the smaller one, as it has waited as long; of an equal tenant, the large one.
        order.add(entry("small", tenant, prompt=10))
        counters.charge("others", 1.0, int(PATIENCE * 1000) - 1)
        assert order.peek(0.0) == entry("small", tenant, prompt=10)
        counters.charge("others", 1.0, 1)
        named = order.peek(0.0)
        assert named is not None
        assert named.entry_id == first


def test_who_waits_in_one_lane_is_not_lifted_in_the_other() -> None:
    counters = ServiceCounters()
    order = Hybrid(counters)
    counters.set("b", 900 * COUNTER_SCALE)
    order.add(large("a large", "a"))
    order.add(entry("b small", "b"))
    order.add(entry("a small", "a"))
    assert counters.value("a") == 0, "it was not idle"
    order.add(entry("c small", "c"))
    assert counters.value("c") == 0, "to the lowest of both lanes"
    order.remove("a small")
    order.remove("a large")
    order.add(large("a again", "a"))
    assert counters.value("a") == 0, "c waits at 0"
