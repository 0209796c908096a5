"""Contract of `engine.scheduling.order.base.Order`, for every order.

Parametrised over ORDERS: a new order is held to it by being named there.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.scheduling.claims import ALL, SAFE
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order.base import Order
from engine.scheduling.policy import ORDERS, UnknownPolicy, make_order
from engine.scheduling.tiers import TieredQueue

Make = Callable[[ServiceCounters], Order]

MAKERS: dict[str, Make] = {
    **{name: (lambda counters, name=name: make_order(name, counters)) for name in ORDERS},
    **{f"tiers of {name}": (lambda counters, name=name: TieredQueue(name, counters)) for name in ORDERS},
}

BY_RANK = ("fcfs", "sjf", "srpt", "las", "edf", "priority", "vtc")
"""Orders whose rank says all: the smallest is next."""


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def entry(number: int, tenant: str = "a", tier: int = 1) -> QueueEntry:
    return QueueEntry(f"e{number}", tenant, float(number), 10, 10, tier=tier)


def random_entries(seed: int, count: int = 40) -> list[QueueEntry]:
    rng = random.Random(seed)
    return [entry(number, rng.choice("abcd"), rng.choice((0, 1, 2))) for number in range(count)]


def mixed_entries(seed: int, count: int = 60) -> list[QueueEntry]:
    """Of all sizes, fresh and half done, with and without deadlines, some of it nonsense."""
    rng = random.Random(seed)
    return [
        QueueEntry(
            f"m{number}",
            rng.choice("abcd"),
            number / 4,
            rng.choice((0, 1, 50, 5000)),
            rng.choice((0, 1, 40, 900)),
            tier=rng.choice((0, 1, 2)),
            weight=rng.choice((0.5, 1.0, 3.0)),
            predicted_high_tokens=rng.choice((0, 10, 2000)),
            deadline_s=rng.choice((None, -5.0, 3.0, 1e9)),
            emitted_tokens=rng.choice((0, 30, 2000)),
            attained_tokens=rng.choice((0, 100, 7000)),
            cached_tokens=rng.choice((0, 16, 6000)),
            locality=rng.choice((0, 1, 2)),
        )
        for number in range(count)
    ]


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
    popped: list[QueueEntry] = []
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


def test_equal_entries_of_a_tenant_keep_their_order(make: Make) -> None:
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


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_removed_entry_may_come_back_at_the_end_of_its_line(name: str) -> None:
    order = MAKERS[name](ServiceCounters())
    for number in range(3):
        order.add(entry(number))
    back = order.remove("e0")
    assert back is not None
    order.add(back)
    # What is due by its arrival is due whenever it joined.
    expected = ["e0", "e1", "e2"] if name.endswith("edf") else ["e1", "e2", "e0"]
    assert [order.pop(0.0).entry_id for _ in range(3)] == expected


def test_an_entry_waits_once(make: Make) -> None:
    order = make(ServiceCounters())
    order.add(entry(0))
    with pytest.raises(ValueError, match="waits already"):
        order.add(entry(0))
    with pytest.raises(ValueError, match="waits already"):
        order.add(entry(0), front=True)
    assert len(order) == 1


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_clone_is_independent_and_goes_on_identically(make: Make, *, is_pickled: bool) -> None:
    """Also where it goes to another process, in one pickle with its counters."""
    counters = ServiceCounters()
    order = make(counters)
    for each in random_entries(5):
        order.add(each)
    for _ in range(10):
        counters.charge(order.pop(0.0).tenant_id, 1.0, 25)
    counters_copy = counters.clone()
    copy = order.clone(counters_copy)
    if is_pickled:
        copy, counters_copy = pickle.loads(pickle.dumps((copy, counters_copy)))
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


@pytest.mark.parametrize("seed", range(3))
def test_somebody_is_named_as_long_as_somebody_waits(make: Make, seed: int) -> None:
    counters = ServiceCounters()
    order = make(counters)
    rng = random.Random(seed)
    for each in mixed_entries(seed):
        order.add(each)
        if rng.random() < 0.3:
            order.remove(rng.choice([waiting.entry_id for waiting in order.entries()]))
    counters.charge("a", 1.0, 10**9)
    while len(order):
        now_s = rng.choice((-1.0, 0.0, 1e6))
        named = order.peek(now_s)
        assert named is not None
        counters.charge(order.pop(now_s).tenant_id, 1.0, rng.choice((-500, 0, 10**6)))
    assert order.peek(0.0) is None


@pytest.mark.parametrize("seed", range(3))
def test_to_take_by_name_what_peek_named_is_to_pop_it(make: Make, seed: int) -> None:
    sides = []
    for by_name in (False, True):
        counters = ServiceCounters()
        order = make(counters)
        rng = random.Random(seed)
        taken: list[QueueEntry] = []
        coming = mixed_entries(seed)
        while coming or len(order):
            if coming and rng.random() < 0.6:
                order.add(coming.pop())
            elif (named := order.peek(0.0)) is not None:
                entry = order.remove(named.entry_id) if by_name else order.pop(0.0)
                assert entry is not None
                taken.append(entry)
                counters.charge(entry.tenant_id, entry.weight, entry.predicted_cost)
                if rng.random() < 0.2:
                    back = replace(entry, entry_id=entry.entry_id + "'", attained_tokens=90)
                    order.add(back, front=True)
        sides.append(taken)
    assert sides[0] == sides[1]
    assert len(sides[0]) > 60


def test_every_order_says_what_it_is(make: Make) -> None:
    order = make(ServiceCounters())
    assert SAFE <= order.claims <= ALL
    assert order.name in (*ORDERS, "tiers")
    assert order.operations == 0


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_an_order_has_the_name_it_is_asked_for_by(name: str) -> None:
    assert make_order(name, ServiceCounters()).name == name


def test_a_rank_is_numbers_and_asking_for_it_changes_nothing(make: Make) -> None:
    asked, unasked = make(ServiceCounters()), make(ServiceCounters())
    entries = mixed_entries(2)
    for each in entries:
        asked.add(each)
        unasked.add(each)
        for subject in (each, entries[0], entries[-1]):
            rank = asked.rank(subject, 1.0)
            assert rank
            assert all(math.isfinite(number) for number in rank)
            assert rank == asked.rank(subject, 1.0)
    assert [asked.pop(0.0) for _ in range(60)] == [unasked.pop(0.0) for _ in range(60)]


@pytest.mark.parametrize("name", BY_RANK)
def test_where_the_rank_says_all_nobody_stands_before_the_head(name: str) -> None:
    counters = ServiceCounters()
    order = make_order(name, counters)
    for each in mixed_entries(4):
        order.add(each)
    while len(order) > 1:
        head = order.pop(0.0)
        assert all(order.rank(head, 0.0) <= order.rank(each, 0.0) for each in order.entries())
        counters.charge(head.tenant_id, 1.0, head.predicted_cost)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_interrupts_who_would_interrupt_him(make: Make, seed: int) -> None:
    counters = ServiceCounters()
    order = make(counters)
    entries = mixed_entries(seed)
    for each in entries:
        order.add(each)
        counters.charge("a", 1.0, 4000)
    # Half of them run: known to the order, and further than when they left it.
    running = [order.pop(0.0) for _ in range(30)]
    running = [
        replace(
            each,
            emitted_tokens=each.emitted_tokens + 7,
            attained_tokens=each.attained_tokens + 7 + each.input_tokens,
            computed_tokens=each.input_tokens,
        )
        for each in running
    ]
    interrupted = 0
    for one in order.entries():
        for other in running:
            assert not (order.outranks(one, other, 0.0) and order.outranks(other, one, 0.0))
            interrupted += order.outranks(one, other, 0.0)
        assert not order.outranks(one, one, 0.0)
    assert order.interrupts or not interrupted


@pytest.mark.parametrize(
    "name", [name for name in sorted(ORDERS) if ORDERS[name](ServiceCounters()).interrupts]
)
def test_an_order_that_interrupts_does(name: str) -> None:
    order = make_order(name, ServiceCounters())
    fresh = QueueEntry("fresh", "a", 1.0, 4, 4, deadline_s=1.0)
    order.add(fresh)
    old = QueueEntry("old", "a", 0.0, 4000, 4000, computed_tokens=600, attained_tokens=600)
    assert order.outranks(fresh, old, 0.0)
    assert not order.outranks(old, fresh, 0.0)


def test_who_interrupted_has_earned_some_tokens_before_it_is_interrupted_back(make: Make) -> None:
    """No ping-pong: right after the swap, the one that gave way does not take the place back."""
    order = make(ServiceCounters())
    entries = mixed_entries(8)
    for each in entries:
        order.add(each)
    swaps = 0
    for waiting in entries:
        for running in entries:
            if waiting is not running and order.outranks(waiting, running, 0.0):
                begun = replace(waiting, attained_tokens=waiting.attained_tokens + 1, computed_tokens=1)
                assert not order.outranks(running, begun, 0.0)
                swaps += 1
    assert swaps > 0 or not order.interrupts


def test_an_unknown_order_is_named_with_those_that_exist() -> None:
    with pytest.raises(UnknownPolicy, match="no order 'lottery'; there are buckets, dlpm, drr"):
        make_order("lottery", ServiceCounters())
    with pytest.raises(UnknownPolicy):
        TieredQueue("lottery", ServiceCounters())
