"""Grammars are compiled once a tenant, in a thread, by turns; masks of a step are made by one call."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from engine.grammar import compiler, source
from engine.messages import Grammar
from tests.support.schemas import CLOSABLE, END, SCHEMAS, VOCABULARY, Drawn, check_value


def word(number: int) -> Grammar:
    return source.of_choice([f"word {number}"]).grammar


class Recorded:
    """Stands before the library: keeps the compiling thread until it may go, and notes what it compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources: list[str] = []
        self.may_go = threading.Event()
        self._matcher = compiler.LLMatcher
        monkeypatch.setattr(compiler, "LLMatcher", self)

    def __call__(self, tokenizer: Any, text: str, **rest: Any) -> Any:
        if threading.current_thread().name == "grammars":
            self.sources.append(text)
            assert self.may_go.wait(60)
        return self._matcher(tokenizer, text, **rest)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def test_a_tenants_grammar_is_compiled_once_while_it_is_kept(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_KEPT_OF_TENANT", 2)
    monkeypatch.setattr(compiler, "MAX_KEPT", 3)
    recorded.may_go.set()
    drawn = Drawn()
    used = [("acme", 0), ("acme", 0), ("beta", 0), ("acme", 1), ("acme", 0)]
    for tenant, number in [*used, ("acme", 2), ("acme", 0), ("acme", 1), ("beta", 0)]:
        drawn.open(word(number), tenant)
    # Tenants share nothing; the one unused for longest goes, of a tenant and of all.
    assert recorded.sources == [word(number).source for number in (0, 0, 1, 2, 1)]
    drawn.open(word(0), "gamma")
    drawn.open(word(0), "acme")
    assert len(recorded.sources) == 7


def test_tenants_take_turns_and_no_caller_waits(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING_OF_TENANT", 3)
    drawn = Drawn()
    grammars = drawn.grammars
    assert grammars.open("acme", word(0)) is None
    while not recorded.sources:
        pass  # The thread takes the first one.
    for number in (1, 2, 3, 1):
        assert grammars.open("acme", word(number)) is None
    refused = grammars.open("acme", word(4))
    assert refused is not None
    assert refused.failed == "3 grammars of the tenant wait to be compiled: try again later"
    assert grammars.open("beta", word(9)) is None
    recorded.may_go.set()
    assert not any(drawn.open(word(number)).failed for number in range(4))
    assert not drawn.open(word(9), "beta").failed
    assert recorded.sources == [word(number).source for number in (0, 1, 9, 2, 3)]


def test_all_masks_of_a_step_are_one_call() -> None:
    drawn = Drawn()
    states = {
        7 * row: drawn.open(source.of_schema(SCHEMAS[name]).grammar) for row, name in enumerate(SCHEMAS)
    }
    chosen = random.Random(1)
    for state in states.values():
        state.forced(40)
        drawn.step(state, chosen)
    calls, rows = drawn.grammars.mask_calls, drawn.grammars.mask_rows
    masks = drawn.grammars.masks(states)
    assert (drawn.grammars.mask_calls - calls, drawn.grammars.mask_rows - rows) == (1, len(SCHEMAS))
    assert {(mask.shape, str(mask.dtype)) for mask in masks.values()} == {((VOCABULARY // 32,), "int32")}
    for row, state in states.items():
        assert masks[row].tolist() == drawn.grammars.masks({row: state})[row].tolist()


@pytest.mark.parametrize("name", CLOSABLE)
def test_a_forced_run_is_the_same_at_once_and_one_by_one(name: str) -> None:
    drawn, chosen = Drawn(), random.Random(name)
    grammar = source.of_schema(CLOSABLE[name]).grammar
    state, single, tokens = drawn.open(grammar), drawn.open(grammar), []
    while not tokens or tokens[-1] != END:
        if run := state.forced(3):
            for token_id in run:
                assert drawn.allowed(single) == [token_id]
                single.accept(token_id)
        else:
            run = [drawn.step(state, chosen) if len(tokens) < 40 else (state.closing(600) or [END])[0]]
            single.accept(run[0])
            if len(tokens) >= 40:
                state.accept(run[0])
        tokens += run
    assert (state.forced(9), state.failed, single.failed) == ([], "", "")
    check_value(CLOSABLE[name], drawn.text(tokens[:-1]))
    again = drawn.open(grammar)
    again.replay(tokens[:-1])
    assert (again.closing(9), END in drawn.allowed(again)) == ([], True)
