"""How a token is drawn from adjusted logits, by torch in plain steps.

The draw is the arg max of score plus Gumbel noise (Gumbel-max trick), and the noise is a hash of seed, token
index and token id: independent of batch, row and evictions. A cut keeps what is not below a threshold, ties
included. What is summed over a vocabulary is a whole number, so that the order of a sum changes nothing.
Twins: `kernels.cpu.sampling`, `kernels.gpu.draw`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Smaller temperatures would overflow the logits; they mean greedy."""
WHOLE = 2.0**40
"""Of the best token, where probabilities are summed as whole numbers."""
BELOW_ONE = 1 - 2.0**-24
_SPREAD, _MIX, _MIX_AGAIN = (word - 2**32 for word in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
_SALTS = (0x9E3779B1 - 2**32, 0x7F4A7C15)
_NO_CHANCE = float("-inf")
_RANK_OF_MINUS_INFINITY = -0x7F800001


@dataclass(slots=True)
class Draws:
    """Inputs of the draw of next tokens, one entry a row (float32 if not said)."""

    temperature: Tensor
    top_k: Tensor
    """int32; 0: no cut."""
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    """int64, not negative."""
    token_index: Tensor
    """int32 or int64: number of the row's output tokens so far."""


def repaired(logits: Tensor, fallback_token_id: int) -> tuple[Tensor, Tensor]:
    """The logits without NaN and infinity, and which rows had any that matters: NaN is impossible; if nothing
    is possible, the fallback is."""
    unsound = ~logits.amax(dim=-1).isfinite()
    logits = logits.nan_to_num(nan=_NO_CHANCE, posinf=torch.finfo(logits.dtype).max, neginf=_NO_CHANCE)
    is_hopeless = logits.amax(dim=-1) == _NO_CHANCE
    logits[:, fallback_token_id] = logits[:, fallback_token_id].where(~is_hopeless, 0.0)
    return logits, unsound


def draw(scores: Tensor, rows: Draws) -> Tensor:
    """Tokens of adjusted, sound logits (float32, on a CPU): drawn, or greedy by temperature."""
    greedy = scores.argmax(dim=-1)
    is_drawn = rows.temperature >= GREEDY_BELOW_TEMPERATURE
    if not is_drawn.any():
        return greedy
    temperature = rows.temperature.where(is_drawn, 1.0)[:, None]
    distances = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    noisy = distances + noise(rows.seeds, rows.token_index, scores.shape[-1])
    noisy = noisy.where(kept(scores, distances, rows), _NO_CHANCE)
    return noisy.argmax(dim=-1).where(is_drawn, greedy)


def kept(scores: Tensor, distances: Tensor, rows: Draws) -> Tensor:
    """What top-k, top-p and min-p leave: always the best token, and all of equal scores or none. `distances`:
    logarithms of the probabilities relative to the best token's."""
    threshold = torch.full_like(scores[:, :1], _NO_CHANCE)
    if (rows.top_k > 0).any():
        vocabulary = scores.shape[-1]
        count = rows.top_k.where(rows.top_k > 0, vocabulary).clamp(max=vocabulary).long()[:, None]
        threshold = _threshold(scores, torch.ones_like(scores, dtype=torch.int64), count)
    if (rows.top_p < 1).any():
        shares = masses(distances).where(scores >= threshold, 0)
        total = shares.sum(dim=-1, keepdim=True).double()
        wanted = (rows.top_p.double()[:, None] * total).ceil().long().clamp(min=1)
        found = _threshold(scores, shares, wanted)
        threshold = threshold.maximum(found.where(rows.top_p[:, None] < 1.0, _NO_CHANCE))
    return (scores >= threshold) & (distances >= rows.min_p.log()[:, None])


def noise(seeds: Tensor, token_index: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise `[rows, vocabulary]`: minus the logarithm of exponential numbers, from 31 bits of a hash.
    All hashing is in int32, whose products wrap around on every device."""
    first, second = _keys(seeds, token_index)[..., None]
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=seeds.device) * _SPREAD
    bits = _shifted(tokens[None] + first, 16)
    bits = _shifted((bits * _MIX) ^ second, 13)
    bits = _shifted(bits * _MIX_AGAIN, 16)
    uniform = (((bits >> 1) & 0x7FFF_FFFF).float() + 0.5) * 2.0**-31
    return uniform.clamp_(max=BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def masses(distances: Tensor) -> Tensor:
    """Probabilities relative to the best token's, as whole numbers."""
    return (distances.exp() * WHOLE).to(torch.int64)


def _keys(seeds: Tensor, token_index: Tensor) -> Tensor:
    """Two keys a row `[2, rows]`: hashes of seed and token index, by MurmurHash3's finaliser."""
    keys = torch.zeros((), dtype=torch.int32, device=seeds.device)
    index = token_index.to(torch.int32)
    salted = torch.stack([index ^ salt for salt in _SALTS])
    for word in (salted, (seeds >> 32).to(torch.int32), seeds.to(torch.int32)):
        keys = _shifted(keys ^ word, 16)
        keys = _shifted(keys * _MIX, 13)
        keys = _shifted(keys * _MIX_AGAIN, 16)
    return keys


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Exclusive or with itself, shifted right logically."""
    return bits ^ ((bits >> places) & ((1 << (32 - places)) - 1))


def _threshold(scores: Tensor, shares: Tensor, wanted: Tensor) -> Tensor:
    """The greatest score `[rows, 1]` such that the shares of those not below it reach `wanted` (at least 1).
    Bisected bit by bit, in whole numbers of the same order; one too great is a NaN, which reaches nothing."""
    low = torch.full_like(scores[:, :1], _RANK_OF_MINUS_INFINITY, dtype=torch.int32)
    for step in (-(2**31), *(2**bit for bit in reversed(range(31)))):
        tried = low + step
        threshold = _rank(tried).view(torch.float32)
        reaches = shares.where(scores >= threshold, 0).sum(dim=-1, keepdim=True) >= wanted
        low = tried.where(reaches, low)
    return _rank(low).view(torch.float32)


def _rank(bits: Tensor) -> Tensor:
    """Maps a float32's bits (int32) to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFF_FFFF)
