"""What a tenant had beside what it is charged: the two views of its one counter."""

from __future__ import annotations

import pytest

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.messages import TenantShare
from gateway.flow.controller import Dispatch, Ticket
from gateway.flow.window import Replica
from tests.support.builders import flow_controller

INPUT, OUTPUT = 60, 20
COST = INPUT + 2 * OUTPUT
LIFE = "engine/1"


class House:
    """The controller in front of one replica of eight places."""

    def __init__(self, *, reports: bool = True, life: str = LIFE) -> None:
        self.flow = flow_controller()
        self.replicas = [Replica("a", 8, 1_000_000, reports=reports, life=life)]
        self.number = 0

    def arrive(self, tenant: str, *, tier: int = 1, weight: float = 1.0) -> str:
        self.number += 1
        name = f"{tenant} {self.number}"
        entry = QueueEntry(name, tenant, float(self.number), INPUT, OUTPUT, tier, weight)
        assert self.flow.enqueue(Ticket(entry, 1, INPUT + OUTPUT), float(self.number)) is None
        return name

    def send(self, tenant: str, *, tier: int = 1, weight: float = 1.0) -> Dispatch:
        name = self.arrive(tenant, tier=tier, weight=weight)
        (turn,) = self.flow.dispatch(float(self.number), self.replicas)
        assert turn.ticket.entry.entry_id == name
        return turn

    def hear(self, tenant: str, share: TenantShare, life: str = LIFE) -> None:
        self.flow.heard("a", life, {tenant: share})

    def finish(self, name: str, input_tokens: int = INPUT, output_tokens: int = OUTPUT) -> None:
        self.flow.finish(name, input_tokens, output_tokens, float(self.number))


def views(turn: Dispatch) -> tuple[float, float]:
    """In cost tokens."""
    return turn.counter / COUNTER_SCALE, turn.had / COUNTER_SCALE


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_a_charge_ahead_is_not_taken_for_service(weight: float) -> None:
    house = House()
    assert views(house.send("acme", weight=weight)) == (COST / weight, 0)
    house.hear("acme", TenantShare(INPUT, 3))
    assert views(house.send("acme", weight=weight)) == (2 * COST / weight, (INPUT + 6) / weight)


def test_with_the_last_request_the_views_meet() -> None:
    house = House()
    first, second = (house.send("acme").ticket.entry.entry_id for _ in range(2))
    house.hear("acme", TenantShare(2 * INPUT, 10))
    house.finish(first, output_tokens=5)
    house.finish(second, output_tokens=9)  # four tokens of it were never reported
    counter, had = views(house.send("acme"))
    assert counter - had == COST
    assert counter == 2 * INPUT + 2 * 14 + COST


def test_what_passes_the_prediction_counts_once() -> None:
    house = House()
    name = house.send("acme").ticket.entry.entry_id
    house.hear("acme", TenantShare(INPUT, OUTPUT + 7))
    house.flow.progress(name, OUTPUT + 7, 1)
    assert views(house.send("acme")) == (2 * COST + 14, COST + 14)


def test_what_was_never_reported_stays_within_what_is_charged_for_the_others() -> None:
    house = House()
    names = [house.send("acme").ticket.entry.entry_id for _ in range(4)]
    for name in names[:3]:
        house.finish(name)
    assert house.flow.in_flight.ahead.of("acme") == COST * COUNTER_SCALE


def test_of_a_server_that_reports_nothing_progress_and_end_are_what_it_had() -> None:
    house = House(reports=False)
    name = house.send("acme").ticket.entry.entry_id
    assert views(house.send("acme")) == (2 * COST, 0)
    house.flow.progress(name, 4, 1)
    assert views(house.send("acme")) == (3 * COST, INPUT + 8)
    house.finish(name, INPUT - 10, 6)  # ten input tokens were cached there
    assert views(house.send("acme")) == (INPUT - 10 + 12 + 3 * COST, INPUT - 10 + 12)


def test_the_last_serial_of_the_tier_goes_back_to_the_engine() -> None:
    house = House()
    assert house.send("acme").heard == 0
    house.hear("acme", TenantShare(1, 0, {0: 70, 1: 90, 2: 70}))
    house.hear("acme", TenantShare(1, 0, {0: 75, 1: 95, 2: 75}))
    turns = [house.send("acme", tier=tier) for tier in (0, 1, 2)]
    assert [turn.heard for turn in turns] == [75, 95, 75]
    assert {turn.engine_life for turn in turns} == {LIFE}


def test_another_life_of_the_engine_begins_at_zero() -> None:
    house = House()
    house.hear("acme", TenantShare(1, 0, {1: 90}))
    house.replicas = [Replica("a", 8, 1_000_000, life="engine/2")]
    turn = house.send("acme")
    assert (turn.heard, turn.engine_life) == (0, "engine/2")
    house.hear("acme", TenantShare(1, 0, {1: 4}), "engine/2")
    assert house.send("acme").heard == 4


def test_a_lift_in_the_step_raises_both_views_in_that_tier_alone() -> None:
    house = House()
    house.send("acme")
    house.hear("acme", TenantShare(0, 0, {}, {1: 500 * COUNTER_SCALE}))
    assert views(house.send("acme")) == (500 + 2 * COST, 500)
    assert views(house.send("acme", tier=0)) == (3 * COST, 0)


def test_a_tenant_that_waits_is_not_lifted() -> None:
    house = House()
    house.send("acme")
    waits = house.arrive("acme")
    house.hear("acme", TenantShare(0, 0, {}, {1: 500 * COUNTER_SCALE}))
    (turn,) = house.flow.dispatch(float(house.number), house.replicas)
    assert (turn.ticket.entry.entry_id, *views(turn)) == (waits, 2 * COST, 0)


def test_no_lift_goes_above_the_first_that_waits() -> None:
    house = House()
    house.send("acme")
    for _ in range(3):
        house.send("flood")
    house.arrive("flood")
    house.hear("acme", TenantShare(0, 0, {}, {1: 10_000 * COUNTER_SCALE}))
    counters = house.flow.queue.tiers
    assert counters.counter("acme", 1) == counters.counter("flood", 1)


@pytest.mark.parametrize("foreseen", [3, 200])
def test_what_is_charged_follows_the_length_that_the_engine_foresees_and_what_was_had_does_not(
    foreseen: int,
) -> None:
    house = House()
    name = house.send("acme").ticket.entry.entry_id
    house.hear("acme", TenantShare(INPUT, 1))
    house.flow.progress(name, 1, 1)
    house.flow.foresee(name, (foreseen, 2 * foreseen), 1.0)
    assert views(house.send("acme")) == (INPUT + 2 * foreseen + COST, INPUT + 2)
    house.flow.progress(name, foreseen + 5, 1)
    house.hear("acme", TenantShare(0, foreseen + 4))
    assert views(house.send("acme")) == (INPUT + 2 * (foreseen + 5) + 2 * COST, INPUT + 2 * (foreseen + 5))
    house.finish(name, output_tokens=foreseen + 5)
    assert house.flow.placement.load("a").kv_tokens[1] == 2 * (INPUT + OUTPUT)
    house.flow.check()


@pytest.mark.parametrize(("told", "taken"), [((-9, 10), (4, 10)), ((10**9, 10**9), (1_000_000, 1_000_000))])
def test_an_engine_foresees_no_less_than_is_out_and_no_more_than_may_come(
    told: tuple[int, int], taken: tuple[int, int]
) -> None:
    house = House()
    name = house.send("acme").ticket.entry.entry_id
    house.flow.progress(name, 4, 1)
    house.flow.foresee(name, told, 1.0)
    (flight,) = house.flow.in_flight
    assert flight.foreseen_tokens == taken
    house.flow.foresee("unheard of", (5, 5), 1.0)


def test_the_log_tells_each_correction_and_the_most_that_was_charged_beyond_it() -> None:
    house = House()
    name = house.send("acme").ticket.entry.entry_id
    house.flow.progress(name, OUTPUT + 2, 1)
    house.flow.foresee(name, (OUTPUT + 10, OUTPUT + 20), 5.0)
    house.flow.progress(name, OUTPUT + 11, 1)
    house.finish(name, output_tokens=OUTPUT + 11)
    corrected, settled = list(house.flow.log.since(0, 10))[-2:]
    assert (corrected.event, corrected.at_s, corrected.cost) == ("correct", 5.0, COST + 20)
    assert corrected.counter == (COST + 4) * COUNTER_SCALE
    assert (settled.event, settled.cost, settled.beyond_cost) == ("settle", COST + 22, 4)


def test_the_log_tells_a_charge_that_a_forecast_confirms_after_output_came_beyond_the_one_before() -> None:
    house = House()
    name = house.send("acme").ticket.entry.entry_id
    for beyond in (3, 6):
        house.flow.progress(name, OUTPUT + beyond, 1)
        house.flow.foresee(name, (1, 1), 5.0)
        house.flow.foresee(name, (1, 1), 6.0)
    house.finish(name, output_tokens=OUTPUT + 6)
    records = [record for record in house.flow.log.since(0, 10) if record.event in ("correct", "settle")]
    assert [record.cost for record in records] == [COST + 6, COST + 12, COST + 12]
    assert records[-1].beyond_cost == 6
