"""Sizes of an engine whose model is loaded; on a GPU by what a step of the largest shape takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.core import TextFactory
from engine.core.first_steps import largest_step, prompt_lengths
from engine.process.capacity import DEFAULTS, EngineSizes, KvShape, MachineMemory, engine_sizes
from engine.process.free_memory import free_memory_bytes
from engine.process.options import EngineSettings
from engine.sizes import blocks_for

if TYPE_CHECKING:
    from engine.model.loader import LoadedModel


def measured_sizes(loaded: LoadedModel, texts: TextFactory, wanted: EngineSettings) -> EngineSizes:
    """All sizes. Raises `CapacityRefused`."""
    shape, device = KvShape(loaded.info.context_tokens, loaded.token_bytes), loaded.device.type
    host_bytes = free_memory_bytes()
    if device != "cuda":
        return engine_sizes(MachineMemory(device, host_bytes, host_bytes), shape, wanted)
    free_bytes, card_bytes = loaded.card_bytes()
    block_tokens = wanted.block_tokens or DEFAULTS[device].block_tokens

    def free_beside(sequences: int, tokens: int) -> int | None:
        lengths = prompt_lengths(sequences, tokens, shape.context_tokens)
        return loaded.free_beside(
            lambda runner: largest_step(runner, texts, lengths),
            num_blocks=sum(blocks_for(length + 1, block_tokens) for length in lengths),
            block_tokens=block_tokens,
            num_rows=sequences,
        )

    return engine_sizes(MachineMemory(device, free_bytes, host_bytes, card_bytes), shape, wanted, free_beside)
