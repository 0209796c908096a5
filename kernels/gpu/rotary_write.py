"""Triton kernel: rotary positions of merged queries and keys, and the cache write of keys and values."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.launching import launch

CONFIGURATION = {"together": 8, "num_warps": 4}


@triton.jit
def _normed(one, other, weight, places, valid, epsilon, half: tl.constexpr):
    """Both halves of heads after an RMSNorm of each head, rounded where Llama's is."""
    first, second = one.to(tl.float32), other.to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / (2 * half) + epsilon)[:, None]
    left = tl.load(weight + places, mask=valid, other=0.0).to(tl.float32)[None, :]
    right = tl.load(weight + half + places, mask=valid, other=0.0).to(tl.float32)[None, :]
    first = (first * scale).to(one.dtype).to(tl.float32) * left
    second = (second * scale).to(one.dtype).to(tl.float32) * right
    return first.to(one.dtype), second.to(one.dtype)


@triton.jit
def rotary_write_kernel(
    qkv, key_cache, value_cache, cosines, sines, contexts, slots, query_norm, key_norm, epsilon,
    stride_token, stride_slot, heads, kv_heads, half: tl.constexpr, width: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens, groups of heads)`; queries come first, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        position = tl.load(contexts + token) - 1
        head = tl.program_id(1) * together + tl.arange(0, together)
        places = tl.arange(0, width)
        valid = places < half
        kind = (head >= heads).to(tl.int32) + (head >= heads + kv_heads) + (head >= heads + 2 * kv_heads)
        is_query, is_key, is_value = (kind == 0)[:, None], (kind == 1)[:, None], (kind == 2)[:, None]
        lies = qkv + token * stride_token + head[:, None] * 2 * half + places[None, :]
        there = (kind < 3)[:, None] & valid[None, :]
        one = tl.load(lies, mask=there, other=0.0)
        other = tl.load(lies + half, mask=there, other=0.0)
        slot_lies = slot * stride_slot + places[None, :]
        value_lies = value_cache + slot_lies + (head - heads - kv_heads)[:, None] * 2 * half
        tl.store(value_lies, one, mask=is_value & valid[None, :])
        tl.store(value_lies + half, other, mask=is_value & valid[None, :])
        if query_norm is not None:
            normed, normed_other = _normed(one, other, query_norm, places, valid, epsilon, half)
            one, other = tl.where(is_query, normed, one), tl.where(is_query, normed_other, other)
        if key_norm is not None:
            normed, normed_other = _normed(one, other, key_norm, places, valid, epsilon, half)
            one, other = tl.where(is_key, normed, one), tl.where(is_key, normed_other, other)
        cosine = tl.load(cosines + position * half + places, mask=valid, other=0.0)[None, :]
        sine = tl.load(sines + position * half + places, mask=valid, other=0.0)[None, :]
        first, second = one.to(tl.float32), other.to(tl.float32)
        turned = (first * cosine - second * sine).to(one.dtype)
        turned_other = (second * cosine + first * sine).to(one.dtype)
        tl.store(lies, turned, mask=is_query & valid[None, :])
        tl.store(lies + half, turned_other, mask=is_query & valid[None, :])
        key_lies = key_cache + slot_lies + (head - heads)[:, None] * 2 * half
        tl.store(key_lies, turned, mask=is_key & valid[None, :])
        tl.store(key_lies + half, turned_other, mask=is_key & valid[None, :])


def rotary_write(
    qkv: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, cosines: torch.Tensor,
    sines: torch.Tensor, contexts: torch.Tensor, slots: torch.Tensor, query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None, epsilon: float,
) -> None:  # fmt: skip
    """As `kernels.reference.rotary_write`; caches and tables of positions are contiguous."""
    kv_heads, dim = key_cache.shape[2:]
    every = qkv.shape[1] // dim
    launch(
        rotary_write_kernel, (len(slots), triton.cdiv(every, CONFIGURATION["together"])), qkv, key_cache,
        value_cache, cosines, sines, contexts, slots, query_norm, key_norm, epsilon, qkv.stride(0),
        key_cache.stride(1), every - 2 * kv_heads, kv_heads, half=dim // 2,
        width=triton.next_power_of_2(dim // 2), **CONFIGURATION,
    )  # fmt: skip
