"""Rules of membership: what is said of engines, what is heard of them, and what follows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine.messages import PROTOCOL_VERSION, ModelInfo, Ready
from gateway.membership import (
    IDLE_S,
    MOST_MEMBERS,
    QUIET_S,
    STEADY_S,
    MemberAct,
    MembershipPlan,
    NamedEngine,
    SeenMember,
    objection,
    plan,
)

A, B = "tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"
JOIN, KEEP, REPLACE, LEAVE, REMOVE = MemberAct
LONG_S = 2 * STEADY_S
HEARD = SeenMember("one", A)
AWAY = SeenMember("one", A, quiet_s=LONG_S)


def said(name: str, address: str, source: str = "sql", *, is_current: bool = True) -> NamedEngine:
    return NamedEngine(name, address, source, is_current)


def decided(words: list[NamedEngine], *members: SeenMember) -> MembershipPlan:
    return plan(words, {member.name: member for member in members})


@pytest.mark.parametrize(
    ("words", "member", "act", "address"),
    [
        ([said("one", A)], None, JOIN, A),
        ([said("one", A, is_current=False)], None, None, None),
        ([said("one", A)], HEARD, KEEP, A),
        ([said("one", A)], AWAY, KEEP, A),
        # Its lease has ended: it stays for as long as it is heard.
        ([said("one", A, is_current=False)], HEARD, KEEP, A),
        ([said("one", A, is_current=False)], SeenMember("one", A, quiet_s=QUIET_S / 2), KEEP, A),
        ([said("one", A, is_current=False)], AWAY, REMOVE, None),
        # Another address counts once the engine is not heard where it was.
        ([said("one", B)], HEARD, KEEP, A),
        ([said("one", B)], SeenMember("one", A, quiet_s=0.1), REPLACE, B),
        # Said at two: the one that is heard keeps the name, else they are tried in turns.
        ([said("one", B), said("one", A)], HEARD, KEEP, A),
        ([said("one", B), said("one", A)], SeenMember("one", A, quiet_s=QUIET_S / 2), KEEP, A),
        ([said("one", B), said("one", A)], AWAY, REPLACE, B),
        # Named no more: no turns at once; it goes when the source has stood by it and nothing runs there.
        ([], HEARD, LEAVE, None),
        ([], SeenMember("one", A, unnamed_s=STEADY_S / 2, idle_s=LONG_S), LEAVE, None),
        ([], SeenMember("one", A, unnamed_s=LONG_S, idle_s=IDLE_S / 2), LEAVE, None),
        ([], SeenMember("one", A, unnamed_s=LONG_S, idle_s=LONG_S), REMOVE, None),
        ([], SeenMember("one", A, quiet_s=QUIET_S / 2), LEAVE, None),
        ([], AWAY, REMOVE, None),
    ],
)
def test_what_is_heard_counts_for_more_than_what_is_said(
    words: list[NamedEngine], member: SeenMember | None, act: MemberAct | None, address: str | None
) -> None:
    made = decided(words, *([] if member is None else [member]))
    assert made.acts.get("one") == act
    assert (made.places["one"].address if "one" in made.places else None) == address


@pytest.mark.parametrize(
    ("words", "members", "name", "line"),
    [
        ([said("a b", A)], [], "a b", "its name must be 1 to 64 letters"),
        ([said("one@", A)], [], "one@", "its name must be 1 to 64 letters"),
        ([said("x" * 65, A)], [], "x" * 64, "its name must be 1 to 64 letters"),
        ([said("one", "http://x")], [], "one", "'http://x' is no address like tcp://HOST:PORT (sql)"),
        ([said("one", A), said("two", A)], [], "two", f"{A} is the address of one (sql)"),
        ([said("another", A), said("one", A)], [HEARD], "another", f"{A} is the address of one (sql)"),
        ([said("one", A), said("one", B, "dns:x")], [], "one", f"too (dns:x), and stays at {A}"),
        ([said("one", B)], [HEARD], "one", f"it is said to be at {B}, too (sql), and stays at {A}"),
        (
            [said(f"e-{number}", f"tcp://10.0.0.1:{number}") for number in range(MOST_MEMBERS + 1)],
            [],
            f"e-{MOST_MEMBERS}",
            "there are 256 engines already (sql)",
        ),
    ],
)
def test_what_is_said_and_not_done_is_one_line(
    words: list[NamedEngine], members: list[SeenMember], name: str, line: str
) -> None:
    made = decided(words, *members)
    assert list(made.refused) == [name]
    assert line in made.refused[name]
    assert len(made.acts) <= MOST_MEMBERS


@pytest.mark.parametrize(
    ("changes", "expected", "why"),
    [
        ({}, {}, ""),
        ({}, {"name": None, "block_tokens": None}, ""),
        ({}, {"name": "other"}, "is called 'one': start it with --engine-id other"),
        ({}, {"tokenizer": "def"}, "its tokenizer.json is another one"),
        ({}, {"block_tokens": 32}, "have 16 tokens, and the other engines' 32"),
        ({"protocol_version": PROTOCOL_VERSION - 1}, {}, "upgrade the older one"),
    ],
)
def test_who_joins_proves_what_it_is(changes: dict[str, Any], expected: dict[str, Any], why: str) -> None:
    model = ModelInfo("m", "x", 1, 1024, 100, [0], "float32", "cpu", "none", tokenizer="abc")
    ready = replace(Ready("one", model, "vtc", 16, 64, 2, 512, 1), **changes)
    wanted: dict[str, Any] = {"name": "one", "tokenizer": "abc", "block_tokens": 16} | expected
    found = objection(ready, **wanted)
    assert why in found
    assert bool(found) == bool(why)


def test_an_engine_of_a_server_s_workers_has_that_server_s_id_in_its_name() -> None:
    name = "engine-0@gw_0123456789ab"
    assert decided([said(name, A)]).acts == {name: MemberAct.JOIN}
