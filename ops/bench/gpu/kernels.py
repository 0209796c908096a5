"""Sections of the GPU's benchmark about kernels: that they are right, and what share of the card they use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from engine.sizes import blocks_for
from kernels import reference
from kernels.batch import pack
from kernels.gpu import launching, operators  # noqa: F401  (registers torch.ops.fairgate)
from kernels.gpu.compiling import compile_all
from kernels.gpu.configurations import tile_tokens
from kernels.machine import AttentionNeeds, KernelMachine, LayerNeeds, machine_of
from kernels.trial import TOLERANCE, choose_for
from ops.bench.gpu.section import NEEDS_CARD, Section

SIZES = {
    torch.bfloat16: [(1, 32, 16), (3, 32, 256), (4, 64, 16), (8, 64, 256), (4, 128, 256), (8, 128, 16),
                     (1, 128, 16), (3, 256, 16), (1, 256, 256)],
    torch.float32: [(8, 32, 256), (1, 64, 16), (3, 128, 256), (4, 256, 16)],
}  # fmt: skip
"""Query heads of a key/value head, their dims, tokens of a block: not all with all: compiling takes long."""
STEPS = [*((64, 1, context) for context in (2048, 4096, 8192)), (128, 1, 1024), (32, 1, 1024),
         (1, 2048, 2048), (1, 512, 8192)]  # fmt: skip
WIDE = (torch.bfloat16, 8192, LayerNeeds(32, 8, 128, 128), 64, STEPS, (8192, 16384))
NARROW = (torch.float32, 64, LayerNeeds(6, 2, 32, 32), 16, [(2, 1, 32), (1, 20, 40)], (4, 500))
"""Of the roofline: matrices; a layer and blocks; sequences, tokens and contexts; tokens and a vocabulary."""
POSITIONS = 512
Steps = list[list[tuple[int, int]]]
"""By sequences: tokens that are computed, and contexts."""
Case = tuple[str, str, tuple[Any, ...]]
"""What it is, an operator, and its arguments."""


def check(section: Section) -> None:
    """Each kernel beside the reference: outputs and all that must not be read are poisoned."""
    torch.manual_seed(1)
    sizes: dict[torch.dtype, Any] = SIZES if section.has_card else {torch.float32: [(3, 32, 16)]}
    machine = machine_of(section.device) if section.has_card else KernelMachine("cuda", (9, 0))
    steps: Steps = [[(9, 40), (1, 17), (23, 23)], *([(1, 40)] * rows for rows in (2, 40, 100, 300))]
    needs, cases = list[AttentionNeeds](), list[Case]()
    for dtype, (ratio, dim, block) in [(dtype, each) for dtype, those in sizes.items() for each in those]:
        options = (block, 5.0, True) if dim == 64 else (None, None, False)
        needs.append(AttentionNeeds(dtype, block, (LayerNeeds(2 * ratio, 2, dim, dim, *options),)))
        cases += _cases(needs[-1], steps if section.has_card else steps[:2], 130, 500, section.device)
    _compile(section, cases)
    for name, need in product(("triton", "torch-sdpa", "flash-attn"), needs):
        try:
            choose_for(need, section.device, name=name, machine=machine)
            problem = None
        except ValueError as error:
            problem = str(error)
        section.note(
            f"attention {name}, {need}", problem or "right", is_right=name != "triton" or not problem
        )
    for what, name, arguments in cases:
        section.note(f"{name}, {what}", part := _difference(name, arguments), is_right=part <= 1)


def _compile(section: Section, cases: list[Case]) -> None:
    """Compiles all of it by the card's own Triton; notes what its assembler made of it."""
    with launching.collecting() as variants:
        for _, name, arguments in cases if section.has_card else ():
            getattr(torch.ops.fairgate, name)(*arguments)
    took, used = compile_all(variants), {}
    for key, variant in variants.items():
        (kernel := variant())._init_handles()
        used[" ".join(map(str, key))] = [kernel.n_regs, kernel.n_spills, kernel.metadata.shared]
    spilling = [name for name, (_, spills, _) in used.items() if spills]
    section.figures |= {"registers, spills, shared bytes": used} if used else {}
    figures = {"seconds": took.seconds, "spilling": spilling}
    section.note("compiled", figures if section.has_card else NEEDS_CARD, is_right=not spilling)


def _cases(
    needs: AttentionNeeds, steps: Steps, tokens: int, vocabulary: int, device: torch.device
) -> Iterator[Case]:
    """Attention of each of `steps`, over blocks in any order, then all other operators: their last token is
    padding, and every second one is drawn with every cut."""
    layer, block = needs.layers[0], needs.block_tokens
    heads, kv_heads, dim = layer.heads, layer.kv_heads, layer.key_dim
    normal = partial(torch.randn, dtype=needs.dtype, device=device)
    options = (dim**-0.5, layer.window or 0, layer.softcap or 0.0, normal(heads) if layer.sinks else None)
    kind = f"{heads} and {kv_heads} heads of {dim}, blocks of {block}, {needs.dtype}"
    tile = tile_tokens(heads // kv_heads, dim)
    for counts, lengths in (zip(*slices, strict=True) for slices in steps):
        blocks = [blocks_for(length, block) for length in lengths]
        tables = [part.tolist() for part in torch.randperm(sum(blocks)).split(blocks)]
        batch = pack(counts, lengths, tables, block_tokens=block, device=device, tile_tokens=tile)
        query, caches = normal(sum(counts), heads, dim), normal(2, sum(blocks), block, kv_heads, dim)
        for table, length in zip(tables, lengths, strict=True):
            caches[:, table[-1], (length - 1) % block + 1 :] = torch.nan
        tiles = () if batch.tiles is None else (batch.tiles,)
        places = (query, *caches, batch.tables, batch.token_tables, batch.token_contexts, *tiles)
        what = f"{len(counts)} x {counts[0]} of {lengths[0]} tokens, {kind}"
        name = "varlen_attention" if tiles else "decode_attention"
        yield what, name, (*places, torch.full_like(query, torch.nan), *options)
    delta, residual, out = normal(3, tokens, heads * dim)
    cache = normal(tokens // block + 1, block, kv_heads, dim).fill_(torch.nan)
    contexts, slots = torch.randint(1, POSITIONS, (tokens,)), torch.randperm(len(cache) * block)[:tokens]
    contexts[-1], slots[-1] = 0, -1
    written, numbers = (contexts.to(device), slots.to(device)), torch.arange(tokens, device=device)
    angles = torch.rand(POSITIONS, dim // 2, device=device) * 6
    turned = (normal(tokens, (heads + 2 * kv_heads) * dim), cache.clone(), cache, angles.cos(), angles.sin())
    norms = normal(2, dim) if dim == 128 else (None, None)
    warm, drawn, weight = numbers % 2, torch.full_like(numbers, -9), normal(heads * dim)
    cuts = (0.8 * warm, (20 * warm).int(), 1 - 0.1 * warm, 0.02 * warm, 977 * numbers, numbers)
    pair, what = normal(2, tokens, kv_heads, dim), f"{tokens} tokens, {kind}"
    yield what, "add_norm", (delta, residual.clone(), weight, torch.full_like(out, torch.nan), 1e-5)
    yield f"no delta, {what}", "add_norm", (None, residual, weight, torch.full_like(out, torch.nan), 1e-5)
    yield what, "silu_multiply", (normal(tokens, 2 * heads * dim), out.fill_(torch.nan))
    yield what, "write_slots", (*pair, cache.clone(), cache.clone(), written[1])
    yield what, "rotary_write", (*turned, *written, *norms, 1e-6)
    yield what, "draw", (3 * normal(tokens, vocabulary), *cuts, 0, drawn, drawn > 0)


def _difference(name: str, arguments: tuple[Any, ...]) -> float:
    """Of what an operator leaves in its arguments from what its twin does, as a part of what rounding
    explains (of whole numbers a 50th may differ). Infinite where another place is poisoned."""
    twins = [part.to("cpu", copy=True) if isinstance(part, torch.Tensor) else part for part in arguments]
    getattr(torch.ops.fairgate, name)(*arguments)
    getattr(reference, name)(*twins)
    worst = 0.0
    for ours, twin in zip(arguments, twins, strict=True):
        if isinstance(ours, torch.Tensor):
            one, other = ours.double(), twin.to(ours.device).double()
            if not torch.equal(one.isnan(), other.isnan()):
                return float("inf")
            distance = (one - other).nan_to_num().norm() / other.nan_to_num().norm().clamp(min=1e-30)
            part = distance if ours.is_floating_point() else (one != other).double().mean()
            worst = max(worst, float(part) / TOLERANCE.get(ours.dtype, 0.02))
    return worst


def roofline(section: Section) -> None:
    """What the card can do, and the share of it that each kernel has at an 8B model's shapes: of the matrix
    rate for prompts, else of the copy bandwidth, where each argument counts once."""
    dtype, size, layer, block, sizes, many = WIDE if section.has_card else NARROW
    one, other = torch.randn(2, size, size, device=section.device).to(dtype).unbind()
    copy, rate = section.copy_bytes_per_s(), 2 * size**3 / section.seconds(lambda: one @ other)
    section.note("copy, TB/s", round(copy / 1e12, 3))
    section.note("matrix rate, TFLOP/s", round(rate / 1e12, 1))
    steps: Steps = [[(tokens, context)] * sequences for sequences, tokens, context in sizes]
    needs = AttentionNeeds(dtype, block, (layer,))
    for what, name, arguments in _cases(needs, steps, *many, section.device):
        taken_s = section.seconds(partial(getattr(torch.ops.fairgate, name), *arguments))
        share = sum(part.nbytes for part in arguments if isinstance(part, torch.Tensor)) / taken_s / copy
        if name == "varlen_attention":
            share = 4 * arguments[0][0].numel() * int(arguments[5].sum()) / taken_s / rate
        section.note(f"{name}, {what}", round(share, 3))
