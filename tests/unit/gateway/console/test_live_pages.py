"""What the live pages show: pure views, rows that hold still, text that is no markup."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec
import pytest

from engine.messages import TIER_RANKS
from gateway.console.live.held_rows import held
from gateway.console.live.stream import event, last_event
from gateway.console.pages.live.figures import (
    Overview,
    SlowFigures,
    jain_index,
    overview_of,
    replica_rows,
    tenant_rows,
    tokens_per_s,
)
from gateway.console.pages.live.move_shown import most_ahead, move_shown
from gateway.console.pages.live.overview import OverviewWriter
from gateway.console.pages.live.waiting import (
    WaitingQuestion,
    WaitingView,
    in_line,
    is_off,
    text_of,
    told_lines,
)
from gateway.metrics.waits import KeptWaits
from gateway.pools.fleet import WaitingRequests
from gateway.pools.live_counters import FleetNow, GatewayNow, ReplicaNow, TenantNow, merged
from gateway.pools.waiting import WaitingNow


def gateway(name: str, *tenants: TenantNow, clock_s: float = 0.0, output_tokens: int = 0) -> GatewayNow:
    queued = {tier: sum(each.queued for each in tenants if each.tier == tier) for tier in TIER_RANKS}
    return GatewayNow(name, "", clock_s, output_tokens, queued, 1, 0.01, list(tenants))


def shares(**had_due: tuple[float, float]) -> list[TenantNow]:
    return [
        TenantNow(name, "standard", 1.0, had=had, due=due, bound=1_000.0)
        for name, (had, due) in had_due.items()
    ]


def fleet(*gateways: GatewayNow, missing: int = 0) -> FleetNow:
    return merged(gateways, missing)


def test_gateways_are_added_up_each_once_and_a_replica_stands_once() -> None:
    here = TenantNow("t1", "standard", 2.0, queued=3, running=1, had=10.0, due=20.0, bound=8.0, arrivals=2)
    there = TenantNow("t1", "standard", 2.0, queued=4, had=30.0, due=20.0, bound=8.0, before_line_us=5)
    one, two = gateway("one", here), gateway("two", there)
    found = fleet(two, one, one, missing=1)
    assert [each.gateway_id for each in found.gateways] == ["one", "two"]
    assert found.queued == {"interactive": 0, "standard": 7, "batch": 0}
    assert found.running == 2
    assert found.tenants == [TenantNow("t1", "standard", 2.0, 7, 1, 40.0, 40.0, 8.0, 2, 5)]
    seen = [
        ReplicaNow("m", "a", "http://a", True, steps=5, name="a@gw"),
        ReplicaNow("m", "its other name", "http://moved", True, steps=9, name="a@gw"),
        ReplicaNow("m", "b", "http://b", False, steps=99, name="b"),
    ]
    replicas = [
        GatewayNow(str(number), "", 0.0, 0, {}, 0, 0.0, replicas=[each]) for number, each in enumerate(seen)
    ]
    assert [(each.replica_id, each.steps) for each in fleet(*replicas).replicas] == [
        ("b", 99),
        ("its other name", 9),
    ]


def test_a_share_stands_beside_the_fair_one_with_the_lag_in_tokens_and_parts_of_the_bound() -> None:
    rows = tenant_rows(shares(t1=(300.0, 200.0), t2=(100.0, 200.0)), {"t1": "zoe", "t2": "amy"})
    assert [row.name for row in rows] == ["amy", "zoe"], "by name, whatever they had"
    amy, zoe = rows
    assert (amy.share, amy.fair, amy.lag_tokens, amy.lag_part) == (0.25, 0.5, 100, 0.1)
    assert (zoe.share, zoe.fair, zoe.lag_tokens, zoe.lag_part) == (0.75, 0.5, -100, -0.1)
    # One that only waits had no part of anything, and its place in the table is its own.
    [idle] = tenant_rows([TenantNow("t3", "batch", 1.0, queued=2)], {})
    assert (idle.name, idle.share, idle.fair, idle.lag_part, idle.before_line_s) == (
        "t3", None, None, None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tenants", "expected"),
    [
        (shares(a=(50.0, 50.0), b=(10.0, 10.0)), 1.0),
        (shares(a=(100.0, 50.0), b=(0.0, 50.0)), 0.5),
        ([], None),
    ],
)
def test_jains_index_is_1_where_all_had_what_they_were_due(tenants: list[TenantNow], expected: float) -> None:
    assert jain_index(tenants) == expected


def test_rates_are_of_gateways_that_are_in_both_snapshots() -> None:
    before = fleet(gateway("one", clock_s=10.0, output_tokens=100), gateway("gone", clock_s=1.0))
    now = fleet(
        gateway("one", clock_s=12.0, output_tokens=150), gateway("new", clock_s=5.0, output_tokens=9_999)
    )
    assert tokens_per_s(now, before) == 25.0
    assert tokens_per_s(now, None) is None
    [(replica, mean_batch)] = replica_rows(
        [ReplicaNow("m", "a", "x", True, steps=20, batch_sum=70)],
        [ReplicaNow("m", "a", "x", True, steps=10, batch_sum=40)],
    )
    assert (replica.is_up, mean_batch) == (True, 3.0)


def test_rows_stay_in_their_places_and_new_ones_are_counted() -> None:
    found = held(["a", "b", "c"], ["d", "c", "a"], str)
    assert [(each.shown, each.is_over) for each in found.rows] == [("a", False), ("b", True), ("c", False)]
    assert found.new == 1


def overview(*tenants: TenantNow, missing: int = 0) -> Overview:
    now = fleet(gateway("one", *tenants), missing=missing)
    return overview_of(now, None, {"t1": "<script>"}, SlowFigures(), 0)


def test_an_overview_holds_still_escapes_names_and_says_who_does_not_answer() -> None:
    texts: dict[Hashable, str] = {}
    writer = OverviewWriter()
    text = writer.text(overview(*shares(t1=(1.0, 1.0)), missing=1), texts)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "1 of 2 gateways answer" in text
    assert "The database does not answer" in text
    later = writer.text(overview(*shares(t2=(1.0, 1.0))), {})
    assert "1 new: show" in later
    assert "nothing lately" in later
    assert "&lt;script&gt;" in later
    # A reader with the same rows gets the text that is there.
    assert OverviewWriter().text(overview(*shares(t1=(1.0, 1.0))), texts) == text
    assert len(texts) == 1


def waiting(*rows: WaitingNow, kept: tuple[KeptWaits, ...] = ()) -> WaitingView:
    found = WaitingRequests(list(rows), len(rows) + 3, 1, 0, list(kept))
    return WaitingView(0, found, {"t1": "<script>", "t5": "nightly"})


ROW = WaitingNow(
    "req_1", "t1", "m", "standard", "waiting", 3.0, 7, "one", {"own": 1, "others": 2_000, "higher_tier": 3},
    4.0, 50.0, -6.0, 100.0,
)  # fmt: skip
OPERATOR, AUDITOR = (WaitingQuestion(None, "", "", may_act=may_act) for may_act in (True, False))


def test_a_waiting_request_shows_what_goes_before_it_and_an_auditor_no_buttons() -> None:
    text = text_of(waiting(ROW), {}, OPERATOR)
    assert "&lt;script&gt;" in text
    for each in ("2,004", "4.0 s", "50 s", "late by 6.0 s", "3 more wait", "/console/waiting/req_1/cancel"):
        assert each in text, each
    assert "higher tiers 3; other tenants, their fair share 2,000; own tenant, earlier 1" in text
    texts: dict[Hashable, str] = {}
    without = text_of(waiting(ROW), texts, AUDITOR)
    assert "/cancel" not in without
    assert "/move" not in without
    # Readers who may do different things never share a text.
    assert text_of(waiting(ROW), texts, OPERATOR) == text


def test_the_line_is_by_turn_and_what_is_over_leaves_it() -> None:
    later, unknown = (
        msgspec.structs.replace(ROW, request_id=name, left_p50_s=left_s)
        for name, left_s in (("req_2", 9.0), ("req_3", None))
    )
    assert in_line([unknown, later, ROW]) == [ROW, later, unknown]
    assert "req_1" not in text_of(waiting(later), {}, OPERATOR)


def kept(
    tenant: str, told_s: float | None, had_s: float, *, requests: int = 20, within: float = 0.4
) -> KeptWaits:
    return KeptWaits(tenant, "standard", requests, told_s, None, had_s, had_s, within)


def test_what_was_told_stands_against_what_they_had_and_replaces_an_estimate_that_does_not_hold() -> None:
    lines = (
        kept("t1", 1.0, 43.0), kept("t5", 1.0, 44.0, requests=19), kept("t3", 2.0, 2.5, within=0.5),
        kept("t4", None, 9.0),
    )  # fmt: skip
    told = told_lines(lines)
    assert [(line.tenant_id, is_off(line)) for line in told] == [("t5", False), ("t1", True), ("t3", False)]
    text = text_of(waiting(ROW, kept=lines), {}, OPERATOR)
    assert "<strong>nightly</strong> (standard): told 1.0 s, had 44 s" in text
    assert "not reliable" in text
    assert "4.0 s" not in text


def side(tier: str, cost: int, left_s: float | None, ahead: int = 0) -> dict[str, Any]:
    return {
        "tier": tier, "cost_nanousd": {"p50": cost}, "tokens_ahead": {"own": ahead},
        "time_left_s": None if left_s is None else {"p50": left_s, "p90": 2 * left_s},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "sooner", "factor"),
    [
        ((41_200, 44.0), (82_400, 3.0), "41 s sooner", "2x the price"),
        ((100, 3.0), (50, 44.0), "41 s later", "0.5x the price"),
        ((100, 44.0), (100, 42.0), "No sooner", "the same price"),
        ((0, 0.09), (100, 0.09), "No sooner", "no longer free"),
        ((100, 44.0), (0, None), "When it would start is not known", "free of charge"),
    ],
)
def test_a_move_says_how_much_sooner_for_how_much_more(
    before: tuple[int, float], after: tuple[int, float | None], sooner: str, factor: str
) -> None:
    offer = move_shown({"from": side("batch", *before), "to": side("standard", *after)})
    assert (offer["sooner"], offer["factor"]) == (sooner, factor)
    if after[1] == 3.0:
        assert offer["starts"].startswith("Starts in 3.0 s instead of in 44 s; nine times in ten within 6.0")
        assert [(row[0], row[2]) for row in offer["rows"]] == [
            ("Now: batch", "in 44 s"), ("Then: standard", "in 3.0 s"),
        ]  # fmt: skip
    if after[1] == 0.09:
        assert offer["starts"].startswith("Starts at once instead of at once")
    if after[1] is None:
        assert "no estimate of its wait" in offer["starts"]


def test_lines_of_a_move_are_on_one_scale() -> None:
    offers = [{"from": side("batch", 1, 1.0, 700), "to": side("standard", 1, 1.0, 9)}]
    assert (most_ahead(offers), most_ahead([])) == (700, 0)


def test_an_event_carries_every_line_of_the_region() -> None:
    assert event("\n<p>\nx</p>\n") == b"data: <p>\ndata: x</p>\n\n"
    assert last_event("Over.", "/console", "Go on").endswith(b"</p>\n\nevent: ended\ndata:\n\n")
