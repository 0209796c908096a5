"""Rows on the device: what a step reads there is what its sequences' whole histories say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import engine.model.rows
from engine.core.model_runner import RowStart, StepWork
from engine.messages import SamplingParams
from engine.model.rows import FIRST_BIASES, DeviceRows
from engine.model.sampler import RowSampling, Wants, is_penalized
from engine.model.staging import GraphShape, StagedStep
from kernels.batch import tiles_of
from tests.support.stand_in_device import DEVICE, StandIn, needs_stand_in
from tests.support.step_work import mask_of

ROWS, VOCABULARY, BLOCKS, BLOCK_TOKENS, CONTEXT = 4, 40, 30, 4, 60
TILE_TOKENS = 3
CPU = torch.device("cpu")
MANY_BIASES = {token_id: token_id / 7 for token_id in range(FIRST_BIASES + 5)}
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logit_bias={3: 1.5}),
    SamplingParams(repetition_penalty=1.3, logit_bias={3: -2.0, 39: 0.5, 40: 9.0}),
    SamplingParams(top_k=99, frequency_penalty=0.5, presence_penalty=-0.25),
    SamplingParams(temperature=1.5, logit_bias=MANY_BIASES),
)
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(eq=False)
class Known:
    """A sequence, as the engine knows it."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    computed: int = 0
    table: list[int] = field(default_factory=list)
    handed_over: int = 0
    has_begun: bool = False
    is_chained: bool = False


def rows_on(device: torch.device, tile_tokens: int = 0) -> DeviceRows:
    return DeviceRows(
        ROWS,
        vocabulary=VOCABULARY,
        num_blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=CONTEXT,
        device=device,
        tile_tokens=tile_tokens,
    )


def histories(generator: random.Random, steps: int) -> Iterator[tuple[StepWork, dict[int, Known]]]:
    """Steps of random sequences that start, leave their rows and come back to others; the sequences of each,
    by row. Expects the tokens that a step chooses at the ends of their lists."""
    held: dict[int, Known] = {}
    resting: list[Known] = []
    for _ in range(steps):
        for row in [row for row in held if generator.random() < 0.15]:
            sequence = held.pop(row)
            if generator.random() < 0.7:
                resting.append(sequence)
        for row in set(range(ROWS)) - held.keys():
            if resting and generator.random() < 0.5:
                held[row] = resting.pop(generator.randrange(len(resting)))
                if generator.random() < 0.5:  # recomputed; else it kept its KV
                    held[row].computed, held[row].table = 0, []
            elif generator.random() < 0.6:
                prompt = [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 19))]
                sampling = generator.choice(SAMPLINGS)
                held[row] = Known(prompt, len(prompt), sampling, generator.getrandbits(63))
            else:
                continue
            held[row].has_begun = held[row].is_chained = False
            held[row].handed_over = 0
        held = {row: each for row, each in held.items() if len(each.token_ids) < CONTEXT}
        chosen = {row: held[row] for row in held if generator.random() < 0.8}
        if chosen:
            yield work_of(chosen, generator), chosen


def work_of(chosen: dict[int, Known], generator: random.Random) -> StepWork:
    work = StepWork()
    for row, sequence in chosen.items():
        position, left = sequence.computed, len(sequence.token_ids) - sequence.computed
        count = left if generator.random() < 0.6 else generator.randint(1, left)
        end = sequence.computed = position + count
        work.rows.append(row)
        work.positions.append(position)
        work.num_tokens.append(count)
        work.samples.append(count == left)
        work.token_ids.append([] if sequence.is_chained else sequence.token_ids[position:end])
        if not sequence.has_begun:
            work.starts.append(
                RowStart(
                    row, "a", position, sequence.num_prompt_tokens, sequence.token_ids, sequence.sampling,
                    sequence.seed,
                )
            )  # fmt: skip
        while len(sequence.table) * BLOCK_TOKENS < end:
            sequence.table.append(generator.randrange(BLOCKS))
        first = sequence.handed_over
        work.blocks += [(row, first + index, block) for index, block in enumerate(sequence.table[first:])]
        sequence.has_begun, sequence.is_chained = True, count == left
        sequence.handed_over = len(sequence.table)
    return work


def numbers(tensor: torch.Tensor | None) -> Any:
    assert tensor is not None
    return tensor.cpu().numpy()


def check_layout(rows: DeviceRows, staged: StagedStep, work: StepWork, known: list[Known]) -> None:
    places = [
        (row, sequence, position)
        for row, sequence, first, count in zip(work.rows, known, work.positions, work.num_tokens, strict=True)
        for position in range(first, first + count)
    ]
    batch, ends = staged.batch, np.cumsum(work.num_tokens)
    slots = [
        sequence.table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for _, sequence, at in places
    ]
    assert numbers(staged.token_ids).tolist() == [sequence.token_ids[at] for _, sequence, at in places]
    assert numbers(batch.token_contexts).tolist() == [at + 1 for *_, at in places]
    assert numbers(batch.token_tables).tolist() == [row * rows.width for row, *_ in places]
    assert numbers(batch.slots).tolist() == slots
    assert batch.context_lens == numbers(batch.contexts).tolist() == [each.computed for each in known]
    assert batch.cu_seqlens_q == [0, *ends]
    fresh = [] if batch.fresh_blocks is None else numbers(batch.fresh_blocks).tolist()
    assert fresh == [slot // BLOCK_TOKENS for slot in slots if slot % BLOCK_TOKENS == 0]
    choosing = np.flatnonzero(work.samples)
    assert numbers(staged.rows).tolist() == [work.rows[index] for index in choosing]
    assert numbers(staged.contexts).tolist() == [known[index].computed for index in choosing]
    if staged.last is None:
        assert len(choosing) == len(work) == ends[-1]
    else:
        assert numbers(staged.last).tolist() == [ends[index] - 1 for index in choosing]


def check_sampling(inputs: RowSampling, wants: Wants, choosing: list[Known]) -> None:
    params = [each.sampling for each in choosing]
    floats = (
        inputs.temperature, inputs.top_p, inputs.min_p, inputs.repetition, inputs.frequency, inputs.presence
    )  # fmt: skip
    for name, column in zip(FLOATS, floats, strict=True):
        assert numbers(column).tolist() == [np.float32(getattr(each, name)) for each in params]
    assert numbers(inputs.top_k).tolist() == [min(each.top_k, VOCABULARY) for each in params]
    assert numbers(inputs.seeds).tolist() == [each.seed for each in choosing]
    outputs = [each.token_ids[each.num_prompt_tokens :] for each in choosing]
    assert numbers(inputs.token_index).tolist() == [len(output) for output in outputs]
    if wants.bias:
        for sampling, ids, values in zip(
            params, numbers(inputs.bias_ids), numbers(inputs.bias_values), strict=True
        ):
            found = {token_id: value for token_id, value in zip(ids, values, strict=True) if token_id >= 0}
            assert found == {
                token_id: np.float32(value)
                for token_id, value in sampling.logit_bias.items()
                if token_id < VOCABULARY
            }
    for index, (sequence, output) in enumerate(zip(choosing, outputs, strict=True)):
        if is_penalized(sequence.sampling):
            counts, in_prompt = numbers(inputs.output_counts)[index], numbers(inputs.in_prompt)[index]
            assert counts.tolist() == np.bincount(output, minlength=VOCABULARY).tolist()
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert np.flatnonzero(in_prompt).tolist() == sorted(set(prompt))


def broken(work: StepWork, generator: random.Random) -> tuple[StepWork, str]:
    """The step with one wrong number, and what is said of it."""
    block_row = work.rows[0]
    tokens = [[VOCABULARY if generator.random() < 0.5 else -1] * count for count in work.num_tokens]
    ways = (
        (replace(work, token_ids=tokens), "token id outside of 0..39"),
        (replace(work, token_ids=[[1] * (count + 1) for count in work.num_tokens]), "tokens from .* on has"),
        (replace(work, token_ids=[[] for _ in work.rows], num_tokens=[2] * len(work)), "2 tokens from .* on"),
        (replace(work, blocks=[*work.blocks, (block_row, 0, BLOCKS)]), "blocks outside of 0..29"),
        (replace(work, blocks=[*work.blocks, (block_row, 0, -1)]), "blocks outside of 0..29"),
        (replace(work, blocks=[*work.blocks, (block_row, 16, 0)]), "entries 0..15"),
        (replace(work, blocks=[*work.blocks, (block_row, -1, 0)]), "entries 0..15"),
        (replace(work, blocks=[*work.blocks, (ROWS, 0, 0)]), "row outside of 0..3"),
        (replace(work, rows=[ROWS, *work.rows[1:]]), "row outside of 0..3"),
        (replace(work, rows=[-1, *work.rows[1:]]), "row outside of 0..3"),
        (replace(work, positions=[64 for _ in work.rows]), "beyond the 64 tokens of a row"),
    )
    return generator.choice(ways)


@pytest.mark.parametrize(
    ("device", "seed"),
    [(CPU, seed) for seed in range(6)]
    + [pytest.param(DEVICE, seed, marks=needs_stand_in) for seed in (6, 7)],
)
def test_a_step_reads_what_its_sequences_histories_say(device: torch.device, seed: int) -> None:
    """Rows that others had before, sequences that come back: counts, biases, tables and lengths are their
    own; a step that is refused changes nothing."""
    generator = random.Random(seed)
    returned = refused = 0
    with nullcontext() if device == CPU else StandIn(late=True), torch.inference_mode():
        rows = rows_on(device)
        for work, chosen in histories(generator, 60):
            if generator.random() < 0.2:
                wrong, message = broken(work, generator)
                with pytest.raises(ValueError, match=message):
                    rows.stage(wrong)
                refused += 1
            known = list(chosen.values())
            staged = rows.stage(work)
            check_layout(rows, staged, work, known)
            choosing = [each for each, samples in zip(known, work.samples, strict=True) if samples]
            assert staged.sampling == [each.sampling for each in choosing]
            if choosing:
                check_sampling(rows.sampling_of(staged), staged.wants, choosing)
                token_ids = [generator.randrange(VOCABULARY) for _ in choosing]
                rows.chosen(staged, torch.tensor(token_ids).to(device))
                for sequence, token_id in zip(choosing, token_ids, strict=True):
                    sequence.token_ids.append(token_id)
            returned += sum(len(start.token_ids) > start.num_prompt_tokens for start in work.starts)
    assert returned > 3 < refused


@pytest.mark.parametrize("device", [CPU, pytest.param(DEVICE, marks=needs_stand_in)])
def test_masks_are_those_of_the_last_choice(device: torch.device) -> None:
    generator, every = random.Random(3), range(VOCABULARY)
    with nullcontext() if device == CPU else StandIn(late=True):
        rows = rows_on(device)
        for count in (0, 2, ROWS, 1, 0, 3):
            allowed = {row: generator.sample(every, 5) for row in generator.sample(range(ROWS), count)}
            masks = {row: mask_of(tokens, VOCABULARY) for row, tokens in allowed.items()}
            rows.set_masks(masks)
            for wrong in ({ROWS: mask_of([1], VOCABULARY)}, {0: mask_of([1], 2 * VOCABULARY)}):
                with pytest.raises(ValueError, match=r"row \d has .* \(\d,\): rows are 0..3, masks 2 words"):
                    rows.set_masks(wrong)
            bits = np.unpackbits(numbers(rows.keep_masks()).view(np.uint8), axis=1, bitorder="little")
            found = [np.flatnonzero(mask[:VOCABULARY]).tolist() for mask in bits]
            assert found == [sorted(allowed.get(row, every)) for row in range(ROWS + 1)]


@needs_stand_in
def test_memory_that_runs_out_while_a_row_starts_leaves_nothing_to_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each launch of the step once: room for biases and for counts is made in it."""
    monkeypatch.setattr(engine.model.rows, "DEVICE_BIASES", 4)
    sampling = SamplingParams(frequency_penalty=0.5, logit_bias=MANY_BIASES)
    with StandIn(late=True) as device, torch.inference_mode():
        for failures in itertools.count():
            rows, known = rows_on(DEVICE), Known([1, 2, 3, 2], 3, sampling, 7)
            work = work_of({1: known}, random.Random(1))
            device.fail_next(torch.OutOfMemoryError("full"), after=failures)
            try:
                rows.stage(work)
                break
            except torch.OutOfMemoryError:
                staged = rows.stage(work)
            check_layout(rows, staged, work, [known])
            check_sampling(rows.sampling_of(staged), staged.wants, [known])
    assert failures > 20


def padded_shape(work: StepWork, generator: random.Random) -> GraphShape:
    """Room for the step, or for more; of block tables sometimes for no change."""
    tokens, changes = sum(work.num_tokens) + generator.randrange(4), generator.choice((0, 40))
    if all(work.samples) and tokens == len(work):
        return GraphShape(tokens, tokens, tokens, changes)
    return GraphShape(tokens, ROWS + 1, ROWS, changes, tiles=tokens // TILE_TOKENS + ROWS, is_mixed=True)


@needs_stand_in
@pytest.mark.parametrize("seed", range(3))
def test_a_padded_step_is_the_plain_one_and_padding(seed: int) -> None:
    generator, overflows, padding = random.Random(seed), 0, 0
    with StandIn(late=True), torch.inference_mode():
        plain, rows = rows_on(DEVICE, TILE_TOKENS), rows_on(DEVICE, TILE_TOKENS)
        rows.reserve([GraphShape(200, ROWS + 1, ROWS, 40, 200, is_mixed=True)])
        for work, chosen in histories(generator, 60):
            shape = padded_shape(work, generator)
            expected, sampling = plain.stage(work), rows.stage_padded(work, shape)
            step, tokens, count = rows.padded_step(shape), sum(work.num_tokens), len(sampling)
            assert sampling == expected.sampling
            for name in ("token_contexts", "token_tables", "slots"):
                same = numbers(getattr(step.batch, name))[:tokens] == numbers(getattr(expected.batch, name))
                assert same.all(), name
            assert (numbers(step.token_ids)[:tokens] == numbers(expected.token_ids)).all()
            assert (numbers(step.batch.token_contexts)[tokens:] == 0).all()
            assert (numbers(step.batch.slots)[tokens:] == -1).all()
            assert set(numbers(step.token_ids)) <= set(range(VOCABULARY))
            assert numbers(step.rows)[:count].tolist() == numbers(expected.rows).tolist()
            assert numbers(step.contexts)[:count].tolist() == numbers(expected.contexts).tolist()
            assert (numbers(step.rows)[count:] == ROWS).all()
            assert not numbers(step.contexts)[count:].any()
            if step.last is not None and expected.last is not None:
                assert numbers(step.last)[:count].tolist() == numbers(expected.last).tolist()
                assert numbers(step.last).max(initial=0) < shape.tokens
            if step.batch.tiles is not None and expected.batch.tiles is not None:
                tiles, wanted = numbers(step.batch.tiles), numbers(expected.batch.tiles)
                assert tiles[: len(wanted)].tolist() == wanted.tolist()
                assert not tiles[len(wanted) :].any()
            assert numbers(rows.tables).tolist() == numbers(plain.tables).tolist()
            for each in (rows, plain):
                token_ids = torch.zeros(len(work), dtype=torch.int64)[:count].to(DEVICE)
                each.chosen(replace(expected, sampling=[]), token_ids)
            for sequence, samples in zip(chosen.values(), work.samples, strict=True):
                sequence.token_ids += [0] * samples
            overflows += len(work.blocks) > shape.changes
            padding += shape.tokens > tokens
    assert overflows > 3 < padding


def test_tiles_cut_sequences_and_begin_with_the_longest_contexts() -> None:
    tiles = np.reshape(tiles_of([1, 7, 3], [40, 10, 3], 3), (-1, 2)).tolist()
    assert tiles == [[0, 1], [7, 1], [4, 3], [1, 3], [8, 3]]
