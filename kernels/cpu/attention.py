"""Compiled paged attention for CPUs, reading the cache in place. Equal to `kernels.reference`.

A worker takes one row and some of its key/value heads, walks the row's blocks, and prefetches the next block.
A key or value is read once for all the query heads that share it. Each row is computed by itself, in an order
that depends only on its own context: neighbours, chunks and the number of workers change no bit of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange

from kernels.batch import PackedBatch, RowTables, array_of
from kernels.cpu.jit import compiled, use_threads
from kernels.cpu.math import CACHE_LINE_BYTES, exp_nonpositive, greatest_of, narrow, prefetch, widen
from kernels.cpu.vectors import KEYS, LANES, add_weighted, scores_of_four

NO_WINDOW = 0
DTYPES = (torch.float32, torch.bfloat16)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PackedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`; float32 or bfloat16 on a CPU."""
    tokens, heads, _ = query.shape
    output = torch.empty(tokens, heads, value_cache.shape[-1], dtype=value_cache.dtype)
    attend_rows(
        array_of(query.reshape(tokens, -1)),
        array_of(key_cache),
        array_of(value_cache),
        batch.rows,
        array_of(output.view(tokens, -1)),
        heads=heads,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach().float().numpy(),
        workers=use_threads(torch.get_num_threads()),
    )
    return output


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: PackedBatch,
) -> None:
    """As `kernels.reference.write_kv`, without clearing a new block: this kernel never reads its tail."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, batch.slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, batch.slots, value)


def attend_rows(
    query: Any,
    keys: Any,
    values: Any,
    rows: RowTables,
    output: Any,
    *,
    heads: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Any,
    workers: int,
) -> None:
    """`query`: `[rows, at least heads * key_dim]`, the heads first in each row. Writes `output`,
    `[rows, heads * value_dim]`. `workers` threads share the rows (see `kernels.cpu.jit`)."""
    attend(
        query,
        keys,
        values,
        rows.contexts,
        rows.table_starts,
        rows.tables,
        output,
        heads,
        np.float32(scale),
        NO_WINDOW if sliding_window is None else sliding_window,
        np.float32(softcap or 0.0),
        NO_SINKS if sinks is None else sinks,
        rows.most_context,
        workers,
        parts_of(len(rows.contexts), keys.shape[2], workers),
    )


NO_SINKS = np.zeros(0, dtype=np.float32)


def parts_of(rows: int, kv_heads: int, workers: int) -> int:
    """Number of parts into which a row's heads are split, so that few rows still occupy every worker."""
    parts = 1
    while rows * parts < 2 * workers and parts < kv_heads:
        parts += 1
        while kv_heads % parts:
            parts += 1
    return parts


@compiled(parallel=True)
def attend(
    query: Any,
    keys: Any,
    values: Any,
    contexts: Any,
    table_starts: Any,
    tables: Any,
    output: Any,
    heads: int,
    scale: Any,
    window: int,
    softcap: Any,
    sinks: Any,
    most_context: int,
    workers: int,
    parts: int,
) -> None:
    """Kernel of `attend_rows`, for other compiled code; each row's heads are split into `parts`."""
    block_tokens, kv_heads, key_dim = keys.shape[1:]
    value_dim = values.shape[3]
    group = heads // kv_heads
    part_kv_heads = kv_heads // parts
    part_heads = part_kv_heads * group
    # What does not fill a vector is added one by one: the rest of a head's width, or blocks of odd sizes.
    key_vectors = key_dim // LANES if block_tokens % KEYS == 0 else 0
    key_rest = key_vectors * LANES
    value_vectors = value_dim // LANES
    value_rest = value_vectors * LANES
    key_stride, value_stride = kv_heads * key_dim, kv_heads * value_dim
    key_lines = max(1, key_stride * keys.itemsize // CACHE_LINE_BYTES)
    value_lines = max(1, value_stride * values.itemsize // CACHE_LINE_BYTES)
    head_lines = -(-block_tokens * value_lines // part_heads)
    key_like, value_like = keys[0, 0, 0, 0], values[0, 0, 0, 0]
    for worker in prange(workers):
        scores = np.empty((part_heads, most_context + 2 * KEYS), np.float32)
        queries = np.empty((part_heads, key_dim), np.float32)
        sums = np.empty((part_heads, value_dim), np.float32)
        shares = np.empty(part_heads, np.float32)
        for item in range(worker, contexts.shape[0] * parts, workers):
            row = item // parts
            first_kv_head = item % parts * part_kv_heads
            first_head = first_kv_head * group
            context = contexts[row]
            table = tables[table_starts[row] :]
            first = 0 if window == NO_WINDOW else max(0, context - window)
            # Four keys at a time, from a multiple of four: the softmax leaves out those before the window.
            start = first - first % KEYS if key_vectors else first
            hidden = first - start
            for head in range(part_heads):
                for dim in range(key_dim):
                    queries[head, dim] = widen(query[row, (first_head + head) * key_dim + dim]) * scale

            token = start
            while token < context:
                number, offset = token // block_tokens, token % block_tokens
                count = min(block_tokens - offset, context - token)
                block = keys[table[number]]
                following = (
                    keys[table[number + 1]]
                    if token + count < context
                    else values[table[first // block_tokens]]
                )
                address = np.uintp(following.ctypes.data)
                step = 0
                while step < count:
                    many = KEYS if key_vectors else 1
                    for line in range(many * key_lines):
                        prefetch(address + np.uintp((step * key_lines + line) * CACHE_LINE_BYTES))
                    at = token - start + step
                    for kv_head in range(part_kv_heads):
                        place = block[offset + step, first_kv_head + kv_head].ctypes.data
                        for head in range(kv_head * group, kv_head * group + group):
                            if key_vectors:
                                scores_of_four(
                                    np.uintp(queries[head].ctypes.data),
                                    np.uintp(place),
                                    key_stride,
                                    key_vectors,
                                    np.uintp(scores[head, at:].ctypes.data),
                                    key_like,
                                )
                            else:
                                scores[head, at] = np.float32(0)
                            if key_rest < key_dim:
                                for near in range(min(many, count - step)):
                                    key = block[offset + step + near, first_kv_head + kv_head]
                                    score = np.float32(0)
                                    for dim in range(key_rest, key_dim):
                                        score += queries[head, dim] * widen(key[dim])
                                    scores[head, at + near] += score
                    step += many
                token += count

            # Softmax; the division follows with the sums.
            visible = context - first
            for head in range(part_heads):
                line_scores = scores[head, hidden : hidden + visible]
                if softcap > 0:
                    for token in range(visible):
                        twice = np.float32(-2) * abs(line_scores[token]) / softcap
                        power = exp_nonpositive(twice)
                        squashed = softcap * (np.float32(1) - power) / (np.float32(1) + power)
                        line_scores[token] = squashed if line_scores[token] >= 0 else -squashed
                best = greatest_of(line_scores)
                total = np.float32(0)
                if sinks.shape[0]:
                    best = max(best, sinks[first_head + head])
                for token in range(visible):
                    weight = exp_nonpositive(line_scores[token] - best)
                    line_scores[token] = weight
                    total += weight
                if sinks.shape[0]:
                    total += exp_nonpositive(sinks[first_head + head] - best)
                shares[head] = np.float32(1) / total

            sums[:] = np.float32(0)
            token = first
            while token < context:
                number, offset = token // block_tokens, token % block_tokens
                count = min(block_tokens - offset, context - token)
                block = values[table[number]]
                address = np.uintp(values[table[number + (token + count < context)]].ctypes.data)
                at = token - start
                for kv_head in range(part_kv_heads):
                    kv = first_kv_head + kv_head
                    place = block[offset, kv].ctypes.data
                    for head in range(kv_head * group, kv_head * group + group):
                        for line in range(head * head_lines, head * head_lines + head_lines):
                            prefetch(address + np.uintp(line * CACHE_LINE_BYTES))
                        if value_vectors:
                            add_weighted(
                                np.uintp(sums[head].ctypes.data),
                                np.uintp(scores[head, at:].ctypes.data),
                                np.uintp(place),
                                value_stride,
                                count,
                                value_vectors,
                                value_like,
                            )
                        if value_rest < value_dim:
                            for step in range(count):
                                weight = scores[head, at + step]
                                value = block[offset + step, kv]
                                for dim in range(value_rest, value_dim):
                                    sums[head, dim] += weight * widen(value[dim])
                token += count
            for head in range(part_heads):
                for dim in range(value_dim):
                    column = (first_head + head) * value_dim + dim
                    output[row, column] = narrow(sums[head, dim] * shares[head], output[row, column])
