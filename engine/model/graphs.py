"""`StepGraphs`: steps captured after loading, each of one shape, and replayed with one launch.

A step is padded to the next shape that was captured: decodes by their number, others by their tokens. What
a graph launches depends on nothing that the host knows: it reads what was staged at fixed places, and leaves
logits and the rows that choose at others, which all graphs share. The choice is a graph of its own, as a
grammar's mask comes between the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from engine.core.model_runner import RowStart, StepWork
from engine.messages import SamplingParams
from engine.model.attention import LayerCache
from engine.model.device import DeviceQueues, mark
from engine.model.forward import Forward
from engine.model.path_report import PathReport
from engine.model.rows import DeviceRows
from engine.model.sampler import GRAPH_WANTS, Chosen, Wants, choose, covering
from engine.model.staging import GraphShape, StagedStep
from engine.sizes import MIXED_SIZES, decode_sizes, padded
from kernels.gpu.compiling import compile_all
from kernels.gpu.launching import collecting
from kernels.machine import first_line

MOST_SECONDS = 8.0
"""For all captures. The largest sizes come first: they serve smaller steps where the others are left out."""
MOST_BYTES = 2 << 30
"""Of the device's memory, for all graphs and what they share."""
ALLOWED_DIFFERENCE = 0.05
"""Relative, of a padded step's logits from the plain one's: other sizes may be other products."""
NAME, PIECEMEAL = "captured steps", "each step is launched piece by piece"
Replay = Callable[[], object]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CapturedStep:
    shape: GraphShape
    step: StagedStep
    """Its tensors are the graph's."""
    replay: Replay


class StepGraphs:
    def __init__(
        self,
        forward: Forward,
        rows: DeviceRows,
        caches: dict[int, LayerCache],
        queues: DeviceQueues,
        fallback_token_id: int,
        max_tokens: int,
    ) -> None:
        """`max_tokens`: of a step. Captures nothing yet."""
        self._forward, self._rows, self._caches, self._queues = forward, rows, caches, queues
        self._fallback_token_id = fallback_token_id
        shapes = [GraphShape(size, size, size, size) for size in decode_sizes(rows.num_rows)]
        shapes += [self._mixed(size) for size in MIXED_SIZES if size <= padded(MIXED_SIZES, max_tokens)]
        self._shapes = sorted(shapes, key=lambda shape: shape.tokens, reverse=True)
        device = rows.tables.device
        self._choosing = torch.full((rows.num_rows,), rows.num_rows, dtype=torch.int64, device=device)
        """Rows that choose, then rows of padding."""
        self._contexts = torch.zeros_like(self._choosing)
        self._logits = torch.empty(0, device=device)
        self._steps: dict[tuple[bool, int], CapturedStep] = {}
        self._choices: dict[tuple[int, Wants], tuple[Chosen, Replay]] = {}
        self._bytes_before = 0
        self.decode_sizes: tuple[int, ...] = ()
        self.mixed_sizes: tuple[int, ...] = ()

    def _mixed(self, tokens: int) -> GraphShape:
        sequences, tile_tokens = min(tokens, self._rows.num_rows), self._forward.tile_tokens
        return GraphShape(
            tokens,
            sequences + 1,  # the last is of padding, and takes the rest of the tokens
            sequences,
            changes=sequences + tokens // self._rows.block_tokens,
            tiles=min(tokens, tokens // tile_tokens + sequences) if tile_tokens else 0,
            is_mixed=True,
        )

    def fitting(self, work: StepWork) -> CapturedStep | None:
        """What a step is padded to; None: nothing, it is launched piece by piece."""
        tokens = sum(work.num_tokens)
        is_mixed = tokens > len(work) or not all(work.samples)
        size = padded(self.mixed_sizes if is_mixed else self.decode_sizes, tokens)
        return self._steps.get((is_mixed, size))

    def launch(self, captured: CapturedStep, work: StepWork) -> tuple[StagedStep, torch.Tensor]:
        """The step, with those that choose a token alone, and their logits. Raises as `DeviceRows.stage`."""
        sampling = self._rows.stage_padded(work, captured.shape)
        captured.replay()
        count = len(sampling)
        staged = self._first(captured.step, count, Wants.of(sampling))
        staged.sampling = sampling
        return staged, self._logits[:count]

    def choose(self, captured: CapturedStep, staged: StagedStep) -> Chosen | None:
        """The choice after `launch`, padded; None: no captured one fits."""
        wants, size = covering(staged.wants), padded(self.decode_sizes, len(staged.rows))
        if size > captured.shape.choosing or (wants.bias and self._rows.biases_moved):
            return None
        chosen, replay = self._choices.get((size, wants), (None, None))
        if replay is not None:
            replay()
        return chosen

    def capture(self) -> list[PathReport]:
        """Captures and checks each shape, the largest first, within the bounds of time and memory."""
        if not self._forward.captures:
            why = "the forward pass or its attention cannot be captured"
            return [PathReport(NAME, False, f"{PIECEMEAL}: {why}")]
        self._bytes_before, left_out = self._queues.memory_bytes(), []
        try:
            self._prepare()
            began_s = time.perf_counter()
            for shape in self._shapes:
                try:
                    if time.perf_counter() - began_s > MOST_SECONDS:
                        raise TimeoutError(f"{MOST_SECONDS:.0f} s have passed")
                    self._capture(shape)
                except (torch.OutOfMemoryError, TimeoutError) as error:
                    kind = "with prompts" if shape.is_mixed else "of decodes"
                    name = f"{NAME} {kind}, {shape.tokens} tokens"
                    left_out.append(PathReport(name, False, first_line(error)))
        except Exception as error:
            mark(self._queues).synchronize()  # of a device that is lost there is more to say
            self._steps.clear()
            self._choices.clear()
            return [PathReport(NAME, False, f"{PIECEMEAL}: {first_line(error)}")]
        self._rows.starts.clear()
        self.decode_sizes, self.mixed_sizes = (
            tuple(sorted(tokens for is_mixed, tokens in self._steps if is_mixed == kind))
            for kind in (False, True)
        )
        mebibytes = (self._queues.memory_bytes() - self._bytes_before) / 2**20
        took = f"{len(self._steps)} sizes in {time.perf_counter() - began_s:.1f} s, {mebibytes:.0f} MiB"
        return [PathReport(NAME, bool(self._steps), took), *left_out]

    def _prepare(self) -> None:
        """Allocates what all graphs share, and compiles all kernels."""
        smallest = self._shapes[-1]
        self._forward.reserve(self._shapes[0].tokens)
        self._rows.reserve(self._shapes)
        self._rows.stage_padded(StepWork(), smallest)
        staged = self._rows.padded_step(smallest)
        logits = self._forward(staged.batch, staged.token_ids, staged.last, self._caches)
        self._logits = logits.new_zeros((self._rows.num_rows, logits.shape[-1]))
        wide = self._logits.float()
        with collecting() as variants:
            for shape in self._shapes:
                self._rows.stage_padded(StepWork(), shape)
                staged, wants = self._run(shape), GRAPH_WANTS[0]
                # No more than the draw: nothing may read the tokens, which it did not write. Other wishes are
                # drawn from float32.
                for scores in () if shape.is_mixed else (self._logits, wide):
                    inputs = self._rows.sampling_of(self._first(staged, shape.tokens, wants))
                    choose(scores[: shape.tokens], inputs, wants)
                mark(self._queues).synchronize()  # a staging buffer is written again
        compile_all(variants)

    def _capture(self, shape: GraphShape) -> None:
        """Captures a step and, for a decode, its choices. Raises `ValueError` where they are not the plain
        ones, and what torch raises."""
        self._rows.stage_padded(StepWork(), shape)
        captured = CapturedStep(shape, *self._captured(lambda: self._run(shape)))
        choices: dict[Wants, tuple[Chosen, Replay]] = {}
        for wants in () if shape.is_mixed else GRAPH_WANTS:
            staged = self._first(captured.step, shape.tokens, wants)
            choices[wants] = self._captured(partial(self._choice, staged))
        self._check(captured, choices)
        if self._queues.memory_bytes() - self._bytes_before > MOST_BYTES:
            raise torch.OutOfMemoryError(f"captured steps would take more than {MOST_BYTES >> 20} MiB")
        self._steps[shape.is_mixed, shape.tokens] = captured
        self._choices |= {(shape.tokens, wants): choice for wants, choice in choices.items()}

    def _captured(self, run: Callable[[], Result]) -> tuple[Result, Replay]:
        """What `run` returned while it was captured, whose tensors are the graph's."""
        results: list[Result] = []
        replay = self._queues.capture(lambda: results.append(run()))
        return results[-1], replay

    def _run(self, shape: GraphShape) -> StagedStep:
        """What is captured of a step."""
        staged, count = self._rows.padded_step(shape), shape.choosing
        self._forward(staged.batch, staged.token_ids, staged.last, self._caches, out=self._logits[:count])
        self._choosing[:count].copy_(staged.rows)
        self._contexts[:count].copy_(staged.contexts)
        return staged

    def _choice(self, staged: StagedStep) -> Chosen:
        """What is captured of a choice."""
        return self._rows.choose(staged, self._logits[: len(staged.rows)], self._fallback_token_id)

    def _first(self, step: StagedStep, count: int, wants: Wants) -> StagedStep:
        """The step, with the first of those that choose."""
        return replace(step, rows=self._choosing[:count], contexts=self._contexts[:count], wants=wants)

    def _check(self, captured: CapturedStep, choices: dict[Wants, tuple[Chosen, Replay]]) -> None:
        """Compares a step with the one that is launched piece by piece, and that with one without padding."""
        work, shape = self._dummy(captured.shape), captured.shape
        count = sum(work.samples)
        plain = self._rows.stage(work)
        unpadded = self._forward(plain.batch, plain.token_ids, plain.last, self._caches).float()
        self._logits.fill_(math.nan)
        self._rows.stage_padded(work, shape)
        self._run(shape)
        expected = self._logits[:count].clone()
        self._logits.fill_(math.nan)
        staged, logits = self.launch(captured, work)
        if not torch.equal(logits, expected):
            raise ValueError(f"replayed, a step of {shape.tokens} tokens does not give the same logits")
        if not float((logits.float() - unpadded).norm() / unpadded.norm()) <= ALLOWED_DIFFERENCE:
            raise ValueError(f"padded to {shape.tokens} tokens, a step gives other logits than without")
        for wants, (chosen, replay) in choices.items():
            token_ids = self._choice(replace(staged, wants=wants)).token_ids.clone()
            replay()
            if not torch.equal(chosen.token_ids[:count], token_ids):
                raise ValueError(f"replayed, a choice among {shape.tokens} does not give the same tokens")

    def _dummy(self, shape: GraphShape) -> StepWork:
        """A step that fits with some padding: each sequence in a block of its own."""
        work, left = StepWork(), max(1, shape.tokens - 1)
        for row in range(min(left, self._rows.num_rows, self._rows.num_blocks)):
            place = row % min(self._rows.block_tokens, 8)
            tokens = min(place + 1, left) if shape.is_mixed else 1
            prompt = [(7 * row + index) % self._rows.vocabulary for index in range(tokens)]
            sampling = SamplingParams(temperature=1.0)
            position = 0 if shape.is_mixed else place
            work.starts.append(RowStart(row, "", position, position + tokens, prompt, sampling, row))
            work.rows.append(row)
            work.positions.append(position)
            work.num_tokens.append(tokens)
            work.samples.append(not (shape.is_mixed and row % 2))
            work.token_ids.append(prompt)
            work.blocks.append((row, 0, row))
            left -= tokens
            if not left:
                break
        return work
