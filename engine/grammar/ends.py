"""The longest end that any state of a schema can need, in bytes: a bound of its tokens.

An end is found by `closing.py`; how it chooses is what makes these bounds hold. In a string it writes the
quote as soon as that may follow; else a closing bracket, a comma, a required name, or the least value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from engine.grammar.schema import FORMATS, resolved

#: An escape that was begun: `\u0000`, or the rest of a character of several bytes.
_ESCAPE = 6
#: What else one token may change: where the same bytes are split into tokens.
_SPLIT = 4
MAX_KEPT = 512
MAX_WORDS = 128


class EndSizes(NamedTuple):
    """Bytes of an end: from the beginning of a value, from the worst place in it, and by how much more bytes
    one more token can make it longer."""

    fresh: int
    worst: int
    growth: int


def of_words(words: Sequence[str]) -> EndSizes:
    longest = max(len(word.encode()) for word in words)
    return EndSizes(longest, longest, longest)


def either(parts: Sequence[EndSizes | None]) -> EndSizes | None:
    """One of several values: whichever was begun."""
    if None in parts or not parts:
        return None
    known = [part for part in parts if part is not None]
    worst = max(part.worst for part in known)
    return EndSizes(max(part.fresh for part in known), worst, worst)


def kept(ends: EndSizes | None, words: tuple[str, ...]) -> dict[str, Any]:
    """The grammar's fields."""
    if ends is None or ends.worst > MAX_KEPT or len(words) > MAX_WORDS:
        return {}
    growth = min(ends.growth + _SPLIT, ends.worst)
    return {"kept_tokens": ends.worst, "growth_tokens": growth, "end_words": words}


def ends_of(schema: dict[str, Any], names: Sequence[str]) -> EndSizes | None:
    """None: not known, as of patterns, formats, recursion and free properties. `names`: the required ones."""
    try:
        return _Reader(schema, frozenset(names)).of(schema)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None  # Too deep, or no schema: the library says why.


class _Reader:
    def __init__(self, root: dict[str, Any], names: frozenset[str]) -> None:
        self.root = root
        self.names = names
        self.known: dict[str, EndSizes | None] = {}

    def of(self, node: Any) -> EndSizes | None:
        if not isinstance(node, dict):
            return None
        parts: list[EndSizes | None] = [self.of_ref(node["$ref"])] if "$ref" in node else []
        parts += [either([self.of(one) for one in node[key]]) for key in ("anyOf", "oneOf") if key in node]
        parts += [self.of(one) for one in node.get("allOf", [])]
        if not parts or node.keys() & {"type", "enum", "const", "properties"}:
            parts.append(self.of_value(node))
        if len(parts) == 1 or None in parts:
            return parts[0] if len(parts) == 1 else None
        # Merged: at most the ends of all, one after another.
        fresh, worst = (sum(part[index] for part in parts if part) for index in (0, 1))
        return EndSizes(fresh, worst, worst)

    def of_ref(self, ref: Any) -> EndSizes | None:
        if not isinstance(ref, str) or not ref.startswith("#/"):
            return None
        if ref not in self.known:
            self.known[ref] = None  # What comes back to itself has no bound.
            self.known[ref] = self.of(resolved(self.root, ref))
        return self.known[ref]

    def of_value(self, node: dict[str, Any]) -> EndSizes | None:
        if "const" in node or "enum" in node:
            values = node["enum"] if "enum" in node else [node["const"]]
            return of_words([written(value) for value in values]) if values else None
        kind = node.get("type")
        if isinstance(kind, list):
            return either([self.of_value({**node, "type": one}) for one in kind])
        readers = {
            "null": self._null, "boolean": self._boolean, "string": self._string, "number": self._number,
            "integer": self._number, "array": self._array, "object": self._object,
        }  # fmt: skip
        return readers[kind](node) if kind in readers else None

    def _null(self, _: dict[str, Any]) -> EndSizes:
        return EndSizes(4, 4, 4)

    def _boolean(self, _: dict[str, Any]) -> EndSizes:
        return EndSizes(5, 5, 5)

    def _string(self, node: dict[str, Any]) -> EndSizes | None:
        least = node.get("minLength", 0)
        if "pattern" in node or node.get("format") in FORMATS:
            return None
        return EndSizes(least + 2, least + 2 + _ESCAPE, _ESCAPE)

    def _number(self, node: dict[str, Any]) -> EndSizes | None:
        if "multipleOf" in node:
            return None
        digits = 1
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            digits = max(digits, len(format(Decimal(str(node.get(key, 0))), "f")))
        return EndSizes(digits + 3, digits + 3, digits + 3)

    def _array(self, node: dict[str, Any]) -> EndSizes | None:
        before, rest, least = node.get("prefixItems", []), node.get("items", True), node.get("minItems", 0)
        most = node.get("maxItems", MAX_KEPT)
        if isinstance(rest, list) or least > MAX_KEPT:
            return None
        more = [] if rest is False or most <= len(before) else [rest]
        items = [self.of(item) for item in [*before[:most], *more]]
        if None in items:
            return None
        known = [item for item in items if item is not None]
        if not known:
            return EndSizes(2, 2, 0)
        needed = sum(known[min(index, len(known) - 1)].fresh + 1 for index in range(least))
        worst = max(item.worst for item in known) + 1
        return EndSizes(2 + needed, 2 + needed + worst, worst)

    def _object(self, node: dict[str, Any]) -> EndSizes | None:
        properties, names = node.get("properties", {}), node.get("required", [])
        if node.get("additionalProperties") is not False:
            return None
        if node.keys() & {"patternProperties", "minProperties", "maxProperties"} or set(names) - set(
            properties
        ):
            return None
        needed, worst, growth = 0, 0, 0
        for name, child in properties.items():
            ends = self.of(child)
            if ends is None:
                return None
            key = len(written(name).encode()) + 2
            # A name that is required elsewhere may be taken for one that is required here.
            needed += key + ends.fresh if name in self.names else 0
            worst = max(worst, key + ends.worst)
            growth = max(growth, ends.growth if name in names else key + ends.worst)
        return EndSizes(2 + needed, 2 + needed + worst, growth)


def written(value: Any) -> str:
    """As grammars write it: compact."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
