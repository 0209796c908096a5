"""Tests of the audit of dispatch logs: inversions, unfair dispatches and untrue ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ops.demo.audit import AuditReport, LogEvent, LogEventKind, audit


def arrived(
    at_s: float, request_id: str, tenant: str, weight: float = 1.0, tier: str = "standard"
) -> LogEvent:
    return LogEvent(at_s, LogEventKind.ARRIVED, request_id, tenant, tier, weight)


def dispatched(
    at_s: float, request_id: str, tenant: str, cost: float, weight: float = 1.0, tier: str = "standard"
) -> LogEvent:
    return LogEvent(at_s, LogEventKind.DISPATCHED, request_id, tenant, tier, weight, cost)


def came(at_s: float, *names: str) -> list[LogEvent]:
    """Requests of the tenants whose names theirs begin with."""
    return [arrived(at_s, name, name[0]) for name in names]


def ended(at_s: float, request_id: str, *costs: float) -> LogEvent:
    return LogEvent(at_s, LogEventKind.ENDED, request_id, request_id[0], "standard", 1.0, *costs)


def judged(*events: LogEvent) -> AuditReport:
    return audit(list(events))


def test_a_served_tenant_that_overtakes_an_earlier_unserved_one_is_an_inversion() -> None:
    report = judged(
        *came(0, "a1"), dispatched(0, "a1", "a", 100), *came(1, "b1", "b2"), *came(2, "a2"),
        dispatched(3, "b1", "b", 10), dispatched(4, "a2", "a", 100),
    )  # fmt: skip
    # b was lifted to a's 100 (a left last), then served 10; a had nothing waiting and stays at 100.
    assert (report.dispatches, report.compared, report.inversions) == (3, 2, 0)
    report = judged(
        *came(0, "a1", "b1", "b2"),
        dispatched(0, "a1", "a", 100),
        *came(2, "a2"),
        dispatched(4, "a2", "a", 100),
    )
    assert report.inversions == report.unfair_dispatches == 1
    assert report.examples[0].dispatched == "a2"
    assert report.examples[0].waiting == "b1"
    assert report.backlog_s == 2


def test_the_same_overtaking_by_an_earlier_request_is_unfair_but_no_inversion() -> None:
    report = judged(
        *came(0, "a1", "a2"),
        *came(1, "b1"),
        dispatched(2, "a1", "a", 100),
        dispatched(3, "a2", "a", 100),
    )
    assert (report.inversions, report.unfair_dispatches) == (0, 1)


def test_weights_and_corrections_count() -> None:
    events = [
        arrived(0, "a1", "a", 4.0),
        arrived(0, "b1", "b"),
        arrived(0, "b2", "b"),
        dispatched(0, "b1", "b", 30),
        arrived(0, "a2", "a", 4.0),
        dispatched(1, "a1", "a", 100, 4.0),  # 25 per weight: still below b's 30
        dispatched(2, "a2", "a", 100, 4.0),
    ]
    assert audit(events).unfair_dispatches == 0
    assert judged(*events[:4], ended(0.5, "b1", 10), *events[4:]).unfair_dispatches == 1


def test_tiers_are_judged_apart_and_leaving_frees_the_line() -> None:
    report = judged(
        *came(0, "a1"),
        arrived(0, "b1", "b", tier="batch"),
        dispatched(1, "a1", "a", 1000),
        *came(1, "a2", "c1"),
        LogEvent(1, LogEventKind.LEFT, "c1", "c", "standard"),
        dispatched(2, "a2", "a", 1000),
    )
    assert (report.compared, report.unfair_dispatches) == (0, 0)


def test_a_log_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="never waited"):
        audit([dispatched(0, "ghost", "a", 1)])


def history(seed: int, choose: Callable[[list[LogEvent], dict[str, float]], LogEvent]) -> AuditReport:
    """Three tenants, one greedy; one server that takes what `choose` names and is given the true service."""
    rng = random.Random(seed)
    waiting: list[LogEvent] = []
    events: list[LogEvent] = []
    service = {"greedy": 0.0, "b": 0.0, "c": 0.0}
    for number in range(400):
        tenant = rng.choices(["greedy", "b", "c"], [6, 1, 1])[0]
        events.append(arrived(number, f"r{number}", tenant))
        waiting.append(events[-1])
        if number % 2:
            chosen = choose(waiting, service)
            waiting.remove(chosen)
            cost = rng.randint(10, 200)
            service[chosen.tenant] += cost
            events.append(dispatched(number, chosen.request_id, chosen.tenant, cost))
    return audit(events)


def test_first_come_first_served_is_unfair_all_the_time() -> None:
    report = history(1, lambda waiting, service: waiting[0])
    assert report.unfair_dispatches > 20
    assert report.inversions == 0


def test_a_queue_that_prefers_the_most_served_commits_inversions() -> None:
    report = history(2, lambda waiting, service: max(waiting, key=lambda item: service[item.tenant]))
    assert report.inversions > 20


def ranked(event: LogEvent, **ranks: float) -> LogEvent:
    return replace(event, ranks=ranks)


def test_honest_ranks_are_believed_lifts_and_running_charges_included() -> None:
    report = judged(
        *came(0, "a1", "b1", "b2"),
        ranked(dispatched(1, "a1", "a", 50), a=0, b=0),
        *came(1, "a2"),  # nothing of a's waited: lifted, but it stands above b anyway
        ranked(dispatched(2, "b1", "b", 50), a=70, b=0),  # a1 is 20 beyond its prediction by now
        ended(3, "a1", 90),
        ranked(dispatched(4, "b2", "b", 50), a=90, b=50),
    )
    assert (report.untrue_ranks, report.unfair_dispatches, report.compared) == (0, 0, 3)


@pytest.mark.parametrize(("a_rank", "untrue"), [(30, 0), (34, 0), (50, 1), (29, 1), (35, 1)])
def test_a_charge_that_was_corrected_in_flight_is_followed(a_rank: float, untrue: int) -> None:
    """Down to 30 by what the engine foresees, then up to 4 beyond that as tokens come."""
    report = judged(
        *came(0, "a1", "a2", "b1"),
        ranked(dispatched(1, "a1", "a", 50), a=0, b=0),
        LogEvent(1.5, LogEventKind.CORRECTED, "a1", "a", "standard", 1.0, 30),
        ranked(dispatched(2, "b1", "b", 50), a=a_rank, b=0),
        ended(3, "a1", 34, 4),
    )
    assert report.untrue_ranks == untrue


@pytest.mark.parametrize(
    ("a_rank", "why"),
    [
        (40, "less than was charged"),
        (95, "more than the request ever cost"),
        (0, "as if nothing was charged"),
    ],
)
def test_a_rank_that_the_charges_do_not_explain_is_found(a_rank: float, why: str) -> None:
    report = judged(
        *came(0, "a1", "a2", "b1"),
        ranked(dispatched(1, "a1", "a", 50), a=0, b=0),
        ranked(dispatched(2, "b1", "b", 50), a=a_rank, b=0),
        ended(3, "a1", 90),
    )
    assert report.untrue_ranks == 1, why


def test_a_waiting_tenant_without_a_rank_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="no rank for b"):
        judged(*came(0, "a1", "b1"), ranked(dispatched(1, "a1", "a", 1), a=0))
