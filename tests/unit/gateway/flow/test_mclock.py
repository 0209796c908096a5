"""Reserved service: when it is due."""

from __future__ import annotations

import pytest

from gateway.flow import mclock
from gateway.flow.mclock import MclockReservations


def test_the_smallest_tag_goes_first_then_the_name() -> None:
    due = MclockReservations(10.0)
    for tenant, at_s in (("c", 1.0), ("b", 2.0), ("a", 2.0)):
        due.arrives(tenant, 10.0, at_s, 0)
    assert due.first_due(0.5, set()) is None
    assert due.first_due(3.0, set()) == "c"
    assert due.first_due(3.0, {"c"}) == "a"
    due.granted("c", 100, 3.0)
    assert due.tag_s("c") == 1.0 + 100 / 10.0
    assert due.first_due(10.9, {"a", "b"}) is None
    assert due.first_due(11.0, {"a", "b"}) == "c"


def test_a_correction_of_the_cost_moves_the_tag() -> None:
    due = MclockReservations(10.0)
    due.arrives("a", 10.0, 0.0, 0)
    due.granted("a", 100, 0.0)
    due.leaves("a")
    due.corrected("a", -40)
    assert due.tag_s("a") == 6.0
    due.ended("a", 6.0)
    due.check({}, {})


def test_idle_time_earns_nothing_but_what_runs_on_the_reservation_is_not_idle() -> None:
    due = MclockReservations(10.0)
    due.arrives("a", 10.0, 0.0, 0)
    due.granted("a", 100, 0.0)
    due.leaves("a")
    due.arrives("a", 10.0, 50.0, 0)
    assert due.tag_s("a") == 10.0, "it ran all the time"
    due.ended("a", 55.0)
    due.leaves("a")
    due.arrives("a", 10.0, 99.0, 0)
    assert due.tag_s("a") == 99.0


def test_who_was_held_back_is_owed_the_burst_and_no_more() -> None:
    due = MclockReservations(4.0)
    due.arrives("a", 10.0, 0.0, 0)
    due.granted("a", 10, 100.0)
    assert due.tag_s("a") == 100.0 - 4.0 + 1.0


def test_a_reservation_can_be_given_and_taken_away_while_its_tenant_waits() -> None:
    due = MclockReservations(4.0)
    due.arrives("a", 0.0, 0.0, 0)
    assert due.tag_s("a") is None
    due.arrives("a", 10.0, 1.0, 1)
    assert due.first_due(1.0, set()) == "a"
    due.check({"a": 2}, {})
    due.arrives("a", 0.0, 2.0, 2)
    assert due.first_due(2.0, set()) is None
    due.check({"a": 3}, {})


def test_tags_that_say_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mclock, "MAX_IDLE_TAGS", 3)
    due = MclockReservations(4.0)
    for number in range(10):
        due.arrives(f"t{number}", 10.0, 0.0, 0)
        due.granted(f"t{number}", 10 if number < 5 else 100_000, 0.0)
        due.leaves(f"t{number}")
    for number in range(10):
        due.ended(f"t{number}", 60.0)
    kept = [number for number in range(10) if due.tag_s(f"t{number}") is not None]
    assert kept == [5, 6, 7, 8, 9], "a tag in the future is a debt"


def test_a_negative_burst_is_refused() -> None:
    with pytest.raises(ValueError, match="reservation_burst_s must be at least 0"):
        MclockReservations(-1.0)
