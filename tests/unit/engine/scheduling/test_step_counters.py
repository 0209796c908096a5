"""Step counters: words, serials, lifts, and the level start of a contest."""

from __future__ import annotations

from engine.scheduling.step_counters import StepCounters


def test_without_a_word_it_is_the_service_here() -> None:
    counters = StepCounters()
    counters.serve("a", 5)
    counters.serve_all({"a": 2, "b": 3})
    assert (counters.value(1, "a"), counters.value(0, "a"), counters.value(1, "b")) == (7, 7, 3)


def test_a_word_and_what_came_after_it() -> None:
    counters = StepCounters()
    counters.serve("a", 50)
    told = counters.serial(1, "a")
    counters.serve("a", 7)
    counters.hear(1, "a", 1000, told)
    assert counters.value(1, "a") == 1007
    counters.serve("a", 3)
    assert counters.value(1, "a") == 1010
    counters.hear(1, "a", 1010, counters.serial(1, "a"))
    assert counters.value(1, "a") == 1010, "the views meet"


def test_a_gateway_that_heard_of_no_service_has_counted_none_before_its_first_word() -> None:
    counters = StepCounters()
    counters.serve_all({"much": 10_000, "little": 10})
    for tenant_id in ("much", "little"):
        counters.hear(1, tenant_id, 3, 0)
        assert counters.value(1, tenant_id) == 3, "a restarted gateway's counters begin anew"
    counters.serve("much", 5)
    counters.hear(1, "much", 4, 0)
    assert counters.value(1, "much") == 9, "what came after its first word counts"
    counters.hear(1, "much", 9, counters.serial(1, "much"))
    assert counters.value(1, "much") == 9


def test_each_gateway_that_connects_begins_anew() -> None:
    counters = StepCounters()
    counters.hear(1, "a", 3, 0)
    counters.serve("a", 50)
    counters.begin_words()
    counters.hear(1, "a", 3, 0)
    assert counters.value(1, "a") == 3


def test_a_lift_is_one_tiers_own_part_of_the_serial_and_told_once() -> None:
    counters = StepCounters()
    counters.serve("a", 5)
    counters.lift(1, "a", 9)
    counters.lift(1, "a", 8)
    assert (counters.value(1, "a"), counters.value(2, "a")) == (9, 5)
    assert counters.serials("a") == {0: 5, 1: 9, 2: 5}, "of every tier: a word may come in any"
    assert counters.take_raised() == {(1, "a"): 4}
    assert counters.take_raised() == {}


def test_a_serial_of_an_engine_before_this_one_takes_nothing_away() -> None:
    counters = StepCounters()
    counters.serve("a", 5)
    counters.hear(1, "a", 1000, 70)
    assert counters.value(1, "a") == 1000
    counters.serve("a", 3)
    assert counters.value(1, "a") == 1003


def test_a_lift_that_the_owner_did_not_take_is_taken_back_by_its_next_word() -> None:
    counters = StepCounters()
    counters.lift(1, "a", 90)
    counters.hear(1, "a", 0, counters.serial(1, "a"))
    assert counters.value(1, "a") == 0


def test_after_a_contested_step_those_served_whole_stand_with_the_lowest_held_back() -> None:
    counters = StepCounters()
    counters.serve_all({"whole": 1, "above": 90, "low": 40, "high": 60})
    counters.settle(1, ["whole", "above"], ["low", "high"])
    assert [counters.value(1, each) for each in ("whole", "above", "low", "high")] == [40, 90, 40, 60]


def test_a_first_contest_begins_level() -> None:
    counters = StepCounters()
    counters.serve_all({"a": 100, "b": 3})
    counters.contend(1, ["a", "b"], 5)
    assert (counters.value(1, "a"), counters.value(1, "b")) == (100, 100)
    counters.serve("a", 10)
    counters.contend(1, ["a", "b"], 6)
    assert counters.value(1, "b") == 100, "the next step is the same contest"


def test_a_later_contest_goes_on_where_the_last_one_ended() -> None:
    counters = StepCounters()
    counters.contend(1, ["a", "b"], 1)
    counters.serve("a", 2)
    counters.settle(1, [], ["a", "b"])
    counters.serve_all({"a": 500, "b": 10})
    counters.contend(1, ["a", "b"], 9)
    assert (counters.value(1, "a"), counters.value(1, "b")) == (502, 500), "what it was behind, it is behind"


def test_one_that_came_between_two_contests_stands_no_lower_than_those_of_the_last() -> None:
    counters = StepCounters()
    counters.contend(1, ["a"], 1)
    counters.settle(1, [], ["a"])
    counters.serve("a", 70)
    counters.contend(1, ["a", "b"], 9)
    assert counters.value(1, "b") == 70


def test_what_is_forgotten_costs_credit_and_hands_out_none() -> None:
    counters = StepCounters(max_tenants=4)
    for number in range(9):
        counters.serve(f"t{number}", 10 * number)
    assert all(counters.value(1, f"t{number}") >= 10 * number for number in range(9))
