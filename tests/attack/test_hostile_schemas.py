"""A tenant that sends schemas made to cost much: each is refused or answered, and no other tenant waits for
them. What each costs is bounded by the library's own limits (`engine/grammar/source.py`)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.server_process import MODEL, Server

pytestmark = pytest.mark.attack

PLAIN_TOKENS = 6
AT_ONCE = 4
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


def nested(schema: Any, levels: int) -> Any:
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def fan_out(levels: int) -> Any:
    """Each definition refers to the next one eight times."""
    parts = {
        f"d{level}": {
            "type": "object",
            "properties": {key: {"$ref": f"#/$defs/d{level + 1}"} for key in "abcdefgh"},
        }
        for level in range(levels)
    }
    return {"$defs": parts | {f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


NAMES = [f"p{number}" for number in range(2_000)]
FIELDS: Any = {name: {"type": "string"} for name in NAMES}
SLOW = [f"(a|b)*a(a|b){{{number}}}" for number in range(10, 40)]
SCHEMAS: dict[str, Any] = {
    "20,000 words": {"enum": [f"word {number}" for number in range(20_000)]},
    "2,000 fields": {"type": "object", "properties": FIELDS},
    "2,000 required": {"type": "object", "properties": FIELDS, "required": NAMES},
    "repeated repetition": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "a million characters": {"type": "string", "minLength": 10**6, "maxLength": 10**6},
    "a million items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "deep": nested({"type": "null"}, 50),
    "fan-out": fan_out(20),
    "all of any": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"a{one}_{other}": {}}}
        for other in range(8)]} for one in range(8)]},
    "any of 3,000": {"anyOf": [{"type": "object", "properties": {name: {"const": name}}} for name in NAMES]},
    "an exponential pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){200}$"},
    "30 patterns at once": {"allOf": [{"type": "string", "pattern": pattern} for pattern in SLOW]},
    "overlapping names": {"type": "object", "patternProperties": {pattern: {} for pattern in SLOW}},
    "divisors": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]},
    "a great number": {"type": "number", "minimum": -1.7e308, "maximum": 1.7e308},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "letters of all scripts": {"type": "string", "pattern": r"^(\p{L}\p{N}\w\s){1,300}$"},
}  # fmt: skip
GRAMMARS: dict[str, Any] = {
    "ambiguous": {"grammar": 'root ::= s\ns ::= s s | s s s | "a" | ""'},
    "doubled rules": {"grammar": "root ::= r0\n"
        + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(300))
        + 'r300 ::= "a"'},
    "a regex": {"regex": "(a{1,1000}){1,1000}"},
}  # fmt: skip


def test_hostile_schemas_are_refused_or_answered_and_stop_no_other_tenant(server: Server) -> None:
    hostile, plain = server.tenant("hostile-schemas"), server.tenant("beside-schemas")
    over = threading.Event()

    def attack(body: Any) -> httpx.Response:
        with server.http(hostile) as client:
            return client.post("/v1/chat/completions", json=ASKED | body)

    def chats() -> list[httpx.Response]:
        """One after the other until the attack is over."""
        answers = list[httpx.Response]()
        with server.http(plain) as client:
            while not over.is_set() or not answers:
                body = ASKED | {"max_tokens": PLAIN_TOKENS, "ignore_eos": True}
                answers.append(client.post("/v1/chat/completions", json=body))
        return answers

    bodies: dict[str, Any] = {name: {"structured_outputs": form} for name, form in GRAMMARS.items()}
    for name, schema in SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"name": "hostile", "schema": schema}}
        bodies[name] = {"response_format": form}
    with ThreadPoolExecutor(AT_ONCE + 1) as threads:
        beside = threads.submit(chats)
        try:
            answers = dict(zip(bodies, threads.map(attack, bodies.values()), strict=True))
        finally:
            over.set()
    for name, answer in answers.items():
        assert answer.status_code in (200, 400, 413), (name, answer.text)
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["param"].startswith(("response_format", "structured_outputs")), (name, error)
    served = beside.result()
    assert len(served) > len(bodies)
    assert {answer.status_code for answer in served} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in served} == {PLAIN_TOKENS}
