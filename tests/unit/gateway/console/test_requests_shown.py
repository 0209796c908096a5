"""What the pages of requests, refusals and targets make of their data."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.console.pages.filters import Filters
from gateway.console.pages.new_rows import newer_than, words_for
from gateway.console.pages.requests import slo
from gateway.console.pages.requests.misses_shown import WHAT_TO_DO, WHY, miss_shown
from gateway.console.pages.requests.quotes import bucket_words, span_of
from gateway.console.pages.requests.request import trace_address
from gateway.console.pages.requests.request_shown import (
    STAGES,
    ahead_words,
    events_shown,
    ledger_lines,
    stages_shown,
    target_lines,
    told_and_happened,
    why_words,
)
from gateway.console.pages.requests.ways_out import WAYS_OUT, way_out
from gateway.domain.timeline import Event, TimelineKind
from gateway.explain.explanation import explanation
from tenants.admin.cursor import Page
from tenants.errors import Invalid
from tenants.ledger.rows import LedgerRow
from tenants.outcomes import Cause
from tenants.slo.slo import DAY_S, SloReport, SloTally, burning
from tenants.slo.target import Slo
from tenants.types import Amounts, Tier
from tests.unit.gateway.test_error_mapping import CASES

EVENTS = [
    Event(TimelineKind.RECEIVED, 0, (7, 1, 1, 10, 2_000)),
    Event(TimelineKind.QUOTED, 0, (100_000, 200_000, 900_000, 5, 400_000, 500_000, 950_000, 9, 1)),
    Event(TimelineKind.RESERVED, 3_000, (0, 7, 10, 0)),
    Event(TimelineKind.QUEUED, 4_000, (10, 20, 0, 5)),
    Event(TimelineKind.DISPATCHED, 304_000, (1, 0, 0)),
    Event(TimelineKind.ADMITTED, 305_000, (0, 0)),
    Event(TimelineKind.PAUSED, 320_000, (2, 0, 0)),
    Event(TimelineKind.RESUMED, 340_000, (0,)),
    Event(TimelineKind.FIRST_TOKEN, 600_000),
    Event(TimelineKind.LAST_TOKEN, 900_000, (5,)),
    Event(TimelineKind.ENDED, 900_000, (0,)),
    Event(TimelineKind.SETTLED, 900_000, (7, 5, 3_000)),
]
TIMELINE: list[dict[str, Any]] = explanation(EVENTS)["timeline"]


def test_told_figures_stand_beside_what_happened() -> None:
    told = told_and_happened(TIMELINE)
    assert [(each.p50, each.p90, each.happened, each.verdict) for each in told] == [
        (0.1, 0.4, 0.304, "within the p90"),
        (0.2, 0.5, 0.6, "above the p90"),
        (0.9, 0.95, 0.9, "within the p50"),
        (5, 9, 5, "within the p50"),
    ]
    assert told_and_happened([each for each in TIMELINE if each["event"] != "quoted"]) == []
    refused = told_and_happened([each for each in TIMELINE if each["event"] in ("received", "quoted")])
    assert {each.verdict for each in refused} == {"it did not get there"}
    old = [each for each in TIMELINE if each["event"] == "dispatched"] + [
        {"event": "quoted", "at_s": 0.0, "wait_p50_us": 1_000}
    ]
    assert [each.verdict for each in told_and_happened(old)] == ["above the p50"]


def test_stages_begin_with_the_first_byte_and_are_drawn_in_bounds() -> None:
    stages, end_s = stages_shown(explanation(EVENTS)["stages"])
    name, start_s, stage_end_s, fill = stages[0]
    assert (name, start_s, fill) == ("read", 0.0, "fill-held")
    assert stage_end_s == pytest.approx(0.002)
    assert end_s == pytest.approx(0.902), "its reading stands before its arrival"
    assert [name for name, *_ in stages][-1] == "paused"
    assert all(name in {words for words, _ in STAGES.values()} for name, *_ in stages)
    many = [{"name": "paused", "start_s": float(n), "end_s": n + 1.0} for n in range(100)]
    assert len(stages_shown(many)[0]) == 24
    assert stages_shown([]) == ([], 0.0)


def test_events_say_their_numbers_with_units() -> None:
    shown = {name: numbers for _, name, numbers in events_shown(TIMELINE)}
    assert shown["received"] == "input tokens 7, sequences 1, tier standard, max tokens 10, read 2 ms"
    assert shown["quoted"].endswith("output p90 tokens 9, is binding: yes")
    assert shown["first token"] == ""
    assert "whose other" in shown["paused"]


def test_the_ledgers_details_are_for_those_who_see_all() -> None:
    row = LedgerRow(
        "req_1", "top_up", "ten_1", "prj_1", "key_1", "gw-7", "batch", "m", Amounts(3, 4, 12_345_678, 1, 9),
        "", datetime(2026, 1, 2, tzinfo=UTC), {"sat_out_for": {"ten_2": 5}}, number=2,
    )  # fmt: skip
    [full], [own] = ledger_lines([row], with_detail=True), ledger_lines([row], with_detail=False)
    assert (full.kind, full.cost, full.gateway_id) == ("top-up 2", "0.012345678", "gw-7")
    assert full.detail == ['sat_out_for: {"ten_2": 5}']
    assert (own.gateway_id, own.detail) == ("", [])
    assert (own.input_tokens, own.output_tokens) == (3, 4)


def test_what_is_ahead_is_told_by_whose_it_is() -> None:
    lined_up = {"own_tokens": 0, "others_tokens": 1_200, "higher_tier_tokens": 0, "running_tokens": 3}
    assert ahead_words(lined_up) == [
        "1,200 tokens of other tenants, within their fair share",
        "3 tokens of these were running already",
    ]


def test_a_miss_is_drawn_on_one_scale_with_what_would_have_been() -> None:
    evidence = {
        "alone_s": 0.2, "fair_s": 0.9, "fair_unlimited_s": 0.9, "fair_without_outages_s": 3.0,
        "fair_without_own_s": None, "limited_s": 0.0, "stalled_s": 1.5,
    }  # fmt: skip
    miss = {"metric": "ttft", "target_s": 1.0, "actual_s": 2.5, "cause": "scheduling", "evidence": evidence}
    shown = miss_shown(miss)
    assert [(name, value, fill) for name, value, fill, _ in shown["bars"]] == [
        ("actual", 2.5, "fill-bad"),
        ("alone", 0.2, "fill-3"),
        ("fair share", 0.9, "fill-3"),
        ("fair, no outages", 3.0, "fill-2"),
    ]
    assert shown["left_out"] == ["fair, without own: never, or not computed because another answer decides"]
    assert shown["waits"] == ["1.5 s for its reader"]
    assert (shown["why"], shown["todo"]) == (WHY[Cause.SCHEDULING], WHAT_TO_DO[Cause.SCHEDULING])
    unknown = miss_shown(miss | {"actual_s": None, "cause": "new", "evidence": {"limited_s": 0.0}})
    assert [name for name, *_ in unknown["bars"]] == []
    assert unknown["left_out"] == ["actual: it never got there", "alone and fair share: not known"]
    assert (unknown["why"], unknown["todo"]) == ("", "")


def test_every_cause_has_a_reason_and_something_to_do_of_one_sentence() -> None:
    for words in (WHY, WHAT_TO_DO):
        assert set(words) == set(Cause)
        assert len(set(words.values())) == len(Cause)
        assert all(text.endswith(".") and text.count(". ") == 0 for text in words.values())


def test_every_code_has_a_way_out() -> None:
    codes = {error.code for _, error in CASES}
    assert len(codes) > 40
    assert codes - set(WAYS_OUT) == set()
    assert way_out("of a newer version") != ""


def test_a_time_without_a_zone_is_utc_and_what_is_none_stays() -> None:
    filters = Filters("/p", {"from": "2026-01-31 18:00", "to": "soon", "tier": ""})
    assert filters.instant("from") == "2026-01-31T18:00:00+00:00"
    assert filters.instant("to") == "soon"
    assert (filters.instant("tier"), filters.get("tier")) == (None, None)
    zoned = Filters("/p", {"from": "2026-01-31T18:00:00+01:00"})
    assert zoned.instant("from") == "2026-01-31T18:00:00+01:00"
    assert filters.link("/q", tier="batch", to="") == "/q?from=2026-01-31+18%3A00&tier=batch"
    problem = filters.problem(Invalid("tier", "is odd"))
    assert (problem.status, dict(problem.errors)) == (400, {"tier": "Is odd."})
    assert dict(filters.problem(Invalid("cursor", "is odd")).errors) == {"": "Cursor: is odd."}


def test_new_ones_are_those_behind_the_newest_shown() -> None:
    path, asked = "/console/requests", {"tenant": "acme", "from": "", "to": ""}
    assert newer_than(path, asked, None, is_first=True) == "/console/requests/new?tenant=acme"
    behind = newer_than(path, asked, 1_999_999, is_first=True)
    assert behind == "/console/requests/new?tenant=acme&from=1970-01-01T00%3A00%3A02%2B00%3A00"
    assert newer_than(path, asked, None, is_first=False) == ""
    assert newer_than(path, {"to": "2026-01-01"}, None, is_first=True) == ""
    assert words_for(Page([], None)) == ""
    assert words_for(Page([], "looked at 5,000")) == ""
    assert words_for(Page([1, 2, 3], None)) == "3 new"
    assert words_for(Page([1] * 100, "more")) == "More than 100 new"


def report(name: str, tally: SloTally) -> SloReport:
    target = Slo("slo_1", "", Tier.STANDARD, "ttft", 2_000_000, 950)
    spans = {0: SloTally(100, 80)}
    return SloReport(target, name, name, tally, tuple(burning(spans, 950, 100.0)), {"capacity": tally.missed})


def test_targets_with_the_least_budget_left_stand_first() -> None:
    reports = [
        report("good", SloTally(1_000, 10)),
        report("none", SloTally()),
        report("bad", SloTally(100, 50)),
    ]
    shown = slo.worst_first(reports, 1)
    assert [each["tenant"] for each in shown] == ["bad", "good", "none"]
    few = slo.worst_first([report("one of one", SloTally(1, 1)), *reports], 2)
    assert [each["tenant"] for each in few] == ["bad", "good", "one of one", "none"]
    assert (shown[0]["target"], shown[0]["attainment"]) == ("95 % within 2.0 s", 0.5)
    assert shown[0]["budget_left"] == pytest.approx(-9)
    assert (shown[2]["attainment"], shown[2]["budget_left"]) == (None, None)
    [(words, page), _, _] = shown[0]["burning"]
    assert (page.fires, page.alert.severity) == (True, "page")
    assert words == "60 min 16.0×, 5 min 16.0× (alert at 14.4)"
    assert shown[0]["causes"] == [("capacity", 50)]


def test_days_without_misses_stand_between_those_with_some() -> None:
    by_day = {0: {"quota": 2}, 3 * DAY_S: {"capacity": 1, "quota": 4, "newer": 5}}
    causes, days = slo.days_shown(by_day)
    assert causes == ["quota", "capacity", "newer"]
    assert days == [(0, [2, 0, 0]), (DAY_S, [0, 0, 0]), (2 * DAY_S, [0, 0, 0]), (3 * DAY_S, [4, 1, 5])]
    assert slo.days_shown({}) == ([], [])


def test_quotes_are_asked_for_by_whole_hours() -> None:
    now = datetime(2026, 1, 9, 12, 30, tzinfo=UTC)
    week = span_of(Filters("/q", {}), now)
    assert week.as_filters == {"from": "2026-01-02T13:00:00+00:00", "to": "2026-01-09T13:00:00+00:00"}
    typed = span_of(Filters("/q", {"from": "2026-01-09 10:59", "to": "2026-01-09 11:01"}), now)
    assert typed.as_filters == {"from": "2026-01-09T10:00:00+00:00", "to": "2026-01-09T12:00:00+00:00"}
    assert bucket_words(10_000).startswith("more than ")
    assert bucket_words(0).startswith("up to ")


def test_a_trace_is_linked_where_a_place_is_set() -> None:
    assert trace_address("", "req_1") == ""
    assert trace_address("https://t.example/?id={request_id}", "a/b") == "https://t.example/?id=a%2Fb"


def test_missed_targets_are_lines_across_the_waterfall_and_the_heading_says_how_long_it_took() -> None:
    misses = [
        {"metric": name, "target_s": at_s} for name, at_s in (("ttft", 1.0), ("tpot", 0.1), ("e2e", 9.0))
    ]
    assert target_lines(misses, 3.0) == [("target of the first token: 1.0 s", 1.0)]
    assert (why_words(1.3), why_words(0.0)) == ("Why it took 1.3 s", "Why it took so long")
