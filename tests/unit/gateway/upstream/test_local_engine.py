"""How answers of our own engine end: calls, JSON that was cut, and JSON that was closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import Delta, Grammar, SamplingParams, SequenceOutcome, SequenceState, Submit
from gateway.requests.fields.tools import tool_fields
from gateway.requests.schemas import ChatCompletionRequest
from gateway.upstream.base import Wording, servers_word
from gateway.upstream.local_engine import LocalEngine

CALL = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a":'}}]}
REST = {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}
FORMAT = {"response_format": {"type": "json_object"}}
BUILT: dict[str, Any] = {"grammar": Grammar("{}")}
TOOLS: dict[str, Any] = {"parts": ("tool_calls",)}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("asked", "fields", "pieces", "end", "told"),
    [
        (BUILT, FORMAT, ['{"a":', "1}"], {}, ("", "", False)),
        (BUILT, FORMAT, ['{"a":'], {"finish": "length"}, ("", "json", False)),
        (BUILT, FORMAT, ['{"a":', "1}"], {"finish": "length", "closed": True}, ("", "", True)),
        (BUILT, {}, ["a"], {"finish": "length"}, ("", "", False)),
        (TOOLS, {}, [CALL, REST], {}, ("tool_calls", "", False)),
        (TOOLS, {}, [CALL], {"finish": "budget"}, ("", "tool_calls", False)),
        (TOOLS, {}, [CALL, REST], {"finish": "length", "closed": True}, ("", "", True)),
        (TOOLS, {}, ["hello"], {}, ("", "", False)),
        *(
            (TOOLS, {"tool_choice": choice}, ["<tool_call>"], {"finish": "length"}, ("", lacking, False))
            for choice, lacking in (
                ("auto", ""),
                ("required", "tool_calls"),
                (NAMED, "tool_calls"),
                ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, ""),
                ({"type": "allowed_tools", "allowed_tools": {"tools": [NAMED]}}, ""),
                (
                    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
                    "tool_calls",
                ),
            )
        ),
        ({}, {}, ["hello"], {"finish": "length"}, ("", "", False)),
    ],
)
async def test_an_answer_says_how_it_ended(
    asked: dict[str, Any],
    fields: dict[str, Any],
    pieces: list[Any],
    end: dict[str, Any],
    told: tuple[str, str, bool],
) -> None:
    finish, closed = end.get("finish", "stop"), end.get("closed", False)
    outcome = SequenceOutcome("r.0", "r", "t", finish, 1, 0, 1, len(pieces), closed=closed)

    async def stream(submit: Submit) -> AsyncIterator[Delta]:
        for number, piece in enumerate(pieces):
            is_text = isinstance(piece, str)
            yield Delta("r.0", number, [1], piece if is_text else "", parts=() if is_text else (piece,))
        yield Delta("r.0", len(pieces), outcome=outcome)

    client: Any = SimpleNamespace(on_ready=None, on_lost=None, submit=stream)
    submit = Submit("r.0", "r", "t", [1], 8, 8, sampling=SamplingParams(), **asked)
    tools = None if "tool_choice" not in fields else [NAMED]
    request = ChatCompletionRequest(model="m", messages=[], tools=tools, **fields)
    wording = Wording(fields=fields, needs=frozenset(tool_fields(request)[1]))
    deltas = [delta async for delta in LocalEngine("e", client).run(submit, wording)]
    found = deltas[-1].outcome
    assert found is not None
    assert [delta.text or delta.parts[0] for delta in deltas[:-1]] == pieces
    assert (found.finish_word, found.incomplete, found.closed) == told
    word = servers_word([found])
    assert (word.basis, word.incomplete, word.closed) == ("engine", *told[1:])


async def test_where_an_answer_goes_on_its_end_is_judged_by_all_of_it() -> None:
    outcome = SequenceOutcome("r.0", "r", "t", "stop", 1, 0, 1, 2)
    submit = Submit("r.0", "r", "t", [1], 8, 8, parts=("tool_calls",))

    async def first(_: Submit) -> AsyncIterator[Delta]:
        yield Delta("r.0", 0, [1], parts=(CALL,))
        yield Delta("r.0", 1, parts=(REST,), outcome=replace(outcome, finish="cancelled"))

    async def rest(_: SequenceState) -> AsyncIterator[Delta]:
        yield Delta("r.0", 1, [1], outcome=outcome)

    engine = LocalEngine("e", SimpleNamespace(on_ready=None, on_lost=None, submit=first, import_=rest))  # type: ignore[arg-type]
    begun = engine.run(submit, Wording())
    assert [delta.outcome.incomplete async for delta in begun if delta.outcome] == [""]
    (last,) = [each async for each in engine.import_state(SequenceState(submit, [1], 0), Wording(), begun)]
    assert last.outcome is not None
    assert (last.outcome.finish_word, last.outcome.incomplete) == ("tool_calls", "tool_calls")
