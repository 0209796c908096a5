"""`ModelRunner`: the interface between scheduling (integers) and execution (tensors, or a virtual clock)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from engine.messages import ModelInfo, SamplingParams


class OutOfDeviceMemory(RuntimeError):
    """The device's memory did not suffice for a step; a smaller one may succeed."""


class DeviceLost(RuntimeError):
    """The device computes nothing more for this process; only a new process can use it."""


@dataclass(slots=True)
class SequenceSlice:
    """The tokens `[position : position + num_tokens]` that one sequence computes in this step; KV goes to the
    slots of `block_table`. `sample`: they end at its last known token, whose logits choose the next."""

    sequence_id: str
    token_ids: list[int]
    """Prompt and output so far (the sequence's own list: do not change it)."""
    num_prompt_tokens: int
    position: int
    num_tokens: int
    block_table: list[int]
    sample: bool
    sampling: SamplingParams
    seed: int


@dataclass(slots=True)
class Sampled:
    """A chosen token; `top` holds (token id, logprob) of the best alternatives where asked for."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    remaining_logits: list[float] | None = None
    """Probe logits of the tokens left, this one included (`engine.forecast.length.probe`); None: none."""
    state: bytes = b""
    """The state itself (float16), where samples are collected."""


class ModelRunner(Protocol):
    """Executes slices. One implementation holds a model, another a virtual clock."""

    info: ModelInfo
    block_tokens: int
    num_blocks: int
    num_host_blocks: int
    swap_block_s: float
    """Seconds to copy one more block out and in again."""
    swap_base_s: float
    """Fixed seconds of copying out and in again, whatever the size."""

    def execute(self, slices: SequenceOf[SequenceSlice]) -> list[Sampled | None]:
        """Computes one step; one entry a slice, None where `sample` is false. Raises `RuntimeError` when the
        device fails (`OutOfDeviceMemory`, `DeviceLost` or another); the step then counts as not done."""
        ...

    def copy_out(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copies blocks to host blocks: (block, host block)."""
        ...

    def copy_in(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copies host blocks to blocks: (host block, block)."""
        ...

    def read_kv(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        """Keys and values of a sequence's first `num_tokens` tokens, one entry a layer."""
        ...

    def read_host_kv(self, host_blocks: list[int], num_tokens: int) -> list[bytes]:
        """As `read_kv`, of tokens whose keys and values lie in host blocks."""
        ...

    def write_kv(self, block_table: list[int], num_tokens: int, kv: list[bytes]) -> None:
        """The inverse of `read_kv`, into other blocks. Raises `ValueError` when the sizes differ."""
        ...
