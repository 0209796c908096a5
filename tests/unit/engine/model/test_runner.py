"""The runner: a sequence's output depends on its own tokens only."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.model_runner import Sampled
from engine.messages import SamplingParams
from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from tests.models.random_models import save_random_model
from tests.support.step_work import SequenceSlice, mask_of, run_step

GREEDY = SamplingParams(temperature=0.0, logprobs=0)
BLOCK_TOKENS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_random_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture
def runner(model_dir: Path) -> TorchRunner:
    return load_runner(model_dir, num_blocks=64, block_tokens=BLOCK_TOKENS, dtype="float32", device="cpu")


@dataclass
class Stream:
    """One sequence, driven by hand."""

    token_ids: list[int]
    blocks: list[int]
    num_prompt_tokens: int
    computed: int = 0
    sampled: list[Sampled] = field(default_factory=list)
    sampling: SamplingParams = GREEDY
    mask: np.ndarray | None = None

    @staticmethod
    def of(prompt: list[int], blocks: list[int], sampling: SamplingParams = GREEDY) -> Stream:
        return Stream(list(prompt), blocks, len(prompt), sampling=sampling)

    def next_slice(self, most_tokens: int) -> SequenceSlice:
        num_tokens = min(most_tokens, len(self.token_ids) - self.computed)
        return SequenceSlice(
            sequence_id="s",
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            position=self.computed,
            num_tokens=num_tokens,
            block_table=self.blocks,
            sample=self.computed + num_tokens == len(self.token_ids),
            sampling=self.sampling,
            seed=5,
            mask=self.mask,
        )


def step(runner: TorchRunner, streams: list[Stream], most_tokens: list[int]) -> None:
    slices = [stream.next_slice(most) for stream, most in zip(streams, most_tokens, strict=True)]
    for stream, piece, sampled in zip(streams, slices, run_step(runner, slices), strict=True):
        assert (sampled is not None) == piece.sample
        stream.computed += piece.num_tokens
        if sampled is not None:
            stream.token_ids.append(sampled.token_id)
            stream.sampled.append(sampled)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(500) for _ in range(length)]


def alone(runner: TorchRunner, token_ids: list[int], count: int) -> Stream:
    stream = Stream.of(token_ids, list(range(30)))
    for _ in range(count):
        step(runner, [stream], [1000])
    return stream


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_chunks_of_any_size_give_the_whole_prompts_tokens_and_logprobs(
    runner: TorchRunner, chunk: int
) -> None:
    whole = alone(runner, prompt(33), 8)
    pieces = Stream.of(prompt(33), list(range(60, 35, -1)))
    while len(pieces.sampled) < 8:
        step(runner, [pieces], [chunk])
    assert pieces.token_ids == whole.token_ids
    for ours, theirs in zip(pieces.sampled, whole.sampled, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_neighbours_of_every_kind_change_nothing(runner: TorchRunner) -> None:
    """Prefill, chunk and decode in one step, tables interleaved: everyone gets what it gets alone."""
    prompts = [prompt(length, 1) for length in (3, 30, 1, 17, 8)]
    expected = [alone(runner, token_ids, 10).token_ids for token_ids in prompts]
    streams = [Stream.of(token_ids, list(range(index, 60, 5))) for index, token_ids in enumerate(prompts)]
    generator = random.Random(4)
    mixed = 0
    while any(len(stream.sampled) < 10 for stream in streams):
        active = [stream for stream in streams if len(stream.sampled) < 10 and generator.random() < 0.8]
        mixed += len({stream.computed < stream.num_prompt_tokens for stream in active}) == 2
        step(runner, active, [generator.randint(1, 9) for _ in active])
    assert mixed > 1
    assert [stream.token_ids for stream in streams] == expected


def test_a_mask_chooses_for_its_row_and_changes_no_other(runner: TorchRunner) -> None:
    """A chunk, prompts and decodes, which are not computed in the order that was asked for."""
    runs = []
    for is_masked in (True, False):
        lengths = enumerate((30, 3, 17, 8))
        streams = [Stream.of(prompt(length, 1), list(range(index, 60, 5))) for index, length in lengths]
        for number in range(8):
            for index in (0, 2) if is_masked else ():
                streams[index].mask = mask_of([100 * index + number], 500)
            step(runner, streams, [9, 3, 20, 20])
        runs.append([stream.sampled for stream in streams])
    masked, plain = runs
    assert (masked[1], masked[3]) == (plain[1], plain[3])
    assert [sampled.token_id for sampled in masked[0]] == list(range(3, 8))
    assert [sampled.token_id for sampled in masked[2]] == list(range(200, 208))


def test_a_step_in_which_nobody_samples_still_writes_the_cache(runner: TorchRunner) -> None:
    stream = Stream.of(prompt(20), list(range(20)))
    step(runner, [stream], [7])
    assert stream.sampled == []
    step(runner, [stream], [100])
    assert stream.token_ids == alone(runner, prompt(20), 1).token_ids


def test_what_a_former_owner_left_in_a_block_reaches_nobody(runner: TorchRunner) -> None:
    expected = alone(runner, prompt(21), 12).token_ids
    for cache in runner._caches.values():
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("inf"))
    streams = [Stream.of(prompt(21), list(range(20))), Stream.of(prompt(2), list(range(20, 40)))]
    for _ in range(12):
        step(runner, streams, [1000, 1000])
    assert streams[0].token_ids == expected


@pytest.mark.parametrize("moved_after", [1, 4, 7])
def test_a_sequence_moves_to_another_runner_with_its_kv(
    runner: TorchRunner, model_dir: Path, moved_after: int
) -> None:
    expected = alone(runner, prompt(18), 12).token_ids
    stream = alone(runner, prompt(18), moved_after)
    kv = runner.read_kv(stream.blocks, stream.computed)
    assert len(kv) == 3, "one entry a layer"
    other = load_runner(model_dir, num_blocks=40, block_tokens=BLOCK_TOKENS, dtype="float32", device="cpu")
    stream.blocks = list(range(39, 9, -1))
    other.write_kv(stream.blocks, stream.computed, kv)
    assert other.read_kv(stream.blocks, stream.computed) == kv
    while len(stream.sampled) < 12:
        step(other, [stream], [1000])
    assert stream.token_ids == expected


def test_kv_of_the_wrong_size_is_refused_and_nothing_is_written(runner: TorchRunner) -> None:
    stream = alone(runner, prompt(9), 1)
    kv = runner.read_kv(stream.blocks, 9)
    before = runner.read_kv([40, 41, 42], 9)
    for wrong, message in (
        (kv[:-1], "2 layers, but the model has 3"),
        ([*kv[:-1], kv[-1][:-4]], "bytes, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.write_kv([40, 41, 42], 9, wrong)
    assert runner.read_kv([40, 41, 42], 9) == before
    with pytest.raises(ValueError, match="9 tokens do not lie in 2 blocks of 4"):
        runner.write_kv([40, 41], 9, kv)


@pytest.mark.parametrize("token_id", [-1, 500])
def test_a_token_that_the_model_does_not_have_is_refused(runner: TorchRunner, token_id: int) -> None:
    stream = Stream.of([3, token_id], [0])
    with pytest.raises(ValueError, match=r"token id outside of 0\.\.499"):
        step(runner, [stream], [10])


@pytest.mark.parametrize("block", [-1, 64])
def test_a_block_that_the_cache_does_not_have_is_refused(runner: TorchRunner, block: int) -> None:
    with pytest.raises(ValueError, match=r"blocks outside of 0\.\.63"):
        step(runner, [Stream.of([3, 4], [block])], [10])


def test_seeded_sampling_is_the_same_in_company(runner: TorchRunner) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    lonely = Stream.of(prompt(12), list(range(12)), sampling)
    for _ in range(15):
        step(runner, [lonely], [1000])
    accompanied = Stream.of(prompt(12), list(range(12)), sampling)
    others = [Stream.of(prompt(30, seed), list(range(12 + 12 * seed, 24 + 12 * seed))) for seed in (0, 1)]
    for _ in range(15):
        step(runner, [others[0], accompanied, others[1]], [1000, 5 if not accompanied.sampled else 1, 2])
        while not accompanied.sampled:
            step(runner, [accompanied], [5])
    assert accompanied.token_ids == lonely.token_ids[: len(accompanied.token_ids)]
    assert len(set(lonely.token_ids[12:])) > 5


def test_blocks_move_to_host_memory_and_back_elsewhere(runner: TorchRunner, model_dir: Path) -> None:
    expected = alone(runner, prompt(18), 12).token_ids
    swapping = load_runner(
        model_dir, num_blocks=40, block_tokens=BLOCK_TOKENS, dtype="float32", device="cpu", num_host_blocks=9
    )
    assert swapping.num_host_blocks == 9
    # A block more may be too quick to be seen; a round trip is not.
    assert swapping.swap_base_s + swapping.swap_block_s > 0
    stream = Stream.of(prompt(18), list(range(8)))
    step(swapping, [stream], [1000])
    swapping.copy_out([(block, 8 - block) for block in stream.blocks[:5]])
    expected_kv = swapping.read_kv(stream.blocks, 17)
    assert swapping.read_host_kv([8 - block for block in stream.blocks[:5]], 17) == expected_kv
    step(swapping, [Stream.of(prompt(30, 3), list(range(8)))], [1000])  # another sequence takes the blocks
    stream.blocks = list(range(20, 30))
    swapping.copy_in([(8 - place, block) for place, block in enumerate(stream.blocks[:5])])
    while len(stream.sampled) < 12:
        step(swapping, [stream], [1000])
    assert stream.token_ids == expected


def test_without_host_memory_no_block_moves(runner: TorchRunner) -> None:
    assert (runner.num_host_blocks, runner.swap_base_s, runner.swap_block_s) == (0, 0.0, 0.0)
    with pytest.raises(ValueError, match="num_host_blocks 0"):
        runner.read_host_kv([0], 1)
    for move in (runner.copy_out, runner.copy_in):
        with pytest.raises(ValueError, match="num_host_blocks 0"):
            move([(0, 0)])
