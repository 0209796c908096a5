"""Lag: tenants that return to the queue below the others, by how much, and their places at the engine.

The flow controller alone, on one replica of eight places; service is charged directly where only counters
matter.
"""

from __future__ import annotations

import pytest

from engine.entry import OUTPUT_TOKEN_COST, QueueEntry
from engine.messages import TenantShare
from engine.scheduling.counters import COUNTER_SCALE, ServiceCounters
from gateway.flow.controller import Dispatch, Ticket
from gateway.flow.window import OWED_KV_PART, OWED_PART, Replica
from tests.support.builders import flow_controller

PLACES = 8
REPLICAS = [Replica("a", PLACES, 1_000_000)]
INPUT, OUTPUT = 60, 20
COST = INPUT + 2 * OUTPUT
KV = INPUT + OUTPUT
UNDER_WAY_COST = PLACES * KV * OUTPUT_TOKEN_COST
"""Of as many tokens as are under way: VTC's U."""


class House:
    """The controller, and who sends what."""

    def __init__(self, order: str = "vtc", places: int = PLACES) -> None:
        self.counters = ServiceCounters()
        self.flow = flow_controller(order, self.counters)
        self.replicas = [Replica("a", places, 1_000_000)]
        self.number = 0

    def arrive(self, tenant: str, count: int = 1, *, weight: float = 1.0, tier: int = 1) -> list[str]:
        names = []
        for _ in range(count):
            self.number += 1
            names.append(f"{tenant} {self.number}")
            entry = QueueEntry(names[-1], tenant, float(self.number), INPUT, OUTPUT, tier, weight)
            assert self.flow.enqueue(Ticket(entry, 1, KV), float(self.number)) is None
        return names

    def dispatch(self) -> list[Dispatch]:
        turns = self.flow.dispatch(float(self.number), self.replicas)
        self.flow.check()
        return turns

    def turns(self) -> list[str]:
        return [turn.ticket.entry.entry_id for turn in self.dispatch()]

    def finish(self, name: str) -> None:
        self.flow.progress(name, OUTPUT, 0)
        self.flow.finish(name, INPUT, OUTPUT, float(self.number))

    def hear(self, tenant: str, cost: int) -> None:
        """The engine reports as much service."""
        self.flow.heard("a", "1", {tenant: TenantShare(cost, 0)})

    def stands(self, tenant: str) -> float:
        """Its counter in the line of standard requests, in cost tokens per weight."""
        return self.flow.queue_clone(self.counters).counter(tenant, 1) / COUNTER_SCALE


def under_flood(weight: float = 1.0) -> House:
    """`light` has one request under way; `flood` has all other places, much service, and a long line."""
    house = House(places=PLACES - 1)
    house.arrive("light", weight=weight)
    house.arrive("flood", PLACES - 1 + 20)
    assert len(house.dispatch()) == PLACES - 1
    house.counters.charge("flood", 1.0, 100_000)
    house.replicas = REPLICAS
    assert len(house.dispatch()) == 1
    return house


@pytest.mark.parametrize("weight", [1.0, 1.6, 0.5])
def test_a_tenant_with_something_under_way_comes_back_below_the_others_by_at_most_what_is_under_way(
    weight: float,
) -> None:
    house = under_flood(weight)
    house.arrive("light", weight=weight)
    assert house.stands("flood") - house.stands("light") == pytest.approx(UNDER_WAY_COST / weight)


def test_what_it_had_no_less_is_no_lag() -> None:
    house = under_flood()
    house.counters.charge("light", 1.0, round(house.stands("flood") - house.stands("light")) - 50)
    house.arrive("light")
    assert house.stands("flood") - house.stands("light") == pytest.approx(50)


def test_a_tenant_with_nothing_under_way_was_idle_once_the_others_had_as_much_as_is_under_way() -> None:
    """Requests that come at random leave moments without any, which are not idleness."""
    house = under_flood()
    house.finish("light 1")
    house.dispatch()  # flood has all places now
    house.counters.charge("flood", 1.0, UNDER_WAY_COST - COST - 1)
    (last,) = house.arrive("light")
    assert house.stands("flood") - house.stands("light") == pytest.approx(UNDER_WAY_COST)
    assert house.flow.cancel(last, float(house.number))
    house.counters.charge("flood", 1.0, 1)
    house.arrive("light")
    assert house.flow.in_flight.ahead.of("flood") == PLACES * COST * COUNTER_SCALE
    assert house.stands("flood") - house.stands("light") == pytest.approx(PLACES * COST)


def test_between_two_requests_on_an_idle_pool_nothing_is_saved_up() -> None:
    """What is under way bounds what is owed, and nothing is."""
    house = House()
    house.arrive("light")
    house.dispatch()
    house.counters.charge("flood", 1.0, 100_000)
    house.finish("light 1")
    house.arrive("flood")
    house.arrive("light")
    assert house.stands("light") == house.stands("flood")


def test_a_newcomer_begins_where_the_first_that_waits_stands_by_what_it_had() -> None:
    house = under_flood()
    house.hear("flood", COST)
    house.arrive("new")
    assert house.stands("flood") - house.stands("new") == pytest.approx((PLACES - 2) * COST)


def test_of_equals_a_newcomer_goes_before_a_tenant_with_something_in_flight_and_after_others() -> None:
    house = under_flood()
    house.hear("flood", (PLACES - 1) * COST)
    (first,) = house.arrive("new")
    (second,) = house.arrive("newer")
    assert house.stands("new") == house.stands("newer") == pytest.approx(house.stands("flood"))
    assert house.turns()[:2] == [first, second]


def test_lag_is_told_once_and_spent() -> None:
    """A tenant that goes on waiting is not lifted again, and pays for every turn."""
    house = under_flood()
    house.arrive("light", 6)
    before = house.stands("light")
    assert [turn.is_owed for turn in house.dispatch()] == [True] * (PLACES // OWED_PART)
    assert house.stands("light") == pytest.approx(before + COST * PLACES // OWED_PART)


def test_who_is_owed_goes_into_a_full_window_and_says_so_to_the_engine() -> None:
    house = under_flood()
    house.arrive("light")
    (turn,) = house.dispatch()
    assert (turn.ticket.entry.tenant_id, turn.is_owed, turn.by_reservation) == ("light", True, False)
    assert house.flow.placement.load("a").sequences[1] == PLACES + 1


def test_places_taken_twice_over_are_a_part_of_all() -> None:
    house = under_flood()
    house.arrive("light", 20)
    assert len(house.turns()) == PLACES // OWED_PART
    house.finish("flood 8")
    assert house.turns() == ["light 33"], "one that ends makes room for one more"


def test_whoever_would_stand_above_the_last_turn_with_this_request_paid_is_not_owed() -> None:
    """By the counters; nor by places, since it has its half of them."""
    house = House(places=PLACES // 2)
    house.arrive("light", PLACES // 2)
    house.dispatch()
    house.arrive("flood", 20)
    house.replicas = [Replica("a", PLACES - 1, 1_000_000)]
    house.dispatch()
    house.counters.charge("flood", 1.0, 100_000)
    house.replicas = REPLICAS
    assert len(house.dispatch()) == 1
    began = house.stands("flood") - COST
    house.counters.charge("light", 1.0, round(began - COST - house.stands("light")) + 1)
    house.arrive("light")
    assert house.turns() == []
    house.counters.charge("light", 1.0, -1)
    assert len(house.turns()) == 1


def test_an_engine_that_pauses_nobody_gets_no_more_than_its_window() -> None:
    house = under_flood()
    house.replicas = [Replica("a", PLACES, 1_000_000, pauses=False)]
    house.arrive("light")
    assert house.turns() == []


def test_a_full_kv_window_is_wider_by_a_part_for_who_is_owed() -> None:
    house = under_flood()
    house.replicas = [Replica("a", PLACES, PLACES * KV)]
    house.arrive("light", PLACES)
    assert len(house.turns()) == PLACES // OWED_KV_PART


def not_owed_by_the_counters(weight: float = 1.0) -> House:
    """`light` is next, and stands above what the last turn by order was measured by."""
    house = under_flood(weight)
    house.counters.charge("light", 1.0, 101_000)
    house.counters.charge("flood", 1.0, 100_000)
    return house


def places_of(house: House, tenant: str) -> int:
    return house.flow.placement.load("a").live.get(tenant, [0, 0, 0])[1]


def test_a_tenant_within_its_part_of_the_places_is_owed_one_whatever_its_counter() -> None:
    """Of eight places two tenants have four each."""
    house = not_owed_by_the_counters()
    house.arrive("light", 20)
    turns = house.dispatch()
    assert {turn.ticket.entry.tenant_id for turn in turns if turn.is_owed} == {"light"}
    assert places_of(house, "light") == PLACES // 2


@pytest.mark.parametrize(("weight", "places"), [(1.0, 4), (3.0, 5), (1 / 3, 2)])
def test_its_part_of_the_places_goes_by_weight(weight: float, places: int) -> None:
    """With three times the weight six: the window is wider by four."""
    house = not_owed_by_the_counters(weight)
    house.arrive("light", 20, weight=weight)
    house.dispatch()
    assert places_of(house, "light") == places


def test_where_there_are_more_tenants_than_places_none_is_owed_one_by_its_part() -> None:
    house = under_flood()
    house.hear("flood", (PLACES - 1) * COST)  # what it is charged it had: none is owed by the counters
    for number in range(PLACES):
        house.arrive(f"new {number}")
    assert house.turns() == []


def test_new_tenants_take_no_more_than_the_wider_window() -> None:
    house = under_flood()
    for number in range(40):
        house.arrive(f"new {number}")
        house.dispatch()
    assert house.flow.placement.load("a").sequences[1] <= PLACES + PLACES // OWED_PART


def test_no_order_but_those_that_go_by_counters_owes_anything() -> None:
    house = House("fcfs")
    house.arrive("light")
    house.dispatch()
    house.arrive("flood", 20)
    house.dispatch()
    house.counters.charge("flood", 1.0, 100_000)
    house.arrive("light")
    assert house.turns() == []


def test_turns_that_are_owed_do_not_move_what_others_are_measured_by() -> None:
    """Else a tenant that catches up would pull the measure down, and end what it is owed."""
    house = under_flood()
    house.arrive("light", 2)
    assert len(house.turns()) == 2
