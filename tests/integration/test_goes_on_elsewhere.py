"""A stream goes on at another engine from what its gateway received, wherever it was cut, as if undisturbed.

The shipped model in float32. One engine gives whole answers. At another one leases come in pieces; after each
of its deltas a third engine gets what a gateway holds by then.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.answers.parser import AnswerForms
from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.grammar.compiler import Grammars
from engine.grammar.forms import form_from
from engine.grammar.source import of_schema, of_tools
from engine.messages import Delta, Grammar, SamplingParams, SequenceState, Submit
from engine.model.loader import load_runner
from tests.support.schemas import SCHEMAS, TOOLS

MODEL = Path("ops/demo/model")
TEXTS = load_texts(MODEL)
FORM = form_from(None, '<tool_call>{"name":1,"arguments":2}</think>')
assert FORM is not None
assert FORM.calls is not None
BUILT = {name: of_schema(SCHEMAS[name]).grammar for name in ("person", "people", "steps")}
PARTS = ("reasoning_content", "tool_calls")


def written(rule: str) -> Grammar:
    return Grammar(json.dumps({"grammars": [{"lark_grammar": f"start: {rule}"}]}))


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": SamplingParams(temperature=0.0)},
    "no seed": {"sampling": SamplingParams(top_p=0.95, top_k=40, ignore_eos=True)},
    "second choice": {"sampling": SamplingParams(temperature=1.3, seed=5, ignore_eos=True), "index": 1},
    "penalties": {"sampling": SamplingParams(seed=3, repetition_penalty=1.2, frequency_penalty=0.7)},
    "log probabilities of what is held": {
        "sampling": SamplingParams(seed=8, logprobs=3, ignore_eos=True, stop=("e§", "a§", " §", "n§", "t§"))
    },
    "schema": {"grammar": BUILT["person"]},
    "closed": {"grammar": BUILT["people"], "max_tokens": 40},
    "no room to close": {"grammar": BUILT["steps"], "max_tokens": 12},
    "forced, one by one": {"sampling": SamplingParams(seed=1, logprobs=0), "grammar": BUILT["steps"]},
    "split characters": {"grammar": written("/[é€𝄞]{9}/")},
    "calls": {"grammar": of_tools(TOOLS, FORM.calls, must_call=True, several=True).grammar, "parts": PARTS},
    "thoughts": {
        "grammar": written('"<think>" /[a-z ]{9}/ "</think>" /[a-z ]{9}/ "<tool_c"'),
        "parts": PARTS,
    },
}
Received = dict[str, list[tuple[Delta, int]]]
"""Each sequence's deltas, with the lease that it had."""


@pytest.fixture(scope="module")
def make_core() -> Callable[[], EngineCore]:
    torch.set_num_threads(1)
    runner = load_runner(MODEL, num_blocks=400, block_tokens=16, num_rows=16, dtype="float32", device="cpu")
    grammars = Grammars(MODEL / "tokenizer.json", runner.info.vocabulary, runner.info.eos_token_ids)
    config, readers = EngineConfig(max_sequences=16, prefix_caching=False), AnswerForms(FORM, TEXTS)

    def make() -> EngineCore:
        ticks = itertools.count()
        clock = lambda: next(ticks) / 1000  # noqa: E731
        return EngineCore(runner, TEXTS, config, clock, grammars=grammars, readers=readers)

    return make


def run(core: EngineCore, leases: dict[str, int], drawn: random.Random) -> Received:
    received: Received = {name: [] for name in leases}
    while core.has_work() or core.table.sequences:
        for name, sequence in core.table.sequences.items():
            if not sequence.may_emit and not sequence.awaits_grammar:
                leases[name] += drawn.randint(1, 6)
                core.top_up(name, leases[name])
        for delta in core.step().deltas.get("gateway", []):
            received[delta.sequence_id].append((delta, leases[delta.sequence_id]))
        core.check()
    return received


def submit_all(core: EngineCore, submits: dict[str, Submit]) -> dict[str, int]:
    for submit in submits.values():
        assert core.submit(submit, "gateway") is None
    return {name: submit.lease_tokens for name, submit in submits.items()}


def state_of(submit: Submit, deltas: list[Delta], lease_tokens: int) -> SequenceState:
    """What a gateway can say of a sequence."""
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    last = deltas[-1] if deltas else Delta("")
    return SequenceState(
        replace(submit, lease_tokens=lease_tokens), ids, sum(len(delta.text) for delta in deltas),
        kv_tokens=len(submit.prompt_token_ids) + len(ids) - 1 if ids else 0, cached_tokens=last.cached_tokens,
        gateway_id="gateway", gpu_us=last.gpu_us, forced_tokens=last.forced_tokens,
    )  # fmt: skip


def answer(deltas: list[Delta]) -> tuple[Any, ...]:
    """All that a client sees, and what it is charged."""
    said = Counter[Any]()
    for part in [part for delta in deltas for part in (*delta.parts, {"content": delta.text})]:
        for call in part.get("tool_calls", ()):
            function = call["function"]
            text = call.get("id", "") + function.get("name", "") + function["arguments"]
            said[call["index"]] = (said[call["index"]] or "") + text
        for kind in ("content", "reasoning_content"):
            said[kind] = (said[kind] or "") + part.get(kind, "")
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    probable = [(entry.token_id, entry.text, [each[:2] for each in entry.top]) for entry in entries]
    outcome = deltas[-1].outcome
    assert outcome is not None
    assert outcome.emitted_tokens == len(ids)
    ended = (outcome.finish, outcome.stop_string, outcome.closed, outcome.message)
    charged = (outcome.prompt_tokens, outcome.computed_tokens, outcome.cached_tokens)
    return ids, dict(said), probable, ended, charged


def logprobs(deltas: list[Delta]) -> list[float]:
    return [entry.logprob for delta in deltas for entry in delta.logprobs]


def test_a_stream_is_as_undisturbed_wherever_its_engine_was_lost(make_core: Callable[[], EngineCore]) -> None:
    prompt = TEXTS._tokenizer.encode("Ada is 36 years old. Write about her.").ids
    defaults = {"max_tokens": 28, "lease_tokens": 99, "sampling": SamplingParams(seed=2)}
    wanted = {name: Submit(name, name, "t", prompt, **defaults | fields) for name, fields in CASES.items()}
    drawn, met = random.Random(4), Counter[str]()
    core = make_core()
    whole = run(core, submit_all(core, wanted), drawn)
    # One more ends by a string of its own answer, and has the half of another before.
    text = "".join(delta.text for delta, _ in whole["second choice"])
    stop = (text[-12:-4], text[6:12] + "§")
    sampling = replace(wanted["second choice"].sampling, stop=stop)
    wanted["stopped"] = replace(wanted["second choice"], sequence_id="stopped", sampling=sampling)
    core = make_core()
    whole |= run(core, submit_all(core, {"stopped": wanted["stopped"]}), drawn)
    core = make_core()
    kept = {name: submit.grammar.kept_tokens if submit.grammar else 0 for name, submit in wanted.items()}
    first = {name: replace(submit, lease_tokens=1 + kept[name]) for name, submit in wanted.items()}
    in_pieces = run(core, submit_all(core, first), drawn)
    for cut in range(max(map(len, in_pieces.values()))):
        core, leases, states = make_core(), dict[str, int](), dict[str, SequenceState]()
        for name, pieces in [item for item in in_pieces.items() if cut < len(item[1])]:
            leases[name] = pieces[cut - 1][1] if cut else first[name].lease_tokens
            states[name] = state_of(wanted[name], [delta for delta, _ in pieces[:cut]], leases[name])
            assert core.import_(states[name]) is None
            met["rests"] += not core.table.sequences[name].may_emit
            met["held"] += len(TEXTS.decode(states[name].output_token_ids)) > states[name].text_sent
        computed = 0 if cut else len(wanted) * len(prompt)
        for name, after in run(core, leases, drawn).items():
            deltas = [delta for delta, _ in (*in_pieces[name][:cut], *after)]
            undisturbed = [delta for delta, _ in whole[name]]
            assert answer(deltas) == answer(undisturbed), (name, cut)
            assert logprobs(deltas) == pytest.approx(logprobs(undisturbed), abs=1e-3)
            outcome, state = deltas[-1].outcome, states[name]
            assert outcome is not None
            assert (outcome.recomputed_tokens, outcome.gpu_us > state.gpu_us) == (state.kv_tokens, True)
            computed += outcome.forced_tokens - state.forced_tokens
            met.update(
                [outcome.finish, f"closed {outcome.closed}", f"by a string {bool(outcome.stop_string)}"]
            )
        served = core.snapshot("engine").service["t"].computed_tokens
        assert served == computed, "what is computed again is no service"
    for each in ("rests", "held", "length", "stop", "closed True", "by a string True"):
        assert met[each] > 5, met
