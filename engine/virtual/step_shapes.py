"""Work of a step (`StepShape`) and its duration on a described machine (`StepTiming`).

`LinearTiming` is the step-time model that real engines fit; a roofline: `ops/simulate/machines/machines.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.messages import StepTime
from engine.scheduling.room import attended_tokens, decode_context
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import padded_shape, predict_step_s

StepPart = tuple[str, int, int]
"""A sequence's share of a step: its id, tokens computed before, tokens in the step. Plain, for speed."""


class StepShape(NamedTuple):
    """Work of a step; a part of `DECODE_TOKENS` counts as a decode."""

    prompt_tokens: int
    prompt_context: int
    """Tokens attended to, summed over the prompt tokens."""
    decode_tokens: int
    decode_context: int
    rows: int
    """Sequences, or rows of a padded batch."""


class StepTiming(Protocol):
    """Durations of steps."""

    def step_s(self, shape: StepShape) -> float: ...

    def decodes_s(self, shape: StepShape, steps: int) -> list[float]:
        """Seconds of each of `steps` successive steps that begin with `shape`, all of decodes: each attends
        to `decode_tokens` more than the one before. Equal to `step_s` of each, to the last bit."""
        ...


@dataclass(frozen=True, slots=True)
class LinearTiming:
    """`engine.step_time.model.predict_step_s`, to the last bit, and the ceiling of an engine that has one."""

    step_time: StepTime
    max_tokens_per_s: float = math.inf

    def step_s(self, shape: StepShape) -> float:
        tokens = shape.prompt_tokens + shape.decode_tokens
        context = shape.prompt_context + shape.decode_context
        computed_s = predict_step_s(self.step_time, tokens, context, shape.rows)
        return max(computed_s, tokens / self.max_tokens_per_s)

    def decodes_s(self, shape: StepShape, steps: int) -> list[float]:
        model = self.step_time
        tokens, rows = padded_shape(model, shape.decode_tokens, shape.rows)
        # Same order of additions as `step_s`, for equal rounding.
        before_s = model.base_s + model.per_token_s * tokens
        after_s = model.per_sequence_s * rows
        context, growth = shape.decode_context, shape.decode_tokens
        contexts = range(context, context + steps * growth, growth)
        least_s = growth / self.max_tokens_per_s
        return [
            max(before_s + model.per_context_token_s * attended + after_s, least_s) for attended in contexts
        ]


@dataclass(slots=True)
class PlainShapes:
    """Step shapes without padding."""

    padded_tokens: int = 0

    def of(self, parts: Iterable[StepPart]) -> StepShape:
        prompt_tokens = prompt_context = decodes = computed = rows = 0
        for _, position, tokens in parts:
            rows += 1
            if tokens == DECODE_TOKENS:
                decodes += 1
                computed += position
            else:
                prompt_tokens += tokens
                prompt_context += attended_tokens(position, tokens)
        context = decode_context(decodes, computed)
        return StepShape(prompt_tokens, prompt_context, DECODE_TOKENS * decodes, context, rows)

    def note(self, shape: StepShape, computed_tokens: int, steps: int) -> None:
        """Notes `steps` computed steps of `shape`, each for `computed_tokens` tokens."""


@dataclass(slots=True)
class PaddedShapes:
    """Step shapes with padding: every prompt, and every decode's context, is as long as the longest one.
    `keeps_rows`: a sequence that ended keeps its row until its whole batch has ended."""

    keeps_rows: bool = False
    padded_tokens: int = 0
    _batch: set[str] = field(default_factory=set)

    def of(self, parts: Iterable[StepPart]) -> StepShape:
        parts = list(parts)
        prompts = [(position, tokens) for _, position, tokens in parts if tokens != DECODE_TOKENS]
        rows = len(parts)
        if self.keeps_rows:
            now = {sequence_id for sequence_id, _, _ in parts}
            self._batch = now if self._batch.isdisjoint(now) else self._batch | now
            rows = len(self._batch)
        has_decodes = len(prompts) < len(parts)
        decodes = rows - len(prompts) if has_decodes else 0
        longest = max((tokens for _, tokens in prompts), default=0)
        deepest = max((position for position, _ in prompts), default=0)
        computed = max((position for _, position, tokens in parts if tokens == DECODE_TOKENS), default=0)
        return StepShape(
            len(prompts) * longest,
            len(prompts) * attended_tokens(deepest, longest),
            DECODE_TOKENS * decodes,
            decode_context(decodes, decodes * computed),
            rows,
        )

    def note(self, shape: StepShape, computed_tokens: int, steps: int) -> None:
        self.padded_tokens += (shape.prompt_tokens + shape.decode_tokens - computed_tokens) * steps


Shapes = PlainShapes | PaddedShapes


def make_shapes(*, padded: bool = False, keeps_rows: bool = False) -> Shapes:
    """`keeps_rows` implies `padded`."""
    return PaddedShapes(keeps_rows) if padded or keeps_rows else PlainShapes()
