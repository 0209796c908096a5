"""Paged attention in Triton: of ragged steps with prompts and chunks, by tiles, and of decodes, by parts."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.configurations import AttentionLaunch, power_of_two, tile_launch, tile_tokens
from kernels.gpu.launching import capability, launch

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(math.log2(math.e))
UNLIMITED = 1 << 30
"""Window of a layer that has none: longer than any context."""


@triton.jit
def span(lowest, end, least, parts, keys: tl.constexpr):
    """The first token to read, a multiple of `keys` from `lowest` down, and how many a part has: one too."""
    start = tl.maximum(lowest, 0) // keys * keys
    return start, tl.maximum(tl.cdiv(tl.cdiv(end - start, parts), keys) * keys, least)


@triton.jit
def attend(
    queries, key_cache, value_cache, table, start, is_key, seen, top, total, sums, factor, bound,
    key_token, value_token, block_tokens: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
    value_dim: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, masked: tl.constexpr,
    capped: tl.constexpr,
):  # fmt: skip
    """Folds `keys` tokens from `start` on, a multiple of `keys`, into the running softmax: `top`, `total`
    `[rows]`, `sums` `[rows, value_width]`. `masked`: only those `is_key` are read, and only `seen` count."""
    places = tl.arange(0, keys)
    if block_tokens % keys == 0:
        slots = tl.load(table + start // block_tokens) * block_tokens + start % block_tokens + places
    else:
        blocks = tl.load(table + (start + places) // block_tokens, mask=is_key, other=0)
        slots = blocks * block_tokens + (start + places) % block_tokens
    dims, value_dims = tl.arange(0, width)[:, None], tl.arange(0, value_width)[None, :]
    key_at = key_cache + (slots * key_token)[None, :] + dims
    value_at = value_cache + (slots * value_token)[:, None] + value_dims
    if masked:
        key = tl.load(key_at, mask=is_key[None, :] & (dims < dim), other=0.0)
        value = tl.load(value_at, mask=is_key[:, None] & (value_dims < value_dim), other=0.0)
    else:
        key, value = tl.load(key_at), tl.load(value_at)
    # The interpreter's product takes bfloat16 for whole numbers.
    if INTERPRETED:
        queries, key, value = queries.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    scores = tl.dot(queries, key, input_precision="ieee") * factor
    if capped:
        scores = bound - 2 * bound / (tl.exp2(scores) + 1)
    if masked:
        scores = tl.where(seen, scores, -float("inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(scores - finite[:, None])
    rescale = tl.exp2(top - finite)
    total = total * rescale + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * rescale[:, None], input_precision="ieee")
    return highest, total, sums


@triton.jit(do_not_specialize_on_alignment=["tiles"])  # a part of what was staged, anywhere
def attention_kernel(
    query, key_cache, value_cache, tables, starts, contexts, tiles, sinks, out, partial, exponents,
    factor, bound, window, least, parts,
    query_row, query_head, key_token, key_head, value_token, value_head, out_row, out_head,
    group: tl.constexpr, members: tl.constexpr, rows: tl.constexpr, pieces: tl.constexpr,
    block_tokens: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, value_dim: tl.constexpr,
    value_width: tl.constexpr, keys: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    """Grid `(kv_heads * pieces, parts, tiles)`, or rows, if `tiles` is None; contexts do not change it. A
    tile's rows are its tokens' heads, `group` of them padded to `members`; a piece has `rows` of them. A part
    attends to `span` tokens; results that are not whole go to `partial` `[rows, heads, parts, value_dim]`."""
    kv_head, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    part = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64)
    count = 1
    if tiles is not None:
        count = tl.load(tiles + 2 * first + 1).to(tl.int32)
        if piece * rows // members >= count:
            return
        first = tl.load(tiles + 2 * first)
    index = piece * rows + tl.arange(0, rows)
    token, member = index // members, index % members
    position = tl.load(contexts + first).to(tl.int32) - 1
    lowest = position + piece * rows // members + 1 - window
    end = position + tl.minimum(count, (piece * rows + rows - 1) // members + 1)
    start, each = span(lowest, end, least, parts, keys)
    is_cut = start + each < end
    start += part * each
    if (part > 0) & (start >= end):
        return
    table = tables + tl.load(starts + first)
    head = kv_head * group + member
    is_row = (token < count) & (member < group)
    dims, value_dims = tl.arange(0, width)[None, :], tl.arange(0, value_width)[None, :]
    query_at = query + ((first + token) * query_row + head * query_head)[:, None] + dims
    queries = tl.load(query_at, mask=is_row[:, None] & (dims < dim), other=0.0)
    top = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        top, total = tl.where(part == 0, sink, top), tl.where(part == 0, 1.0, total)
    sums = tl.zeros([rows, value_width], tl.float32)
    key_cache += kv_head * key_head
    value_cache += kv_head * value_head
    if tiles is None:
        end = tl.minimum(start + each, end)
    elif dim == width and value_dim == value_width:
        # Up to here all tokens see all keys; nowhere, if the window hides some from the last token.
        whole = tl.where(end > window, start, (lowest + window) // keys * keys)
        for at in range(start, whole, keys):
            every = tl.arange(0, keys) >= 0
            top, total, sums = attend(
                queries, key_cache, value_cache, table, at, every, every, top, total, sums, factor, bound,
                key_token, value_token, block_tokens, dim, width, value_dim, value_width, keys, False, capped,
            )  # fmt: skip
        start = whole
    for at in range(start, end, keys):
        positions = at + tl.arange(0, keys)
        is_key = (positions >= lowest) & (positions < end)
        seen = is_key[None, :]
        if tiles is not None:
            distance = (position + token)[:, None] - positions[None, :]
            seen = (distance >= 0) & (distance < window)
        top, total, sums = attend(
            queries, key_cache, value_cache, table, at, is_key, seen, top, total, sums, factor, bound,
            key_token, value_token, block_tokens, dim, width, value_dim, value_width, keys, True, capped,
        )  # fmt: skip
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    is_written = is_row[:, None] & (value_dims < value_dim)
    if partial is not None:  # noqa: SIM102 (known when this is compiled; the other is not)
        if is_cut:
            place = (first * (tl.num_programs(0) // pieces * group) + head) * parts + part
            tl.store(partial + place[:, None] * value_dim + value_dims, sums, mask=is_written)
            tl.store(exponents + place, top + tl.log2(total), mask=is_row)
            return
    out_at = out + ((first + token) * out_row + head * out_head)[:, None] + value_dims
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_written)


def launch_attention(
    chosen: AttentionLaunch, places: tuple[Tensor, ...], tiles: Tensor | None, out: Tensor, members: int,
    in_tile: int, scale: float, window: int, softcap: float, sinks: Tensor | None,
    partial: Tensor | None = None, exponents: Tensor | None = None, parts: int = 1,
) -> None:  # fmt: skip
    """`places`: the operators' first six tensors. `in_tile`: `members` times the most tokens of a tile."""
    query, key_cache, value_cache = places[:3]
    rows, heads, dim = query.shape
    block_tokens, kv_heads, value_dim = value_cache.shape[1:]
    pieces = -(-in_tile // chosen.rows)
    # Scores are exponents of two; a bounded one is bound * tanh(score / bound), by an exponential.
    factor = (2 * scale / softcap if softcap else scale) * math.log2(math.e)
    launch(
        attention_kernel, (kv_heads * pieces, parts, rows if tiles is None else tiles.shape[0]),
        *places, tiles, sinks, out, partial, exponents, factor, softcap * math.log2(math.e),
        window or UNLIMITED, chosen.least, parts,
        *query.stride()[:2], *key_cache.stride()[1:3], *value_cache.stride()[1:3], *out.stride()[:2],
        group=heads // kv_heads, members=members, rows=chosen.rows, pieces=pieces, block_tokens=block_tokens,
        dim=dim, width=power_of_two(dim, 16), value_dim=value_dim, value_width=power_of_two(value_dim, 16),
        keys=chosen.keys, capped=softcap > 0, num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip


def varlen_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor, starts: Tensor, contexts: Tensor,
    tiles: Tensor, out: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    """As `kernels.reference.varlen_attention`, of tiles of at most `configurations.tile_tokens`. Rows and
    heads may lie apart, a head's numbers may not."""
    group, dim = query.shape[1] // key_cache.shape[2], max(query.shape[2], value_cache.shape[3])
    members = power_of_two(group)
    launch_attention(
        tile_launch(dim, query.dtype, capability()),
        (query, key_cache, value_cache, tables, starts, contexts), tiles, out,
        members, members * tile_tokens(group, dim), scale, window, softcap, sinks,
    )  # fmt: skip
