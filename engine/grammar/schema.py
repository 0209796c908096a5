"""A client's JSON Schema, checked and made ready for the grammar library."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from engine.grammar.refused import GrammarRefused

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 48
#: Depths of all parts that are referred to, added up. The library walks a chain of them on one stack.
MAX_CHAIN = 500
#: What the library intersects at one place: a pattern counts 1, a digit of `multipleOf` 2. Its work doubles
#: with each, beyond any limit of its own.
MAX_INTERSECTED = 8
MAX_NOTES = 16

_ONE = frozenset(
    ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
     "propertyNames", "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Keys whose constraints the library merges with those beside them.
_MERGED = ("properties", "patternProperties", "additionalProperties", "allOf", "anyOf", "oneOf", "$ref")
_NOT_ENFORCED = (_ONE - {"items", "additionalProperties", "additionalItems"}) | {
    "uniqueItems", "minContains", "maxContains", "dependencies", "dependentRequired", "dependentSchemas"
}  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def prepared(schema: Any, where: str = "") -> tuple[dict[str, Any], list[str], list[str]]:
    """The schema with its objects closed, what of it is not enforced, and the names that it requires.

    An object that lists properties and does not speak of others is closed, unless its constraints are merged
    with those of another schema: what is written is valid all the same, and an end can be promised."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarRefused(f"a schema is a JSON object, not {json.dumps(schema)[:40]}", where)
    walk = _Walk()
    try:
        text = json.dumps(schema, allow_nan=False)
        if len(text) > MAX_SCHEMA_BYTES:
            raise GrammarRefused(
                f"the schema has {len(text)} bytes; at most {MAX_SCHEMA_BYTES} are allowed: split it", where
            )
        ready: dict[str, Any] = json.loads(text)
        deepest = walk.height(ready, "#", False)
        chain = deepest + sum(walk.heights.get(ref, MAX_DEPTH) for ref in walk.refs - {"#"})
        weight = _intersected(ready, ready, {}) if max(deepest, chain) <= MAX_CHAIN else 0
    except RecursionError:
        deepest = chain = MAX_CHAIN + 1
    except ValueError:
        raise GrammarRefused("it holds a number that is none in JSON", where) from None
    if deepest > MAX_DEPTH or chain > MAX_CHAIN:
        raise GrammarRefused(
            f"it is nested too deep: at most {MAX_DEPTH} parts in one another are allowed, and "
            f"{MAX_CHAIN} with all parts that a $ref names: use flatter parts, or fewer",
            where,
        )
    if weight > MAX_INTERSECTED:
        raise GrammarRefused(
            f"too many patterns for one value, or a long multipleOf: {MAX_INTERSECTED} patterns "
            "are allowed, or multiples of up to 4 digits: join them into one",
            where,
        )
    ready.pop("x-guidance", None)
    for pointer, node in walk.to_close:
        # A part of a choice is merged where the choice as a whole is.
        if not {pointer, re.sub(r"(/(anyOf|oneOf|allOf)/\d+)+$", "", pointer)} & walk.merged_refs:
            node["additionalProperties"] = False
    return ready, walk.notes[:MAX_NOTES], list(walk.required)


def resolved(root: dict[str, Any], ref: str) -> Any:
    """What a local reference points to, or None."""
    node: Any = root
    for step in unquote(ref).removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal():
            node = dict(enumerate(node)).get(int(name))
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def required_names(node: dict[str, Any]) -> list[str]:
    return [name for name in _listed(node, "required") if isinstance(name, str)]


class _Walk:
    """Over all parts of a schema, once each."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.required: dict[str, None] = {}
        self.to_close: list[tuple[str, dict[str, Any]]] = []
        self.refs: set[str] = set()
        self.merged_refs: set[str] = set()
        self.heights: dict[str, int] = {}

    def height(self, node: Any, pointer: str, merged: bool) -> int:
        if not isinstance(node, dict):
            return 0
        names, properties = required_names(node), node.get("properties")
        beside = sum(1 for key in _MERGED if key in node)
        merges = merged or beside > 1 or "required" in node or len(_listed(node, "allOf")) > 1
        if isinstance(node.get("$ref"), str):
            ref = unquote(node["$ref"])
            self.refs.add(ref)
            self.merged_refs |= {ref} if merges else set()
        below = [
            self.height(child, f"{pointer}/{step}", merges and key in ("allOf", "anyOf", "oneOf"))
            for key, step, child in _children(node)
        ]
        self.heights[pointer] = 1 + max(below, default=0)
        self.notes += [f"{pointer}/{key}" for key in _not_enforced(node)]
        self.required.update(dict.fromkeys(names))
        if isinstance(properties, dict) and beside == 1 and not merged and properties.keys() >= set(names):
            self.to_close.append((pointer, node))
        return self.heights[pointer]


def _children(node: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for key, value in node.items():
        if key in _NAMED and isinstance(value, dict):
            for name, child in value.items():
                yield key, f"{key}/{name.replace('~', '~0').replace('/', '~1')}", child
        elif key in _LISTS and isinstance(value, list):
            yield from ((key, f"{key}/{index}", child) for index, child in enumerate(value))
        elif key in _ONE:
            yield key, key, value


def _not_enforced(node: dict[str, Any]) -> Iterator[str]:
    yield from (key for key in node if key in _NOT_ENFORCED and node[key] not in (False, None))
    kind, properties = node.get("type", "string"), node.get("properties")
    kinds = kind if isinstance(kind, list) else [kind]
    if "format" in node and node["format"] not in FORMATS and "string" in kinds:
        yield "format"
    if isinstance(properties, dict) and properties.keys() - set(required_names(node)):
        yield from (key for key in ("minProperties", "maxProperties") if key in node)
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        # The library allows a whole number that is excluded where another bound is less than one away.
        bound, others = node.get(key), [node.get(other) for other in _BOUNDS if other != key]
        if kinds != ["integer"] and isinstance(bound, (int, float)) and bound % 1 == 0:
            near = [one for one in others if isinstance(one, (int, float)) and abs(one - bound) < 1]
            yield from [key] if near else []


def _intersected(node: Any, root: dict[str, Any], known: dict[str, int]) -> int:
    if not isinstance(node, dict):
        return 0
    inside = 1 if node.keys() & {"pattern", "format", "patternProperties"} else 0
    if type(multiple := node.get("multipleOf")) in (int, float):
        inside += 2 * len(Decimal(str(multiple)).normalize().as_tuple().digits)
    beside = Counter[str]()
    for key, _, child in _children(node):
        weight = _intersected(child, root, known)
        if key == "allOf":
            beside[key] += weight
        elif key in ("anyOf", "oneOf"):
            beside[key] = max(beside[key], weight)
        else:
            inside = max(inside, weight)
    if isinstance(ref := node.get("$ref"), str):
        if ref not in known:
            known[ref] = 0  # Recursion adds nothing: the library refuses it beside other keys.
            known[ref] = _intersected(resolved(root, ref), root, known)
        beside[ref] = known[ref]
    return inside + sum(beside.values())


def _listed(node: dict[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []
