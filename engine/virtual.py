"""What is a replica without a GPU?

The same core, scheduler and KV bookkeeping as a real engine, over a runner that moves a virtual clock by a
step-time model instead of computing. How long each answer becomes is given with the request.

With `audit`, the runner keeps what a KV cache would keep, one number a slot, and draws each token from the
numbers it finds through the block table. A block that was freed too early, shared by mistake, not restored
or not recomputed then changes the tokens, exactly as it would change a model's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.core import EngineConfig, EngineCore, StepResult, attended_tokens
from engine.forecast.step_time import PRIOR, predict_step_s
from engine.messages import ModelInfo, Refused, SamplingParams, StepTime, Submit
from engine.step import Sampled, SequenceSlice

EOS_TOKEN_ID = 0
VOCABULARY = 1024
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Lets time pass. Raises ValueError when asked to go back."""
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds} s)")
        self.now_s += seconds


class VirtualRunner:
    """Implements `ModelRunner` on a clock; the answer of each sequence ends after the length it was given."""

    def __init__(
        self,
        clock: VirtualClock,
        *,
        num_blocks: int = 512,
        block_tokens: int = 16,
        context_tokens: int = 4096,
        step_time: StepTime = PRIOR,
        audit: bool = False,
    ) -> None:
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
        self._clock = clock
        self._step_time = step_time
        self._lengths: dict[str, int] = {}
        self._slots: list[int] | None = [0] * (num_blocks * block_tokens) if audit else None

    def set_length(self, sequence_id: str, output_tokens: int) -> None:
        """How many tokens the answer has, its EOS included. Without: until `max_tokens`."""
        self._lengths[sequence_id] = output_tokens

    def execute(self, slices: SequenceOf[SequenceSlice]) -> list[Sampled | None]:
        """Moves the clock by the step's time, and samples."""
        tokens = sum(piece.num_tokens for piece in slices)
        context = sum(attended_tokens(piece.position, piece.num_tokens) for piece in slices)
        self._clock.advance(predict_step_s(self._step_time, tokens, context, len(slices)))
        if self._slots is not None:
            for piece in slices:
                for position in range(piece.position, piece.position + piece.num_tokens):
                    content = _mix(position << 32 | piece.token_ids[position])
                    self._slots[self._slot(piece.block_table, position)] = content
        return [self._sample(piece) if piece.sample else None for piece in slices]

    def read_kv(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        """The kept numbers as one layer; without `audit` there are none, and the sequence is recomputed."""
        if self._slots is None:
            return []
        kept = [self._slots[self._slot(block_table, position)] for position in range(num_tokens)]
        return [struct.pack(f"<{num_tokens}Q", *kept)]

    def write_kv(self, block_table: list[int], num_tokens: int, kv: list[bytes]) -> None:
        """The inverse of `read_kv`. Raises ValueError when the sizes differ."""
        if self._slots is None or len(kv) != 1 or len(kv[0]) != 8 * num_tokens:
            raise ValueError(f"this is not the KV of {num_tokens} tokens of a virtual model")
        for position, content in enumerate(struct.unpack(f"<{num_tokens}Q", kv[0])):
            self._slots[self._slot(block_table, position)] = content

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def _sample(self, piece: SequenceSlice) -> Sampled:
        end = piece.position + piece.num_tokens
        index = end - piece.num_prompt_tokens
        if index + 1 == self._lengths.get(piece.sequence_id):
            return Sampled(EOS_TOKEN_ID, logprob=0.0)
        drawn = _mix(piece.seed ^ index)
        if self._slots is not None:
            for position in range(end):
                drawn = _mix(drawn ^ self._slots[self._slot(piece.block_table, position)])
        return Sampled(1 + drawn % (VOCABULARY - 1), logprob=0.0)


def _mix(value: int) -> int:
    """A 64-bit finaliser (splitmix64)."""
    value = (value + _MIX) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


class VirtualText:
    """One letter a token. Holds back what may become a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that no stop string can still swallow."""
        self._held += self.logprob_text(token_id)
        found = [self._held.find(stop) for stop in self._stop if stop in self._held]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def flush(self) -> str:
        """What was held back."""
        shown, self._held = self._held, ""
        return shown

    def logprob_text(self, token_id: int) -> str:
        """The token's letter."""
        return chr(ord("a") + token_id % 26)


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class VirtualTexts:
    """Implements `TextFactory`."""

    def open(self, prompt_token_ids: list[int], sampling: SamplingParams) -> VirtualText:
        """A new answer's text."""
        return VirtualText(sampling.stop)


class VirtualReplica:
    """An engine core on virtual time."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        clock: VirtualClock | None = None,
        num_blocks: int = 512,
        block_tokens: int = 16,
        context_tokens: int = 4096,
        step_time: StepTime = PRIOR,
        audit: bool = False,
    ) -> None:
        self.clock = clock if clock is not None else VirtualClock()
        self.runner = VirtualRunner(
            self.clock,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            step_time=step_time,
            audit=audit,
        )
        self.core = EngineCore(self.runner, VirtualTexts(), config or EngineConfig(), self.clock)

    def submit(
        self, submit: Submit, *, output_tokens: int | None = None, gateway_id: str = "virtual"
    ) -> Refused | None:
        """Takes a sequence whose answer has `output_tokens` tokens (None: as many as it may)."""
        if output_tokens is not None:
            self.runner.set_length(submit.sequence_id, output_tokens)
        return self.core.submit(submit, gateway_id)

    def step(self) -> StepResult:
        """One iteration; the clock moves by the step's time."""
        return self.core.step()
