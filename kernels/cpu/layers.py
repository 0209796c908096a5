"""Compiled passes of a decoder layer between its matrix products.

For float32 arrays, or bfloat16 as uint16 bits (see `kernels.cpu.math`); sums are float32. Rows are shared
among `workers` threads, each row is computed by itself: the result does not depend on their number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from kernels.cpu.jit import compiled
from kernels.cpu.math import exp_nonpositive, narrow, rank_of, widen

SEARCHED_AT_ONCE = 512
"""Scores in a block whose maximum is found before its index."""
LOWEST_RANK = np.int32(-0x80000000)
RANK_OF_INFINITY = np.int32(0x7F800000)
RANK_OF_MINUS_INFINITY = np.int32(-0x7F800001)


@compiled(parallel=True)
def add_and_normalize(
    residual: Any, addend: Any, weight: Any, epsilon: Any, normalized: Any, workers: int
) -> None:
    """`residual += addend`, then `normalized = residual / rms(residual) * weight` (RMSNorm). `residual`
    `[rows, hidden]` is float32 whatever the others are; an `addend` of no rows adds nothing."""
    hidden = residual.shape[1]
    for worker in prange(workers):
        for row in range(worker, residual.shape[0], workers):
            values = residual[row]
            if addend.shape[0]:
                for dim in range(hidden):
                    values[dim] += widen(addend[row, dim])
            squares = np.float32(0)
            for dim in range(hidden):
                squares += values[dim] * values[dim]
            factor = np.float32(1) / np.sqrt(squares / np.float32(hidden) + epsilon)
            for dim in range(hidden):
                normalized[row, dim] = narrow(values[dim] * factor * widen(weight[dim]), normalized[row, dim])


@compiled(parallel=True)
def silu_and_multiply(gate_and_up: Any, product: Any, workers: int) -> None:
    """`product = silu(gate) * up`; a row of `gate_and_up` is `[gate | up]`."""
    width = product.shape[1]
    for worker in prange(workers):
        for row in range(worker, product.shape[0], workers):
            for dim in range(width):
                gate = widen(gate_and_up[row, dim])
                up = widen(gate_and_up[row, width + dim])
                # 1 / (1 + e^-x), from e^-|x| so that nothing overflows.
                power = exp_nonpositive(-abs(gate))
                sigmoid = (np.float32(1) if gate >= 0 else power) / (np.float32(1) + power)
                product[row, dim] = narrow(gate * sigmoid * up, product[row, dim])


@compiled(parallel=True)
def rotate_and_write(
    projected: Any,
    heads: int,
    cosines: Any,
    sines: Any,
    contexts: Any,
    slots: Any,
    keys: Any,
    values: Any,
    query_weight: Any,
    key_weight: Any,
    epsilon: Any,
    workers: int,
) -> None:
    """Rotary positions for queries (in place) and keys; keys and values go to the cache.

    A row of `projected` is `[queries | keys | values]`; its position is one less than its context.
    `cosines` and `sines` are `[positions, key_dim / 2]`: dimension d is turned together with
    d + key_dim / 2 (RoPE, Su et al. 2021, in the halves layout of GPT-NeoX). Where `query_weight` and
    `key_weight` are not empty, each head is RMS-normalised first (Qwen 3)."""
    block_tokens, kv_heads, key_dim = keys.shape[1:]
    value_dim = values.shape[3]
    half = key_dim // 2
    for worker in prange(workers):
        turned = np.empty(key_dim, np.float32)
        for row in range(worker, projected.shape[0], workers):
            cosine = cosines[contexts[row] - 1]
            sine = sines[contexts[row] - 1]
            block = slots[row] // block_tokens
            offset = slots[row] % block_tokens
            for head in range(heads + kv_heads):
                source = projected[row, head * key_dim : (head + 1) * key_dim]
                weight = query_weight if head < heads else key_weight
                for dim in range(key_dim):
                    turned[dim] = widen(source[dim])
                if weight.shape[0]:
                    squares = np.float32(0)
                    for dim in range(key_dim):
                        squares += turned[dim] * turned[dim]
                    factor = np.float32(1) / np.sqrt(squares / np.float32(key_dim) + epsilon)
                    for dim in range(key_dim):
                        turned[dim] *= factor * widen(weight[dim])
                for dim in range(half):
                    left, right = turned[dim], turned[half + dim]
                    turned[dim] = left * cosine[dim] - right * sine[dim]
                    turned[half + dim] = right * cosine[dim] + left * sine[dim]
                if head < heads:
                    for dim in range(key_dim):
                        source[dim] = narrow(turned[dim], source[dim])
                else:
                    target = keys[block, offset, head - heads]
                    for dim in range(key_dim):
                        target[dim] = narrow(turned[dim], target[dim])
            first = (heads + kv_heads) * key_dim
            for kv_head in range(kv_heads):
                for dim in range(value_dim):
                    value = widen(projected[row, first + kv_head * value_dim + dim])
                    values[block, offset, kv_head, dim] = narrow(value, values[block, offset, kv_head, dim])


@compiled(parallel=True)
def greatest(scores: Any, winners: Any, workers: int) -> None:
    """`winners[row]`: index of the first maximum of `scores[row]` (float32); -1: not finite, or with NaNs."""
    width = scores.shape[1]
    for worker in prange(workers):
        for row in range(worker, scores.shape[0], workers):
            bits = scores[row].view(np.int32)
            best, least, best_start = LOWEST_RANK, np.int32(0), 0
            for start in range(0, width, SEARCHED_AT_ONCE):
                part = bits[start : start + SEARCHED_AT_ONCE]
                local = LOWEST_RANK
                for index in range(part.shape[0]):
                    rank = rank_of(part[index])
                    local = max(local, rank)
                    least = min(least, rank)
                if local > best:
                    best, best_start = local, start
            winner = -1
            if RANK_OF_MINUS_INFINITY < best < RANK_OF_INFINITY and least >= RANK_OF_MINUS_INFINITY:
                winner = best_start
                while rank_of(bits[winner]) != best:
                    winner += 1
            winners[row] = winner


@compiled(parallel=True)
def take_rows(table: Any, row_numbers: Any, taken: Any, workers: int) -> None:
    """`taken[i] = table[row_numbers[i]]`, as float32: the embedding of tokens."""
    for worker in prange(workers):
        for row in range(worker, row_numbers.shape[0], workers):
            source = table[row_numbers[row]]
            for dim in range(taken.shape[1]):
                taken[row, dim] = widen(source[dim])
