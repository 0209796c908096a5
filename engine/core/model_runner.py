"""`ModelRunner`: the interface between scheduling (integers) and execution (tensors, or a virtual clock).

A running sequence has a *row* in the runner, which keeps what its steps need: block table, length, last
token, sampling parameters. A step's work names rows and what changed in them, so that it does not grow with
the contexts. A step is launched, and its results are collected later: the next one may be launched in
between, as a decode's token goes into its row where it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.messages import ModelInfo, SamplingParams


class OutOfDeviceMemory(RuntimeError):
    """The device's memory did not suffice for a step; a smaller one may succeed."""


class DeviceLost(RuntimeError):
    """The device computes nothing more for this process; only a new process can use it."""


@dataclass(slots=True)
class RowStart:
    """A sequence that takes a row, from the one that had it before."""

    row: int
    sequence_id: str
    position: int
    """Tokens whose keys and values are in the cache already."""
    num_prompt_tokens: int
    token_ids: list[int]
    """Prompt and output so far: the sequence's own list, to be read during the launch only."""
    sampling: SamplingParams
    seed: int


@dataclass(slots=True)
class StepWork:
    """One step: entry i of the first five lists is the slice of one sequence, of tokens `[position : position
    + num_tokens]`. Then what changed since the step before."""

    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    """The slice ends at the sequence's last token, whose logits choose the next."""
    token_ids: list[list[int]] = field(default_factory=list)
    """The slice's tokens; empty: the one that the row's last step chose."""
    starts: list[RowStart] = field(default_factory=list)
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """Changed entries of block tables: (row, index, block)."""
    awaits_masks: bool = False
    """A slice that chooses a token has a grammar: no token is chosen before `ModelRunner.choose`."""

    def __len__(self) -> int:
        return len(self.rows)


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


@dataclass(slots=True)
class StepOutput:
    sampled: list[Sampled | None]
    """One entry a slice, None where it does not sample."""
    device_s: float | None = None
    """How long the device computed, by its own events; None: the time that passed."""


class ModelRunner(Protocol):
    """Executes steps. One implementation holds a model, another a virtual clock."""

    info: ModelInfo
    block_tokens: int
    num_blocks: int
    num_rows: int
    """Most sequences that can have a row."""
    num_host_blocks: int
    swap_block_s: float
    """Seconds to copy one more block out and in again."""
    swap_base_s: float
    """Fixed seconds of copying out and in again, whatever the size."""
    steps_ahead: int
    """Steps to launch before the one before is collected, as suits the device; 0: nothing overlaps there. Any
    runner takes 1."""
    graph_sizes: tuple[int, ...]
    """Sequences, ascending, for which a step of decodes is captured: it is padded to the next one."""
    mixed_sizes: tuple[int, ...]
    """Tokens for which a step with prompts is captured, likewise."""

    def launch(self, work: StepWork) -> Any:
        """Starts a step; returns the ticket for `collect`. Raises `RuntimeError` when the device fails
        (`OutOfDeviceMemory`, `DeviceLost` or another); the step then counts as not done."""
        ...

    def choose(self, ticket: Any, masks: Mapping[int, Any]) -> None:
        """Chooses the tokens of the step that was launched last, which awaits masks. `masks` by row: the
        tokens that may follow, `[ceil(vocabulary / 32)]` words (numpy int32), the lowest bit first; all may
        in a row without one. Raises as `launch`."""
        ...

    def collect(self, ticket: Any) -> StepOutput:
        """Waits for the oldest launched step. Raises as `launch`; the changes of the step's rows
        count all the same."""
        ...

    def copy_out(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copies blocks to host blocks: (block, host block). Ordered between the steps launched before and
        after; need not be done when it returns."""
        ...

    def copy_in(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copies host blocks to blocks: (host block, block). As `copy_out`."""
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
