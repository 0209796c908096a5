"""What clients ask for becomes a grammar, or an error that names the limit and the way out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.grammar import source
from engine.grammar.forms import CallForm
from engine.grammar.refused import GrammarRefused
from engine.grammar.source import Built, of_schema
from tests.support.schemas import END, SCHEMAS, TOOLS, VOCABULARY, Drawn, thing


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int, part: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    parts = {f"p{index}": part({"$ref": f"#/$defs/p{(index + 1) % length}"}) for index in range(length)}
    return {"$ref": "#/$defs/p0", "$defs": parts}


REFUSED: dict[str, tuple[Callable[[], Built], str]] = {
    "no schema": (lambda: of_schema(False), "a schema is a JSON object, not false"),
    "no number": (lambda: of_schema({"const": float("nan")}), "a number that is none in JSON"),
    "large": (lambda: of_schema({"enum": ["word " * 9] * 9_000}), "at most 262144 are allowed"),
    "deep": (lambda: of_schema(nested(60)), "at most 48 parts in one another"),
    "very deep": (lambda: of_schema(nested(5_000)), "at most 48 parts in one another"),
    "chain of parts": (lambda: of_schema(chain(300, lambda part: thing(a=part))), "use flatter parts"),
    "crossed patterns": (
        lambda: of_schema({"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(9, 30)]}),
        "8 patterns are allowed, or multiples of up to 4 digits",
    ),
    "long multiple": (lambda: of_schema({"multipleOf": 9_999_991}), "a long multipleOf"),
    "multiples": (lambda: of_schema({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "long"),
    "no words": (lambda: source.of_choice([]), "a choice has 1 to 1000 words; it has 0"),
    "empty word": (lambda: source.of_choice(["a", ""]), "leave it out"),
    "long pattern": (lambda: source.of_regex("a" * 40_000), "at most 32768 are allowed"),
    "no grammar": (lambda: source.of_grammar("root = "), "neither Lark nor GBNF"),
    "deep grammar": (lambda: source.of_grammar("root ::= " + "(" * 9_000 + ")" * 9_000), "nested too deep"),
    "many rules": (
        lambda: source.of_grammar("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(2_000))),
        "at most 1000 are allowed",
    ),
    "crossed terminals": (lambda: source.of_grammar("start: A\nA: " + " & ".join(["/a/"] * 9)), "at most 6"),
    "a schema inside": (lambda: source.of_grammar("start: %json {}"), "send a schema by itself"),
    "schemas of tools": (
        lambda: source.of_tools(
            [source.ToolSchema(f"t{n}", {"enum": ["word " * 9] * 3_000}) for n in range(9)],
            *[CallForm("", "", "name", "arguments")],
            must_call=True,
            several=False,
        ),
        "at most 524288 are allowed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_library_sees_it(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(GrammarRefused, match=message):
        build()


many = thing(**{f"p{n}": {"type": "string"} for n in range(2_000)})
names = "abcdefgh"
long = {"type": "array", "items": {"type": "null"}, "minItems": 10**5}
#: What the library's own limits bound, and the part of its reason; empty: it compiles.
BOUNDED: dict[str, tuple[Callable[[], Built], str]] = {
    "many words": (lambda: of_schema({"enum": [f"word {n}" for n in range(18_000)]}), ""),
    "many properties": (lambda: of_schema(many), ""),
    "many variants": (lambda: of_schema({"anyOf": [thing(**{f"p{n}": {}}) for n in range(2_000)]}), ""),
    "crossed repeats": (lambda: source.of_regex("(a{1,1000}){1,1000}"), ""),
    "exponential": (lambda: source.of_regex("(a|b)*a(a|b){200}"), ""),
    "long text": (lambda: of_schema({"type": "string", "minLength": 10**6}), ""),
    "long list": (lambda: of_schema(long), ""),
    "fan-out": (lambda: of_schema(chain(40, lambda part: thing(**dict.fromkeys(names, part)))), ""),
    "products": (
        lambda: of_schema({"allOf": [{"anyOf": [thing(**{m + n: {}}) for m in names]} for n in names]}),
        "schema too large",
    ),
    "wide range": (lambda: of_schema({"type": "number", "minimum": -1e308, "maximum": 1e308}), "range"),
    "no pattern": (lambda: of_schema({"type": "string", "pattern": "(?=a)b"}), "look-"),
    "a method's name": (lambda: of_schema({"type": "_eq__"}), "Invalid type"),
    "unsatisfiable": (lambda: of_schema({"minLength": 3, "maxLength": 1, "type": "string"}), "greater"),
    "ambiguous": (lambda: source.of_grammar('root ::= s\ns ::= s s | s s s | "a" | ""'), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return Drawn()


@pytest.mark.parametrize("name", BOUNDED)
def test_hostile_grammars_are_bounded_by_the_librarys_limits(name: str, drawn: Drawn) -> None:
    build, reason = BOUNDED[name]
    grammar = build().grammar
    assert reason in source.check(grammar)
    assert bool(source.check(grammar)) == bool(reason)
    state, rng = drawn.open(grammar), random.Random(1)
    for _ in range(20):
        if state.failed or state.is_complete:
            break
        drawn.step(state, rng)
    assert reason in state.failed
    assert state.failed or not reason


def test_a_circle_is_no_grammar_and_tokens_of_the_model_alone_may_be() -> None:
    circle = of_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    assert "nothing can be said" in source.check(circle.grammar)
    assert source.check(source.of_grammar('start: <[151657]> "a"').grammar) == ""


def test_the_schema_says_all_that_the_library_warns_of() -> None:
    schema = thing(
        *["a"],
        a={"type": "array", "uniqueItems": True, "contains": {"type": "null"}},
        b={"type": "string", "format": "color"},
        c={"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        d={"not": {"type": "null"}, "if": {}, "then": {}},
    )
    built = source.of_schema({**schema, "minProperties": 2})
    names = ["a/uniqueItems", "a/contains", "b/format", "c/exclusiveMinimum", "d/not", "d/if", "d/then"]
    assert set(built.not_enforced) == {"#/minProperties", *(f"#/properties/{name}" for name in names)}
    for each in SCHEMAS.values():
        built = source.of_schema(each)
        _, warnings = LLMatcher.validate_grammar_with_warnings(built.grammar.source)
        assert len(built.not_enforced) == len([one for one in warnings if "oneOf" not in one])


@pytest.mark.parametrize(
    ("built", "text"),
    [
        (source.of_regex("[a-c]{3}/x"), "abc/x"),
        (source.of_choice(["yes", "no", 'may "be"']), 'may "be"'),
        (source.of_grammar('root ::= "a" | "b" root'), "bba"),
        (source.of_grammar('start: "a" B\nB: /b+/'), "abb"),
        (source.of_any_json(), '{"a":[1,{}]}'),
        (source.of_schema({**thing(a={"const": 1}), "x-guidance": {"whitespace_pattern": " +"}}), '{"a":1}'),
    ],
)
def test_a_grammar_allows_its_texts_and_no_more(built: Built, text: str, drawn: Drawn) -> None:
    assert source.check(built.grammar) == ""
    state = drawn.open(built.grammar)
    state.replay(drawn.grammars._tokenizer.tokenize_str(text))
    assert state.failed == ""
    assert END in drawn.allowed(state)
    other = drawn.open(built.grammar)
    other.replay(drawn.grammars._tokenizer.tokenize_str(" " + text))
    assert other.failed


@pytest.mark.parametrize("begin", ["<tool_call>", "<|im_start|>"])
def test_a_call_that_begins_in_free_text_keeps_to_its_schema(begin: str, drawn: Drawn) -> None:
    form = CallForm(begin, "!", "name", "arguments")
    special = source.special_tokens([{"id": 3, "content": "<|im_start|>", "special": True}])
    strict = [source.ToolSchema("add", TOOLS[0].parameters, strict=True)]
    built = source.of_tools(strict, form, must_call=False, several=False, special=special)
    state = drawn.open(built.grammar)
    tokenizer = drawn.grammars._tokenizer
    state.replay(tokenizer.tokenize_str("No call <yet"))
    assert (END in drawn.allowed(state), state.closing(9)) == (True, [])
    state.replay(tokenizer.tokenize_str(begin, parse_special=True))
    end = drawn.text(state.closing(80) or [])
    assert end == b'{"name":"add","arguments":{"left":0,"right":0}}!'
    assert drawn.text(state.forced(60)).startswith(b'{"name":"add","arguments":{"left":')
    assert all(token_id < VOCABULARY for token_id in drawn.allowed(state))
