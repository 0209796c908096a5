"""Timelines: completeness, bounds, and their explanation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.messages import Decision, DecodeShare, SequenceOutcome
from gateway.domain.estimate import Times
from gateway.domain.timeline import (
    FIELDS,
    MAX_EVENTS,
    MAX_NOTES,
    OUTCOMES,
    Event,
    Timeline,
    TimelineKind,
    UnreadableTimeline,
    Whose,
    assemble,
    bounded,
    first,
    lags_s,
    number,
    pack,
    trace_numbers,
    unpack,
)
from gateway.explain.explanation import explain, explanation, stages_of, waits_of
from tenants.outcomes import RequestOutcome


def _decision(kind: str, at_s: float, *others: str, displaced: int = 0) -> Decision:
    return Decision(1, at_s, kind, "r.0", "rule", [], list(others), displaced)


def _outcome(*decisions: Decision, chunks: list[tuple[float, int]] | None = None) -> SequenceOutcome:
    return SequenceOutcome(
        "r.0", "r", "ten", "stop", 300, 100, 200, 20, decisions=list(decisions), chunks=chunks or []
    )


def _whole(outcome: SequenceOutcome, *, whose: Whose = Whose.OTHER) -> list[Event]:
    timeline = Timeline()
    timeline.note(TimelineKind.RECEIVED, 10.0, 300, 1, 1, 64)
    timeline.note(TimelineKind.RESERVED, 10.5, 500_000, 300, 20)
    timeline.note(TimelineKind.QUEUED, 10.5, 900_000, 0, 300_000)
    timeline.note(TimelineKind.DISPATCHED, 12.5, 1, 0, 0)
    times = Times(10.0, 12.5, 13.0, 14.9, 15.0)
    return assemble(
        timeline, times, [outcome], RequestOutcome.COMPLETED, output_tokens=20, charged=(300, 20, 57_000),
        whose=lambda _: whose,
    )  # fmt: skip


def test_a_timeline_is_in_order_and_survives_its_storage() -> None:
    events = _whole(_outcome(_decision("admit", 0.1), chunks=[(0.3, 128), (0.4, 72)]))

    assert [each.at_us for each in events] == sorted(each.at_us for each in events)
    assert unpack(pack(events)) == events
    assert len(pack(events)) < 250
    assert [TimelineKind(each.kind) for each in events][:4] == [
        TimelineKind.RECEIVED, TimelineKind.RESERVED, TimelineKind.QUEUED, TimelineKind.DISPATCHED,
    ]  # fmt: skip
    assert [number(each, "tokens") for each in events if each.kind == TimelineKind.PREFILLED] == [128, 72]


def test_the_explanation_says_where_the_time_went() -> None:
    events = _whole(_outcome(_decision("admit", 0.1), chunks=[(0.3, 128), (0.4, 72)]))

    assert explain(events) == [
        "waited 0.50 s for its tenant's own limits before it got in line",
        "waited 2.0 s in line: 1.2 M tokens ahead, of which 900 k its tenant's own backlog,"
        " 300 k higher tiers",
        "waited 0.10 s at the engine for a place in its batch",
        "200 prompt tokens were computed in 0.40 s, in 2 chunks, 100 more were in the cache",
        "20 tokens came in 1.9 s, one every 100 ms",
    ]


LATE = SequenceOutcome(
    "r.0", "r", "ten", "stop", 300, 100, 200, 20, first_token_s=0.05, finished_s=0.35, chunks=[(0.05, 200)]
)
"""The engine was done 0.35 s after its dispatch."""


def test_the_gateways_lag_is_not_the_engines_time() -> None:
    times = Times(10.0, 12.5, 16.6, 16.61, 16.7)
    timeline = Timeline()
    timeline.note(TimelineKind.DISPATCHED, 12.5, 1, 0, 0)
    events = assemble(
        timeline, times, [LATE], RequestOutcome.COMPLETED, output_tokens=20, charged=(300, 20, 0)
    )
    waits = waits_of(events)

    assert lags_s(timeline, times, [LATE]) == pytest.approx((4.05, 3.76))
    assert (waits.prefill_s, waits.decode_s, waits.gateway_s) == pytest.approx((0.05, 0.3, 4.06))
    assert explain(events) == [
        "200 prompt tokens were computed in 50 ms at the engine, 4.0 s until the gateway had the first token",
        "20 tokens came in 0.30 s, one every 16 ms, 3.8 s until the gateway had the last",
    ]
    named = {each.name: (each.start_s, each.end_s) for each in stages_of(events)}
    assert named["prefill"][1] == named["decode"][0] == pytest.approx(2.55)
    assert named["gateway"] == pytest.approx((2.85, 6.61))


def test_a_lag_is_neither_the_step_in_which_a_request_came_nor_its_readers_wait() -> None:
    """It came in the middle of a step of 0.2 s; later its reader stood still until 16.5 s."""
    came = replace(LATE, unread_s=0.2)
    read = Timeline()
    read.note(TimelineKind.STALLED, 13.0, 3_500_000)

    assert lags_s(read, Times(10.0, 12.5, 12.65, 16.61), [came]) == pytest.approx((0.0, 0.11))
    assert lags_s(read, Times(10.0, 12.5, 13.0, 16.61), [came]) == pytest.approx((0.25, 0.11))
    assert lags_s(read, Times(10.0, 12.5, 13.0, 16.61), [replace(LATE, chunks=[])]) == (0.0, 0.0)


def test_it_says_how_the_tokens_came_without_naming_any_tenant() -> None:
    share = DecodeShare(12, 8, 3, 40, 5, {"rival": 40})
    events = _whole(replace(_outcome(_decision("admit", 0.1)), decode=share))
    (decoded,) = [each.as_json() for each in events if each.kind == TimelineKind.DECODED]
    assert (decoded["floor_tokens"], decoded["turn_tokens"], decoded["sat_out_share_steps"]) == (12, 8, 40)
    said = " ".join(explain(events))
    assert "8 of them in turns by weight, with steps sat out: 3 for its tenant's other requests," in said
    assert "40 for the share of other tenants, 5 for higher tiers" in said
    assert "rival" not in f"{events} {said}"


def test_pauses_say_whose_the_place_was() -> None:
    outcome = _outcome(
        _decision("admit", 0.1), _decision("pause", 1.0, "x.0", displaced=7), _decision("resume", 1.5),
        _decision("preempt", 2.0, "y.0"), _decision("admit", 2.2),
    )  # fmt: skip
    events = _whole(outcome, whose=Whose.HIGHER_TIER)

    assert waits_of(events).paused_s == pytest.approx(0.7)
    assert (
        "gave up its place for a higher tier twice, 0.70 s in all; computed again once, at no charge"
        in explain(events)
    )
    assert [each.name for each in stages_of(events) if each.name == "paused"] == ["paused", "paused"]


def test_the_stages_follow_each_other_to_the_end() -> None:
    events = _whole(_outcome(_decision("admit", 0.1)))
    stages = [each for each in stages_of(events) if each.name != "paused"]

    assert [each.name for each in stages] == ["limits", "queue", "engine", "prefill", "decode", "settle"]
    assert stages[0].start_s == 0
    assert stages[-1].end_s == pytest.approx(5.0)
    assert all(before.end_s == after.start_s for before, after in pairwise(stages))


def test_a_request_that_never_had_its_turn_is_explained_as_well() -> None:
    timeline = Timeline()
    timeline.note(TimelineKind.QUEUED, 10.0, 0, 5_000, 0)
    events = assemble(
        timeline, Times(10.0, ended_s=40.0), [], RequestOutcome.EXPIRED, output_tokens=0, charged=(0, 0, 0)
    )

    assert explain(events) == [
        "waited 30 s in line: 5,000 tokens ahead, of which 5,000 the fair share of others",
        "ended after 30 s: expired",
    ]


def test_an_engines_clock_never_puts_anything_behind_the_end() -> None:
    events = _whole(_outcome(_decision("admit", 99.0)))

    assert events[-2].kind == TimelineKind.ENDED
    assert max(each.at_us for each in events) == events[-1].at_us == 5_000_000


def test_sequences_that_wait_at_the_same_time_wait_once() -> None:
    timeline = Timeline()
    timeline.note(TimelineKind.STALLED, 10.0, 4_000_000)
    timeline.note(TimelineKind.STALLED, 11.0, 1_000_000)
    timeline.note(TimelineKind.STALLED, 13.0, 3_000_000)
    timeline.note(TimelineKind.TOPPED_UP, 14.5, 3_000_000, 64)  # from 11.5 on
    timeline.note(TimelineKind.TOPPED_UP, 21.0, 1_000_000, 128)

    assert timeline.waited_s(TimelineKind.STALLED) == pytest.approx(6.0)
    assert timeline.waited_s(TimelineKind.TOPPED_UP) == pytest.approx(4.0)
    assert timeline.waited_s(TimelineKind.STALLED, TimelineKind.TOPPED_UP) == pytest.approx(7.0)
    lost = [
        Event(TimelineKind.PAUSED, 2_000_000, (0, 0, 1)),
        Event(TimelineKind.PAUSED, 3_000_000, (1, 0, 1)),
    ]
    back = [Event(TimelineKind.RESUMED, 4_000_000, (0,)), Event(TimelineKind.RESUMED, 7_000_000, (1,))]
    waits = waits_of(
        [*lost, *back, *(Event(kind, round(at_s * 1e6), numbers) for kind, at_s, numbers in timeline.notes)]
    )
    assert (waits.paused_s, waits.stalled_s, waits.rested_s) == pytest.approx((5.0, 6.0, 4.0))


def test_notes_are_bounded() -> None:
    timeline = Timeline()
    for each in range(10 * MAX_NOTES):
        timeline.note(TimelineKind.STALLED, float(each), 1)

    assert len(timeline.notes) == MAX_NOTES


EVENTS = st.lists(
    st.builds(
        lambda kind, at: Event(kind, at, (1,)),
        st.sampled_from(list(TimelineKind)[:19]),
        st.integers(0, 10**9),
    ),
    max_size=300,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_a_timeline_is_bounded_and_counts_what_it_left_out(events: list[Event]) -> None:
    kept = bounded(events)
    left_out = sum(number(each, "count") for each in kept if each.kind == TimelineKind.LEFT_OUT)
    marks = sum(each.kind == TimelineKind.LEFT_OUT for each in kept)

    assert len(kept) <= MAX_EVENTS
    assert len(kept) - marks + left_out == len(events)
    for kind in {each.kind for each in events}:
        assert first(kept, TimelineKind(kind)) == first(events, TimelineKind(kind))
    explanation(kept)


@settings(deadline=None)
@given(EVENTS)
def test_no_timeline_is_too_strange_to_be_explained(events: list[Event]) -> None:
    assert all(isinstance(each, str) for each in explain(events))
    assert waits_of(events).queue_s >= 0


def test_strange_bytes_are_no_timeline() -> None:
    for strange in (b"", b"\xff", b"\x92\x63\x90", pack([])[:-1]):
        with pytest.raises(UnreadableTimeline):
            unpack(strange)


def test_a_kind_of_a_later_version_is_shown_by_its_number() -> None:
    assert Event(99, 1_000_000, (7,)).as_json() == {"event": "kind 99", "at_s": 1.0, "numbers": [7]}


def test_every_kind_and_every_outcome_has_its_place_for_good() -> None:
    """They are stored: a number that changes its meaning would rewrite the past."""
    assert set(FIELDS) == set(TimelineKind)
    assert {each.name: each.value for each in TimelineKind} == {
        "RECEIVED": 1, "QUOTED": 2, "RESERVED": 3, "QUEUED": 4, "MOVED": 5, "DISPATCHED": 6, "ADMITTED": 7,
        "PREFILLED": 8, "FIRST_TOKEN": 9, "PAUSED": 10, "RESUMED": 11, "SWAPPED": 12, "RESTORED": 13,
        "PREEMPTED": 14, "TOPPED_UP": 15, "STALLED": 16, "LAST_TOKEN": 17, "ENDED": 18, "SETTLED": 19,
        "LEFT_OUT": 20, "DECODED": 21, "TRACED": 22, "RELOCATED": 23,
    }  # fmt: skip
    assert [each.value for each in OUTCOMES][:5] == [
        "completed", "disconnected", "cancelled", "slow_reader", "budget",
    ]  # fmt: skip


@pytest.mark.parametrize("parent", ["b7ad6b7169203331", "0"])
def test_a_trace_is_shown_with_its_callers_span_where_it_has_one(parent: str) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    event = unpack(pack([Event(TimelineKind.TRACED, 7, trace_numbers(trace_id, parent))]))[0]
    shown = {"event": "traced", "at_s": 7e-6, "trace_id": trace_id}
    assert event.as_json() == shown | ({"parent_span_id": parent} if parent != "0" else {})
