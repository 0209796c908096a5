"""An interactive request on an engine full of batch streams: which one is paused, when, at whose cost.

The real engine core in front of a small random model, float32, CPU.
"""

from __future__ import annotations

import pytest
import torch

from engine.core.core import EngineConfig, EngineCore
from engine.messages import SamplingParams, SequenceOutcome, Submit
from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from engine.sequence import SequenceStatus
from gateway.domain.usage import use_of_outcomes
from tests.integration.exactness import NoText
from tests.models.random_models import save_random_model

GATEWAY = "gateway"
INTERACTIVE, BATCH = 0, 2
PLACES = 3
STREAM_TOKENS, QUICK_TOKENS = 40, 9


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    model_dir = save_random_model("qwen3", tmp_path_factory.mktemp("preemption") / "qwen3")
    return load_runner(model_dir, num_blocks=200, block_tokens=4, dtype="float32", device="cpu")


def stream(number: int, *, tier: int = BATCH, max_tokens: int = STREAM_TOKENS) -> Submit:
    return Submit(
        sequence_id=f"s{number}",
        request_id=f"r{number}",
        tenant_id=f"tenant {number}",
        prompt_token_ids=[7 + number, 11, 13, 17, 19 + number],
        max_tokens=max_tokens,
        lease_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True),
        tier=tier,
    )


QUICK = stream(9, tier=INTERACTIVE, max_tokens=QUICK_TOKENS)


class House:
    """An engine, and everything that came out of it."""

    def __init__(self, runner: TorchRunner) -> None:
        self.now_s = 0.0
        config = EngineConfig(max_batched_tokens=64, max_sequences=PLACES, prefix_caching=False)
        self.core = EngineCore(runner, NoText(), config, lambda: self.now_s)
        self.tokens: dict[str, list[int]] = {}
        self.outcomes: dict[str, SequenceOutcome] = {}
        self.blocks_freed = 0
        """Blocks that a sequence lost before it had ended."""

    def submit(self, submit: Submit) -> None:
        assert self.core.submit(submit, GATEWAY) is None

    def step(self) -> None:
        tables = {name: list(each.block_table) for name, each in self.core.table.sequences.items()}
        self.now_s += 0.01
        for delta in self.core.step().deltas.get(GATEWAY, []):
            self.tokens.setdefault(delta.sequence_id, []).extend(delta.token_ids)
            if delta.outcome is not None:
                self.outcomes[delta.sequence_id] = delta.outcome
        self.core.check()
        for name, before in tables.items():
            sequence = self.core.table.sequences.get(name)
            if sequence is not None and sequence.block_table[: len(before)] != before:
                self.blocks_freed += len(before)

    def run(self) -> None:
        while self.core.has_work():
            self.step()


def charged(outcome: SequenceOutcome) -> tuple[int, int]:
    """Input and output tokens, as a gateway reckons them."""
    use = use_of_outcomes([outcome], [outcome.prompt_tokens], 1)
    return use.input_tokens, use.output_tokens


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> House:
    """Every stream by itself."""
    house = House(runner)
    for submit in (*(stream(number) for number in range(PLACES)), QUICK):
        house.submit(submit)
        house.run()
    return house


def test_an_interactive_request_starts_within_two_steps_and_nobody_loses_anything(
    runner: TorchRunner, alone: House
) -> None:
    house = House(runner)
    for number in range(PLACES):
        house.submit(stream(number))
    for _ in range(6):
        house.step()
    assert [each.state for each in house.core.table.sequences.values()] == [SequenceStatus.RUNNING] * PLACES
    free_before = house.core.table.pool.num_free
    house.submit(QUICK)
    step_of_arrival = house.core.table.decisions.step
    house.step()
    admitted = [each for each in house.core.table.decisions.last() if each.sequence_id == "s9"]
    assert [each.kind for each in admitted] == ["admit"]
    assert admitted[0].step - step_of_arrival <= 2
    assert house.tokens["s9"], "its first token came with that step"
    (paused,) = house.core.table.paused.values()
    assert paused.block_table, "who gave way keeps its KV"
    assert house.core.table.pool.num_free < free_before
    house.run()

    assert house.tokens == alone.tokens
    assert {name: charged(each) for name, each in house.outcomes.items()} == {
        name: charged(each) for name, each in alone.outcomes.items()
    }
    assert house.blocks_freed == 0
    assert all(each.preemptions == each.recomputed_tokens == 0 for each in house.outcomes.values())
    counts = house.core.table.pool.counts
    assert (counts.swapped_out_blocks, counts.evicted_blocks) == (0, 0)


def test_both_sides_record_what_was_displaced(runner: TorchRunner) -> None:
    house = House(runner)
    for number in range(PLACES):
        house.submit(stream(number))
    for _ in range(6):
        house.step()
    house.submit(QUICK)
    house.run()
    (took,) = [each for each in house.outcomes["s9"].decisions if each.others]
    assert (took.kind, took.displaced_tokens) == ("admit", QUICK_TOKENS)
    (displaced,) = took.others
    (lost,) = [each for each in house.outcomes[displaced].decisions if each.kind == "pause"]
    assert (lost.others, lost.displaced_tokens) == (["s9"], QUICK_TOKENS)
    untouched = {f"s{number}" for number in range(PLACES)} - {displaced}
    assert all(not each.displaced_tokens for name in untouched for each in house.outcomes[name].decisions)


def test_where_there_is_room_nobody_gives_way(runner: TorchRunner, alone: House) -> None:
    house = House(runner)
    for number in range(PLACES - 1):
        house.submit(stream(number))
    house.step()
    house.submit(QUICK)
    house.run()
    assert house.tokens["s9"] == alone.tokens["s9"]
    assert not any(each.displaced_tokens for one in house.outcomes.values() for each in one.decisions)
