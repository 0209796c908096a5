"""`DeviceRows`: what the steps need of every running sequence, by row, in tensors on the device.

Block tables, lengths, last tokens, sampling parameters, seeds and penalty counts lie there from step to
step, in tensors that never move. What a step changes is written into a staging buffer in host memory, copied
at once and applied by index operations; positions and slots are computed from what lies there. So a decode
needs a few bytes from the host, whatever its context, and no answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.model_runner import RowStart, StepWork
from engine.messages import SamplingParams
from engine.model.sampler import RowSampling, Wants, is_penalized
from engine.sizes import DECODE_TOKENS, blocks_for
from kernels.batch import PackedBatch, fresh_entries, lay_out

STAGING_BUFFERS = 3
"""A buffer is written again when the step that reads it is over: two steps in flight, and the next."""
FIRST_STAGING_ENTRIES = 4096
FIRST_BIASES = 64
_LENGTH, _PROMPT, _SEED, _TOP_K, _LAST_TOKEN = range(5)
_INTEGERS = 5
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(slots=True)
class StagedStep:
    """A step as the device needs it. Tensors are int64, on the device."""

    batch: PackedBatch
    token_ids: Tensor
    """`[tokens]`: what is fed."""
    rows: Tensor
    """`[choosing]`: rows of the sequences that choose a token."""
    contexts: Tensor
    """`[choosing]`: their tokens, with those of this step."""
    last: Tensor | None
    """`[choosing]`: their last rows in the batch; None: every row of the batch chooses."""
    sampling: list[SamplingParams]
    wants: Wants


class _Staging:
    """Integers on their way to the device: parts of one buffer, and one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries = FIRST_STAGING_ENTRIES
        self._buffers: list[Tensor] = []
        self._target = torch.empty(0, dtype=torch.int64)
        self._turn = 0
        self._allocate()
        self._parts: list[np.ndarray] = []

    def _allocate(self) -> None:
        pinned = self._device.type == "cuda"
        self._buffers = [
            torch.empty(self._entries, dtype=torch.int64, pin_memory=pinned) for _ in range(STAGING_BUFFERS)
        ]
        if self._device.type != "cpu":
            self._target = torch.empty(self._entries, dtype=torch.int64, device=self._device)

    def add(self, values: Sequence[int] | np.ndarray) -> None:
        """Appends a part."""
        self._parts.append(np.asarray(values, dtype=np.int64).reshape(-1))

    def send(self) -> list[Tensor]:
        """Copies all parts to the device; returns them there."""
        sizes = [len(part) for part in self._parts]
        total = sum(sizes)
        if total > self._entries:
            # The former buffers live until the copies that read them are done: torch sees to that.
            self._entries = 2 * total
            self._allocate()
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        host = self._buffers[self._turn][:total]
        if total:
            np.concatenate(self._parts, out=host.numpy())
        self._parts = []
        if self._device.type != "cpu":
            target = self._target[:total]
            target.copy_(host, non_blocking=True)
            host = target
        return list(host.split(sizes))


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, there once the step's last event is; on a CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    return host


class DeviceRows:
    def __init__(
        self,
        num_rows: int,
        *,
        vocabulary: int,
        num_blocks: int,
        block_tokens: int,
        context_tokens: int,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self.width = min(num_blocks, blocks_for(context_tokens, block_tokens) + 1)
        """Entries of a row's block table."""
        self.tables = torch.zeros(num_rows * self.width, dtype=torch.int64, device=device)
        self._vocabulary = vocabulary
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._device = device
        self._integers = torch.zeros((_INTEGERS, num_rows), dtype=torch.int64, device=device)
        self._floats = torch.zeros((len(_FLOATS), num_rows), dtype=torch.float32, device=device)
        self._lengths, self._last_tokens = self._integers[_LENGTH], self._integers[_LAST_TOKEN]
        self._bias_ids = torch.full((num_rows, FIRST_BIASES), -1, dtype=torch.int32, device=device)
        self._bias_values = torch.zeros((num_rows, FIRST_BIASES), dtype=torch.float32, device=device)
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None
        self.starts: dict[int, RowStart] = {}
        """What the sequence of a row started with."""
        self._staging = _Staging(device)

    def stage(self, work: StepWork) -> StagedStep:
        """Applies a step's changes and lays the step out. Raises ValueError for a token, row or block outside
        of the model's, before anything is changed."""
        self._check(work)
        staging, block_tokens = self._staging, self._block_tokens
        for start in work.starts:
            self.starts[start.row] = start
        is_plain = all(tokens == 1 for tokens in work.num_tokens)
        fed = [
            token_id
            for tokens, count in zip(work.token_ids, work.num_tokens, strict=True)
            for token_id in tokens or [-1] * count
        ]
        choosing = [index for index, samples in enumerate(work.samples) if samples]
        every = len(choosing) == len(work)
        table_starts = [row * self.width for row in work.rows]
        on_cpu = self._device.type == "cpu"
        fresh = [] if on_cpu else fresh_entries(table_starts, work.positions, work.num_tokens, block_tokens)
        ends = np.cumsum(work.num_tokens)
        parts = {
            "rows": work.rows,
            "queries": [] if is_plain else work.num_tokens,
            "fed": fed if max(fed) >= 0 else [],
            "choosing": [] if every else [work.rows[index] for index in choosing],
            "indices": [] if every else choosing,
            "last": [] if every and is_plain else ends[choosing] - 1,
            "fresh": fresh,
            "entries": [row * self.width + index for row, index, _ in work.blocks],
            "blocks": [block for _, _, block in work.blocks],
        }
        for values in parts.values():
            staging.add(values)
        apply = self._stage_starts(work.starts) if work.starts else None
        sent = staging.send()
        staged = dict(zip(parts, sent, strict=False))
        if work.blocks:
            self.tables.index_copy_(0, staged["entries"], staged["blocks"])
        if apply is not None:
            apply(sent[len(parts) :])
        rows = staged["rows"]
        before = self._lengths.index_select(0, rows)
        queries = None if is_plain else staged["queries"]
        contexts = before + (1 if queries is None else queries)
        self._lengths.index_copy_(0, rows, contexts)
        batch = lay_out(
            work.num_tokens,
            [position + count for position, count in zip(work.positions, work.num_tokens, strict=True)],
            table_starts,
            self.tables,
            rows * self.width,
            contexts,
            queries,
            block_tokens=block_tokens,
            fresh=None if on_cpu else staged["fresh"],
        )
        token_ids = self._last_tokens.index_select(0, batch.token_tables // self.width)
        if staged["fed"].shape[0]:
            token_ids = torch.where(staged["fed"] < 0, token_ids, staged["fed"])
        sampling = [self.starts[work.rows[index]].sampling for index in choosing]
        return StagedStep(
            batch=batch,
            token_ids=token_ids,
            rows=rows if every else staged["choosing"],
            contexts=contexts if every else contexts.index_select(0, staged["indices"]),
            last=None if every and is_plain else staged["last"],
            sampling=sampling,
            wants=Wants.of(sampling),
        )

    def sampling_of(self, step: StagedStep) -> RowSampling:
        """Inputs of the choice of a step's tokens."""
        rows, wants = step.rows, step.wants
        integers = self._integers.index_select(1, rows)
        temperature, top_p, min_p, repetition, frequency, presence = self._floats.index_select(1, rows)
        counts = in_prompt = None
        if wants.penalties and self._counts is not None and self._in_prompt is not None:
            counts, in_prompt = self._counts.index_select(0, rows), self._in_prompt.index_select(0, rows)
        return RowSampling(
            temperature=temperature,
            top_k=integers[_TOP_K].int(),
            top_p=top_p,
            min_p=min_p,
            seeds=integers[_SEED],
            token_index=step.contexts - integers[_PROMPT],
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            bias_ids=self._bias_ids.index_select(0, rows) if wants.bias else self._bias_ids[:0],
            bias_values=self._bias_values.index_select(0, rows) if wants.bias else self._bias_values[:0],
            output_counts=counts,
            in_prompt=in_prompt,
        )

    def chosen(self, step: StagedStep, token_ids: Tensor) -> None:
        """Puts the chosen tokens into their rows: the next step goes on with them."""
        self._last_tokens.index_copy_(0, step.rows, token_ids)
        if step.wants.penalties and self._counts is not None:
            self._counts.view(-1).index_add_(
                0, step.rows * self._vocabulary + token_ids, torch.ones_like(token_ids, dtype=torch.int32)
            )

    def _check(self, work: StepWork) -> None:
        # On a device what is read or written outside of a tensor ends the process, or is another's.
        most_tokens = self.width * self._block_tokens
        for row in (*work.rows, *[row for row, _, _ in work.blocks]):
            if not 0 <= row < self.num_rows:
                raise ValueError(f"a step names a row outside of 0..{self.num_rows - 1}")
        for tokens, count, position in zip(work.token_ids, work.num_tokens, work.positions, strict=True):
            if len(tokens) != count and (tokens or count != DECODE_TOKENS):
                raise ValueError(f"a slice of {count} tokens from {position} on has {len(tokens)}")
            if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise ValueError(f"a slice holds a token id outside of 0..{self._vocabulary - 1}")
            if position + count > most_tokens:
                raise ValueError(f"a slice of {count} tokens ends beyond the {most_tokens} tokens of a row")
        for _, index, block in work.blocks:
            if not 0 <= block < self._num_blocks:
                raise ValueError(f"a block table names blocks outside of 0..{self._num_blocks - 1}")
            if not 0 <= index < self.width:
                raise ValueError(f"a block table has entries 0..{self.width - 1}, not {index}")

    def _stage_starts(self, starts: list[RowStart]) -> Callable[[list[Tensor]], None]:
        """Stages what rows start with; the result applies it, given the staged parts."""
        staging = self._staging
        params = [start.sampling for start in starts]
        staging.add([start.row for start in starts])
        staging.add(
            [start.position for start in starts]
            + [start.num_prompt_tokens for start in starts]
            + [start.seed for start in starts]
            + [min(each.top_k, self._vocabulary) for each in params]
            + [0] * len(starts)
        )
        floats = [[getattr(each, name) for each in params] for name in _FLOATS]
        staging.add(np.array(floats, dtype=np.float64).view(np.int64))
        biases = [
            (start.row, place, token_id, value)
            for start in starts
            for place, (token_id, value) in enumerate(start.sampling.logit_bias.items())
        ]
        most = max((place for _, place, _, _ in biases), default=-1) + 1
        if most > self._bias_ids.shape[1]:
            self._widen_biases(most)
        width, known = self._bias_ids.shape[1], self._vocabulary
        staging.add([row * width + place for row, place, _, _ in biases])
        staging.add([token_id if 0 <= token_id < known else -1 for _, _, token_id, _ in biases])
        staging.add(np.array([value for *_, value in biases], dtype=np.float64).view(np.int64))
        counted = [start for start in starts if is_penalized(start.sampling)]
        if counted and self._counts is None:
            shape = (self.num_rows, self._vocabulary)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        staging.add([start.row for start in counted])
        seen = [
            start.row * self._vocabulary + token_id
            for start in counted
            for token_id in set(start.token_ids[: start.num_prompt_tokens])
        ]
        outputs = [
            (start.row * self._vocabulary + token_id, count)
            for start in counted
            for token_id, count in Counter(start.token_ids[start.num_prompt_tokens :]).items()
        ]
        staging.add(seen)
        staging.add([place for place, _ in outputs])
        staging.add([count for _, count in outputs])

        def apply(parts: list[Tensor]) -> None:
            rows, integers, floats, bias_places, bias_ids, bias_values, counted_rows = parts[:7]
            seen_places, output_places, output_counts = parts[7:]
            self._integers.index_copy_(1, rows, integers.view(_INTEGERS, -1))
            self._floats.index_copy_(1, rows, floats.view(torch.float64).view(len(_FLOATS), -1).float())
            self._bias_ids.index_fill_(0, rows, -1)
            if bias_places.shape[0]:
                self._bias_ids.view(-1).index_copy_(0, bias_places, bias_ids.int())
                values = bias_values.view(torch.float64).float()
                self._bias_values.view(-1).index_copy_(0, bias_places, values)
            if counted_rows.shape[0] and self._counts is not None and self._in_prompt is not None:
                self._counts.index_fill_(0, counted_rows, 0)
                self._in_prompt.index_fill_(0, counted_rows, False)
                self._in_prompt.view(-1).index_fill_(0, seen_places, True)
                self._counts.view(-1).index_copy_(0, output_places, output_counts.int())

        return apply

    def _widen_biases(self, most: int) -> None:
        ids, values = self._bias_ids, self._bias_values
        self._bias_ids = ids.new_full((self.num_rows, 2 * most), -1)
        self._bias_values = values.new_zeros((self.num_rows, 2 * most))
        self._bias_ids[:, : ids.shape[1]] = ids
        self._bias_values[:, : ids.shape[1]] = values
