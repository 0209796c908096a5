"""The spans of a kept trace against its request's timeline."""

from __future__ import annotations

from dataclasses import replace

from engine.telemetry.spans import SpanKind, SpanRecord
from gateway.domain.timeline import Event, TimelineKind
from gateway.metrics import gen_ai
from gateway.trace_context import RequestTrace, TraceContext
from gateway.tracing.build import ClientCall, KeptTrace, spans_of
from gateway.tracing.decision import KeepCause

CALLER = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "rojo=1")
TRACE = RequestTrace.of("req_1", CALLER)
STAGES = ("limits", "store", "queue", "prefill", "decode", "gateway", "settle")
ARRIVED_NS = 1_700_000_000_000_000_000
K = TimelineKind
EVENTS = (
    Event(K.RECEIVED, 0, (10, 1, 1, 100, 500)),
    Event(K.QUOTED, 0, (1_000_000, 2_000_000, 3_000_000, 4, 5_000_000, 6_000_000, 7_000_000, 8, 1)),
    Event(K.RESERVED, 1_000, (700, 10, 100, 1)),
    Event(K.QUEUED, 2_000, (1, 2, 3, 4)),
    Event(K.DISPATCHED, 10_000, (1, 0, 0)),
    Event(K.FIRST_TOKEN, 20_000, (2_000,)),
    Event(K.PAUSED, 25_000, (3, 4, 0)),
    Event(K.RESUMED, 27_000, (0,)),
    Event(K.TOPPED_UP, 28_000, (50, 40)),
    Event(K.STALLED, 29_000, (60,)),
    Event(K.LAST_TOKEN, 40_000, (12, 1_000)),
    Event(K.ENDED, 41_000, (0,)),
    Event(K.SETTLED, 41_000, (10, 12, 34)),
)


def kept(**changes: object) -> KeptTrace:
    found = KeptTrace(
        TRACE, KeepCause.PREEMPTED, "chat", "nick", "tiny", "/v1/chat/completions", EVENTS, ARRIVED_NS,
        ARRIVED_NS + 45_000_000, {"fairgate.outcome": "budget", "fairgate.stop_cause": ""},
    )  # fmt: skip
    return replace(found, **changes)  # type: ignore[arg-type]


def by_name(found: KeptTrace) -> dict[str, SpanRecord]:
    spans = {each.name: each for each in spans_of(found)}
    assert len(spans) == len(spans_of(found))
    return spans


def test_names_kinds_parents_and_times() -> None:
    spans = by_name(kept())
    assert {name: each.kind for name, each in spans.items()} == {
        "POST /v1/chat/completions": SpanKind.SERVER,
        "chat tiny": SpanKind.INTERNAL,
        **dict.fromkeys(STAGES, SpanKind.INTERNAL),
    }
    server, chat = spans["POST /v1/chat/completions"], spans["chat tiny"]
    assert (server.parent_id, server.is_parent_remote) == (CALLER.span_id, True)
    assert chat.parent_id == server.span_id
    stages = [spans[name] for name in STAGES]
    assert {each.parent_id for each in stages} == {chat.span_id}
    assert len({each.span_id for each in spans.values()}) == 9
    assert {(each.trace_id, each.state) for each in spans.values()} == {(CALLER.trace_id, "rojo=1")}
    between = [(each.start_ns - ARRIVED_NS, each.end_ns - ARRIVED_NS) for each in stages]
    assert [(since // 1000, until // 1000) for since, until in between] == [
        (0, 700), (700, 1_000), (2_000, 10_000), (10_000, 18_000), (18_000, 39_000), (39_000, 40_000),
        (41_000, 45_000),
    ]  # fmt: skip
    assert (server.start_ns, server.end_ns) == (ARRIVED_NS - 500_000, ARRIVED_NS + 45_000_000)


def test_attributes_have_what_was_told_what_was_ahead_and_what_it_cost() -> None:
    spans = by_name(kept())
    chat = spans["chat tiny"].attributes
    assert chat[gen_ai.REQUEST_MODEL] == "nick"
    assert chat[gen_ai.RESPONSE_MODEL] == "tiny"
    ahead = ("own", "others", "higher_tier", "running")
    assert [chat[f"fairgate.ahead.{name}_tokens"] for name in ahead] == [1, 2, 3, 4]
    assert (chat["fairgate.quote.ttft_p50_s"], chat["fairgate.quote.wait_p90_s"]) == (2.0, 5.0)
    assert (chat["fairgate.quote.is_binding"], chat["fairgate.cost_nanousd"]) == (True, 34)
    assert (chat["fairgate.trace.kept_for"], chat["fairgate.outcome"]) == ("preempted", "budget")
    assert "fairgate.stop_cause" not in chat, "what is empty is left out"
    assert "error.type" not in chat
    assert spans["POST /v1/chat/completions"].attributes["http.route"] == "/v1/chat/completions"


def test_what_happened_is_an_event_and_a_missed_target_has_its_cause() -> None:
    missed = [{"metric": "ttft", "cause": "capacity", "fair_s": 1.5}]
    events = by_name(kept(missed=missed))["chat tiny"].events
    assert [each.name for each in events] == [
        "first_token", "paused", "resumed", "topped_up", "stalled", "slo.missed"
    ]  # fmt: skip
    assert events[1].at_ns == ARRIVED_NS + 25_000_000
    assert dict(events[1].attributes)["fairgate.whose"] == "higher_tier"
    assert events[0].attributes == {"fairgate.lag_us": 2_000}
    assert events[3].attributes == {"fairgate.waited_us": 50, "fairgate.covered_output_tokens": 40}
    assert events[-1].attributes == {
        "fairgate.metric": "ttft", "fairgate.cause": "capacity", "fairgate.fair_s": 1.5
    }  # fmt: skip


def test_an_error_is_on_its_spans_and_a_request_that_came_to_no_turn_has_no_later_stages() -> None:
    events = (*EVENTS[:4], Event(K.ENDED, 30_000, (10,)), Event(K.SETTLED, 30_000, (0, 0, 0)))
    spans = by_name(kept(events=events, error="expired"))
    assert set(spans) == {"POST /v1/chat/completions", "chat tiny", "limits", "store", "queue", "settle"}
    assert spans["queue"].end_ns == ARRIVED_NS + 30_000_000
    assert (spans["chat tiny"].error, spans["chat tiny"].attributes["error.type"]) == ("expired", "expired")
    assert spans["queue"].error == ""


def test_a_sequence_at_another_server_is_a_client_span_that_the_server_was_told_of() -> None:
    call = ClientCall(1, "vllm", "gpu-1", 8000, "b", 39_000)
    client = next(each for each in spans_of(kept(clients=[call])) if each.kind is SpanKind.CLIENT)
    assert client.name == "chat tiny"
    assert TRACE.onward("client.1")["traceparent"] == f"00-{CALLER.trace_id}-{client.span_id}-01"
    assert client.parent_id == TRACE.span_id("chat")
    assert (client.attributes["server.address"], client.attributes["server.port"]) == ("gpu-1", 8000)
    assert client.attributes[gen_ai.PROVIDER] == "vllm"
    assert (client.start_ns - ARRIVED_NS, client.end_ns - ARRIVED_NS) == (10_000_000, 39_000_000)
