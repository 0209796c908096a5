"""A step in steady decode asks nothing of the device: one event, one copy to it, a few bytes a sequence.

Counted on the stand-in, with one step ahead; the contexts cross edges of blocks meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import engine.model.graphs
import engine.model.rows
from engine.core.core import EngineConfig, EngineCore
from engine.grammar.compiler import Grammars
from engine.grammar.source import of_regex
from engine.messages import SamplingParams, Submit
from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from tests.integration.exactness import NoText
from tests.models.random_models import save_random_model
from tests.support.stand_in_device import CARD, DEVICE, StandIn, StandInQueues, needs_stand_in

pytestmark = needs_stand_in
FILE = "tests/integration/test_device_counts.py"
BLOCK_TOKENS = 64
SHORT, LONG = 121, 121 + 30 * BLOCK_TOKENS
"""Contexts; blocks end at the same steps, and groups of similar contexts, too. A block of the first sequence
ends while it is counted."""
STEPS = 8
MOST_BYTES = 64
"""That a step sends to the device, a running sequence."""
LAUNCHES_A_LAYER = {"torch-sdpa": 38, "triton": 9}
"""Operators of 8 sequences' decode, Llama, by attention kernel: of transformers' own pass, of the lean
one, for which they are as many whatever runs; named in docs/architecture.md."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.4,
    presence_penalty=0.3, logit_bias={7: 2.0, 11: -3.0}, logprobs=3, seed=5,
    ignore_eos=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Iterator[StandIn]:
    torch.set_num_threads(1)
    with StandIn() as device:
        yield device


def a_runner(model_dir: Path, attention: str, layers: int) -> TorchRunner:
    save_random_model("llama", model_dir, num_hidden_layers=layers, max_position_embeddings=4096)
    return load_runner(
        model_dir,
        num_blocks=300,
        block_tokens=BLOCK_TOKENS,
        dtype="float32",
        device=str(DEVICE),
        attention=attention,
        machine=CARD,
        queues=StandInQueues(),
    )


@pytest.fixture(scope="module")
def attention(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "torch-sdpa"))


@pytest.fixture(scope="module")
def runner(attention: str, device: StandIn, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    return a_runner(tmp_path_factory.mktemp("one layer"), attention, 1)


@dataclass
class Counts:
    """Of some steps: copies to the device and their bytes, launches by operator."""

    copies: int
    num_bytes: int
    launches: Counter[str]
    allocations: int
    """Of device memory; a captured step has its own."""


def steady(
    device: StandIn,
    runner: TorchRunner,
    sequences: int,
    context: int,
    sampling: SamplingParams = GREEDY,
    grammars: Grammars | None = None,
) -> Counts:
    """Decodes with `sequences` of about `context` tokens; asserts that each step waits for one event only.
    With `grammars` the first of them may only say letters."""
    config = EngineConfig(max_batched_tokens=2048, max_sequences=64, watermark_permille=0, steps_ahead=1)
    core = EngineCore(runner, NoText(), config, lambda: 0.0, grammars=grammars)
    prompt = [3 + place * 7 % 400 for place in range(context + 64)]
    for number in range(sequences):
        submit = Submit(
            sequence_id=str(number),
            request_id=str(number),
            tenant_id="a",
            # One prefix, which is computed once, and edges of blocks that are met at different steps.
            prompt_token_ids=prompt[: context + number],
            max_tokens=200,
            lease_tokens=200,
            sampling=sampling,
            grammar=of_regex("[a-z]{199}").grammar if grammars is not None and not number else None,
        )
        assert core.submit(submit, "gateway") is None
    # Until all decode, and every shape was seen.
    while any(sequence.known_tokens < 2 for sequence in core.table.sequences.values()):
        core.step()
    device.reset()
    for _ in range(STEPS):
        assert core.step().num_tokens == sequences
    counts = Counts(
        device.copies_to_device.total(), device.bytes_to_device.total(), device.launches.copy(),
        device.allocations.total(),
    )  # fmt: skip
    waits, event_waits = device.unexpected_waits(), device.event_waits.copy()
    for number in range(sequences):
        core.cancel(str(number))
    while core.has_work():
        core.step()
    assert waits == [], "a step waits for the device"
    assert event_waits.total() == STEPS, event_waits
    return counts


STEADY = [
    pytest.param(
        attention, sequences, sampling, id=f"{attention}, {sequences} {name}",
        marks=pytest.mark.long if attention == "triton" and (sequences, name) != (8, "everything") else (),
    )
    for attention in LAUNCHES_A_LAYER
    for sequences in (1, 8, 64)
    for name, sampling in (("greedy", GREEDY), ("everything", EVERYTHING))
]  # fmt: skip


@pytest.mark.parametrize(("attention", "sequences", "sampling"), STEADY, indirect=["attention"])
def test_a_step_waits_once_and_sends_a_few_bytes(
    sequences: int, sampling: SamplingParams, device: StandIn, runner: TorchRunner
) -> None:
    short, long = (steady(device, runner, sequences, context, sampling) for context in (SHORT, LONG))
    assert short.copies == STEPS
    rows_alone = 8 * sequences * STEPS
    assert rows_alone < short.num_bytes <= MOST_BYTES * sequences * STEPS, (
        "no block ended, or too much is sent"
    )
    assert short == long, "a step depends on the context"


@pytest.mark.parametrize("sampling", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
def test_a_row_with_a_grammar_makes_no_other_row_wait(
    sampling: SamplingParams, device: StandIn, runner: TorchRunner, tmp_path: Path
) -> None:
    """Its masks are one call and one copy more a step; what is waited for, and what a plain step launches, is
    as without."""
    plain = steady(device, runner, 8, SHORT, sampling)
    grammars = Grammars(bytes_tokenizer(tmp_path), runner.info.vocabulary, runner.info.eos_token_ids)
    masked = steady(device, runner, 8, SHORT, sampling, grammars)
    calls = grammars.mask_calls
    assert 0 < grammars.mask_rows == calls, "all masks of a step are one call"
    assert masked.copies == plain.copies + STEPS
    assert steady(device, runner, 8, SHORT, sampling).launches == plain.launches
    assert grammars.mask_calls == calls


def bytes_tokenizer(folder: Path) -> Path:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


ASKING: list[Callable[[torch.Tensor], object]] = [
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: torch.tensor([1, 2], device=x.device),
    lambda x: x[[0]],
    lambda x: x[x > 0],
]


@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize("part", ["forward pass", "choice"])
def test_a_question_to_the_device_is_found_with_its_line(
    part: str,
    ask: Callable[[torch.Tensor], object],
    device: StandIn,
    runner: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name, tensor_at = {
        "forward pass": (runner, "_forward", 1), "choice": (engine.model.rows, "choose", 0)
    }[part]  # fmt: skip
    plain = getattr(owner, name)

    def asking(*args: Any, **named: Any) -> Any:
        ask(args[tensor_at])
        return plain(*args, **named)

    monkeypatch.setattr(owner, name, asking)
    with pytest.raises(AssertionError, match=f"{FILE}:{ask.__code__.co_firstlineno} "):
        steady(device, runner, 1, SHORT)


@pytest.mark.parametrize("attention", LAUNCHES_A_LAYER, indirect=True)
def test_launches_a_layer_are_counted(
    device: StandIn, runner: TorchRunner, attention: str, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    two_layers, most = a_runner(tmp_path, attention, 2), LAUNCHES_A_LAYER[attention] * STEPS
    one, two = (steady(device, each, 8, 70).launches.total() for each in (runner, two_layers))
    record_property("launches a layer", (two - one) / STEPS)
    record_property("launches besides", (2 * one - two) / STEPS)
    assert 0 < two - one <= most
    if attention == "triton":
        for sequences, context, sampling in ((1, 70, EVERYTHING), (12, 30, GREEDY), (3, SHORT, GREEDY)):
            runs = [steady(device, each, sequences, context, sampling) for each in (runner, two_layers)]
            assert runs[1].launches.total() - runs[0].launches.total() == most, (sequences, context)


def test_a_captured_step_is_two_launches_and_allocates_nothing(
    device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward pass and choice, whatever is decoded: sequences, contexts, options, padding."""
    monkeypatch.setattr(engine.model.graphs, "MOST_SECONDS", 600.0)
    runner = a_runner(tmp_path, "triton", 1)
    [report] = runner.capture(64)
    assert report.chosen, report
    for sequences, context, sampling in ((1, SHORT, GREEDY), (8, 70, EVERYTHING), (21, SHORT, EVERYTHING)):
        counts = steady(device, runner, sequences, context, sampling)
        assert counts.launches.total() == 2 * STEPS, counts.launches
        assert all(name.endswith("graph replay") for name in counts.launches)
        assert (counts.allocations, counts.copies) == (0, STEPS)
        assert counts.num_bytes <= MOST_BYTES * sequences * STEPS
