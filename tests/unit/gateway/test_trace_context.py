"""Trace contexts are read as W3C has them; all else is dropped, and passed on is what was understood."""

from __future__ import annotations

import pytest

from gateway.trace_context import MAX_STATE_CHARACTERS, RANDOM, RequestTrace, TraceContext, read

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.parametrize(
    ("parent", "flags"),
    [
        (PARENT, 1),
        (f" {PARENT}\t", 1),
        (PARENT[:-2] + "00", 0),
        (PARENT[:-2] + "ff", 3),
        ("01" + PARENT[2:], 1),
        ("cc" + PARENT[2:] + "-what-comes", 1),
    ],
)
def test_a_traceparent_is_passed_on_in_our_version(parent: str, flags: int) -> None:
    found, dropped = read([parent], [])
    assert (found, dropped) == (TraceContext(TRACE_ID, SPAN_ID, flags), "")
    assert found is not None
    assert RequestTrace.of("req_1", found).traceparent("chat").endswith(f"-{flags:02x}")


@pytest.mark.parametrize(
    "parents",
    [
        [""],
        ["x" * 10_000],
        [PARENT + "x"],
        [PARENT + "-more"],
        ["cc" + PARENT[2:] + "x"],
        ["cc" + PARENT[2:] + "-" + "x" * 10_000],
        ["ff" + PARENT[2:]],
        [PARENT.upper()],
        [PARENT.replace(TRACE_ID, "0" * 32)],
        [PARENT.replace(SPAN_ID, "0" * 16)],
        [PARENT + "\r\nx-injected: 1"],
        [PARENT, PARENT],
    ],
)
def test_what_is_no_traceparent_is_dropped(parents: list[str]) -> None:
    assert read(parents, ["a=1"]) == (None, "traceparent")


def test_without_a_traceparent_nothing_is_dropped() -> None:
    assert read([], ["a=1"]) == (None, "")


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (["a=1", " b=2 ,, ", ""], "a=1,b=2"),
        (["fw529a3039@dt=FfAA:1"], "fw529a3039@dt=FfAA:1"),
        (["a=" + "v" * (MAX_STATE_CHARACTERS // 2 - 2)], "a=" + "v" * (MAX_STATE_CHARACTERS // 2 - 2)),
        (
            [",".join(f"k{number}=1" for number in range(32))],
            ",".join(f"k{number}=1" for number in range(32)),
        ),
    ],
)
def test_a_tracestate_is_passed_on(states: list[str], state: str) -> None:
    found, dropped = read([PARENT], states)
    assert dropped == ""
    assert found is not None
    assert found.state == state
    assert RequestTrace.of("req_1", found).onward("client.0")["tracestate"] == state


@pytest.mark.parametrize(
    "states",
    [
        ["garbage"],
        ["a=1,garbage"],
        ["A=1"],
        ["a=1,a=2"],
        ["a=1=2"],
        ["a=\u00e4"],
        ["a=1\r\nx-injected: 1"],
        ["a=" + "v" * 10_000],
        [",".join(f"k{number}=1" for number in range(33))],
        ["a=1" for _ in range(400)],
    ],
)
def test_a_broken_tracestate_leaves_the_trace(states: list[str]) -> None:
    found, dropped = read([PARENT], states)
    assert (found, dropped) == (TraceContext(TRACE_ID, SPAN_ID, 1), "tracestate")
    assert found is not None
    assert list(RequestTrace.of("req_1", found).onward("client.0")) == ["traceparent"]


def test_a_server_gets_the_same_trace_and_a_span_of_our_own() -> None:
    caller = TraceContext(TRACE_ID, SPAN_ID, 1, "a=1")
    requests = [RequestTrace.of(f"req_{number}", caller) for number in range(20)]
    found = [read([each.onward("client.0")["traceparent"]], [])[0] for each in requests]
    assert {(each.trace_id, each.flags) for each in found if each is not None} == {(TRACE_ID, 1)}
    spans = {each.span_id for each in found if each is not None}
    assert len(spans) == 20
    assert SPAN_ID not in spans
    assert requests[0].span_id("client.0") != requests[0].span_id("client.1")
    assert requests[0].onward("client.0")["tracestate"] == "a=1"


def test_a_request_without_a_caller_is_the_root_of_a_trace_of_its_own() -> None:
    traces = [RequestTrace.of(f"req_{number}", None) for number in range(20)]
    assert len({each.trace_id for each in traces}) == 20
    assert {each.parent_id for each in traces} == {""}
    onward = traces[0].onward("client.0")
    assert read([onward["traceparent"]], [])[0] == TraceContext(
        traces[0].trace_id, traces[0].span_id("client.0"), RANDOM
    )
    assert list(onward) == ["traceparent"]
    assert RequestTrace.of("req_0", None) == traces[0], "by its id: whoever knows that can name its spans"
