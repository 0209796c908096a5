"""What a grammar allows is valid, and can be closed within the tokens that are kept for that."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.grammar import source
from engine.grammar.forms import CallForm
from engine.messages import Grammar
from tests.support.schemas import CLOSABLE, END, SCHEMAS, TOOLS, Drawn, check_value, thing

HERMES = CallForm("<tool_call>\n", "\n</tool_call>", "name", "arguments")
LISTED = CallForm("[TOOL_CALLS]", "", "name", "arguments", ",", as_list=True)
BARE = CallForm("", "", "name", "parameters")


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return Drawn()


def drawn_texts(drawn: Drawn, grammar: Grammar, seed: int, most: int = 60) -> Iterator[bytes]:
    """The text so far with its end, after each token; both bounds hold wherever it stands."""
    state, rng, tokens, before = drawn.open(grammar), random.Random(seed), [], None
    while True:
        end = state.closing(grammar.kept_tokens or 100)
        if grammar.kept_tokens or end is not None:
            assert end is not None, drawn.text(tokens)
            assert before is None or not grammar.kept_tokens or len(end) <= before + grammar.growth_tokens
            yield drawn.text(tokens + end)
            before = len(end)
        if state.is_complete or len(tokens) == most:
            return
        if (token_id := drawn.step(state, rng)) == END:
            return
        assert not state.failed
        tokens.append(token_id)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 50), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_end_is_a_valid_value(name: str, seeds: range, drawn: Drawn) -> None:
    grammar = source.of_schema(SCHEMAS[name]).grammar
    assert (grammar.kept_tokens > 0) == (name in CLOSABLE)
    for seed in seeds:
        for text in drawn_texts(drawn, grammar, seed):
            check_value(SCHEMAS[name], text)


def read_hermes(text: str) -> list[dict[str, Any]]:
    calls = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    return [json.loads(call) for call in calls.split("\n</tool_call>\n<tool_call>\n")]


def read_listed(text: str) -> list[dict[str, Any]]:
    listed = json.loads(text.removeprefix("[TOOL_CALLS]"))
    assert isinstance(listed, list)
    return listed


@pytest.mark.parametrize("is_open", [None, True, False])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(
    ("form", "read"),
    [(HERMES, read_hermes), (LISTED, read_listed), (BARE, lambda text: [json.loads(text)])],
)
def test_every_end_of_calls_is_valid(
    form: CallForm,
    read: Callable[[str], list[dict[str, Any]]],
    several: bool,
    is_open: bool | None,
    drawn: Drawn,
) -> None:
    several &= form is not BARE
    built = source.of_tools(TOOLS, form, must_call=True, several=several)
    if is_open is not None:
        built = source.after_thoughts(built, "</think>", is_open=is_open, begin="<think>")
    assert built.grammar.kept_tokens > 0
    schemas = {tool.name: tool.parameters or thing() for tool in TOOLS}
    for seed in range(2):
        for text in drawn_texts(drawn, built.grammar, seed):
            thoughts, _, answer = text.decode().rpartition("</think>")
            assert bool(thoughts) <= (is_open is not None)
            calls = read(answer.lstrip("\n"))
            assert several or len(calls) == 1
            for call in calls:
                check_value(schemas[call["name"]], json.dumps(call[form.arguments_key]).encode())


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """One whose end is known."""
    kind = rng.choice(["leaf", "text", "range"] + ["object", "list", "either"] * (2 if depth < 3 else 0))
    if kind == "leaf":
        return dict(rng.choice([schema for name, schema in CLOSABLE.items() if name != "draft four"]))
    if kind == "text":
        least = rng.randint(0, 6)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
    if kind == "range":
        low, width = rng.choice([-150, -2, 0, 7, 999, 12345]), rng.choice([1, 7, 10**6])
        return {"type": rng.choice(["integer", "number"]), "minimum": low, "maximum": low + width}
    if kind == "list":
        return {"type": "array", "items": drawn_schema(rng, depth + 1), "minItems": rng.randint(0, 2)}
    if kind == "either":
        return {"anyOf": [drawn_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(["a", "ab", "abc", "name", "nation", "é", "x y"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.5]
    return thing(*required, **{name: drawn_schema(rng, depth + 1) for name in names})


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 2_000), marks=pytest.mark.long)])
def test_the_bounds_hold_for_drawn_schemas(seeds: range, drawn: Drawn) -> None:
    closable = 0
    for seed in seeds:
        schema = drawn_schema(random.Random(seed))
        if not (grammar := source.of_schema(schema).grammar).kept_tokens:
            continue
        closable += 1
        for text in drawn_texts(drawn, grammar, seed):
            check_value(schema, text)
    assert closable > len(seeds) // 2


def test_an_end_writes_the_names_that_are_required_and_no_others(drawn: Drawn) -> None:
    schema = CLOSABLE["names alike"]
    state = drawn.open(source.of_schema(schema).grammar)
    assert drawn.text(state.closing(40) or []) == b'{"name":"","nation":0}'
    state.replay(drawn.grammars._tokenizer.tokenize_str('{"name":"x","'))
    assert drawn.text(state.closing(40) or []) == b'nation":0}'
    assert state.closing(2) is None
    state.accept(drawn.grammars._tokenizer.tokenize_str("b")[0])
    assert "doesn't satisfy the grammar" in state.failed
    assert (state.closing(40), state.forced(40), state.is_complete) == (None, [], False)
