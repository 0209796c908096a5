"""Under grammars each sequence has the answer that it would have alone, token by token.

The histories of `test_one_step_ahead.py`, in which half of the sequences have a grammar: batches, chunks,
preemption, swaps, moves, leases that run dry, budgets that end. Alone no token is forced, as those sequences
ask for log probabilities; in the histories runs of forced tokens are appended without sampling.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.core.core import EngineCore
from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.grammar.compiler import Grammars
from engine.messages import Delta, SamplingParams, Submit
from engine.scheduling.counters import scaled
from engine.virtual.replica import EOS_TOKEN_ID, VirtualReplica, VirtualTexts
from tests.property.test_engine_histories import BLOCK_TOKENS, NUM_BLOCKS, History, run_histories
from tests.property.test_one_step_ahead import RUNNERS, AheadHistory
from tests.support.virtual_grammars import SCHEMAS, TOKENIZER_FILE, built, compiled


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return compiled("abcdx")


class GrammarHistory(AheadHistory):
    def __init__(self, seed: int, policy: str, grammars: Grammars, **runner: Any) -> None:
        self.grammars = grammars
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
        super().__init__(seed, policy, **runner)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replica.core = EngineCore(
            self.runner, VirtualTexts(), self.config, self.replica.clock, grammars=self.grammars
        )

    def drawn_fields(self) -> dict[str, Any]:
        grammar = self.rng.choice((None, *map(built, SCHEMAS)))
        penalties = self.rng.choice((0.0, 0.5))
        sampling = SamplingParams(frequency_penalty=penalties, ignore_eos=self.rng.random() < 0.2)
        return super().drawn_fields() | ({"grammar": grammar, "sampling": sampling} if grammar else {})

    def disturb(self) -> None:
        super().disturb()
        live = [each.sequence_id for each in self.replica.core.running()]
        if live and self.rng.random() < 0.06:
            name = self.rng.choice(live)
            self.interrupted.add(name)
            self.replica.core.cancel(name, "budget")

    def take(self, delta: Delta) -> None:
        super().take(delta)
        outcome, submit = delta.outcome, self.submits[delta.sequence_id]
        if outcome is None:
            return
        self.met["forced"] += outcome.forced_tokens
        # An end is not computed; where `max_tokens` cuts, its first token takes the place of a sampled one.
        written = len(delta.token_ids) - (outcome.finish == "length") if outcome.closed else 0
        if outcome.finish == "budget":
            self.written[delta.sequence_id] = written
        self.met[f"closed by {outcome.finish}"] += outcome.closed
        cost = INPUT_TOKEN_COST * outcome.forced_tokens - OUTPUT_TOKEN_COST * (
            outcome.forced_tokens + written
        )
        self.accounted[submit.tenant_id] -= written
        self.cost += cost
        whole = INPUT_TOKEN_COST * outcome.computed_tokens + OUTPUT_TOKEN_COST * outcome.emitted_tokens
        self.charges[submit.tenant_id] += scaled(whole + cost, submit.weight) - scaled(whole, submit.weight)
        if submit.grammar is not None and (outcome.closed or outcome.finish == "stop"):
            self.check_valid(delta.sequence_id)

    def check_valid(self, name: str) -> None:
        ids = [token_id for token_id in self.tokens[name] if token_id != EOS_TOKEN_ID]
        value = json.loads(self.tokenizer.decode(ids, skip_special_tokens=False))
        if isinstance(value, list):
            assert {"red", "green"} >= set(value) > set()
        elif "kind" in value:
            assert list(value) == ["kind", "parts", "name"]
            assert len(value["name"]) <= 4
            assert all(list(part) == ["x"] and isinstance(part["x"], int) for part in value["parts"])
        else:
            assert set(value) <= {"ok", "n"}
            assert isinstance(value["n"], int)
        self.met["valid"] += 1

    def new_replica(self) -> VirtualReplica:
        return VirtualReplica(
            num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, audit=True, grammars=self.grammars
        )

    def sampling_alone(self, submit: Submit) -> SamplingParams:
        return replace(submit.sampling, logprobs=0) if submit.grammar else submit.sampling

    def check_end(self) -> None:
        History.check_end(self)


IN_SUITE = (("hybrid", "late"), ("vtc", "at-once"))


@pytest.mark.parametrize(("policy", "runner"), IN_SUITE)
def test_each_sequence_has_its_answer_of_alone(policy: str, runner: str, grammars: Grammars) -> None:
    kind = partial(GrammarHistory, grammars=grammars, **RUNNERS[runner])
    met = run_histories(policy, range(4), kind)
    for what in ("preempted", "recomputed", "closed by budget", "closed by length", "forced", "valid"):
        assert met[what] > 0, what
