"""Does every order keep the contract of `engine.scheduling.order.Order`?

Parametrised over ORDERS: a new order is held to it by being named there.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order import Entry, Order
from engine.scheduling.policy import ORDERS, UnknownPolicy, make_order
from engine.scheduling.tiers import TieredQueue

Make = Callable[[ServiceCounters], Order]

MAKERS: dict[str, Make] = {
    **{name: (lambda counters, name=name: make_order(name, counters)) for name in ORDERS},
    **{f"tiers of {name}": (lambda counters, name=name: TieredQueue(name, counters)) for name in ORDERS},
}


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def entry(number: int, tenant: str = "a", tier: int = 1) -> Entry:
    return Entry(f"e{number}", tenant, float(number), 10, 10, tier=tier)


def random_entries(seed: int, count: int = 40) -> list[Entry]:
    rng = random.Random(seed)
    return [entry(number, rng.choice("abcd"), rng.choice((0, 1, 2))) for number in range(count)]


def test_an_empty_order_has_no_head_and_nothing_to_pop(make: Make) -> None:
    order = make(ServiceCounters())
    assert len(order) == 0
    assert order.peek(0.0) is None
    assert order.remove("nobody") is None
    assert list(order.entries()) == []
    with pytest.raises(IndexError):
        order.pop(0.0)


@pytest.mark.parametrize("seed", range(5))
def test_every_entry_is_popped_exactly_once_and_is_what_peek_named(make: Make, seed: int) -> None:
    counters = ServiceCounters()
    order = make(counters)
    entries = random_entries(seed)
    rng = random.Random(seed)
    popped: list[Entry] = []
    waiting = list(entries)
    while waiting or len(order):
        if waiting and (not len(order) or rng.random() < 0.6):
            order.add(waiting.pop(0))
            continue
        named = order.peek(0.0)
        popped.append(order.pop(0.0))
        assert popped[-1] is named
        counters.charge(popped[-1].tenant_id, 1.0, rng.randint(1, 100))
    assert sorted(popped, key=lambda each: each.arrived_s) == entries
    assert len(order) == 0


def test_peek_changes_nothing(make: Make) -> None:
    asked, unasked = make(ServiceCounters()), make(ServiceCounters())
    for each in random_entries(3):
        asked.add(each)
        unasked.add(each)
        for _ in range(3):
            asked.peek(0.0)
    assert [asked.pop(0.0) for _ in range(40)] == [unasked.pop(0.0) for _ in range(40)]


def test_a_tenants_own_entries_keep_their_order(make: Make) -> None:
    counters = ServiceCounters()
    order = make(counters)
    for number in range(30):
        order.add(entry(number, "ab"[number % 2]))
    popped = []
    while len(order):
        popped.append(order.pop(0.0))
        counters.charge(popped[-1].tenant_id, 1.0, 7)
    for tenant in "ab":
        mine = [each.arrived_s for each in popped if each.tenant_id == tenant]
        assert mine == sorted(mine)


def test_an_entry_added_to_the_front_is_the_head_of_its_line(make: Make) -> None:
    order = make(ServiceCounters())
    for number in range(5):
        order.add(entry(number))
    preempted = order.pop(0.0)
    order.add(preempted, front=True)
    assert order.peek(0.0) is preempted
    assert [order.pop(0.0).entry_id for _ in range(5)] == ["e0", "e1", "e2", "e3", "e4"]


def test_a_removed_entry_never_surfaces(make: Make) -> None:
    order = make(ServiceCounters())
    entries = random_entries(11, 20)
    for each in entries:
        order.add(each)
    gone = {each.entry_id for each in entries[::3]}
    for entry_id in gone:
        removed = order.remove(entry_id)
        assert removed is not None
        assert removed.entry_id == entry_id
        assert order.remove(entry_id) is None
    assert len(order) == 20 - len(gone)
    assert not gone & {each.entry_id for each in order.entries()}
    assert not gone & {order.pop(0.0).entry_id for _ in range(20 - len(gone))}


def test_a_removed_entry_may_come_back_at_the_end_of_its_line(make: Make) -> None:
    order = make(ServiceCounters())
    for number in range(3):
        order.add(entry(number))
    back = order.remove("e0")
    assert back is not None
    order.add(back)
    assert [order.pop(0.0).entry_id for _ in range(3)] == ["e1", "e2", "e0"]


def test_an_entry_waits_once(make: Make) -> None:
    order = make(ServiceCounters())
    order.add(entry(0))
    with pytest.raises(ValueError, match="waits already"):
        order.add(entry(0))
    with pytest.raises(ValueError, match="waits already"):
        order.add(entry(0), front=True)
    assert len(order) == 1


def test_a_clone_is_independent_and_goes_on_identically(make: Make) -> None:
    counters = ServiceCounters()
    order = make(counters)
    for each in random_entries(5):
        order.add(each)
    for _ in range(10):
        counters.charge(order.pop(0.0).tenant_id, 1.0, 25)
    counters_copy = counters.clone()
    copy = order.clone(counters_copy)
    assert len(copy) == len(order)

    def drain(each: Order, charged: ServiceCounters) -> list[str]:
        served = []
        each.add(entry(100, "new"))
        while len(each):
            served.append(each.pop(0.0).entry_id)
            charged.charge(each_tenant[served[-1]], 1.0, 30)
        return served

    each_tenant = {each.entry_id: each.tenant_id for each in [*order.entries(), entry(100, "new")]}
    first = drain(copy, counters_copy)
    assert len(order) == 30, "draining the copy changed the original"
    assert drain(order, counters) == first
    assert counters.values() == counters_copy.values()


def test_an_unknown_order_is_named_with_those_that_exist() -> None:
    with pytest.raises(UnknownPolicy, match="no order 'lottery'; there are fcfs, vtc"):
        make_order("lottery", ServiceCounters())
    with pytest.raises(UnknownPolicy):
        TieredQueue("lottery", ServiceCounters())
