"""Triton kernels: tokens drawn from logits, as `kernels.sampling` has it.

Four launches, whatever the rows ask for: the best score of each part of the vocabulary; of a row, and the
threshold of its cuts; the arg max of score plus noise of each part; of a row.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import sampling
from kernels.gpu.launching import launch

PARTS = {"part_tokens": 2048, "num_warps": 4}
CUTS = {"span": 4096, "num_warps": 16}
PER_ROW = ["temperature", "top_k", "top_p", "min_p", "seeds", "token_index", "unsound"]
"""One number a row, read or written alone: wherever they lie, a kernel is compiled once."""
GREEDY_BELOW = tl.constexpr(sampling.GREEDY_BELOW_TEMPERATURE)
WHOLE = tl.constexpr(sampling.WHOLE)
BELOW_ONE = tl.constexpr(sampling.BELOW_ONE)
GREATEST = tl.constexpr(torch.finfo(torch.float32).max)
NO_CHANCE = tl.constexpr(float("-inf"))
FIRST_SALT, SECOND_SALT = tl.constexpr(0x9E3779B1), tl.constexpr(0x7F4A7C15)
SPREAD, MIX, MIX_AGAIN = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)


@triton.jit
def _scores(logits, tokens, vocabulary):
    """Float32 without NaN and infinity; beyond the vocabulary no chance."""
    raw = tl.load(logits + tokens, mask=tokens < vocabulary, other=NO_CHANCE).to(tl.float32)
    return tl.minimum(tl.where(raw == raw, raw, NO_CHANCE), GREATEST)


@triton.jit
def _rank(bits):
    """Maps a float32's bits to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _log(value, less_one):
    """The natural logarithm of a positive normal float32, relative error 2e-7: `tl.log` is not exact around
    1, where the greatest noise comes from. `less_one`: the value less 1, maybe more exactly. A polynomial
    around 1 (Cephes), as in `kernels.cpu.math`."""
    bits = value.to(tl.int32, bitcast=True)
    whole = (bits - 0x3F3504F3) >> 23
    part = tl.where(whole == 0, less_one, (bits - (whole << 23)).to(tl.float32, bitcast=True) - 1.0)
    power = 7.0376836e-2 * part - 1.1514610e-1
    power = power * part + 1.1676999e-1
    power = power * part - 1.2420141e-1
    power = power * part + 1.4249323e-1
    power = power * part - 1.6668058e-1
    power = power * part + 2.0000715e-1
    power = power * part - 2.4999994e-1
    power = power * part + 3.3333331e-1
    exponent = whole.to(tl.float32)
    rest = power * part * part * part - 0.5 * part * part - exponent * 2.1219444e-4
    return part + rest + exponent * 0.693359375


@triton.jit
def _shifted(bits, places: tl.constexpr):
    return bits ^ (bits >> places)


@triton.jit
def _mixed(key, word):
    """MurmurHash3's finaliser of one more word."""
    key = _shifted(key ^ word, 16)
    key = _shifted(key * MIX, 13)
    return _shifted(key * MIX_AGAIN, 16)


@triton.jit
def _noise(seed, index, tokens):
    """Gumbel noise of tokens."""
    high, low = (seed >> 32).to(tl.uint32), seed.to(tl.uint32)
    nothing = tl.zeros_like(low)
    first = _mixed(_mixed(_mixed(nothing, index.to(tl.uint32) ^ FIRST_SALT), high), low)
    second = _mixed(_mixed(_mixed(nothing, index.to(tl.uint32) ^ SECOND_SALT), high), low)
    bits = _shifted(tokens.to(tl.uint32) * SPREAD + first, 16)
    bits = _shifted((bits * MIX) ^ second, 13)
    bits = _shifted(bits * MIX_AGAIN, 16)
    uniform = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, BELOW_ONE)
    exponential = -_log(1.0 - uniform, -uniform)
    return -_log(exponential, exponential - 1.0)


@triton.jit
def _mass(logits, vocabulary, least, best, temperature, counts: tl.constexpr, span: tl.constexpr):
    """Whole numbers: how many scores are not below `least`, or their probabilities."""
    sums = tl.zeros([span], tl.int64)
    for start in range(0, vocabulary, span):
        tokens = start + tl.arange(0, span)
        scores = _scores(logits, tokens, vocabulary)
        if counts:
            shares = (tokens < vocabulary).to(tl.int64)
        else:
            shares = (tl.exp(tl.div_rn(scores - best, temperature)) * WHOLE).to(tl.int64)
        sums += tl.where(scores >= least, shares, 0)
    return tl.sum(sums, 0)


@triton.jit
def _threshold(
    logits, vocabulary, floor, best, temperature, wanted, counts: tl.constexpr, span: tl.constexpr
):
    """A score, not below `floor`, such that what is not below it reaches `wanted`, and what is above does
    not: bisected in whole numbers of the order of float32."""
    low = _rank(floor.to(tl.int32, bitcast=True)).to(tl.int64)
    high = _rank(best.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        least = _rank(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        mass = _mass(logits, vocabulary, least, best, temperature, counts, span)
        low = tl.where(mass >= wanted, middle, low)
        high = tl.where(mass < wanted, middle, high)
        if counts:
            high = tl.where(mass == wanted, middle + 1, high)  # these it is, wherever the threshold lies
    return _rank(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def best_kernel(logits, bests, unsounds, stride_row, vocabulary, parts, part_tokens: tl.constexpr):
    """Grid `(parts, rows)`."""
    part, row = tl.program_id(0), tl.program_id(1)
    tokens = part * part_tokens + tl.arange(0, part_tokens)
    row_logits = logits + row.to(tl.int64) * stride_row
    raw = tl.load(row_logits + tokens, mask=tokens < vocabulary, other=NO_CHANCE).to(tl.float32)
    tl.store(unsounds + row * parts + part, tl.max(((raw != raw) | (raw > GREATEST)).to(tl.int32), 0))
    tl.store(bests + row * parts + part, tl.max(_scores(row_logits, tokens, vocabulary), 0))


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def cut_kernel(
    logits, temperature, top_k, top_p, bests, unsounds, best, threshold, unsound, stride_row, vocabulary,
    parts, most_parts: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """Grid `(rows,)`."""
    row, part = tl.program_id(0), tl.arange(0, most_parts)
    row_best = tl.max(tl.load(bests + row * parts + part, mask=part < parts, other=NO_CHANCE), 0)
    seen = tl.max(tl.load(unsounds + row * parts + part, mask=part < parts, other=0), 0)
    tl.store(best + row, row_best)
    tl.store(unsound + row, ((seen > 0) | (row_best == NO_CHANCE)).to(tl.int8))
    least = tl.full([], NO_CHANCE, tl.float32)
    heat, count, share = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    if (heat >= GREEDY_BELOW) & (row_best > NO_CHANCE):
        row_logits = logits + row.to(tl.int64) * stride_row
        if (count > 0) & (count < vocabulary):
            least = _threshold(row_logits, vocabulary, least, row_best, heat, count, True, span)
        if share < 1:
            total = _mass(row_logits, vocabulary, least, row_best, heat, False, span)
            wanted = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            least = _threshold(row_logits, vocabulary, least, row_best, heat, wanted, False, span)
    tl.store(threshold + row, least)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def choose_kernel(
    logits, temperature, min_p, seeds, token_index, best, threshold, bests, places, stride_row, vocabulary,
    parts, part_tokens: tl.constexpr,
):  # fmt: skip
    """Grid `(parts, rows)`."""
    part, row = tl.program_id(0), tl.program_id(1)
    tokens = part * part_tokens + tl.arange(0, part_tokens)
    values = _scores(logits + row.to(tl.int64) * stride_row, tokens, vocabulary)
    heat, row_best = tl.load(temperature + row), tl.load(best + row)
    if (heat >= GREEDY_BELOW) & (row_best > NO_CHANCE):
        distances = tl.div_rn(values - row_best, heat)
        share = tl.load(min_p + row)
        least = tl.where(share > 0, _log(share, share - 1.0), NO_CHANCE)
        is_kept = (values >= tl.load(threshold + row)) & (distances >= least)
        noisy = distances + _noise(tl.load(seeds + row), tl.load(token_index + row), tokens)
        values = tl.where(is_kept, noisy, NO_CHANCE)
    most = tl.max(values, 0)
    tl.store(bests + row * parts + part, most)
    tl.store(places + row * parts + part, tl.min(tl.where(values == most, tokens, vocabulary), 0))


@triton.jit
def settle_kernel(best, bests, places, token_ids, fallback, vocabulary, parts, most_parts: tl.constexpr):
    """Grid `(rows,)`. Of equal values the first token's is taken."""
    row, part = tl.program_id(0), tl.arange(0, most_parts)
    values = tl.load(bests + row * parts + part, mask=part < parts, other=NO_CHANCE)
    tokens = tl.load(places + row * parts + part, mask=part < parts, other=vocabulary)
    token = tl.min(tl.where(values == tl.max(values, 0), tokens, vocabulary), 0)
    token = tl.where(tl.load(best + row) == NO_CHANCE, fallback, token)
    tl.store(token_ids + row, token.to(tl.int64))


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seeds: torch.Tensor, token_index: torch.Tensor, fallback: int,
    token_ids: torch.Tensor, unsound: torch.Tensor,
) -> None:  # fmt: skip
    """As `kernels.reference.draw`; the last dimension of the logits is contiguous."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PARTS["part_tokens"])
    bests, best = logits.new_empty(rows, parts, dtype=torch.float32), torch.empty_like(temperature)
    places, threshold = torch.empty_like(bests, dtype=torch.int32), torch.empty_like(best)
    lies = (logits.stride(0), vocabulary, parts)
    padded = triton.next_power_of_2(parts)
    launch(best_kernel, (parts, rows), logits, bests, places, *lies, **PARTS)
    launch(
        cut_kernel, (rows,), logits, temperature, top_k, top_p, bests, places, best, threshold,
        unsound.view(torch.int8), *lies, most_parts=padded, **CUTS,
    )  # fmt: skip
    launch(
        choose_kernel, (parts, rows), logits, temperature, min_p, seeds, token_index, best, threshold, bests,
        places, *lies, **PARTS,
    )  # fmt: skip
    launch(settle_kernel, (rows,), best, bests, places, token_ids, fallback, *lies[1:], most_parts=padded)
