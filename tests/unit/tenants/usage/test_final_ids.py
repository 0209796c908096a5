"""Which ledger ids are final."""

from __future__ import annotations

from tenants.usage.fold import WaitingIds, step


def test_what_came_while_others_were_waited_for_waits_for_those_that_run_now() -> None:
    waiting = WaitingIds(10, frozenset({"a"}))
    assert step(4, waiting, 12, {"b"}) == (10, WaitingIds(12, frozenset({"b"})))


def test_nothing_is_final_while_one_that_was_noted_runs() -> None:
    waiting = WaitingIds(10, frozenset({"a", "b"}))
    assert step(4, waiting, 12, {"b", "c"}) == (4, WaitingIds(10, frozenset({"b"})))


def test_all_that_is_seen_is_final_where_none_writes() -> None:
    assert step(4, WaitingIds(10, frozenset({"a"})), 12, frozenset()) == (12, WaitingIds())
