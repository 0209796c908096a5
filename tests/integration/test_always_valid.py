"""Every answer under a schema is valid by it: shipped model, temperature 1, also where `max_tokens` cuts.

The long part prints how many are valid without a grammar (`pytest -m long -s`).
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

import jsonschema_rs
import pytest

from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.grammar.compiler import Grammars
from engine.grammar.forms import form_of
from engine.grammar.source import of_schema, of_tools
from engine.messages import Grammar, SamplingParams, SequenceOutcome, Submit
from engine.model.loader import load_runner
from tests.support.schemas import SCHEMAS as NAMED
from tests.support.schemas import TOOLS

MODEL = Path("ops/demo/model")
MAX_TOKENS = 80
SCHEMAS = tuple(NAMED.values())


@dataclass
class Answers:
    """An engine, and what it answers."""

    core: EngineCore
    texts: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, SequenceOutcome] = field(default_factory=dict)

    def ask(self, name: str, prompt: list[int], grammar: Grammar | None, max_tokens: int, seed: int) -> None:
        submit = Submit(
            name, name, "tenant", prompt, max_tokens, max_tokens, sampling=SamplingParams(seed=seed),
            grammar=grammar,
        )  # fmt: skip
        assert self.core.submit(submit, "gateway") is None

    def run(self) -> None:
        while self.core.has_work():
            for deltas in self.core.step().deltas.values():
                for delta in deltas:
                    self.texts[delta.sequence_id] = self.texts.get(delta.sequence_id, "") + delta.text
                    if delta.outcome is not None:
                        self.outcomes[delta.sequence_id] = delta.outcome


@pytest.fixture(scope="module")
def core() -> EngineCore:
    runner = load_runner(MODEL, num_blocks=1200, block_tokens=16, num_rows=64)
    grammars = Grammars(MODEL / "tokenizer.json", runner.info.vocabulary, runner.info.eos_token_ids)
    config = EngineConfig(max_sequences=64)
    return EngineCore(runner, load_texts(MODEL), config, lambda: 0.0, grammars=grammars)


def calls_of_tools() -> Grammar:
    form = form_of(MODEL)
    assert form is not None
    assert form.calls is not None
    return of_tools(TOOLS, form.calls, must_call=True, several=True).grammar


def check_valid(number: int, text: str) -> None:
    if number < len(SCHEMAS):
        jsonschema_rs.validator_for(SCHEMAS[number]).validate(json.loads(text, parse_float=near))
        return
    for call in text.split("\n"):
        said = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"), parse_float=near)
        [tool] = [tool for tool in TOOLS if tool.name == said["name"]]
        jsonschema_rs.validator_for(tool.parameters or {}).validate(said["arguments"])


def near(number: str) -> float:
    """A float on the same side of any bound: JSON has no largest number, and its digits do not end."""
    value = max(-sys.float_info.max, min(sys.float_info.max, float(number)))
    written, rounded = Decimal(number), Decimal(repr(value))
    return (
        value if written == rounded else math.nextafter(value, math.inf if written > rounded else -math.inf)
    )


def check(core: EngineCore, seeds: range) -> Counter[str]:
    prompt = load_texts(MODEL)._tokenizer.encode("Ada is 36 years old. Write it as JSON.").ids
    answers, drawn, met = Answers(core), random.Random(7), Counter[str]()
    built = [*[of_schema(schema).grammar for schema in SCHEMAS], calls_of_tools()]
    for seed in seeds:
        for number, grammar in enumerate(built):
            most = drawn.randint(1, MAX_TOKENS) if seed % 2 else MAX_TOKENS
            answers.ask(f"{number} {seed}", prompt, grammar, most, seed)
    answers.run()
    for name, outcome in answers.outcomes.items():
        number, _ = map(int, name.split())
        assert outcome.finish in ("stop", "length"), outcome.message
        if outcome.finish == "length" and not outcome.closed:
            # Nothing was promised, or not even the shortest value fits.
            assert not built[number].kept_tokens or outcome.emitted_tokens <= built[number].kept_tokens
            met["cut"] += 1
            continue
        check_valid(number, answers.texts[name])
        met["closed"] += outcome.closed
        met["forced"] += outcome.forced_tokens
        met["valid"] += 1
    assert len(answers.outcomes) == len(seeds) * len(built)
    return met


def test_answers_are_valid_wherever_they_are_cut(core: EngineCore) -> None:
    met = check(core, range(3))
    assert met["valid"] > met["cut"]
    assert met["closed"] > 5
    assert met["forced"] > 100
    assert core.table.pool.num_referenced == 0


@pytest.mark.long
def test_all_forty_schemas_with_fifty_seeds(core: EngineCore) -> None:
    print(dict(check(core, range(50))))
    prompt = load_texts(MODEL)._tokenizer.encode("Ada is 36 years old. Write it as JSON.").ids
    answers, valid = Answers(core), 0
    for seed in range(50):
        for number in range(len(SCHEMAS)):
            answers.ask(f"{number} {seed}", prompt, None, MAX_TOKENS, seed)
    answers.run()
    for name, text in answers.texts.items():
        try:
            valid += jsonschema_rs.validator_for(SCHEMAS[int(name.split()[0])]).is_valid(json.loads(text))
        except json.JSONDecodeError:
            continue
    print(f"without a grammar {valid} of {len(answers.texts)} are valid")
