"""Sampler: chooses the next tokens from a step's logits, in one batched pass.

Order of operations as in transformers (and, up to min-p, vLLM): logit bias, repetition penalty (prompt and
output), frequency and presence penalties (output); greedy rows end here; temperature, top-k, top-p, min-p,
draw. Reported logprobs are `log_softmax` of the logits before any of this. Randomness is one uniform number
for each (seed, token index), by a hash: independent of batch, row and evictions.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.model_runner import Sampled
from engine.messages import SamplingParams
from engine.model.path_report import PathReport
from kernels.cpu import jit

log = logging.getLogger(__name__)

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Smaller temperatures would overflow the logits; they mean greedy."""
TOP_P_CANDIDATES = 256
_NO_CHANCE = float("-inf")
GREEDY_REPORT = PathReport("greedy tokens", True, "found and checked for soundness in one compiled pass")


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """Inputs of the next token of one row of logits."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int

    @property
    def token_index(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], *, fallback_token_id: int = 0) -> list[Sampled]:
    """Chooses a token for each row of `logits` (`[rows, vocabulary]`, float32; may change in place). Biased
    ids beyond the vocabulary are ignored, NaN is impossible; if nothing is possible: `fallback_token_id`."""
    if all(_is_plain_greedy(row.sampling) for row in rows):
        greedy = greedy_tokens(logits)
        if greedy is not None:
            return [Sampled(token_id) for token_id in greedy]
    logits = _repair(logits, fallback_token_id)
    reported = [row.sampling.logprobs for row in rows]
    logprobs = logits.log_softmax(dim=-1) if any(count is not None for count in reported) else None
    _adjust(logits, rows)
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW_TEMPERATURE]
    if drawn:
        chosen = _draw(logits if len(drawn) == len(rows) else logits[drawn], [rows[index] for index in drawn])
        for index, token_id in zip(drawn, chosen, strict=True):
            token_ids[index] = token_id
    if logprobs is None:
        return [Sampled(token_id) for token_id in token_ids]
    return _with_logprobs(token_ids, reported, logprobs)


def greedy_tokens(logits: torch.Tensor) -> list[int] | None:
    """Each row's first greatest logit, in one compiled pass. None: not here, or a row needs repair."""
    if jit.MISSING is not None or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return None
    from kernels.cpu.layers import greatest

    winners = np.empty(len(logits), dtype=np.int64)
    greatest(logits.contiguous().numpy(), winners, jit.use_threads(torch.get_num_threads()))
    token_ids: list[int] = winners.tolist()
    return token_ids if min(token_ids, default=0) >= 0 else None


def warm_up() -> None:
    """Compiles the kernel in advance, so that the first step need not wait."""
    greedy_tokens(torch.zeros(1, 2))


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Distributions `[rows, vocabulary]`, float64, of adjusted logits; every temperature must be positive."""
    scores = logits / _column([p.temperature for p in params], logits)
    _limit_top_k(scores, [p.top_k for p in params])
    _limit_top_p(scores, [p.top_p for p in params])
    _limit_min_p(scores, [p.min_p for p in params])
    return scores.double().softmax(dim=-1)


def uniform(seed: int, token_index: int) -> float:
    """A number in (0, 1), independent for each seed and token index (48 bits of a BLAKE2b hash)."""
    message = struct.pack("<Qq", seed & 0xFFFF_FFFF_FFFF_FFFF, token_index)
    digest = hashlib.blake2b(message, digest_size=6).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**48


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _repair(logits: torch.Tensor, fallback_token_id: int) -> torch.Tensor:
    """A row's maximum is not finite exactly where it needs repair: a sound step costs one reduction."""
    best = logits.amax(dim=-1)
    if bool(best.isfinite().all()):
        return logits
    log.warning("the model gave %d rows of logits that are not finite", int((~best.isfinite()).sum()))
    logits = torch.nan_to_num(logits, nan=_NO_CHANCE, posinf=torch.finfo(logits.dtype).max, neginf=_NO_CHANCE)
    hopeless = logits.amax(dim=-1) == _NO_CHANCE
    logits[hopeless, fallback_token_id] = 0.0
    return logits


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Logit bias and penalties, in place. Row by row: few rows have them."""
    vocabulary = logits.shape[-1]
    for index, row in enumerate(rows):
        params = row.sampling
        if not _is_adjusted(params):
            continue
        scores = logits[index]
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocabulary}
        if bias:
            scores.index_add_(0, _ids(list(bias), scores), scores.new_tensor(list(bias.values())))
        if params.repetition_penalty != 1.0:
            seen = _ids(sorted(set(row.token_ids)), scores)
            values = scores[seen]
            scores[seen] = torch.where(
                values < 0, values * params.repetition_penalty, values / params.repetition_penalty
            )
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            emitted = row.token_ids[row.num_prompt_tokens :]
            if emitted:
                distinct, counts = _ids(emitted, scores).unique(return_counts=True)
                scores[distinct] -= params.frequency_penalty * counts + params.presence_penalty


def _is_plain_greedy(params: SamplingParams) -> bool:
    return (
        params.temperature < GREEDY_BELOW_TEMPERATURE and params.logprobs is None and not _is_adjusted(params)
    )


def _is_adjusted(params: SamplingParams) -> bool:
    return (
        bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _ids(token_ids: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """By inversion: the first token whose cumulated probability exceeds the row's uniform number."""
    cumulated = probabilities(logits, [row.sampling for row in rows]).cumsum(dim=-1)
    numbers = [uniform(row.seed, row.token_index) for row in rows]
    targets = _column(numbers, cumulated) * cumulated[:, -1:]
    chosen: list[int] = torch.searchsorted(cumulated, targets, right=True)[:, 0].tolist()
    return chosen


def _limit_top_k(scores: torch.Tensor, top_k: list[int]) -> None:
    """Keeps the k best (and ties with the k-th)."""
    vocabulary = scores.shape[-1]
    limited = [i for i, k in enumerate(top_k) if 0 < k < vocabulary]
    if not limited:
        return
    wanted = [top_k[i] for i in limited]
    part = scores[limited]
    best = part.topk(max(wanted), dim=-1).values
    threshold = best.gather(1, _ids([k - 1 for k in wanted], scores)[:, None])
    scores[limited] = part.masked_fill(part < threshold, _NO_CHANCE)


def _limit_top_p(scores: torch.Tensor, top_p: list[float]) -> None:
    """Keeps the smallest set of best tokens whose probability reaches p, at least one. It nearly always lies
    among the first `TOP_P_CANDIDATES`; only the other rows are sorted whole, which is slow."""
    limited = [i for i, p in enumerate(top_p) if p < 1.0]
    candidates = TOP_P_CANDIDATES
    while limited:
        part = scores[limited]
        wanted = _column([top_p[i] for i in limited], part).double()
        candidates = min(candidates, part.shape[-1])
        best, tokens = part.topk(candidates, dim=-1)
        share = (best.double() - part.double().logsumexp(dim=-1, keepdim=True)).exp()
        better = share.cumsum(dim=-1) - share
        beyond = better >= wanted
        beyond[:, 0] = False
        kept = torch.full_like(part, _NO_CHANCE).scatter_(1, tokens, best.masked_fill(beyond, _NO_CHANCE))
        if candidates == part.shape[-1]:
            scores[limited] = kept
            return
        reached: list[bool] = beyond[:, -1].tolist()
        done = [row for row, is_found in enumerate(reached) if is_found]
        scores[[limited[row] for row in done]] = kept[done]
        limited = [index for index, is_found in zip(limited, reached, strict=True) if not is_found]
        candidates = part.shape[-1]


def _limit_min_p(scores: torch.Tensor, min_p: list[float]) -> None:
    """Keeps what is at least `min_p` times as probable as the best token; always the best one."""
    limited = [i for i, p in enumerate(min_p) if p > 0.0]
    if not limited:
        return
    part = scores[limited]
    relative = (part - part.amax(dim=-1, keepdim=True)).exp()
    scores[limited] = part.masked_fill(relative < _column([min_p[i] for i in limited], part), _NO_CHANCE)


def _with_logprobs(token_ids: list[int], reported: list[int | None], logprobs: torch.Tensor) -> list[Sampled]:
    """Adds logprobs of the token and its best alternatives to each row that requested them."""
    chosen: list[float] = logprobs.gather(1, _ids(token_ids, logprobs)[:, None])[:, 0].tolist()
    most = min(max((count or 0) for count in reported), logprobs.shape[-1])
    best = logprobs.topk(most, dim=-1)
    values: list[list[float]] = best.values.tolist()
    indices: list[list[int]] = best.indices.tolist()
    return [
        Sampled(token_id)
        if count is None
        else Sampled(token_id, logprob, list(zip(indices[row][:count], values[row][:count], strict=True)))
        for row, (token_id, count, logprob) in enumerate(zip(token_ids, reported, chosen, strict=True))
    ]
