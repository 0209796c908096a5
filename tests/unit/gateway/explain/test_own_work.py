"""Time that went to a tenant's own later work."""

from __future__ import annotations

import pytest

from gateway.explain.load_log import LoadLog
from gateway.explain.own_work import LoggedRequest, own_time_s


def request(
    tenant: str, known_s: float, *, came_s: float = 0.0, queued_s: float = 0.0, output_tokens: int = 100
) -> LoggedRequest:
    """One that runs from the moment that it is queued."""
    return LoggedRequest(tenant, 1, 1.0, queued_s, 100, output_tokens, 1, came_s, known_s, queued_s)


def test_only_its_tenants_later_work_is_its_own() -> None:
    mine = request("a", known_s=5.0)
    earlier, later, stranger = request("a", 4.0), request("a", 6.0), request("b", 6.0)
    assert own_time_s(mine, [earlier, stranger], 8.0) == 0.0
    assert own_time_s(mine, [later], 8.0) == pytest.approx(4.0)
    assert own_time_s(mine, [earlier, later, stranger, later], 8.0) == pytest.approx(8.0 * 2 / 5)


def test_work_counts_by_its_cost_and_where_it_overlaps() -> None:
    mine = request("a", known_s=5.0, output_tokens=100)
    large = request("a", known_s=6.0, output_tokens=1_300)
    assert own_time_s(mine, [large], 8.0) == pytest.approx(8.0 * 2_700 / 3_000)
    large.ended_s, large.dispatched_s = 12.0, 4.0
    assert own_time_s(mine, [large], 8.0) == pytest.approx(8.0 * 1_350 / 1_650)
    large.dispatched_s = None
    assert own_time_s(mine, [large], 8.0) == 0.0, "it had nothing of the engine"
    large.dispatched_s, large.came_s, large.since_s = 0.0, -3.0, -2.0
    large.ended_s = 0.0
    assert own_time_s(mine, [large], 8.0) == 0.0, "it had ended before"


def test_before_it_is_queued_requests_on_their_way_count_alike() -> None:
    mine = request("a", 5.0, queued_s=2.0)
    together = [request("a", 6.0, queued_s=2.0, output_tokens=9_999) for _ in range(3)]
    assert own_time_s(mine, together, 2.0) == pytest.approx(1.5)
    assert own_time_s(mine, together, 2.0, limited_s=1.0) == pytest.approx(0.75), "counted elsewhere"
    after = own_time_s(mine, together, 6.0) - 1.5
    assert own_time_s(mine, together, 6.0, rested_s=2.0) == pytest.approx(1.5 + after / 2)


def test_the_log_knows_it_until_it_is_forgotten() -> None:
    log = LoadLog(max_kept=3)
    for number, known_s in enumerate((10.0, 11.0)):
        log.arrived(f"r{number}", "a", 1, 1.0, 0.0, 100, 100, came_s=0.0, known_s=known_s)
        log.dispatched(f"r{number}", 1, 0.0)
    assert log.own_time_s("r0", 4.0, limited_s=0.0, rested_s=0.0) == pytest.approx(2.0)
    assert log.own_time_s("r1", 4.0, limited_s=0.0, rested_s=0.0) == 0.0
    for number in range(2, 4):
        log.arrived(f"r{number}", "b", 1, 1.0, 0.0, 1, 1)
    assert log.own_time_s("r0", 4.0, limited_s=0.0, rested_s=0.0) is None
