"""The sampler's rules in float64, sorted, one row at a time: `engine.model.sampler` is compared with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.messages import SamplingParams

GREEDY_BELOW = 1e-5
LOW = 0xFFFF_FFFF


def adjusted(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Logits with bias and penalties."""
    scores = np.array(logits, np.float64)
    for token, value in params.logit_bias.items():
        if 0 <= token < len(scores):
            scores[token] += value
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def probabilities(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Of the draw, after temperature and cuts. All of equal scores are kept, or none."""
    shares = np.exp((scores - scores.max()) / params.temperature)
    order = np.argsort(-scores, kind="stable")
    if 0 < params.top_k < len(scores):
        shares[scores < scores[order[params.top_k - 1]]] = 0
    if params.top_p < 1:
        reached = np.cumsum(shares[order]) >= params.top_p * shares.sum() - 1e-12
        shares[scores < scores[order[np.argmax(reached)]]] = 0
    shares[shares < params.min_p] = 0
    return np.asarray(shares / shares.sum())


def noise(seed: int, token_index: int, vocabulary: int) -> np.ndarray:
    """Gumbel noise of every token."""
    first, second = (_key(seed, token_index, salt) for salt in (0x9E3779B1, 0x7F4A7C15))
    bits = _shifted((np.arange(vocabulary, dtype=np.uint64) * 0x9E3779B1 + first) & LOW, 16)
    bits = _shifted((bits * 0x85EBCA6B & LOW) ^ second, 13)
    bits = _shifted(bits * 0xC2B2AE35 & LOW, 16)
    uniform = ((bits >> 1).astype(np.float32) + np.float32(0.5)) / 2**31
    return -np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-24).astype(np.float64)))


def noisy(
    logits: np.ndarray,
    params: SamplingParams,
    seed: int,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The scores whose greatest is the token, in units of the logits."""
    scores = adjusted(logits, params, prompt, output)
    if mask is not None:
        scores[[not mask[token // 32] >> token % 32 & 1 for token in range(len(scores))]] = -np.inf
    if params.temperature < GREEDY_BELOW:
        return scores
    added = params.temperature * noise(seed, len(output), len(scores))
    return np.where(probabilities(scores, params) > 0, scores + added, -np.inf)


def _key(seed: int, token_index: int, salt: int) -> int:
    key = 0
    for word in (token_index ^ salt, seed >> 32, seed):
        key = _shifted((key ^ word) & LOW, 16)
        key = _shifted(key * 0x85EBCA6B & LOW, 13)
        key = _shifted(key * 0xC2B2AE35 & LOW, 16)
    return key


def _shifted(bits: Any, places: int) -> Any:
    return bits ^ (bits >> places)
