"""Reserved service: when it is due."""

from __future__ import annotations

import pytest

from engine.entry import QueueEntry
from gateway.flow import mclock
from gateway.flow.mclock import MclockReservations
from gateway.flow.types import Ticket

NONE_WAIT = (0, 0, 0)


def ticket(tenant: str, rate: float, tier: int = 1, reserved_tier: int | None = None) -> Ticket:
    entry = QueueEntry(f"{tenant} {tier}", tenant, 0.0, 1, 1, tier)
    return Ticket(entry, 1, 2, reserved_cost_per_s=rate, reserved_tier=reserved_tier)


def test_the_smallest_tag_goes_first_then_the_name() -> None:
    due = MclockReservations(10.0)
    for tenant, at_s in (("c", 1.0), ("b", 2.0), ("a", 2.0)):
        due.arrives(ticket(tenant, 10.0), at_s, NONE_WAIT)
    assert due.first_due(0.5, set()) is None
    assert due.first_due(3.0, set()) == "c"
    assert due.first_due(3.0, {"c"}) == "a"
    due.granted("c", 100, 3.0)
    assert due.tag_s("c") == 1.0 + 100 / 10.0
    assert due.first_due(10.9, {"a", "b"}) is None
    assert due.first_due(11.0, {"a", "b"}) == "c"


def test_a_correction_of_the_cost_moves_the_tag() -> None:
    due = MclockReservations(10.0)
    due.arrives(ticket("a", 10.0), 0.0, NONE_WAIT)
    due.granted("a", 100, 0.0)
    due.leaves(ticket("a", 10.0).entry)
    due.corrected("a", -40)
    assert due.tag_s("a") == 6.0
    due.ended("a", 6.0)
    due.check({}, {})


def test_idle_time_earns_nothing_but_what_runs_on_the_reservation_is_not_idle() -> None:
    due = MclockReservations(10.0)
    due.arrives(ticket("a", 10.0), 0.0, NONE_WAIT)
    due.granted("a", 100, 0.0)
    due.leaves(ticket("a", 10.0).entry)
    due.arrives(ticket("a", 10.0), 50.0, NONE_WAIT)
    assert due.tag_s("a") == 10.0, "it ran all the time"
    due.ended("a", 55.0)
    due.leaves(ticket("a", 10.0).entry)
    due.arrives(ticket("a", 10.0), 99.0, NONE_WAIT)
    assert due.tag_s("a") == 99.0


def test_who_was_held_back_is_owed_the_burst_and_no_more() -> None:
    due = MclockReservations(4.0)
    due.arrives(ticket("a", 10.0), 0.0, NONE_WAIT)
    due.granted("a", 10, 100.0)
    assert due.tag_s("a") == 100.0 - 4.0 + 1.0


def test_a_reservation_can_be_given_and_taken_away_while_its_tenant_waits() -> None:
    due = MclockReservations(4.0)
    due.arrives(ticket("a", 0.0), 0.0, NONE_WAIT)
    assert due.tag_s("a") is None
    due.arrives(ticket("a", 10.0), 1.0, (0, 1, 0))
    assert due.first_due(1.0, set()) == "a"
    due.check({"a": [0, 2, 0]}, {})
    due.arrives(ticket("a", 0.0), 2.0, (0, 2, 0))
    assert due.first_due(2.0, set()) is None
    due.check({"a": [0, 3, 0]}, {})


def test_a_reservation_for_a_tier_is_due_by_the_requests_of_that_tier_alone() -> None:
    due = MclockReservations(4.0)
    due.arrives(ticket("a", 10.0, 2, reserved_tier=0), 0.0, NONE_WAIT)
    assert due.first_due(5.0, set()) is None
    due.arrives(ticket("a", 10.0, 0, reserved_tier=0), 5.0, (0, 0, 1))
    assert (due.first_due(5.0, set()), due.tier("a")) == ("a", 0)
    assert due.tag_s("a") == 5.0, "what waited in another tier earned nothing"
    due.granted("a", 100, 5.0)
    due.leaves(ticket("a", 10.0, 0).entry)
    due.ended("a", 6.0)
    due.arrives(ticket("a", 10.0, 2, reserved_tier=0), 7.0, (0, 0, 1))
    assert due.tag_s("a") == 15.0, "the clock goes on beside requests of other tiers"
    assert due.first_due(99.0, set()) is None
    due.check({"a": [0, 0, 2]}, {})


def test_a_request_that_moves_between_tiers_gains_and_loses_the_reservation() -> None:
    due = MclockReservations(4.0)
    due.moves("a", 1, 2, 0.0)
    due.arrives(ticket("a", 10.0, 2, reserved_tier=0), 0.0, NONE_WAIT)
    due.moves("a", 2, 0, 30.0)
    assert due.first_due(30.0, set()) == "a"
    assert due.tag_s("a") == 30.0, "it earned nothing before"
    due.moves("a", 0, 1, 31.0)
    assert due.first_due(99.0, set()) is None
    due.check({"a": [0, 1, 0]}, {})


def test_a_move_within_a_reservation_for_all_tiers_leaves_its_tag_alone() -> None:
    due = MclockReservations(4.0)
    due.arrives(ticket("a", 10.0, 2), 0.0, NONE_WAIT)
    due.moves("a", 2, 0, 30.0)
    assert due.tag_s("a") == 0.0
    assert due.first_due(30.0, set()) == "a"


def test_another_tier_for_a_reservation_makes_nothing_due_that_waited_without_one() -> None:
    due = MclockReservations(100.0)
    due.arrives(ticket("a", 10.0, 2, reserved_tier=0), 0.0, NONE_WAIT)
    due.arrives(ticket("a", 10.0, 2, reserved_tier=2), 50.0, (0, 0, 1))
    assert due.tag_s("a") == 50.0
    assert due.first_due(50.0, set()) == "a"
    due.check({"a": [0, 0, 2]}, {})
    due.arrives(ticket("a", 10.0, 1), 60.0, (0, 0, 2))
    assert due.tier("a") is None


def test_tags_that_say_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mclock, "MAX_IDLE_TAGS", 3)
    due = MclockReservations(4.0)
    for number in range(10):
        due.arrives(ticket(f"t{number}", 10.0), 0.0, NONE_WAIT)
        due.granted(f"t{number}", 10 if number < 5 else 100_000, 0.0)
        due.leaves(ticket(f"t{number}", 10.0).entry)
    for number in range(10):
        due.ended(f"t{number}", 60.0)
    kept = [number for number in range(10) if due.tag_s(f"t{number}") is not None]
    assert kept == [5, 6, 7, 8, 9], "a tag in the future is a debt"


def test_a_negative_burst_is_refused() -> None:
    with pytest.raises(ValueError, match="reservation_burst_s must be at least 0"):
        MclockReservations(-1.0)
