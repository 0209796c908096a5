"""Orders by length, service and deadline rank as their rules say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order.base import Order
from engine.scheduling.order.buckets import LONGEST_TOKENS, Buckets
from engine.scheduling.order.edf import DEFAULT_S, HORIZON_S, Edf
from engine.scheduling.order.hrrn import Hrrn, size_class
from engine.scheduling.order.las import QUANTUM_TOKENS, Las
from engine.scheduling.order.mlfq import LEVELS, Mlfq
from engine.scheduling.order.priority import (
    AGEING,
    BUSY_ENTRIES,
    HISTORY_CAP_COST,
    HISTORY_WEIGHT,
    MARGIN_TOKENS,
    TIER_TOKENS,
    URGENCY_TOKENS_PER_S,
    Priority,
)
from engine.scheduling.order.recent import MAX_REMEMBERED
from engine.scheduling.order.sizes import remaining_tokens
from engine.scheduling.order.sjf import Sjf
from engine.scheduling.order.srpt import PROTECTED_SHARE, Srpt


def entry(name: str, prompt: int = 10, output: int = 10, **facts: float | str | None) -> QueueEntry:
    plain = QueueEntry(name, "a", 0.0, prompt, output)
    return replace(plain, **facts)  # type: ignore[arg-type]


def drain(order: Order) -> list[str]:
    return [order.pop(0.0).entry_id for _ in range(len(order))]


# ---------------------------------------------------------------- sizes, sjf, srpt


def test_remaining_is_what_is_not_computed_and_not_emitted_and_never_nothing() -> None:
    assert remaining_tokens(entry("e", 100, 40)) == 140
    assert remaining_tokens(entry("e", 100, 40, cached_tokens=60)) == 80
    assert remaining_tokens(entry("e", 100, 40, computed_tokens=100, emitted_tokens=30)) == 10
    assert remaining_tokens(entry("e", 100, 40, computed_tokens=100, emitted_tokens=70)) == 1
    assert remaining_tokens(entry("e", 0, 0)) == 1


class Ageing(Sjf):
    """One that ages fast."""

    ageing = 1.0


def test_of_two_with_one_median_the_more_certain_is_shorter() -> None:
    order = Sjf(ServiceCounters())
    order.add(entry("wide", predicted_high_tokens=100))
    order.add(entry("narrow", predicted_high_tokens=14))
    order.add(entry("unknown"))
    assert drain(order) == ["unknown", "narrow", "wide"]


def test_with_no_caution_only_the_median_counts() -> None:
    class Median(Sjf):
        caution = 0.0

    order = Median(ServiceCounters())
    order.add(entry("wide", output=9, predicted_high_tokens=100))
    order.add(entry("narrow"))
    assert drain(order) == ["wide", "narrow"]


def test_who_has_waited_for_size_over_ageing_is_passed_by_nobody() -> None:
    for served, first in ((990, "short"), (1000, "long")):
        counters = ServiceCounters()
        order = Ageing(counters)
        order.add(entry("long", 1000, 10))
        counters.charge("other", 1.0, served)
        order.add(entry("short", 5, 10))
        # 1010 - served against 15.
        assert order.pop(0.0).entry_id == first


def test_time_does_not_age_what_nobody_was_served_instead_of() -> None:
    order = Sjf(ServiceCounters())
    order.add(entry("long", 1000, 10, arrived_s=0.0))
    order.add(entry("short", 5, 10, arrived_s=1e6))
    assert order.pop(1e6).entry_id == "short"


def test_a_preempted_entry_keeps_the_age_it_had() -> None:
    counters = ServiceCounters()
    order = Ageing(counters)
    order.add(entry("old", 100, 10))
    counters.charge("other", 1.0, 500)
    old = order.pop(0.0)
    order.add(entry("new", 20, 10))
    order.add(old, front=True)
    assert drain(order) == ["old", "new"]


def test_who_joins_again_at_the_end_begins_to_wait_anew() -> None:
    for make in (lambda counters: Ageing(counters), Hrrn):
        counters = ServiceCounters()
        order = make(counters)
        order.add(entry("again", 100, 10))
        counters.charge("other", 1.0, 500)
        order.add(entry("patient", 100, 10))
        again = order.remove("again")
        assert again is not None
        counters.charge("other", 1.0, 10)
        order.add(again)
        assert drain(order) == ["patient", "again"]


def test_what_is_remembered_of_those_who_left_is_bounded() -> None:
    counters = ServiceCounters()
    order = Ageing(counters)
    for number in range(3 * MAX_REMEMBERED):
        order.add(entry(f"e{number}"))
        order.pop(0.0)
    assert len(order._left) == MAX_REMEMBERED


def test_less_remaining_interrupts_until_the_runner_is_near_its_end() -> None:
    order = Srpt(ServiceCounters())
    runner = entry("runner", 50, 1000, computed_tokens=50, emitted_tokens=200)
    short = entry("short", 20, 100)
    assert order.outranks(short, runner, 0.0)
    assert not order.outranks(runner, short, 0.0)
    near_its_end = replace(runner, emitted_tokens=round(1000 * PROTECTED_SHARE))
    assert not order.outranks(entry("tiny", 1, 1), near_its_end, 0.0)
    assert order.outranks(
        entry("tiny", 1, 1), replace(near_its_end, emitted_tokens=near_its_end.emitted_tokens - 1), 0.0
    )


def test_a_runner_keeps_the_age_with_which_it_waited() -> None:
    counters = ServiceCounters()

    class AgeingSrpt(Srpt):
        ageing = 1.0

    order = AgeingSrpt(counters)
    order.add(entry("old", 100, 100))
    counters.charge("other", 1.0, 1000)
    old = order.pop(0.0)
    assert not order.outranks(entry("newcomer", 1, 1), old, 0.0), "it has waited for longer than it is long"
    assert order.outranks(entry("newcomer", 1, 1), entry("unknown", 100, 100), 0.0)


# ---------------------------------------------------------------- hrrn


def test_the_highest_response_ratio_goes_next() -> None:
    counters = ServiceCounters()
    order = Hrrn(counters)
    order.add(entry("long", 1000))
    counters.charge("other", 1.0, 900)
    order.add(entry("short", 10))
    counters.charge("other", 1.0, 8)
    # (908 + 1000) / 1000 against (8 + 10) / 10.
    assert order.pop(0.0).entry_id == "long"
    order.add(entry("long again", 1000))
    counters.charge("other", 1.0, 2)
    assert order.pop(0.0).entry_id == "short"


def test_cached_tokens_do_not_count_as_size() -> None:
    counters = ServiceCounters()
    order = Hrrn(counters)
    order.add(entry("long", 1000))
    order.add(entry("cached", 1000, cached_tokens=990))
    counters.charge("other", 1.0, 50)
    assert drain(order) == ["cached", "long"]


def test_a_class_spans_a_fourth_of_a_doubling() -> None:
    assert [size_class(size) for size in (1, 2, 4, 1024)] == [0, 4, 8, 40]
    assert len({size_class(size) for size in range(1000, 2001)}) == 5


def test_who_came_back_does_not_hide_how_long_the_one_behind_has_waited() -> None:
    counters = ServiceCounters()
    order = Hrrn(counters)
    order.add(entry("patient", 100))
    counters.charge("other", 1.0, 500)
    order.add(entry("new", 50))
    order.add(entry("back", 100), front=True)
    counters.charge("other", 1.0, 10)
    assert drain(order) == ["back", "patient", "new"]


def test_the_last_who_came_back_goes_first_in_a_copy_too() -> None:
    counters = ServiceCounters()
    order = Hrrn(counters)
    order.add(entry("first back", 100), front=True)
    copy = order.clone(counters)
    copy.add(entry("last back", 3000), front=True)
    assert drain(copy) == ["last back", "first back"]


# ---------------------------------------------------------------- las


def test_who_has_had_least_goes_first_and_equals_by_arrival() -> None:
    order = Las(ServiceCounters())
    order.add(entry("much", attained_tokens=500))
    order.add(entry("fresh 1"))
    order.add(entry("some", attained_tokens=20))
    order.add(entry("fresh 2"))
    assert drain(order) == ["fresh 1", "fresh 2", "some", "much"]


def test_a_runner_gives_way_when_it_is_a_quantum_ahead() -> None:
    order = Las(ServiceCounters())
    waiting = entry("waiting", attained_tokens=100)
    assert not order.outranks(waiting, entry("r", attained_tokens=99 + QUANTUM_TOKENS), 0.0)
    assert order.outranks(waiting, entry("r", attained_tokens=100 + QUANTUM_TOKENS), 0.0)


# ---------------------------------------------------------------- mlfq


@pytest.mark.parametrize(
    ("prompt", "attained", "level"),
    [
        (1, 0, 0),
        (64, 0, 0),
        (65, 0, 1),
        (128, 0, 1),
        (129, 0, 2),
        (1000, 0, 4),
        (64, 63, 0),
        (64, 64, 1),
        (64, 64 + 127, 1),
        (64, 64 + 128, 2),
        (1000, 1023, 4),
        (1000, 1024, 5),
        (10**9, 0, LEVELS - 1),
        (1, 10**9, LEVELS - 1),
    ],
)
def test_an_entry_skips_to_the_level_of_its_prompt_and_drops_with_its_service(
    prompt: int, attained: int, level: int
) -> None:
    assert Mlfq(ServiceCounters()).level(entry("e", prompt, attained_tokens=attained)) == level


def test_a_higher_level_goes_first_and_interrupts() -> None:
    order = Mlfq(ServiceCounters())
    order.add(entry("long", 1000))
    order.add(entry("short", 10))
    assert order.outranks(entry("short", 10), entry("long", 1000), 0.0)
    assert not order.outranks(entry("another", 10), entry("short", 10), 0.0)
    assert drain(order) == ["short", "long"]


def test_a_starved_entry_is_promoted_and_starts_anew() -> None:
    counters = ServiceCounters()

    class Impatient(Mlfq):
        starved_cost = 1000

    order = Impatient(counters)
    long = entry("long", 1000, attained_tokens=5000)
    order.add(long)
    counters.charge("other", 1.0, 999)
    order.add(entry("short", 10))
    assert order.level(long) > 0
    counters.charge("other", 1.0, 1)
    assert order.level(long) == 0
    assert not order.outranks(entry("s", 10), long, 0.0)
    # "short" joined level 0 before.
    assert drain(order) == ["short", "long"]
    assert order.level(long) == 0, "it runs with a quantum of its own"
    assert order.level(replace(long, attained_tokens=5063)) == 0
    assert order.level(replace(long, attained_tokens=5064)) == 1


# ---------------------------------------------------------------- edf


def test_the_earliest_deadline_goes_first() -> None:
    order = Edf(ServiceCounters())
    order.add(entry("none", arrived_s=10.0))
    order.add(entry("late", arrived_s=10.0, deadline_s=10.0 + DEFAULT_S + 1))
    order.add(entry("soon", arrived_s=10.0, deadline_s=12.0))
    assert drain(order) == ["soon", "none", "late"]


def test_a_deadline_counts_between_arrival_and_horizon() -> None:
    order = Edf(ServiceCounters())
    assert order.rank(entry("past", arrived_s=50.0, deadline_s=-1e9), 0.0) == (50.0,)
    assert order.rank(entry("never", arrived_s=50.0, deadline_s=1e9), 0.0) == (50.0 + HORIZON_S,)


BY_DEADLINE = pytest.mark.parametrize("make", [Edf, Priority])


def of(tenant_id: str, name: str, deadline_s: float | None, own_s: float | None = None) -> QueueEntry:
    return entry(name, tenant_id=tenant_id, deadline_s=deadline_s, own_deadline_s=own_s)


@BY_DEADLINE
def test_a_clients_word_takes_no_place_from_another_tenant(make: type[Edf | Priority]) -> None:
    order = make(ServiceCounters())
    order.add(of("b", "promised", 10.0))
    order.add(of("a", "hasty", 20.0, own_s=1.0))
    order.add(of("a", "without a promise", None, own_s=0.5))
    assert [order.pop(0.0).tenant_id for _ in range(3)] == ["b", "a", "a"]


@BY_DEADLINE
def test_in_a_tenants_places_its_clients_words_decide(make: type[Edf | Priority]) -> None:
    order = make(ServiceCounters())
    order.add(of("a", "a first", 5.0))
    order.add(of("b", "b", 10.0))
    order.add(of("a", "a second", 20.0, own_s=1.0))
    order.add(of("a", "a third", 25.0, own_s=2.0))
    # Places of tenants: a, b, a, a; whatever is said. Of a, by what is asked for.
    assert drain(order.clone(ServiceCounters())) == ["a second", "b", "a third", "a first"]
    assert order.remove("a third") is not None
    assert drain(order) == ["a second", "b", "a first"], "what leaves without a turn takes its place along"


@BY_DEADLINE
def test_a_word_that_is_later_than_the_promise_changes_nothing(make: type[Edf | Priority]) -> None:
    order = make(ServiceCounters())
    order.add(of("a", "first", 5.0, own_s=500.0))
    order.add(of("a", "second", 6.0))
    assert drain(order) == ["first", "second"]


@BY_DEADLINE
def test_of_two_timeouts_the_shorter_goes_first_however_long_they_are(make: type[Edf | Priority]) -> None:
    order = make(ServiceCounters())
    for timeout_s in (7200.0, 600.0, 300.0, 100.0):
        order.add(of("a", f"{timeout_s:g} s", None, own_s=timeout_s))
    order.add(of("b", "of another tenant", None))
    order.add(of("a", "silent", None))
    # The places of the tenants go by their arrival: a word of one's own changes none.
    assert drain(order) == ["silent", "100 s", "300 s", "600 s", "of another tenant", "7200 s"]


@BY_DEADLINE
def test_who_took_a_place_of_its_tenant_comes_back_to_it(make: type[Edf | Priority]) -> None:
    order = make(ServiceCounters())
    order.add(of("a", "a first", 5.0))
    order.add(of("b", "b", 10.0))
    hasty = of("a", "hasty", 20.0, own_s=1.0)
    order.add(hasty)
    rank = order.rank(hasty, 0.0)
    assert order.pop(0.0) is hasty
    assert order.rank(hasty, 0.0) == rank
    order.add(hasty, front=True)
    assert drain(order) == ["hasty", "b", "a first"]


def test_a_word_gives_no_power_to_interrupt_another_tenant() -> None:
    order = Priority(ServiceCounters())
    running = of("b", "running", 20.0)
    hasty = of("a", "hasty", 20.0, own_s=0.0)
    order.add(hasty)
    assert not order.outranks(hasty, running, 0.0)


# ---------------------------------------------------------------- priority


def score(order: Priority, subject: QueueEntry) -> float:
    return order.rank(subject, 0.0)[0]


def test_each_term_of_the_score_counts_what_it_says() -> None:
    counters = ServiceCounters()
    order = Priority(counters)
    base = entry("base", 100, 100)
    assert score(order, replace(base, tier=2)) - score(order, base) == TIER_TOKENS
    by_10_s = score(order, replace(base, deadline_s=30.0)) - score(order, replace(base, deadline_s=20.0))
    assert by_10_s == 10 * URGENCY_TOKENS_PER_S
    assert score(order, replace(base, deadline_s=20.0)) < score(order, base)
    before = score(order, base)
    counters.charge("somebody", 1.0, 160)
    assert score(order, base) - before == 160 * AGEING


def test_a_tenant_that_had_more_than_the_least_served_one_goes_later_up_to_a_cap() -> None:
    counters = ServiceCounters()
    order = Priority(counters)
    order.add(entry("other", tenant_id="b"))
    fresh = score(order, entry("e"))
    counters.charge("a", 1.0, 400)
    aged = 400 * AGEING
    assert score(order, entry("e")) - fresh == 400 * HISTORY_WEIGHT + aged
    counters.charge("a", 1.0, 10**6)
    assert score(order, entry("e")) - fresh == HISTORY_CAP_COST * HISTORY_WEIGHT + aged + 10**6 * AGEING


def test_length_counts_the_more_the_longer_the_queue() -> None:
    order = Priority(ServiceCounters())
    weights = []
    for _ in range(BUSY_ENTRIES + 10):
        weights.append((score(order, entry("x", 1000, 1)) - score(order, entry("y", 10, 1))) / 990)
        order.add(entry(f"e{len(weights)}"))
    assert weights[0] == 0
    assert weights[BUSY_ENTRIES // 2] == 0.5
    assert weights[-1] == 1


def test_a_score_interrupts_by_more_than_the_margin() -> None:
    order = Priority(ServiceCounters())
    running = entry("running", deadline_s=20.0)
    by_margin = 20.0 - MARGIN_TOKENS / URGENCY_TOKENS_PER_S
    assert not order.outranks(entry("w", deadline_s=by_margin), running, 0.0)
    assert order.outranks(entry("w", deadline_s=by_margin - 0.5), running, 0.0)


# ---------------------------------------------------------------- buckets


class SmallBuckets(Buckets):
    """One whose batches are full with four."""

    batch_entries = 4


def test_one_bucket_while_few_wait() -> None:
    order = SmallBuckets(ServiceCounters())
    for number in range(7):
        order.add(entry(f"e{number}", 10 if number % 2 else 9000))
    assert order.edges() == [LONGEST_TOKENS]
    assert drain(order) == [f"e{number}" for number in range(7)]


def test_a_full_bucket_is_split_at_its_midpoint_and_all_are_merged_when_few_are_left() -> None:
    order = SmallBuckets(ServiceCounters())
    for number in range(8):
        order.add(entry(f"e{number}", LONGEST_TOKENS // 2 + 1 if number < 3 else LONGEST_TOKENS // 2 - 1))
    assert order.edges() == [LONGEST_TOKENS // 2, LONGEST_TOKENS]
    for _ in range(4):
        order.pop(0.0)
    assert len(order.edges()) == 2
    order.pop(0.0)
    assert order.edges() == [LONGEST_TOKENS]


def test_those_who_left_do_not_count_for_a_split() -> None:
    order = SmallBuckets(ServiceCounters())
    for number in range(7):
        order.add(entry(f"short {number}"))
    for _ in range(6):
        order.pop(0.0)
    for number in range(7):
        order.add(entry(f"long {number}", 30_000))
    assert order.edges() == [LONGEST_TOKENS]


def test_no_split_where_most_lie_above_the_midpoint() -> None:
    order = SmallBuckets(ServiceCounters())
    for number in range(20):
        order.add(entry(f"e{number}", 30_000))
    assert order.edges() == [LONGEST_TOKENS]


def test_a_run_stays_with_its_bucket_then_goes_to_who_has_waited_longest() -> None:
    class ShortRuns(Buckets):
        batch_entries, run_entries = 2, 3

    order = ShortRuns(ServiceCounters())
    for number in range(12):
        order.add(entry(f"{'long' if number % 2 else 'short'} {number}", 20_000 if number % 2 else 100))
    assert len(order.edges()) > 1
    assert drain(order) == [
        *("short 0", "short 2", "short 4"),
        *("long 1", "long 3", "long 5"),
        *("short 6", "short 8", "short 10"),
        *("long 7", "long 9", "long 11"),
    ]
