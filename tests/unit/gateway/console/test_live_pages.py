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
    TightLimit,
    overview_of,
    replica_rows,
    scale_of,
    share_rows,
    tiers_of,
    tokens_per_s,
)
from gateway.console.pages.live.move_shown import most_ahead, move_shown
from gateway.console.pages.live.overview import OverviewWriter, refusal_lines
from gateway.console.pages.live.past_hour import HourEvent, past_hour, replica_events
from gateway.console.pages.live.waiting import (
    WaitingQuestion,
    WaitingView,
    in_line,
    is_off,
    text_of,
    told_lines,
)
from gateway.metrics.waits import KeptWaits, RecentFirstTokens, first_token_s
from gateway.pools.fleet import WaitingRequests
from gateway.pools.live_counters import FleetNow, GatewayNow, ReplicaNow, TenantNow, merged
from gateway.pools.waiting import WaitingNow
from tenants.counts.minute_store import MINUTE_US, EngineKey, EngineMinute, FlowKey, FlowMinute
from tenants.types import Limit, Meter, SubjectKind, Window


def gateway(
    name: str,
    *tenants: TenantNow,
    clock_s: float = 0.0,
    output_tokens: int = 0,
    replicas: list[ReplicaNow] | None = None,
) -> GatewayNow:
    queued = {tier: sum(each.queued for each in tenants if each.tier == tier) for tier in TIER_RANKS}
    return GatewayNow(name, "", clock_s, output_tokens, queued, 1, 0.01, list(tenants), 0, replicas or [])


def shares(**had_due: tuple[float, float]) -> list[TenantNow]:
    return [TenantNow(name, "standard", 1.0, had=had, due=due) for name, (had, due) in had_due.items()]


def fleet(*gateways: GatewayNow, missing: int = 0) -> FleetNow:
    return merged(gateways, missing)


def test_gateways_are_added_up_each_once_and_a_replica_stands_once() -> None:
    here = TenantNow("t1", "standard", 2.0, queued=3, running=1, had=10.0, due=20.0, arrivals=2)
    there = TenantNow("t1", "standard", 2.0, queued=4, had=30.0, due=20.0, before_line_us=5)
    one, two = gateway("one", here), gateway("two", there)
    found = fleet(two, one, one, missing=1)
    assert [each.gateway_id for each in found.gateways] == ["one", "two"]
    assert found.queued == {"interactive": 0, "standard": 7, "batch": 0}
    assert found.running == 2
    assert found.tenants == [TenantNow("t1", "standard", 2.0, 7, 1, 40.0, 40.0, 2, 5)]
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


def a_row(
    name: str = "ads", *, queued: int = 0, running: int = 0, weight: float = 1.0, **of: Any
) -> TenantNow:
    return TenantNow(name, "standard", weight, queued, running, **of)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (a_row(had=84, due=84), "ads had 84 %, 4.2 times its weight: others left 64 % unused"),
        (a_row(had=25, due=25), "ads had 25 %, 25 % over its weight: others left 5 % unused"),
        (a_row(had=5, due=9, queued=3), "ads had 5 %, 44 % less than due: 3 requests are waiting"),
        (a_row(had=5, due=9, queued=1), "ads had 5 %, 44 % less than due: 1 request is waiting"),
        (a_row(had=30, due=20), "ads had 30 %, more than its due of 20 %: the next requests make up for it"),
        (a_row(had=5.5, due=5.5), "ads had 5.5 %, 73 % less than its weight: it asked for no more"),
        (a_row(had=21, due=20.5), ""),
    ],
)
def test_a_sentence_says_why_a_tenant_is_more_than_a_tenth_off(row: TenantNow, words: str) -> None:
    rest = 100 - row.had
    rows = share_rows([row, a_row("rest", weight=4.0, had=rest, due=rest)], {})
    [ads] = [each for each in rows if each.name == "ads"]
    assert ads.entitled == 0.2
    assert (ads.sentence if ads.why else "") == words
    if "asked for no more" in words:
        [limited, _] = share_rows([row, a_row("rest", weight=4.0, had=rest, due=rest)], {}, {"ads"})
        assert limited.why.endswith("less than its weight: its limit is exhausted")


def test_who_is_furthest_behind_comes_first_then_who_is_furthest_off_its_weight() -> None:
    tenants = [
        *shares(a=(10, 10), crawler=(60, 52), ads=(6, 10), labs=(14, 18), b=(10, 10)),
        TenantNow("night", "batch", 1.0, had=50.0, due=50.0),
    ]
    now = overview(*tenants)
    assert [row.name for row in now.rows] == ["ads", "labs", "crawler", "a", "b", "night"]
    assert scale_of(now.rows) == pytest.approx(0.4), "the flood's, over all tiers"
    tiers = tiers_of(now, most=4)
    assert [(each.tier, [row.name for row in each.rows]) for each in tiers] == [
        ("standard", ["ads", "labs", "crawler", "a"])
    ]
    assert [each.part for each in tiers_of(now)] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert [row.name for tier in tiers_of(now, "LA") for row in tier.rows] == ["labs"]
    # One that only waits in a tier without service has no share, and noise does not fill the picture.
    [idle] = share_rows([a_row(queued=2)], {})
    assert (idle.had, idle.due, idle.entitled, idle.before_line_s) == (None, None, 1.0, None)
    assert scale_of([idle]) == 0.05


def test_what_needs_somebody_the_worst_first_and_where_to_act() -> None:
    limit = TightLimit("t3", "finance", "lim_1", "1,500 tokens a day", refused=300, since_us=1)
    free = TightLimit("t3", "finance", "lim_2", "9 requests a day", is_exhausted=False)
    flood = [
        a_row("crawler", had=80, due=71, running=9),
        a_row("ads", had=5, due=14, queued=4, arrivals=9, before_line_us=9_000_000),
        a_row("labs", had=15, due=15),
    ]
    slow = SlowFigures(tight=(limit, free), read_us=0)
    now = fleet(gateway("one", *flood, replicas=[ReplicaNow("m", "a", "x", False)]), missing=1)
    found = overview_of(now, None, {}, slow, 0).needs
    assert [(each.words, each.href) for each in found] == [
        ("1 of 2 gateways answer: figures of the others are missing", "#gateways"),
        ("Replica a is down", "/console/upstreams"),
        (
            "finance: the limit of 1,500 tokens a day is exhausted; 300 requests refused today",
            "/console/tenants/t3/limits/lim_1",
        ),
        ("Requests of ads take 1.0 s to reach the queue: a store is slow", "/console/alerts"),
        (
            "ads had 5 %, 64 % less than due: 4 requests are waiting",
            "/console/waiting?tenant=ads&tier=standard",
        ),
        (
            "crawler had 80 %, more than its due of 71 %: its running requests finish first",
            "/console/tenants/crawler/limits",
        ),
    ]
    calm = shares(crawler=(80, 80), ads=(10, 10), labs=(10, 10))
    [need] = overview_of(fleet(gateway("one", *calm)), None, {}, SlowFigures(), 0).needs
    assert need.words.endswith("others left 47 % unused; nobody is behind, so nothing to do")
    assert not need.is_bad


def test_refusals_are_sentences_with_the_limit_or_the_cause_most_first() -> None:
    limit = Limit("lim_1", "t1", SubjectKind.TENANT, "t1", Meter.TOTAL_TOKENS, 9, window=Window.DAY)
    none = {"tenant_id": "", "tenant": None, "limit_id": ""}
    rows = [
        none | {"code": "invalid_api_key", "count": 12},
        *(
            {"tenant_id": "t1", "tenant": "finance", "code": code, "limit_id": "lim_1", "count": count}
            for code, count in (("insufficient_quota", 299), ("rate_limit_exceeded", 1))
        ),
    ]
    first, second = refusal_lines(rows, {"lim_1": limit})
    assert (first.name, first.count, first.cause) == ("finance", 300, "daily tokens")
    assert first.href == "/console/refusals?tenant=t1&limit_id=lim_1"
    assert (second.name, second.cause, second.href) == (
        "",
        "wrong key",
        "/console/refusals?code=invalid_api_key",
    )


def test_times_to_the_first_token_are_of_the_last_minutes_and_of_all_gateways() -> None:
    one, other = RecentFirstTokens(), RecentFirstTokens()
    one.note(30.0, 0.0)
    for _ in range(9):
        one.note(0.1, 310.0)
    other.note(2.0, 320.0)
    counts = one.counts(320.0) + other.counts(320.0)
    assert first_token_s(counts, 0.5) == pytest.approx(0.1, rel=0.03)
    assert first_token_s(counts, 0.95) == pytest.approx(2.0, rel=0.03)
    assert first_token_s([], 0.5) is None


def test_the_past_hour_has_service_against_weights_and_numbers_what_happened() -> None:
    last = 100 * MINUTE_US
    tenants = {f"t{number}": 600 - 60 * number for number in range(6)}
    rows = [
        (FlowKey(last - back * MINUTE_US, "m", "standard", each), FlowMinute(served, served, 0, 2, 1_000_000))
        for back in (1, 70)
        for each, served in tenants.items()
    ]
    rows.append((FlowKey(last - MINUTE_US, "m", "batch", "t0"), FlowMinute(90, 90)))
    lost = [
        (EngineKey(last - back * MINUTE_US, "m", "a"), EngineMinute(state))
        for back, state in ((9, "up"), (8, "down"), (7, "down"), (6, "up"))
    ]
    events = [*replica_events(lost), HourEvent(1, "long ago", "/")]
    drawn = past_hour(rows, {"t0": "crawler"}, {"t0": 5.0}, events, last + 30_000_000)
    assert [line.name for line in drawn.lines] == ["crawler", "t1", "t2", "t3", "2 others"]
    crawler = drawn.lines[0]
    total = sum(tenants.values()) + 90
    assert crawler.part == pytest.approx(690 / total)
    assert crawler.entitled == pytest.approx((sum(tenants.values()) / 2 + 90) / total)
    assert [(number, event.words) for number, _, event in drawn.marks] == [
        (1, "replica a lost"),
        (2, "replica a is back"),
    ]
    assert drawn.rows[0].before_line_s == 0.5
    xs = [float(point.partition(",")[0]) for point in crawler.points.split()]
    assert (len(xs), xs[0], xs[-1]) == (60, 46.0, 752.0)
    assert past_hour([], {}, {}, [], last).lines == ()


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


def test_an_overview_escapes_names_and_readers_with_one_question_share_its_text() -> None:
    texts: dict[Hashable, str] = {}
    writer = OverviewWriter()
    text = writer.text(overview(*shares(t1=(1.0, 1.0)), missing=1), texts)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "1 of 2 gateways answer" in text
    assert "The database does not answer" in text
    assert OverviewWriter().text(overview(*shares(t1=(2.0, 2.0))), texts) == text
    assert "No active tenant has" in OverviewWriter("acme").text(overview(*shares(t1=(1.0, 1.0))), texts)
    assert len(texts) == 2


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
    last = b'event: stopped\ndata: Over. <a href="/console">Go on</a>\n\n'
    assert last_event("Over.", "/console", "Go on") == last
