"""Sampler: chooses the next tokens from a step's logits, where the logits lie and without the host.

Order of operations as in transformers (and, up to min-p, vLLM): logit bias, repetition penalty (prompt and
output), frequency and presence penalties (output); greedy rows end here; temperature, top-k, top-p, min-p,
draw. Reported logprobs are the log-softmax of the logits before any of this.

The draw is the arg max of score plus Gumbel noise (Gumbel-max trick), and the noise is a hash of seed, token
index and token id: independent of batch, row and evictions. A cut keeps what is not below a threshold, ties
included. What is summed over a vocabulary is a whole number, so that the order of a sum changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.model_runner import Sampled
from engine.messages import SamplingParams
from engine.model.path_report import PathReport
from kernels.cpu import jit

log = logging.getLogger(__name__)

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Smaller temperatures would overflow the logits; they mean greedy."""
WHOLE = 2.0**40
"""Of the best token, where probabilities are summed as whole numbers."""
BELOW_ONE = 1 - 2.0**-24
_SPREAD, _MIX, _MIX_AGAIN = (word - 2**32 for word in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
_SALTS = (0x9E3779B1 - 2**32, 0x7F4A7C15)
_NO_CHANCE = float("-inf")
_RANK_OF_MINUS_INFINITY = -0x7F800001
SAMPLING_REPORT = PathReport("sampled tokens", True, "chosen and checked for soundness in compiled passes")


@dataclass(slots=True)
class RowSampling:
    """Inputs of the next tokens of a step, one entry a row, where the logits are (float32 if not said)."""

    temperature: Tensor
    top_k: Tensor
    """int32; 0: no cut."""
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    """int64, not negative."""
    token_index: Tensor
    """int32 or int64: number of the row's output tokens so far."""
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    bias_ids: Tensor
    """int32 `[rows, biases]`; what is not in the vocabulary is ignored (-1: none)."""
    bias_values: Tensor
    output_counts: Tensor | None = None
    """int32 `[rows, vocabulary]`; needed for penalties, as `in_prompt`."""
    in_prompt: Tensor | None = None
    """bool `[rows, vocabulary]`."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What any row of a step asks for: nothing else is launched. No row's token depends on it."""

    bias: bool = False
    penalties: bool = False
    draws: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    logprobs: int | None = None
    """The most alternatives; None: no row reports any logprob."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Wants:
        drawn = [p for p in params if p.temperature >= GREEDY_BELOW_TEMPERATURE]
        return cls(
            bias=any(p.logit_bias for p in params),
            penalties=any(is_penalized(p) for p in params),
            draws=bool(drawn),
            top_k=any(p.top_k > 0 for p in drawn),
            top_p=any(p.top_p < 1.0 for p in drawn),
            min_p=any(p.min_p > 0.0 for p in drawn),
            logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen tokens `[rows]` (int64), on the device."""

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    """`[rows, alternatives]`, the best first; as `top_values`, their logprobs."""
    top_values: Tensor | None = None
    unsound: Tensor | None = None
    """bool `[rows]`: the logits were not finite. None: all were."""


def read(chosen: Chosen, reported: Sequence[int | None]) -> list[Sampled]:
    """Copies the tokens to the host; `reported`: each row's number of alternatives, None: no logprob."""
    if chosen.unsound is not None and (count := int(chosen.unsound.sum())):
        log.warning("the model gave %d rows of logits that are not finite", count)
    token_ids: list[int] = chosen.token_ids.tolist()
    if chosen.logprobs is None or chosen.top_ids is None or chosen.top_values is None:
        return [Sampled(token_id) for token_id in token_ids]
    logprobs: list[float] = chosen.logprobs.tolist()
    alternatives = zip(chosen.top_ids.tolist(), chosen.top_values.tolist(), strict=True)
    return [
        Sampled(token_id)
        if count is None
        else Sampled(token_id, logprob, list(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, (ids, values), count in zip(
            token_ids, logprobs, alternatives, reported, strict=True
        )
    ]


def choose(logits: Tensor, rows: RowSampling, wants: Wants, *, fallback_token_id: int = 0) -> Chosen:
    """Chooses a token for each row of `logits` (`[rows, vocabulary]`, float32). Reads nothing back
    and writes into none of its inputs. NaN is impossible; if nothing is possible: `fallback_token_id`."""
    best, unsound = greedy_tokens(logits), None
    if best is None:
        logits, unsound = _repaired(logits, fallback_token_id)
    scores = adjusted(logits, rows, wants)
    if scores is not logits or best is None:
        best = greedy_tokens(scores)
    if best is None:
        token_ids = draw(scores, rows, wants)
    else:
        token_ids = draw_compiled(scores, best, rows) if wants.draws else torch.from_numpy(best)
    if wants.logprobs is None:
        return Chosen(token_ids, unsound=unsound)
    top = logits.topk(min(wants.logprobs, logits.shape[-1]), dim=-1)
    greatest = logits.amax(dim=-1, keepdim=True)
    distances = logits - greatest
    # By whole numbers, not `log_softmax`, whose order of summing depends on device and batch.
    total = _masses(distances).sum(dim=-1, keepdim=True).double().div(WHOLE).log().float()
    own = distances.gather(1, token_ids[:, None]) - total
    return Chosen(token_ids, own[:, 0], top.indices, top.values - greatest - total, unsound)


def warm_up() -> None:
    """Compiles the kernels in advance, so that the first step need not wait."""
    zeros, ones = torch.zeros(1), torch.ones(1)
    whole = torch.zeros(1, dtype=torch.int64)
    biases = zeros[:, None][:, :0]
    rows = RowSampling(
        ones, whole.int(), ones, zeros, whole, whole, ones, zeros, zeros, biases.int(), biases
    )  # fmt: skip
    choose(torch.zeros(1, 2), rows, Wants(draws=True))


def adjusted(logits: Tensor, rows: RowSampling, wants: Wants) -> Tensor:
    """The logits after bias and penalties; those of rows without any are unchanged to the bit."""
    scores = logits
    if wants.bias:
        is_known = (rows.bias_ids >= 0) & (rows.bias_ids < logits.shape[-1])
        ids = rows.bias_ids.where(is_known, 0).long()
        scores = scores.scatter_add(1, ids, rows.bias_values.where(is_known, 0.0))
    if wants.penalties:
        if rows.output_counts is None or rows.in_prompt is None:
            raise ValueError("penalties need the counts of tokens")
        is_output = rows.output_counts > 0
        factor = rows.repetition[:, None]
        repeated = torch.where(scores < 0, scores * factor, scores / factor)
        scores = torch.where(rows.in_prompt | is_output, repeated, scores)
        scores = scores - (rows.frequency[:, None] * rows.output_counts + rows.presence[:, None] * is_output)
    return scores


def draw(scores: Tensor, rows: RowSampling, wants: Wants) -> Tensor:
    """Tokens of adjusted logits: greedy where the temperature says so, else drawn. By torch, on any device;
    `kernels.cpu.sampling` is its twin."""
    greedy = scores.argmax(dim=-1)
    if not wants.draws:
        return greedy
    is_drawn = rows.temperature >= GREEDY_BELOW_TEMPERATURE
    temperature = rows.temperature.where(is_drawn, 1.0)[:, None]
    distances = (scores - scores.amax(dim=-1, keepdim=True)) / temperature
    noisy = distances + noise(rows.seeds, rows.token_index, scores.shape[-1])
    if wants.top_k or wants.top_p or wants.min_p:
        noisy = noisy.where(kept(scores, distances, rows, wants), _NO_CHANCE)
    return noisy.argmax(dim=-1).where(is_drawn, greedy)


def draw_compiled(scores: Tensor, best: np.ndarray, rows: RowSampling) -> Tensor:
    """As `draw`, in one compiled pass; `best` is each row's best token, and becomes the drawn one."""
    from kernels.cpu import sampling

    floats = torch.stack((rows.temperature, rows.top_p, rows.min_p.log())).numpy()
    integers = torch.stack((rows.top_k, rows.seeds, rows.token_index)).numpy()
    greedy_below, workers = np.float32(GREEDY_BELOW_TEMPERATURE), jit.use_threads(torch.get_num_threads())
    sampling.draw(scores.contiguous().numpy(), floats, integers, greedy_below, best, workers)
    return torch.from_numpy(best)


def kept(scores: Tensor, distances: Tensor, rows: RowSampling, wants: Wants) -> Tensor:
    """What top-k, top-p and min-p leave: always the best token, and all of equal scores or none. `distances`:
    logarithms of the probabilities relative to the best token's."""
    threshold = torch.full_like(scores[:, :1], _NO_CHANCE)
    if wants.top_k:
        vocabulary = scores.shape[-1]
        count = rows.top_k.where(rows.top_k > 0, vocabulary).clamp(max=vocabulary).long()[:, None]
        threshold = _threshold(scores, torch.ones_like(scores, dtype=torch.int64), count)
    if wants.top_p:
        masses = _masses(distances).where(scores >= threshold, 0)
        total = masses.sum(dim=-1, keepdim=True).double()
        wanted = (rows.top_p.double()[:, None] * total).ceil().long().clamp(min=1)
        found = _threshold(scores, masses, wanted)
        threshold = threshold.maximum(found.where(rows.top_p[:, None] < 1.0, _NO_CHANCE))
    is_kept = scores >= threshold
    if wants.min_p:
        is_kept &= distances >= rows.min_p.log()[:, None]
    return is_kept


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


def _masses(distances: Tensor) -> Tensor:
    return (distances.exp() * WHOLE).to(torch.int64)


def _threshold(scores: Tensor, masses: Tensor, wanted: Tensor) -> Tensor:
    """The greatest score `[rows, 1]` such that the masses of those not below it reach `wanted` (at least 1).
    Bisected bit by bit, in whole numbers of the same order; one too great is a NaN, which reaches nothing."""
    low = torch.full_like(scores[:, :1], _RANK_OF_MINUS_INFINITY, dtype=torch.int32)
    for step in (-(2**31), *(2**bit for bit in reversed(range(31)))):
        tried = low + step
        threshold = _rank(tried).view(torch.float32)
        reaches = masses.where(scores >= threshold, 0).sum(dim=-1, keepdim=True) >= wanted
        low = tried.where(reaches, low)
    return _rank(low).view(torch.float32)


def _rank(bits: Tensor) -> Tensor:
    """Maps a float32's bits (int32) to an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFF_FFFF)


def greedy_tokens(logits: Tensor) -> np.ndarray | None:
    """Each row's first greatest logit, in one compiled pass. None: not here, or a row is not finite."""
    if jit.MISSING is not None or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return None
    from kernels.cpu.layers import greatest

    winners = np.empty(len(logits), dtype=np.int64)
    greatest(logits.contiguous().numpy(), winners, jit.use_threads(torch.get_num_threads()))
    return winners if winners.min(initial=0) >= 0 else None


def _repaired(logits: Tensor, fallback_token_id: int) -> tuple[Tensor, Tensor]:
    """The logits without NaN and infinity, and which rows had any that matters."""
    unsound = ~logits.amax(dim=-1).isfinite()
    logits = logits.nan_to_num(nan=_NO_CHANCE, posinf=torch.finfo(logits.dtype).max, neginf=_NO_CHANCE)
    is_hopeless = logits.amax(dim=-1) == _NO_CHANCE
    logits[:, fallback_token_id] = logits[:, fallback_token_id].where(~is_hopeless, 0.0)
    return logits, unsound


def is_penalized(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
