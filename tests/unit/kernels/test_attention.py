"""Paged attention: the reference equals the formula, and the fast kernels equal the reference."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels import reference, torch_sdpa
from kernels.batch import PackedBatch, pack
from kernels.cpu import attention as numba_attention
from kernels.dispatch import FLASH_ATTN, KERNELS, NUMBA, Attend
from kernels.torch_sdpa import sort_key

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[3]
NAN = float("nan")
TRIED = [name for name in KERNELS if name != FLASH_ATTN]


@dataclass
class Case:
    """A random packed step over a cache in which everything outside of the contexts is NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: PackedBatch
    contexts: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each sequence, unpaged."""


def make_case(
    lens: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    block_tokens: int = 4,
    seed: int = 0,
) -> Case:
    """`lens`: tokens computed now, and tokens of context, of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_tokens) for _, context in lens]
    num_blocks = sum(needed) + 3
    # Block 0 is unused: the first thing a careless padding would read.
    order = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    key_cache = torch.full((num_blocks, block_tokens, kv_heads, key_dim), NAN)
    value_cache = torch.full((num_blocks, block_tokens, kv_heads, value_dim), NAN)
    contexts = [
        (
            torch.randn(context, kv_heads, key_dim, generator=generator),
            torch.randn(context, kv_heads, value_dim, generator=generator),
        )
        for _, context in lens
    ]
    # What came before this step was written in a step of its own; then this step writes its tokens.
    before = [index for index, (new, context) in enumerate(lens) if context > new]
    for which, counts in ((before, [lens[i][1] - lens[i][0] for i in before]), (range(len(lens)), None)):
        if not which:
            continue
        ends = counts or [context for _, context in lens]
        batch = pack(
            counts or [new for new, _ in lens], ends, [tables[index] for index in which],
            block_tokens=block_tokens, device=CPU,
        )  # fmt: skip
        starts = [0] * len(which) if counts else [context - new for new, context in lens]
        reference.write_kv(
            key_cache,
            value_cache,
            torch.cat([contexts[i][0][start:end] for i, start, end in zip(which, starts, ends, strict=True)]),
            torch.cat([contexts[i][1][start:end] for i, start, end in zip(which, starts, ends, strict=True)]),
            batch,
        )
    query = torch.randn(sum(new for new, _ in lens), heads, key_dim, generator=generator)
    return Case(query, key_cache, value_cache, batch, contexts)


def by_the_book(
    case: Case, *, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query, one head, one key at a time."""
    heads, kv_heads = case.query.shape[1], case.key_cache.shape[2]
    rows = []
    for index, (keys, values) in enumerate(case.contexts):
        new = case.batch.query_tokens(index)
        for offset in range(new):
            position = len(keys) - new + offset
            query = case.query[case.batch.cu_seqlens_q[index] + offset]
            outputs = []
            for head in range(heads):
                kv_head = head * kv_heads // heads
                first = 0 if window is None else max(0, position - window + 1)
                weights, total = [], 0.0 if sinks is None else math.exp(float(sinks[head]))
                for key in keys[first : position + 1]:
                    score = float(query[head] @ key[kv_head]) * scale
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    weights.append(math.exp(score))
                    total += weights[-1]
                outputs.append(
                    sum(
                        weight / total * value[kv_head]
                        for weight, value in zip(weights, values[first : position + 1], strict=True)
                    )
                )
            rows.append(torch.stack(outputs))
    return torch.stack(rows)


OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 1}, id="window-1"),
    pytest.param({"window": 5}, id="window-5"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"window": 3, "softcap": 1.5, "sinks": True}, id="everything"),
]
SHAPES = [
    pytest.param({"lens": [(1, 1)]}, id="one-token"),
    pytest.param({"lens": [(1, 7), (1, 4), (1, 5)]}, id="decodes"),
    pytest.param({"lens": [(1, 2), (1, 33), (1, 16), (1, 60), (1, 17), (1, 12)]}, id="decodes-padded"),
    pytest.param({"lens": [(7, 7), (3, 11)]}, id="prefill-and-chunk"),
    pytest.param({"lens": [(1, 9), (5, 5), (1, 3), (4, 13), (1, 40)]}, id="mixed"),
    pytest.param({"lens": [(2, 9), (1, 8)], "heads": 8, "kv_heads": 1}, id="multi-query"),
    pytest.param({"lens": [(2, 9), (1, 8)], "heads": 3, "kv_heads": 3}, id="multi-head"),
    pytest.param({"lens": [(5, 9), (1, 8)], "heads": 6, "key_dim": 24, "value_dim": 12}, id="dims-differ"),
    pytest.param({"lens": [(3, 9), (1, 8)], "block_tokens": 1}, id="blocks-of-one"),
    pytest.param({"lens": [(3, 9), (1, 8), (2, 40)], "block_tokens": 16}, id="blocks-of-16"),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_is_the_formula_on_odd_shapes(
    shape: dict[str, object], options: dict[str, object]
) -> None:
    case = make_case(**shape)
    heads = case.query.shape[1]
    sinks = torch.linspace(-1, 1, heads) if options.get("sinks") else None
    window, softcap = options.get("window"), options.get("softcap")
    expected = by_the_book(case, scale=0.4, window=window, softcap=softcap, sinks=sinks)
    for name in TRIED:
        got = KERNELS[name].attend(
            case.query, case.key_cache, case.value_cache, case.batch, scale=0.4, sliding_window=window,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("twin", [torch_sdpa.paged_attention, numba_attention.paged_attention])
@pytest.mark.parametrize("seed", range(8))
def test_the_twin_is_the_reference_on_random_batches(seed: int, twin: Attend) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    lens = []
    for _ in range(draw(1, 24)):
        new = 1 if draw(0, 3) else draw(2, 40)
        lens.append((new, new + draw(0, 90)))
    case = make_case(lens, heads=6, kv_heads=3, block_tokens=draw(1, 17), seed=seed)
    for window in (None, draw(1, 60)):
        arguments = (case.query, case.key_cache, case.value_cache, case.batch)
        torch.testing.assert_close(
            twin(*arguments, scale=0.3, sliding_window=window),
            reference.paged_attention(*arguments, scale=0.3, sliding_window=window),
            atol=1e-5,
            rtol=1e-5,
        )


def test_decodes_of_similar_length_are_attended_together() -> None:
    lens = sorted([(1, 3), (1, 64), (1, 4), (6, 9), (1, 60), (1, 5)], key=lambda each: sort_key(*each, 4))
    groups, chunks = torch_sdpa._plan(make_case(lens).batch)
    assert [group.end - group.start for group in groups] == [2, 1, 2]
    assert len(chunks) == 1
    for group in groups:
        padded = group.blocks.numel()
        used = sum(-(-int(length) // 4) for length in group.context_lens)
        assert padded < 2 * used


def test_half_precision_is_close_to_float32() -> None:
    case = make_case([(1, 40), (9, 20), (1, 7)])
    exact = reference.paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=0.4)
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        halves = (case.query.to(dtype), case.key_cache.to(dtype), case.value_cache.to(dtype))
        for name in TRIED:
            if name == NUMBA and dtype == torch.float16:
                continue
            got = KERNELS[name].attend(*halves, case.batch, scale=0.4)
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), exact, atol=tolerance, rtol=tolerance)


def test_a_written_token_lies_in_its_slot_and_nothing_else_is_touched() -> None:
    cache = torch.full((5, 4, 1, 2), 7.0), torch.full((5, 4, 1, 2), 7.0)
    batch = pack([2, 1], [6, 3], [[3, 1], [4]], block_tokens=4, device=CPU)
    assert batch.slots.tolist() == [4, 5, 18]
    assert batch.fresh_blocks is not None
    assert batch.fresh_blocks.tolist() == [1]
    reference.write_kv(*cache, torch.ones(3, 1, 2), torch.full((3, 1, 2), 2.0), batch)
    assert cache[0][1, :, 0, 0].tolist() == [1, 1, 0, 0], "a block that begins is cleared"
    assert cache[1][4, :, 0, 0].tolist() == [7, 7, 2, 7], "a block that goes on is not"
    assert (cache[0][[0, 2, 3]] == 7).all()


@pytest.mark.parametrize(
    ("lens", "tables", "message"),
    [
        (([0], [3]), [[0]], "computes 0 tokens"),
        (([4], [3]), [[0]], "computes 4 tokens of a context of 3"),
        (([1], [5]), [[0]], "context of 5 tokens does not fit in 1 blocks of 4"),
        (([1, 1], [2, 2]), [[0]], "one entry a sequence"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    lens: tuple[list[int], list[int]], tables: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(*lens, tables, block_tokens=4, device=CPU)


def test_without_numba_torchs_kernel_serves_and_says_why() -> None:
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch\n"
        "from kernels.machine import AttentionNeeds, LayerNeeds\n"
        "from kernels.trial import choose_for\n"
        "needs = AttentionNeeds(torch.float32, 16, (LayerNeeds(4, 2, 16, 16),))\n"
        "choice = choose_for(needs, torch.device('cpu'))\n"
        "assert choice.kernel.name == 'torch-sdpa', choice\n"
        "assert 'numba' in dict(choice.passed_over), choice\n"
        "from engine.model.sampler import greedy_tokens\n"
        "assert greedy_tokens(torch.zeros(2, 3)) is None\n"
        "try:\n"
        "    choose_for(needs, torch.device('cpu'), name='numba')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'fairgate[engine]'" in done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 11])
def test_a_rows_bits_depend_on_neither_neighbours_nor_chunks_nor_workers(
    dtype: torch.dtype, window: int | None
) -> None:
    """Every token of three sequences: in one prefill of all, and alone as a decode, with other threads."""
    contexts = [70, 33, 5]
    whole = make_case([(length, length) for length in contexts], heads=6, kv_heads=3, block_tokens=16)
    cache = whole.key_cache.to(dtype), whole.value_cache.to(dtype)
    query = whole.query.to(dtype)
    options = {"scale": 0.35, "sliding_window": window}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = numba_attention.paged_attention(query, *cache, whole.batch, **options)
        torch.set_num_threads(1)
        for index, length in enumerate(contexts):
            table = whole.batch.table(index).tolist()
            for context in range(1, length + 1):
                row = whole.batch.cu_seqlens_q[index] + context - 1
                alone = pack([1], [context], [table], block_tokens=16, device=CPU)
                got = numba_attention.paged_attention(query[row : row + 1], *cache, alone, **options)
                assert torch.equal(got[0], together[row]), (index, context)
    finally:
        torch.set_num_threads(threads)


def test_a_row_is_split_among_workers_by_whole_heads() -> None:
    assert numba_attention.parts_of(rows=64, kv_heads=4, workers=2) == 1
    assert numba_attention.parts_of(rows=1, kv_heads=4, workers=2) == 4
    assert numba_attention.parts_of(rows=2, kv_heads=6, workers=4) == 6
    assert numba_attention.parts_of(rows=1, kv_heads=1, workers=8) == 1
    for workers in (1, 2, 3):
        case = make_case([(1, 9), (3, 20)], heads=12, kv_heads=6)
        output = torch.zeros(4, 12 * 8)
        numba_attention.attend_rows(
            case.query.reshape(4, -1).numpy(), case.key_cache.numpy(), case.value_cache.numpy(),
            case.batch.rows, output.numpy(), heads=12, scale=0.3, sliding_window=None, softcap=None,
            sinks=None, workers=workers,
        )  # fmt: skip
        expected = reference.paged_attention(
            case.query, case.key_cache, case.value_cache, case.batch, scale=0.3
        )
        torch.testing.assert_close(output.view(4, 12, 8), expected, atol=1e-5, rtol=1e-5)
