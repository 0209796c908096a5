"""`DeviceRows`: what the steps need of every running sequence, by row, in tensors on the device.

Block tables, lengths, last tokens, sampling parameters, seeds, penalty counts and masks lie there from step
to step, in tensors that never move. What a step changes is written into a staging buffer in host memory,
copied at once and applied by index operations; positions and slots are computed from what lies there. So a
decode needs a few bytes from the host, whatever its context, and no answer.

A step that is replayed from a captured graph is padded to the graph's shape. One more row, the last, is that
of padding: its length stays 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.model_runner import RowStart, StepWork
from engine.messages import SamplingParams
from engine.model.sampler import Chosen, RowSampling, Wants, choose, is_penalized
from engine.model.staging import GraphShape, StagedStep, Staging
from engine.sizes import DECODE_TOKENS, blocks_for
from kernels.batch import fresh_entries, lay_out, tiles_of

FIRST_BIASES = 64
DEVICE_BIASES = 1024
"""On a device, where captured graphs read them and they should not move: as many as the gateway lets pass."""
MASK_BITS = 32
"""Tokens of a word of a mask. Here two words are one number, as integers are staged."""
_LENGTH, _PROMPT, _SEED, _TOP_K, _LAST_TOKEN = range(5)
_INTEGERS = 5
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


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
        tile_tokens: int = 0,
        lists_fresh: bool = True,
    ) -> None:
        """`tile_tokens` and `lists_fresh`: whether the batches of steps have tiles, of that many tokens, and
        name the blocks that begin (on a CPU they never do)."""
        self.num_rows = num_rows
        self.width = min(num_blocks, blocks_for(context_tokens, block_tokens) + 1)
        """Entries of a row's block table."""
        self.tables = torch.zeros((num_rows + 1) * self.width, dtype=torch.int64, device=device)
        self.vocabulary = vocabulary
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._device = device
        self._tile_tokens = tile_tokens
        self._lists_fresh = lists_fresh and device.type != "cpu"
        self._integers = torch.zeros((_INTEGERS, num_rows + 1), dtype=torch.int64, device=device)
        self._floats = torch.zeros((len(_FLOATS), num_rows + 1), dtype=torch.float32, device=device)
        self._lengths, self._last_tokens = self._integers[_LENGTH], self._integers[_LAST_TOKEN]
        shape = (num_rows + 1, FIRST_BIASES if device.type == "cpu" else DEVICE_BIASES)
        self._bias_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._bias_values = torch.zeros(shape, dtype=torch.float32, device=device)
        self.biases_moved = False
        """A sequence has more biases than there was room for: what was captured reads others."""
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None
        self._masks: Tensor | None = None
        self._masked: set[int] = set()
        """Rows whose mask may exclude a token."""
        self.starts: dict[int, RowStart] = {}
        """What the sequence of a row started with."""
        self._staging = self._padded = Staging(device)
        self._masks_staging = Staging(device, 0)  # one of its own: a buffer serves one transfer a step

    def stage(self, work: StepWork) -> StagedStep:
        """Applies a step's changes and lays the step out. Raises ValueError for a token, row or block outside
        of the model's, before anything is changed."""
        choosing = self._begin(work)
        is_plain = all(tokens == 1 for tokens in work.num_tokens)
        every = len(choosing) == len(work)
        parts = self._parts(work, choosing, is_mixed=not is_plain)
        table_starts = [row * self.width for row in work.rows]
        if max(parts["fed"]) < 0:
            parts["fed"] = []
        if every:
            parts["indices"] = []
            if is_plain:
                parts["last"] = []
        if self._lists_fresh:
            parts["fresh"] = fresh_entries(table_starts, work.positions, work.num_tokens, self.block_tokens)
        staged = self._laid_out(
            dict(zip(parts, self._send(list(parts.values()), work.starts), strict=True)),
            work.num_tokens,
            [position + count for position, count in zip(work.positions, work.num_tokens, strict=True)],
            table_starts,
            every=every,
        )
        staged.sampling = [self.starts[work.rows[index]].sampling for index in choosing]
        staged.wants = Wants.of(staged.sampling)
        return staged

    def reserve(self, shapes: Sequence[GraphShape]) -> None:
        """Prepares `stage_padded` for these shapes; what captured steps read will not move."""
        self.keep_counts()
        self.keep_masks()
        self._padded = Staging(self._device, max(sum(shape.sizes().values()) for shape in shapes))

    def stage_padded(self, work: StepWork, shape: GraphShape) -> list[SamplingParams]:
        """Sends a step to where `padded_step` of the shape reads it, and applies what it has no part for; the
        sampling parameters of those that choose. As `stage`, raises ValueError."""
        choosing = self._begin(work)
        parts = self._parts(work, choosing, is_mixed=shape.is_mixed)
        too_many = len(parts["entries"]) > shape.changes
        if too_many or work.starts:
            # One copy, as each takes a staging buffer.
            names = ("entries", "blocks") if too_many else ()
            changes = self._send([parts.pop(name) for name in names], work.starts)
            if too_many:
                self.tables.index_copy_(0, *changes)
        fillers = {
            "rows": self.num_rows, "entries": self.num_rows * self.width, "indices": shape.sequences - 1
        }  # fmt: skip
        padded = []
        for name, size in shape.sizes().items():
            values = np.full(size, fillers.get(name, 0), dtype=np.int64)
            part = parts.get(name, [])
            values[: len(part)] = part
            if name == "queries":
                values[-1] = shape.tokens - sum(work.num_tokens)
            padded.append(values)
        self._padded.send(padded)
        return [self.starts[work.rows[index]].sampling for index in choosing]

    def padded_step(self, shape: GraphShape) -> StagedStep:
        """The step that was staged for a shape: what is launched here is the same whatever that is."""
        sizes = shape.sizes()
        parts = self._padded.target[: sum(sizes.values())].split(list(sizes.values()))
        return self._laid_out(
            dict(zip(sizes, parts, strict=True)),
            [shape.tokens],
            [],
            [],
            every=not shape.is_mixed,
            padding=self.num_rows * self.width,
        )

    def _begin(self, work: StepWork) -> list[int]:
        """Checks a step and notes what begins; which of its slices choose a token."""
        self._check(work)
        for start in work.starts:
            self.starts[start.row] = start
        return [index for index, samples in enumerate(work.samples) if samples]

    def _parts(self, work: StepWork, choosing: list[int], *, is_mixed: bool) -> dict[str, Any]:
        """What the device has to know of a step."""
        parts: dict[str, Any] = {
            "rows": work.rows,
            "fed": [
                token_id
                for tokens, count in zip(work.token_ids, work.num_tokens, strict=True)
                for token_id in tokens or [-1] * count
            ],
            "entries": [row * self.width + index for row, index, _ in work.blocks],
            "blocks": [block for _, _, block in work.blocks],
            "indices": choosing,
            "last": np.cumsum(work.num_tokens)[choosing] - 1,
        }
        if is_mixed:
            parts["queries"] = work.num_tokens
            if self._tile_tokens:
                contexts = map(sum, zip(work.positions, work.num_tokens, strict=True))
                parts["tiles"] = tiles_of(work.num_tokens, list(contexts), self._tile_tokens)
        return parts

    def _laid_out(
        self,
        parts: dict[str, Tensor],
        query_lens: list[int],
        context_lens: list[int],
        table_starts: list[int],
        *,
        every: bool,
        padding: int | None = None,
    ) -> StagedStep:
        """Launches what a step changes in the rows; the step as the device needs it."""
        if parts["entries"].shape[0]:
            self.tables.index_copy_(0, parts["entries"], parts["blocks"])
        rows, queries, tiles = parts["rows"], parts.get("queries"), parts.get("tiles")
        contexts = self._lengths.index_select(0, rows) + (1 if queries is None else queries)
        if padding is not None:
            contexts = contexts.masked_fill(rows == self.num_rows, 0)
        self._lengths.index_copy_(0, rows, contexts)
        batch = lay_out(
            query_lens,
            context_lens,
            table_starts,
            self.tables,
            rows * self.width,
            contexts,
            queries,
            block_tokens=self.block_tokens,
            fresh=parts.get("fresh"),
            tiles=None if tiles is None or not tiles.shape[0] else tiles.view(-1, 2),
            padding=padding,
        )
        token_ids = self._last_tokens.index_select(0, batch.token_tables // self.width)
        if parts["fed"].shape[0]:
            token_ids = torch.where(parts["fed"] < 0, token_ids, parts["fed"])
        return StagedStep(
            batch=batch,
            token_ids=token_ids,
            rows=rows if every else rows.index_select(0, parts["indices"]),
            contexts=contexts if every else contexts.index_select(0, parts["indices"]),
            last=None if every and queries is None else parts["last"],
            sampling=[],
            wants=Wants(),
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
            masks=self.keep_masks().index_select(0, rows) if wants.mask else None,
        )

    def set_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Sets the masks of rows, as `ModelRunner.choose` has them; every token may be chosen in all others.
        Raises ValueError for a row or a size outside of the model's, before anything is changed."""
        if not masks and not self._masked:
            return
        words = -(-self.vocabulary // MASK_BITS)
        for row, mask in masks.items():
            if not 0 <= row < self.num_rows or mask.shape != (words,):
                last = self.num_rows - 1
                raise ValueError(
                    f"row {row} has a mask of {mask.shape}: rows are 0..{last}, masks {words} words"
                )
        rows, kept = [*masks, *self._masked.difference(masks)], self.keep_masks()
        sent = np.full((len(rows), 2 * kept.shape[1]), -1, dtype=np.int32)
        for place, mask in enumerate(masks.values()):
            sent[place, :words] = mask
        self._masked.update(masks)
        numbers, sent_masks = self._masks_staging.send([rows, sent.view(np.int64)])
        kept.index_copy_(0, numbers, sent_masks.view(len(rows), -1))
        self._masked = set(masks)

    def choose(self, step: StagedStep, logits: Tensor, fallback_token_id: int) -> Chosen:
        """Chooses a step's tokens from its logits, and puts them into their rows."""
        chosen = choose(logits, self.sampling_of(step), step.wants, fallback_token_id=fallback_token_id)
        self.chosen(step, chosen.token_ids)
        return chosen

    def chosen(self, step: StagedStep, token_ids: Tensor) -> None:
        """Puts the chosen tokens into their rows: the next step goes on with them."""
        self._last_tokens.index_copy_(0, step.rows, token_ids)
        if step.wants.penalties and self._counts is not None:
            self._counts.view(-1).index_add_(
                0, step.rows * self.vocabulary + token_ids, torch.ones_like(token_ids, dtype=torch.int32)
            )

    def _check(self, work: StepWork) -> None:
        # On a device what is read or written outside of a tensor ends the process, or is another's.
        most_tokens = self.width * self.block_tokens
        for row in (*work.rows, *[row for row, _, _ in work.blocks]):
            if not 0 <= row < self.num_rows:
                raise ValueError(f"a step names a row outside of 0..{self.num_rows - 1}")
        for tokens, count, position in zip(work.token_ids, work.num_tokens, work.positions, strict=True):
            if len(tokens) != count and (tokens or count != DECODE_TOKENS):
                raise ValueError(f"a slice of {count} tokens from {position} on has {len(tokens)}")
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
                raise ValueError(f"a slice holds a token id outside of 0..{self.vocabulary - 1}")
            if position + count > most_tokens:
                raise ValueError(f"a slice of {count} tokens ends beyond the {most_tokens} tokens of a row")
        for _, index, block in work.blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"a block table names blocks outside of 0..{self.num_blocks - 1}")
            if not 0 <= index < self.width:
                raise ValueError(f"a block table has entries 0..{self.width - 1}, not {index}")

    def _send(self, parts: list[Any], starts: list[RowStart]) -> list[Tensor]:
        """Sends parts of a step and applies what rows start with; the parts, on the device."""
        sent = self._staging.send([*parts, *(self._starting(starts) if starts else ())])
        if starts:
            self._start(*sent[len(parts) :])
        return sent[: len(parts)]

    def _starting(self, starts: list[RowStart]) -> Iterator[Sequence[int] | np.ndarray]:
        """What `_start` needs to know."""
        params = [start.sampling for start in starts]
        yield [start.row for start in starts]
        yield (
            [start.position for start in starts]
            + [start.num_prompt_tokens for start in starts]
            + [start.seed for start in starts]
            + [min(each.top_k, self.vocabulary) for each in params]
            + [0] * len(starts)
        )
        floats = [[getattr(each, name) for each in params] for name in _FLOATS]
        yield np.array(floats, dtype=np.float64).view(np.int64)
        biases = [
            (start.row, place, token_id, value)
            for start in starts
            for place, (token_id, value) in enumerate(start.sampling.logit_bias.items())
        ]
        most = max((place for _, place, _, _ in biases), default=-1) + 1
        if most > self._bias_ids.shape[1]:
            self._widen_biases(most)
        width, known = self._bias_ids.shape[1], self.vocabulary
        yield [row * width + place for row, place, _, _ in biases]
        yield [token_id if 0 <= token_id < known else -1 for _, _, token_id, _ in biases]
        yield np.array([value for *_, value in biases], dtype=np.float64).view(np.int64)
        counted = [start for start in starts if is_penalized(start.sampling)]
        if counted:
            self.keep_counts()
        yield [start.row for start in counted]
        yield [
            start.row * known + token_id
            for start in counted
            for token_id in set(start.token_ids[: start.num_prompt_tokens])
        ]
        outputs = [
            (start.row * known + token_id, count)
            for start in counted
            for token_id, count in Counter(start.token_ids[start.num_prompt_tokens :]).items()
        ]
        yield [place for place, _ in outputs]
        yield [count for _, count in outputs]

    def _start(
        self, rows: Tensor, integers: Tensor, floats: Tensor, bias_places: Tensor, bias_ids: Tensor,
        bias_values: Tensor, counted: Tensor, seen: Tensor, outputs: Tensor, output_counts: Tensor,
    ) -> None:  # fmt: skip
        self._integers.index_copy_(1, rows, integers.view(_INTEGERS, -1))
        self._floats.index_copy_(1, rows, floats.view(torch.float64).view(len(_FLOATS), -1).float())
        self._bias_ids.index_fill_(0, rows, -1)
        if bias_places.shape[0]:
            self._bias_ids.view(-1).index_copy_(0, bias_places, bias_ids.int())
            values = bias_values.view(torch.float64).float()
            self._bias_values.view(-1).index_copy_(0, bias_places, values)
        if counted.shape[0] and self._counts is not None and self._in_prompt is not None:
            self._counts.index_fill_(0, counted, 0)
            self._in_prompt.index_fill_(0, counted, False)
            self._in_prompt.view(-1).index_fill_(0, seen, True)
            self._counts.view(-1).index_copy_(0, outputs, output_counts.int())

    def keep_counts(self) -> None:
        """Allocates what penalties need, if it is not there."""
        if self._counts is None:
            shape = (self.num_rows + 1, self.vocabulary)
            counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = counts  # last: where there is no memory for one, there is neither

    def keep_masks(self) -> Tensor:
        """The masks of all rows, which are allocated if they are not there."""
        if self._masks is None:
            shape = (self.num_rows + 1, -(-self.vocabulary // (2 * MASK_BITS)))
            self._masks = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        return self._masks

    def _widen_biases(self, most: int) -> None:
        shape = (self.num_rows + 1, 2 * most)
        ids, values = self._bias_ids.new_full(shape, -1), self._bias_values.new_zeros(shape)
        width = self._bias_ids.shape[1]
        ids[:, :width], values[:, :width] = self._bias_ids, self._bias_values
        self._bias_ids, self._bias_values, self.biases_moved = ids, values, True
