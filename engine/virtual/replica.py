"""`VirtualReplica`: an engine core on virtual time, without a model.

The core, scheduler and KV bookkeeping of a real engine, over a runner on a virtual clock. With `audit` it
keeps one number a slot and draws each token from those found through the block table: a block freed too
early, shared by mistake, not restored or not recomputed changes the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from engine.core.core import EngineConfig, EngineCore, StepResult
from engine.core.model_runner import Sampled, StepOutput, StepWork
from engine.grammar.compiler import Grammars
from engine.messages import ModelInfo, Refused, SamplingParams, StepTime, Submit
from engine.step_time.model import PRIOR, predict_step_s
from engine.virtual.step_shapes import PlainShapes, Shapes

EOS_TOKEN_ID = 0
VOCABULARY = 1024
MOST_ROWS = 1 << 20
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class VirtualClock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds} s)")
        self.now_s += seconds


@dataclass(slots=True)
class _VirtualRow:
    sequence_id: str
    num_prompt_tokens: int
    seed: int
    block_table: list[int] = field(default_factory=list)
    last_token: int = 0


@dataclass(slots=True)
class VirtualStep:
    work: StepWork
    sampled: list[Sampled | None]


class VirtualRunner:
    """Implements `ModelRunner` on a clock; each sequence's answer has a given length."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        num_blocks: int = 512,
        block_tokens: int = 16,
        context_tokens: int = 4096,
        step_time: StepTime = PRIOR,
        num_host_blocks: int = 0,
        swap_block_s: float = 0.0,
        swap_base_s: float = 0.0,
        audit: bool = False,
        shapes: Shapes | None = None,
    ) -> None:
        """`shapes`: how steps are padded, by default not at all."""
        self.info = ModelInfo(
            model_id="virtual",
            architecture="virtual",
            parameters=0,
            context_tokens=context_tokens,
            vocabulary=VOCABULARY,
            eos_token_ids=[EOS_TOKEN_ID],
            dtype="none",
            device="virtual",
            attention="virtual",
        )
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.swap_block_s = swap_block_s
        self.swap_base_s = swap_base_s
        self.num_rows = MOST_ROWS
        self.steps_ahead = 0
        self.graph_sizes, self.mixed_sizes = step_time.graph_sizes, step_time.mixed_sizes
        self._rows: dict[int, _VirtualRow] = {}
        self._host: list[list[int]] = [[] for _ in range(num_host_blocks)]
        self._clock = clock
        self._step_time = step_time
        self._lengths: dict[str, int] = {}
        self._shapes = shapes or PlainShapes()
        self._slots: list[int] | None = [0] * (num_blocks * block_tokens) if audit else None

    def set_length(self, sequence_id: str, output_tokens: int) -> None:
        """Sets an answer's length in tokens, its EOS included. Default: `max_tokens`."""
        self._lengths[sequence_id] = output_tokens

    def launch(self, work: StepWork) -> VirtualStep:
        """Computes the step: nothing overlaps on a virtual clock."""
        for start in work.starts:
            self._rows[start.row] = _VirtualRow(start.sequence_id, start.num_prompt_tokens, start.seed)
        rows = [self._rows[row] for row in work.rows]
        ids = [row.sequence_id for row in rows]
        shape = self._shapes.of(zip(ids, work.positions, work.num_tokens, strict=True))
        self._shapes.note(shape, sum(work.num_tokens), 1)
        tokens = shape.prompt_tokens + shape.decode_tokens
        context = shape.prompt_context + shape.decode_context
        self._clock.advance(predict_step_s(self._step_time, tokens, context, shape.rows))
        if self._slots is not None:
            for number, index, block in work.blocks:
                self._rows[number].block_table[index:] = [block]
            for row, position, fed in zip(rows, work.positions, work.token_ids, strict=True):
                self._write(row, position, fed or [row.last_token])
        sampled: list[Sampled | None] = []
        for row, position, count, samples in zip(
            rows, work.positions, work.num_tokens, work.samples, strict=True
        ):
            sampled.append(self._sample(row, position + count) if samples else None)
        return VirtualStep(work, sampled)

    def choose(self, ticket: VirtualStep, masks: Mapping[int, SequenceOf[int]]) -> None:
        """Puts tokens that the masks allow in the place of those that were drawn."""
        for place, number in enumerate(ticket.work.rows):
            drawn = ticket.sampled[place]
            if drawn is None or number not in masks:
                continue
            words = [int(word) & 0xFFFFFFFF for word in masks[number]]
            allowed = [32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1]
            token_id = allowed[_mix(drawn.token_id) % len(allowed)]
            self._rows[number].last_token = token_id
            ticket.sampled[place] = Sampled(token_id, logprob=0.0)

    def collect(self, ticket: VirtualStep) -> StepOutput:
        return StepOutput(ticket.sampled)

    def _write(self, row: _VirtualRow, position: int, token_ids: list[int]) -> None:
        """As in a model, a slot's content depends on all tokens up to its own."""
        assert self._slots is not None
        table = row.block_table
        before = self._slots[self._slot(table, position - 1)] if position else 0
        for at, token_id in enumerate(token_ids, position):
            before = _mix(before ^ (at << 32 | token_id))
            self._slots[self._slot(table, at)] = before

    @property
    def padded_tokens(self) -> int:
        """Padding: positions of padded steps without a token."""
        return self._shapes.padded_tokens

    def copy_out(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Takes the time of half a round trip; with `audit` the numbers are copied, too."""
        self._clock.advance((self.swap_base_s + len(pairs) * self.swap_block_s) / 2)
        if self._slots is not None:
            for block, host_block in pairs:
                start = block * self.block_tokens
                self._host[host_block] = self._slots[start : start + self.block_tokens]

    def copy_in(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        self._clock.advance((self.swap_base_s + len(pairs) * self.swap_block_s) / 2)
        if self._slots is not None:
            for host_block, block in pairs:
                start = block * self.block_tokens
                self._slots[start : start + self.block_tokens] = self._host[host_block]

    def read_kv(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        if self._slots is None:
            return []
        kept = [self._slots[self._slot(block_table, position)] for position in range(num_tokens)]
        return [struct.pack(f"<{num_tokens}Q", *kept)]

    def read_host_kv(self, host_blocks: list[int], num_tokens: int) -> list[bytes]:
        if self._slots is None:
            return []
        kept = [content for block in host_blocks for content in self._host[block]][:num_tokens]
        return [struct.pack(f"<{num_tokens}Q", *kept)]

    def write_kv(self, block_table: list[int], num_tokens: int, kv: list[bytes]) -> None:
        if self._slots is None or len(kv) != 1 or len(kv[0]) != 8 * num_tokens:
            raise ValueError(f"this is not the KV of {num_tokens} tokens of a virtual model")
        for position, content in enumerate(struct.unpack(f"<{num_tokens}Q", kv[0])):
            self._slots[self._slot(block_table, position)] = content

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def _sample(self, row: _VirtualRow, end: int) -> Sampled:
        index = end - row.num_prompt_tokens
        if index + 1 == self._lengths.get(row.sequence_id):
            row.last_token = EOS_TOKEN_ID
            return Sampled(EOS_TOKEN_ID, logprob=0.0)
        drawn = _mix(row.seed ^ index)
        if self._slots is not None:
            for position in range(end):
                drawn = _mix(drawn ^ self._slots[self._slot(row.block_table, position)])
        row.last_token = 1 + drawn % (VOCABULARY - 1)
        return Sampled(row.last_token, logprob=0.0)


def _mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64)."""
    value = (value + _MIX) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class VirtualText:
    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.stopped = ""

    def push(self, token_id: int) -> str:
        """Appends a token; returns text that cannot be part of a stop string."""
        self._held += self.logprob_text(token_id)
        places = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if places:
            start, self.stopped = min(places)
            shown, self._held = self._held[:start], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def flush(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def logprob_text(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class VirtualTexts:
    def open(self, prompt_token_ids: list[int], sampling: SamplingParams) -> VirtualText:
        return VirtualText(sampling.stop)


class VirtualReplica:
    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        clock: VirtualClock | None = None,
        grammars: Grammars | None = None,
        **runner: Any,
    ) -> None:
        """`runner`: what a `VirtualRunner` takes; `grammars`: of any tokenizer of at most its vocabulary."""
        self.clock = clock if clock is not None else VirtualClock()
        self.runner = VirtualRunner(self.clock, **runner)
        self.core = EngineCore(
            self.runner, VirtualTexts(), config or EngineConfig(), self.clock, grammars=grammars
        )

    def submit(
        self, submit: Submit, *, output_tokens: int | None = None, gateway_id: str = "virtual"
    ) -> Refused | None:
        """Submits a sequence whose answer has `output_tokens` tokens (None: `max_tokens`)."""
        if output_tokens is not None:
            self.runner.set_length(submit.sequence_id, output_tokens)
        return self.core.submit(submit, gateway_id)

    def step(self) -> StepResult:
        return self.core.step()
