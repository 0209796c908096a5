"""What came since a replay is counted by the queue's order: own requests, tenants' turns, higher tiers."""

from __future__ import annotations

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.since import ComingSince


def came(*lines: tuple[str, int, int], weight: float = 1.0) -> ComingSince:
    """(tenant, tier, requests)."""
    since = ComingSince()
    for tenant, tier, count in lines:
        for number in range(count):
            since.note(QueueEntry(f"{tenant}{tier} {number}", tenant, 0.0, 100, 50, tier, weight))
    return since


def test_of_its_own_tenant_and_of_higher_tiers_all_go_first_and_of_lower_ones_none() -> None:
    since = came(("me", 1, 3), ("boss", 0, 2), ("low", 2, 9)).ahead_of("me", 1.0, 1, more=5, own_waiting=3)
    assert (since.more, since.ahead) == (5, 5)
    assert (since.own_cost, since.higher_cost, since.others_cost) == (3 * 200, 2 * 200, 0)
    assert (since.input_tokens, since.mean_input_tokens, since.mean_output_tokens) == (500, 100, (50, 50))


@pytest.mark.parametrize(("own_waiting", "ahead"), [(0, 1), (4, 5), (99, 30)])
def test_of_another_tenant_as_much_goes_first_as_its_turns_bring(own_waiting: int, ahead: int) -> None:
    since = came(("flood", 1, 30)).ahead_of("me", 1.0, 1, more=30, own_waiting=own_waiting)
    assert since.ahead == ahead
    assert since.others_cost == ahead * 200


def test_a_heavier_tenant_lets_fewer_go_first() -> None:
    since = came(("flood", 1, 30)).ahead_of("me", 4.0, 1, more=30, own_waiting=3)
    assert since.ahead == 1


def test_where_tenants_take_no_turns_all_go_first() -> None:
    assert came(("flood", 1, 30)).ahead_of("me", 1.0, 1, more=30, own_waiting=None).ahead == 30


def test_what_left_is_taken_off() -> None:
    since = came(("me", 1, 10)).ahead_of("me", 1.0, 1, more=4, own_waiting=10)
    assert (since.more, since.ahead) == (4, 4)
    assert not came()
    assert came(("me", 1, 1))
