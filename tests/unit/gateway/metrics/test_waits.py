"""Waits told and had, of the last requests of each tenant and tier."""

from __future__ import annotations

import pytest

from gateway.metrics.waits import MAX_KEPT, MAX_LINES, RecentWaits


def test_what_was_told_stands_beside_what_was_had() -> None:
    waits = RecentWaits()
    for had_s in (0.5, 1.0, 3.0, 4.0):
        waits.note("acme", "standard", (1.0, 3.0), had_s)
    assert waits.of("acme", "standard") == {
        "requests": 4, "told_p50_s": 1.0, "told_p90_s": 3.0, "had_p50_s": 1.0, "had_p90_s": 4.0,
        "within_told_p90": 0.75,
    }  # fmt: skip
    assert waits.of("acme", "batch") is None
    waits.note("labs", "batch", (0.0, 0.5), 2.0)
    labs, acme = waits.latest(None, "", most=9)
    assert (acme.tenant_id, acme.tier, acme.told_p50_s, acme.had_p50_s) == ("acme", "standard", 1.0, 1.0)
    assert [waits.latest({"acme"}, "", 9), waits.latest(None, "batch", 9)] == [[acme], [labs]]
    assert waits.latest(None, "", most=1) == [labs]


def test_without_estimates_only_what_was_had_is_known() -> None:
    waits = RecentWaits()
    waits.note("acme", "standard", None, 2.0)
    shown = waits.of("acme", "standard")
    assert shown is not None
    assert (shown["told_p50_s"], shown["told_p90_s"], shown["within_told_p90"]) == (None, None, None)
    assert shown["had_p50_s"] == pytest.approx(2.0)


def test_memory_is_bounded_and_the_longest_silent_are_forgotten() -> None:
    waits = RecentWaits()
    for _ in range(MAX_KEPT + 10):
        waits.note("first", "standard", None, 1.0)
    assert (waits.of("first", "standard") or {})["requests"] == MAX_KEPT
    waits.note("second", "standard", None, 1.0)
    waits.note("first", "standard", None, 1.0)
    for number in range(MAX_LINES - 1):
        waits.note(f"t{number}", "standard", None, 1.0)
    assert waits.of("first", "standard") is not None
    assert waits.of("second", "standard") is None
