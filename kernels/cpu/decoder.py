"""All layers of a Llama-like decoder in one compiled call.

Everything between the cache and the weights is float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from kernels.batch import RowTables
from kernels.cpu.attention import NO_SINKS, attend, parts_of
from kernels.cpu.jit import compiled
from kernels.cpu.layers import add_and_normalize, rotate_and_write, silu_and_multiply, take_rows
from kernels.cpu.products import multiply

Array = Any


class DecoderWeights(NamedTuple):
    """All layers' weights; the first dimension of each is the layer. Products are panels and a bias."""

    qkv: Array
    qkv_bias: Array
    output: Array
    output_bias: Array
    gate_and_up: Array
    gate_and_up_bias: Array
    down: Array
    down_bias: Array
    norm: Array
    norm_epsilon: Array
    mlp_norm: Array
    mlp_norm_epsilon: Array
    query_norm: Array
    """`[layers, key_dim]`, or `[layers, 0]` where heads are not normalised."""
    key_norm: Array
    head_epsilon: Array
    scale: Array
    window: Array
    """`kernels.cpu.attention.NO_WINDOW`: the layer attends to everything."""


class Ends(NamedTuple):
    """Weights and tables before and after the layers."""

    embedding: Array
    norm: Array
    norm_epsilon: Any
    head: Array
    head_bias: Array
    cosines: Array
    sines: Array


class Buffers(NamedTuple):
    """Buffers of a step, float32, with at least as many rows as the step has tokens."""

    residual: Array
    normalized: Array
    projected: Array
    attended: Array
    added: Array
    both: Array
    product: Array


class Caches(NamedTuple):
    """Addresses of each layer's keys and values, and one layer's arrays for shape and dtype."""

    key_addresses: Array
    value_addresses: Array
    keys: Array
    values: Array


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_context: Any, address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def run(
    weights: DecoderWeights,
    ends: Ends,
    buffers: Buffers,
    caches: Caches,
    token_ids: Array,
    tables: RowTables,
    rows: Array,
    logits: Array,
    *,
    heads: int,
    workers: int,
) -> None:
    """Runs one step: writes the keys and values of all `token_ids`, and to `logits[i]` (float32, at least the
    head's panels * PANEL wide) the logits of packed row `rows[i]`; `rows` must ascend."""
    kept = tables if len(rows) == len(token_ids) else tables.only(rows)
    kv_heads = caches.keys.shape[2]
    _run(
        *weights, *ends, *buffers, *caches, token_ids, tables.contexts, tables.table_starts, tables.tables,
        tables.slots, kept.contexts, kept.table_starts, rows, tables.most_context, logits, heads, workers,
        parts_of(len(token_ids), kv_heads, workers), parts_of(len(rows), kv_heads, workers), NO_SINKS,
    )  # fmt: skip


@compiled()
def _run(
    qkv: Any,
    qkv_bias: Any,
    output: Any,
    output_bias: Any,
    gate_and_up: Any,
    gate_and_up_bias: Any,
    down: Any,
    down_bias: Any,
    norm: Any,
    norm_epsilon: Any,
    mlp_norm: Any,
    mlp_norm_epsilon: Any,
    query_norm: Any,
    key_norm: Any,
    head_epsilon: Any,
    scale: Any,
    window: Any,
    embedding: Any,
    final_norm: Any,
    final_epsilon: Any,
    head: Any,
    head_bias: Any,
    cosines: Any,
    sines: Any,
    residual_buffer: Any,
    normalized_buffer: Any,
    projected_buffer: Any,
    attended_buffer: Any,
    added_buffer: Any,
    both_buffer: Any,
    product_buffer: Any,
    key_addresses: Any,
    value_addresses: Any,
    keys_like: Any,
    values_like: Any,
    token_ids: Any,
    contexts: Any,
    table_starts: Any,
    tables: Any,
    slots: Any,
    kept_contexts: Any,
    kept_starts: Any,
    rows: Any,
    most_context: int,
    logits: Any,
    heads: int,
    workers: int,
    parts: int,
    kept_parts: int,
    no_sinks: Any,
) -> None:
    layers = qkv.shape[0]
    count = token_ids.shape[0]
    residual, projected = residual_buffer[:count], projected_buffer[:count]
    normalized, attended = normalized_buffer[:count], attended_buffer[:count]
    added, both, product = added_buffer[:count], both_buffer[:count], product_buffer[:count]
    take_rows(embedding, token_ids, residual, workers)
    for layer in range(layers):
        addend = added if layer else added[:0]
        add_and_normalize(residual, addend, norm[layer], norm_epsilon[layer], normalized, workers)
        multiply(normalized, qkv[layer], qkv_bias[layer], projected, workers)
        keys = carray(_pointer(key_addresses[layer]), keys_like.shape, keys_like.dtype)
        values = carray(_pointer(value_addresses[layer]), values_like.shape, values_like.dtype)
        rotate_and_write(
            projected, heads, cosines, sines, contexts, slots, keys, values,
            query_norm[layer], key_norm[layer], head_epsilon[layer], workers,
        )  # fmt: skip
        if layer == layers - 1 and rows.shape[0] < count:
            # The other rows are not needed any more: their keys and values are written.
            count = rows.shape[0]
            for row in range(count):
                residual[row] = residual[rows[row]]
                projected[row] = projected[rows[row]]
            residual, projected = residual[:count], projected[:count]
            normalized, attended = normalized[:count], attended[:count]
            added, both, product = added[:count], both[:count], product[:count]
            contexts, table_starts, parts = kept_contexts, kept_starts, kept_parts
        attend(
            projected, keys, values, contexts, table_starts, tables, attended, heads, scale[layer],
            window[layer], np.float32(0), no_sinks, most_context, workers, parts,
        )  # fmt: skip
        multiply(attended, output[layer], output_bias[layer], added, workers)
        add_and_normalize(residual, added, mlp_norm[layer], mlp_norm_epsilon[layer], normalized, workers)
        multiply(normalized, gate_and_up[layer], gate_and_up_bias[layer], both, workers)
        silu_and_multiply(both, product, workers)
        multiply(product, down[layer], down_bias[layer], added, workers)
    add_and_normalize(residual, added, final_norm, final_epsilon, normalized, workers)
    multiply(normalized, head, head_bias, logits, workers)
