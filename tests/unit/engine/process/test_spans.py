"""An engine's own spans: its times, its pauses, and links to what took a place."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.messages import Decision, SequenceOutcome
from engine.process.spans import EngineSpans, spans_of
from engine.telemetry.sender import SpanSender, SpanTarget
from engine.telemetry.spans import SpanRecord

TRACE_ID, CHAT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{CHAT_ID}-01"
OTHER_TRACE, OTHER_CHAT = "1" * 32, "2" * 16
ENDED_NS = 1_700_000_010_000_000_000
DECISIONS = [
    Decision(1, 1.0, "admit", "s.0", "fits", [], []),
    Decision(5, 3.0, "pause", "s.0", "higher_tier", [], ["other.0", "unknown.0"], 4),
    Decision(9, 5.0, "resume", "s.0", "fits", [], []),
    Decision(12, 8.0, "preempt", "s.0", "memory", [], ["other.0"]),
]


def outcome(**changes: object) -> SequenceOutcome:
    fields = {"scheduled_s": 1.0, "first_token_s": 2.0, "finished_s": 10.0, "trace_context": PARENT}
    fields |= {"decisions": DECISIONS, "chunks": [(1.5, 30)]} | changes
    made = SequenceOutcome("s.0", "s", "ten_1", "stop", 30, 0, 30, 12)
    return msgspec.structs.replace(made, **fields)


def known() -> dict[str, str]:
    return {"other.0": f"00-{OTHER_TRACE}-{OTHER_CHAT}-00"}


class Kept:
    """Where spans go in this test."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    def send(self, spans: Sequence[SpanRecord]) -> str:
        self.spans += spans
        return ""

    def close(self) -> None:
        pass


def test_times_are_the_engines_own_and_all_is_below_the_gateways_span() -> None:
    spans = spans_of(outcome(), ENDED_NS, known())
    root = spans[0]
    assert (root.name, root.trace_id, root.parent_id, root.is_parent_remote) == (
        "engine", TRACE_ID, CHAT_ID, True
    )  # fmt: skip
    assert {each.parent_id for each in spans[1:]} == {root.span_id}
    assert len({each.span_id for each in spans}) == len(spans)
    began_ns = ENDED_NS - 10_000_000_000
    assert [
        (each.name, (each.start_ns - began_ns) / 1e9, (each.end_ns - began_ns) / 1e9) for each in spans
    ] == [
        ("engine", 0.0, 10.0),
        ("engine wait", 0.0, 1.0),
        ("engine prefill", 1.0, 2.0),
        ("engine decode", 2.0, 10.0),
        ("engine pause", 3.0, 5.0),
        ("engine pause", 8.0, 10.0),
    ]


def test_a_pause_links_to_the_request_that_took_the_place() -> None:
    pauses = [each for each in spans_of(outcome(), ENDED_NS, known()) if each.name == "engine pause"]
    assert [[(link.trace_id, link.span_id) for link in each.links] for each in pauses] == [
        [(OTHER_TRACE, OTHER_CHAT)]
    ] * 2
    assert pauses[0].attributes["fairgate.displaced_tokens"] == 4


def test_a_sequence_that_never_ran_only_waited_and_a_failure_is_an_error() -> None:
    never = outcome(scheduled_s=None, first_token_s=None, decisions=[], finish="failed", message="broken")
    spans = spans_of(never, ENDED_NS, {})
    assert [each.name for each in spans] == ["engine", "engine wait"]
    assert [each.error for each in spans] == ["broken", ""]


def test_only_kept_traces_with_a_known_time_are_made_and_links_come_from_sequences_that_came() -> None:
    kept = Kept()
    engine = EngineSpans(SpanSender(kept, SpanTarget("x")), max_known=2)
    for name in ("other.0", "late.0"):
        engine.came(name, f"00-{OTHER_TRACE}-{OTHER_CHAT}-00")
    engine.came("untraced.0", None)
    engine.settled(outcome(trace_context=None), ENDED_NS)
    engine.settled(outcome(), 0)
    engine.settled(outcome(), ENDED_NS)
    engine.came("s.0", PARENT)  # the oldest is forgotten
    engine.settled(outcome(), ENDED_NS)
    engine.close()
    links = [len(each.links) for each in kept.spans if each.name == "engine pause"]
    assert links == [1, 1, 0, 0]
    assert engine.lost == 0
