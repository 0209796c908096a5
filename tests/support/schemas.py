"""Schemas as clients send them, and what draws texts from a grammar with no model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from engine.grammar.compiler import Grammars
from engine.grammar.source import ToolSchema
from engine.grammar.state import GrammarState
from engine.messages import Grammar

TOKENIZER = Path("ops/demo/model/tokenizer.json")
VOCABULARY = 640
END = 2

_text: dict[str, Any] = {"type": "string"}
_whole = {"type": "integer"}


def thing(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_person = thing("name", "age", name=_text, age={"type": "integer", "minimum": 0, "maximum": 150})
_cat = thing("kind", "lives", kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9})
_dog = thing("kind", kind={"const": "dog"}, tricks={"type": "array", "items": _text})

#: Every end is known: an answer that is cut can be closed.
CLOSABLE: dict[str, dict[str, Any]] = {
    "person": _person,
    "strict person": {**_person, "additionalProperties": False},
    "nothing required": thing(first=_text, second=_whole, third={"type": "null"}),
    "names alike": thing("name", "nation", name=_text, named=_text, nation=_whole, nations=_whole),
    "odd names": thing("a b", 's "x"', "é", **{"a b": _text, 's "x"': _whole, "é": _text, "/~": _whole}),
    "long words": thing("text", text={"type": "string", "minLength": 5, "maxLength": 40}),
    "enumeration": {"enum": ["red", "re", 'green "x"', "a}b", 1, 12, None, True, -1.5]},
    "constants": thing("a", "b", a={"const": "only\n"}, b={"const": 7}),
    "kinds": thing("a", "b", a={"type": ["string", "null"]}, b={"type": ["integer", "boolean", "null"]}),
    "yes or no": {"type": "boolean"},
    "number": {"type": "number"},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "below": {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 0.75},
    "from hundred": {"type": "integer", "minimum": 100, "maximum": 12345},
    "negative": thing("t", t={"type": "number", "minimum": -273.15, "maximum": -0.5}),
    "list": {"type": "array", "items": _whole},
    "list of three": {"type": "array", "items": _text, "minItems": 3, "maxItems": 3},
    "list of lists": {"type": "array", "minItems": 2, "items": {"type": "array", "items": _whole}},
    "pair": {"type": "array", "prefixItems": [_text, _whole], "minItems": 2, "maxItems": 2},
    "people": thing("people", people={"type": "array", "items": _person, "maxItems": 3}),
    "either": {"anyOf": [_person, {"type": "array", "items": _whole}, {"type": "null"}]},
    "pets": {"type": "array", "items": {"oneOf": [_cat, _dog], "discriminator": {"propertyName": "kind"}}},
    "pydantic": {
        "$defs": {"Cat": _cat, "Dog": _dog, "Color": {"enum": ["black", "white"], "type": "string"}},
        **thing(
            "pet",
            pet={"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "title": "Pet"},
            color={"allOf": [{"$ref": "#/$defs/Color"}], "default": "black"},
            note={"anyOf": [_text, {"type": "null"}], "default": None},
        ),
    },
    "deep": thing("a", a=thing("b", b=thing("c", c=thing("d", d={"type": "array", "items": _person})))),
    "steps": thing(
        *("steps", "answer"),
        steps={"type": "array", "items": thing("why", "out", why=_text, out=_text)},
        answer=_text,
    ),
    "both": {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 9}]},
    "draft four": {"definitions": {"n": _whole}, **thing("n", n={"$ref": "#/definitions/n"})},
    "empty": thing(),
}
#: An end is not known: patterns, formats, recursion, properties of any name.
OPEN: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "pattern": thing("code", code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "date": thing("day", day={"type": "string", "format": "date"}),
    "mail": thing("mail", mail={"type": "string", "format": "email"}),
    "unknown format": {"type": "string", "format": "color", "pattern": "^#[0-9a-f]{6}$"},
    "identifier": {"type": "string", "format": "uuid"},
    "named by pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]+$": _whole},
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1},
    "tree": {
        "$defs": {"t": thing("v", v=_whole, below={"type": "array", "items": {"$ref": "#/$defs/t"}})},
        "$ref": "#/$defs/t",
    },
    "merged": {"allOf": [thing("a", a=_text), thing("b", b=_whole)]},
    "multiples": {"type": "integer", "multipleOf": 5, "minimum": 0},
    "tagged": thing("id", id={"type": "string", "pattern": "^t[0-9]+$"}, tags={"type": "array"}),
}
SCHEMAS = CLOSABLE | OPEN

TOOLS = [
    ToolSchema("add", thing("left", "right", left=_whole, right=_whole)),
    ToolSchema("weather", thing("place", place=_text, unit={"enum": ["C", "F"]})),
    ToolSchema("now"),
]


class Drawn:
    """The demo model's grammars, and answers drawn from them by chance."""

    def __init__(self) -> None:
        self.grammars = Grammars(TOKENIZER, VOCABULARY, [END], threads=1)
        self.text = self.grammars._tokenizer.decode_bytes

    def open(self, grammar: Grammar, tenant_id: str = "acme") -> GrammarState:
        while (state := self.grammars.open(tenant_id, grammar)) is None:
            pass
        return state

    def allowed(self, state: GrammarState) -> list[int]:
        mask = self.grammars.masks({0: state})[0]
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()

    def step(self, state: GrammarState, rng: random.Random) -> int:
        """One token, accepted: short ones more often, so that a text has many parts."""
        allowed = self.allowed(state)
        short = [one for one in allowed if len(self.text([one])) == 1 or one == END]
        token_id = rng.choice(short if short and rng.random() < 0.6 else allowed)
        state.accept(token_id)
        return token_id


def check_value(schema: dict[str, Any], text: bytes) -> Any:
    """The text's value, which must be valid; a number that no double holds counts as the largest."""
    value = json.loads(text.decode(), parse_float=lambda digits: max(-1e300, min(1e300, float(digits))))
    jsonschema_rs.validator_for(schema).validate(value)
    return value
