"""Schemas and their compiled grammars, for virtual engines: the shipped tokenizer, in their vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.grammar import source
from engine.grammar.compiler import Grammars
from engine.messages import Grammar
from engine.virtual.replica import EOS_TOKEN_ID, VOCABULARY

TOKENIZER_FILE = Path("ops/demo/model/tokenizer.json")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
        "required": ["n"],
    },
    {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "sum"},
            "parts": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}},
                                                 "required": ["x"]}},
            "name": {"type": "string", "maxLength": 4},
        },
        "required": ["kind", "parts", "name"],
    },
)  # fmt: skip


def built(schema: dict[str, Any]) -> Grammar:
    return source.of_schema(schema).grammar


def compiled(tenants: str) -> Grammars:
    """All schemas are compiled for these tenants: on virtual time no thread may decide when."""
    made = Grammars(TOKENIZER_FILE, VOCABULARY, [EOS_TOKEN_ID], threads=1)
    for tenant in tenants:
        for schema in SCHEMAS:
            while made.open(tenant, built(schema)) is None:
                pass
    return made
