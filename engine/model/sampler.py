"""Sampler: chooses the next tokens from a step's logits, where the logits lie and without the host.

Order of operations as in transformers (and, up to min-p, vLLM): logit bias, repetition penalty (prompt and
output), frequency and presence penalties (output), the mask of a grammar; greedy rows end here; temperature,
top-k, top-p, min-p, draw. Reported logprobs are the log-softmax of the logits before any of this.
The draw is that of `kernels.sampling`.
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
from kernels.gpu import operators  # noqa: F401  (registers torch.ops.fairgate)
from kernels.sampling import GREEDY_BELOW_TEMPERATURE, WHOLE, Draws, draw, masses, repaired

log = logging.getLogger(__name__)

MOST_LOGPROBS = 20
"""Alternatives that a gateway allows, if its configuration does not say more."""
SAMPLING_REPORT = PathReport("sampled tokens", True, "chosen and checked for soundness in compiled passes")


@dataclass(slots=True)
class RowSampling(Draws):
    """Inputs of the next tokens of a step, one entry a row, where the logits are (float32 if not said)."""

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
    masks: Tensor | None = None
    """int64 `[rows, ceil(vocabulary / 64)]`: a bit a token, the lowest first; each row has one that may be
    chosen. Needed for masks."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What any row of a step asks for: nothing else is launched. No row's token depends on it."""

    bias: bool = False
    penalties: bool = False
    draws: bool = False
    logprobs: int | None = None
    """The most alternatives; None: no row reports any logprob."""
    mask: bool = False

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Wants:
        return cls(
            bias=any(p.logit_bias for p in params),
            penalties=any(is_penalized(p) for p in params),
            draws=any(p.temperature >= GREEDY_BELOW_TEMPERATURE for p in params),
            logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
        )


GRAPH_WANTS = (Wants(draws=True), Wants(True, True, True, MOST_LOGPROBS, True))
"""Captured on a device, the least first."""


def covering(wants: Wants) -> Wants:
    """The first of `GRAPH_WANTS` that does all that `wants` does; `wants` itself if none does."""
    for each in GRAPH_WANTS:
        pairs = ((each.bias, wants.bias), (each.penalties, wants.penalties), (each.mask, wants.mask))
        is_enough = (each.logprobs or -1) >= (-1 if wants.logprobs is None else wants.logprobs)
        if is_enough and all(does or not wanted for does, wanted in pairs):
            return each
    return wants


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
    """Chooses a token for each row of `logits` (`[rows, vocabulary]`). Reads nothing back and writes into
    none of its inputs: on a device it can be part of a captured graph. NaN is impossible; if nothing is
    possible: `fallback_token_id`."""
    choosing = _choose_here if logits.device.type == "cpu" else _choose_there
    logits, token_ids, unsound = choosing(logits, rows, wants, fallback_token_id)
    if wants.logprobs is None:
        return Chosen(token_ids, unsound=unsound)
    top = logits.topk(min(wants.logprobs, logits.shape[-1]), dim=-1)
    greatest = logits.amax(dim=-1, keepdim=True)
    distances = logits - greatest
    # By whole numbers, not `log_softmax`, whose order of summing depends on device and batch.
    total = masses(distances).sum(dim=-1, keepdim=True).double().div(WHOLE).log().float()
    own = distances.gather(1, token_ids[:, None]) - total
    return Chosen(token_ids, own[:, 0], top.indices, top.values - greatest - total, unsound)


def _choose_here(
    logits: Tensor, rows: RowSampling, wants: Wants, fallback_token_id: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The logits without what is not finite, tokens, and which rows had such (None: none)."""
    logits, unsound = logits.float(), None
    best = greedy_tokens(logits)
    if best is None:
        logits, unsound = repaired(logits, fallback_token_id)
    scores = adjusted(logits, rows, wants)
    if scores is not logits or best is None:
        best = greedy_tokens(scores)
    if best is None:
        return logits, draw(scores, rows), unsound
    return logits, draw_compiled(scores, best, rows) if wants.draws else torch.from_numpy(best), unsound


def _choose_there(
    logits: Tensor, rows: RowSampling, wants: Wants, fallback_token_id: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `_choose_here`; where no row wants more than a draw, the logits are as they were."""
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    is_unsound = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    unsound = is_unsound
    if wants.bias or wants.penalties or wants.mask or wants.logprobs is not None:
        logits, unsound = repaired(logits.float(), fallback_token_id)
    torch.ops.fairgate.draw(
        adjusted(logits, rows, wants), rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds,
        rows.token_index, fallback_token_id, token_ids, is_unsound,
    )  # fmt: skip
    return logits, token_ids, unsound


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
    """The logits after bias, penalties and masks; those of rows without any are unchanged to the bit,
    but for minus infinity."""
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
    if wants.mask:
        if rows.masks is None:
            raise ValueError("masks are wanted, but there are none")
        # What may be chosen is finite: whatever the model gave, it is above what may not.
        scores = scores.clamp(min=torch.finfo(scores.dtype).min)
        scores = scores.where(_unpacked(rows.masks, logits.shape[-1]), float("-inf"))
    return scores


def _unpacked(masks: Tensor, vocabulary: int) -> Tensor:
    """The bits of masks: bool `[rows, vocabulary]`."""
    octets = masks.view(torch.uint8)
    if masks.device.type == "cpu":
        bits = np.unpackbits(octets.numpy(), axis=1, count=vocabulary, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return ((octets[..., None] >> places) & 1).flatten(1)[:, :vocabulary].view(torch.bool)


def draw_compiled(scores: Tensor, best: np.ndarray, rows: RowSampling) -> Tensor:
    """As `draw`, in one compiled pass; `best` is each row's best token, and becomes the drawn one."""
    from kernels.cpu import sampling

    floats = torch.stack((rows.temperature, rows.top_p, rows.min_p.log())).numpy()
    integers = torch.stack((rows.top_k, rows.seeds, rows.token_index)).numpy()
    greedy_below, workers = np.float32(GREEDY_BELOW_TEMPERATURE), jit.use_threads(torch.get_num_threads())
    sampling.draw(scores.contiguous().numpy(), floats, integers, greedy_below, best, workers)
    return torch.from_numpy(best)


def greedy_tokens(logits: Tensor) -> np.ndarray | None:
    """Each row's first greatest logit, in one compiled pass. None: not here, or a row is not finite."""
    if jit.MISSING is not None or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return None
    from kernels.cpu.layers import greatest

    winners = np.empty(len(logits), dtype=np.int64)
    greatest(logits.contiguous().numpy(), winners, jit.use_threads(torch.get_num_threads()))
    return winners if winners.min(initial=0) >= 0 else None


def is_penalized(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
