"""Builds the grammar of an answer from what a client asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.grammar.ends import EndSizes, either, ends_of, kept, of_words, written
from engine.grammar.forms import CallForm
from engine.grammar.refused import GrammarRefused
from engine.grammar.schema import prepared
from engine.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 32 * 1024
#: Rules and brackets: the library walks a chain of them on one stack.
MAX_PARTS = 1000
MAX_ANDS = 6
MAX_SOURCE_BYTES = 512 * 1024
MAX_CHOICES = 1000

#: Compact JSON; what the library cannot enforce is left out, and said.
_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "coerce_one_of": True, "lenient": True}
_ANY_TEXT = "/(?s:.*)/"

#: Bounds of what one grammar may cost; the lexer's states hold memory, 1 to 2 kB each.
LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class Built(msgspec.Struct, frozen=True):
    """A grammar, and the parts of the wish that it does not enforce."""

    grammar: Grammar
    not_enforced: tuple[str, ...] = ()


class ToolSchema(msgspec.Struct, frozen=True):
    """A tool as the grammar of its calls needs it."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
    where: str = ""
    """The field to blame for its parameters."""


def of_schema(schema: dict[str, Any] | bool, *, where: str = "") -> Built:
    """One JSON value that the schema allows, without white space."""
    ready, not_enforced, names = prepared(schema, where)
    source = LLMatcher.grammar_from_json_schema(json.dumps(ready), overrides=_OPTIONS)
    return _built(source, ends_of(ready, names), not_enforced, names)


def of_any_json() -> Built:
    """Any JSON object."""
    return of_schema({"type": "object"})


def of_regex(pattern: str) -> Built:
    """A text that the pattern matches as a whole."""
    _check_size(pattern, "the pattern")
    return _built(LLMatcher.grammar_from_regex(pattern), None)


def of_choice(words: Sequence[str]) -> Built:
    """One of the words."""
    if not words or len(words) > MAX_CHOICES:
        raise GrammarRefused(f"a choice has 1 to {MAX_CHOICES} words; it has {len(words)}")
    if not all(words):
        raise GrammarRefused("a word of a choice is empty: leave it out")
    text = "start: " + " | ".join(_quoted(word) for word in words)
    _check_size(text, "the choice")
    return _built(_lark(text), of_words(words))


def of_grammar(text: str) -> Built:
    """A text of a context-free grammar, in Lark's form or in GBNF (`root ::= ...`)."""
    _check_size(text, "the grammar")
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise GrammarRefused("the grammar is nested too deep: name its parts as rules of their own") from None
    except Exception as error:
        raise GrammarRefused(f"the grammar is neither Lark nor GBNF: {error}") from None
    bare = re.sub(r'"(\\.|[^"\\\n])*"|/(\\.|[^/\\\n])+/', "", lark)
    if found := re.search("%(json|regex|lark)", bare):
        raise GrammarRefused(f"the grammar holds {found[0]}, which is not allowed: send a schema by itself")
    for sign, most in (("&", MAX_ANDS), ("~", MAX_ANDS), (":([", MAX_PARTS)):
        if (count := sum(bare.count(one) for one in sign)) > most:
            raise GrammarRefused(f"the grammar has {count} of {' '.join(sign)}; at most {most} are allowed")
    return _built(_lark(lark), None)


def of_tools(
    tools: Sequence[ToolSchema],
    form: CallForm,
    *,
    must_call: bool,
    several: bool,
    special: Mapping[str, int] | None = None,
) -> Built:
    """Calls of the tools in a model family's form. Without `must_call` there may be text alone, or before the
    calls; what begins as a call must then end as one. `special`: as `special_tokens` gives them."""
    plain: dict[str, Any] = {"type": "object", "properties": {}}
    places = [tool.where or f"tools[{number}].function.parameters" for number, tool in enumerate(tools)]
    ready = [
        prepared((tool.parameters or plain) if must_call or tool.strict else {"type": "object"}, where)
        for tool, where in zip(tools, places, strict=True)
    ]
    # One tool's required names are tried in another's arguments, too.
    names = list(dict.fromkeys(name for _, _, required in ready for name in required))
    rules: list[str] = []
    parts: list[EndSizes | None] = []
    for tool, (schema, _, _) in zip(tools, ready, strict=True):
        head = f'{{"{form.name_key}":{written(tool.name)},"{form.arguments_key}":'
        inner = json.dumps({**schema, "x-guidance": _OPTIONS})
        rules.append(f"call_{len(rules)}: {_quoted(head)} %json {inner} {_quoted('}')}")
        ends, around = ends_of(schema, names), len(head.encode()) + 1
        parts.append(ends and EndSizes(ends.fresh + around, ends.worst + around, ends.growth))
    call = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
    begin, end = _lark_text(form.begin, special), _lark_text(form.end, special)
    if form.as_list:
        more = f'("," {call})*' if several else ""
        calls = f'"[" {call} {more} "]" {end}'
    else:
        more = f"({_lark_text(form.between, special)} {begin} {call} {end})*" if several else ""
        calls = f"{call} {end} {more}"
    if must_call:
        rules += [f"start: {begin} {calls}"]
    elif not form.begin:
        rules += [f"start: TEXT | {calls}", "TEXT: /[^{\\[](?s:.*)/"]
    elif begin.startswith("<["):
        rules += [f"start: TEXT | TEXT {begin} {calls}", f"TEXT: {_ANY_TEXT}"]
    else:
        rules += [f"start: TEXT | head {calls}", f"head[lazy]: TEXT {begin}", f"TEXT: {_ANY_TEXT}"]
    ends = either(parts)
    if ends:
        worst = ends.worst + sum(len(text.encode()) for text in (form.begin, form.end, form.between)) + 2
        ends = EndSizes(worst, worst, worst if several or not must_call or len(tools) > 1 else ends.growth)
    source = _lark("\n".join(["%llguidance {}", *rules]))
    not_enforced = [f"{where}{note[1:]}" for where, one in zip(places, ready, strict=True) for note in one[1]]
    return _built(source, ends, not_enforced, names)


def after_thoughts(
    built: Built, end: str, *, is_open: bool, begin: str = "", special: Mapping[str, int] | None = None
) -> Built:
    """The same after thoughts that `end` ends. Not `is_open`: they start with `begin`, or are left out."""
    last = _lark_text(end, special)
    kind = "" if last.startswith("<[") else "[lazy]"
    first = "" if is_open else f"answer | {_lark_text(begin, special)} "
    lines = (
        f"start: {first}thoughts GAP answer",
        f"thoughts{kind}: {_ANY_TEXT} {last}",
        "GAP: /\\n{0,2}/",
        "answer: @answer",
    )
    grammar = json.loads(built.grammar.source)
    grammar["grammars"][0]["name"] = "answer"
    grammar["grammars"].insert(0, {"lark_grammar": "\n".join(lines)})
    inner = built.grammar
    ends = None
    if inner.kept_tokens:
        before = len(begin.encode()) + len(end.encode()) + 5
        worst = before + inner.kept_tokens
        ends = EndSizes(worst, worst, max(before, inner.growth_tokens))
    return _built(json.dumps(grammar), ends, built.not_enforced, words=(end, *inner.end_words))


def either_of(calls: Built, answer: Built) -> Built:
    """What one or the other allows."""
    lark = "%llguidance {}\nstart: calls | text\ncalls: @calls\ntext: @text"
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    parts: list[EndSizes | None] = []
    for name, each in (("calls", calls), ("text", answer)):
        (inner,) = json.loads(each.grammar.source)["grammars"]
        grammars.append({**inner, "name": name})
        worst = each.grammar.kept_tokens
        parts.append(EndSizes(worst, worst, worst) if worst else None)
    return _built(
        json.dumps({"grammars": grammars}),
        either(parts),
        (*calls.not_enforced, *answer.not_enforced),
        words=(*calls.grammar.end_words, *answer.grammar.end_words),
    )


def special_tokens(added_tokens: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Those of a `tokenizer.json` that the library keeps apart from text: any `<name>` is one to it."""
    return {
        token["content"]: token["id"]
        for token in added_tokens
        if token.get("special") or (token["content"][:1] == "<" and token["content"][-1:] == ">")
    }


def check(grammar: Grammar) -> str:
    """The library's reason why this is no grammar, or empty. Takes up to a second of processor time."""
    if reason := " ".join(LLMatcher.validate_grammar(grammar.source, limits=LIMITS).split()):
        return reason
    # What it refuses only as it begins, such as a reference to itself. By bytes, which have no special tokens
    # of the model: a grammar that needs them at once is refused in the making, which says nothing.
    matcher = LLMatcher(LLTokenizer("byte"), grammar.source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return ""
    matcher.compute_bitmask()
    return "nothing can be said by it, or it is too complex to begin" if matcher.is_error() else ""


def _built(
    source: str,
    ends: EndSizes | None,
    not_enforced: Sequence[str] = (),
    names: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Built:
    if len(source) > MAX_SOURCE_BYTES:
        raise GrammarRefused(f"the schemas have {len(source)} bytes; at most {MAX_SOURCE_BYTES} are allowed")
    words = (*words, *(f"{written(name)}:" for name in names))
    fields = kept(ends, words)
    return Built(Grammar(source, **fields), tuple(not_enforced))


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _lark_text(text: str, special: Mapping[str, int] | None) -> str:
    """Lark for a text that may hold special tokens; nothing for the empty text."""
    known = special or {}
    either_name = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    pieces = re.split(f"({either_name})", text) if known else [text]
    return " ".join(f"<[{known[one]}]>" if one in known else _quoted(one) for one in pieces if one)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _check_size(text: str, what: str) -> None:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(
            f"{what} has {len(text.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        )
