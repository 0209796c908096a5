"""The switch between macro-states: constant work, hysteresis, and hybrid outside of what was fitted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.flow.learned.actions import HYBRID
from gateway.flow.learned.macro_state import Situation
from gateway.flow.learned.switch import HOLDS_S, MacroStateSwitch
from tests.support.learned_tables import STRICT_SLOTS, learned_table

CALM = Situation(queued_per_place=0.0, long_at_head=False, kv_share=0.1, trend=1.0)
QUEUE = Situation(queued_per_place=1.0, long_at_head=False, kv_share=0.1, trend=1.5)
BEYOND = Situation(queued_per_place=9.0, long_at_head=False, kv_share=0.1, trend=1.5)


def test_a_state_is_taken_on_when_two_looks_in_a_row_show_it() -> None:
    switch = MacroStateSwitch(learned_table())
    assert (switch.state, switch.actions, switch.look(CALM, 0.0)) == (None, HYBRID, None)
    assert switch.look(QUEUE, 2.0) is None
    assert switch.look(CALM, 4.0) is None, "one look each: neither is taken on"
    assert switch.look(CALM, 6.0) == (HYBRID, "learned: no queue; KV cache free; arrivals steady")
    assert switch.look(CALM, 8.0) is None, "nothing changes"
    assert (switch.state, switch.is_outside, switch.switches) == (0, False, 1)


def test_what_was_taken_on_is_held_and_a_load_at_a_border_does_not_swing() -> None:
    switch = MacroStateSwitch(learned_table())
    switch.look(CALM, 0.0)
    assert switch.look(CALM, 2.0) is not None
    at_s = [2.0 + 2.0 * turn for turn in range(1, 7)]
    told = [switch.look(QUEUE, now_s) for now_s in at_s]
    first = next(now_s for now_s, each in zip(at_s, told, strict=True) if each is not None)
    assert first == 2.0 + HOLDS_S
    assert told[at_s.index(first)] == (STRICT_SLOTS, "learned: a queue; KV cache free; arrivals rising")
    assert (switch.state, switch.actions) == (5, STRICT_SLOTS)
    swings = [switch.look((CALM, QUEUE)[turn % 2], 100.0 + 2 * turn) for turn in range(50)]
    assert swings == [None] * 50, "every other look: never twice in a row"


@pytest.mark.parametrize(
    ("beyond", "says"),
    [
        (BEYOND, "queued_per_place 9, at most 8 was"),
        (msgspec.structs.replace(QUEUE, kv_share=0.99), "kv_share 0.99, at most 0.95 was"),
        (msgspec.structs.replace(QUEUE, trend=float("nan")), "trend nan, at most 6 was"),
    ],
)
def test_outside_of_what_was_fitted_it_is_hybrid_at_once(beyond: Situation, says: str) -> None:
    switch = MacroStateSwitch(learned_table())
    switch.look(QUEUE, 0.0)
    assert switch.look(QUEUE, 2.0) is not None
    assert switch.look(beyond, 4.0) == (
        HYBRID,
        f"learned: outside of what the table was fitted on ({says}): hybrid",
    )
    assert (switch.state, switch.is_outside, switch.actions, switch.times_outside) == (None, True, HYBRID, 1)
    assert switch.look(beyond, 6.0) is None, "said once"
    told = [switch.look(QUEUE, 8.0 + 2 * turn) for turn in range(4)]
    assert [each is not None for each in told] == [False, False, False, True], "and back after the hold"
    assert switch.is_outside is False


def test_a_state_that_was_never_seen_is_outside() -> None:
    switch = MacroStateSwitch(learned_table({0: HYBRID}))
    assert switch.look(QUEUE, 0.0) == (
        HYBRID,
        "learned: outside of what the table was fitted on (it never was in the state: a queue; KV cache free;"
        " arrivals rising): hybrid",
    )


def test_each_look_looks_up_once_and_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = learned_table()
    switch = MacroStateSwitch(table)
    switch.look(CALM, 0.0)
    built = table.indexed

    def search(self: Any) -> None:
        raise AssertionError("a table is not searched")

    monkeypatch.setattr(type(table), "by_state", search)
    for turn in range(1, 100):
        switch.look((CALM, QUEUE, BEYOND)[turn % 3], 2.0 * turn)
    assert switch.lookups == 100
    assert table.indexed is built
