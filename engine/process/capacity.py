"""Sizes of an engine from settings, device, model and free memory; refuses less KV than one context takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.process.options import AUTO_HOST_BLOCKS, EngineSettings
from engine.sizes import DECODE_TOKENS, blocks_for

MIB = 2**20
GIB = 2**30
CPU_KV_SHARE = 0.25
"""Share of the available memory that the KV cache on a CPU takes by itself."""
CPU_MOST_KV_SHARE = 0.5
"""Share that it takes where one whole context needs more than `CPU_KV_SHARE`."""
CPU_MOST_KV_BYTES = 16 * GIB
"""Most that it takes by itself, unless one whole context needs more."""
CPU_SMALL_KV_BYTES = 256 * MIB
"""Taken even where `max_sequences` contexts need less: room for further requests and cached prefixes."""
CUDA_KV_SHARE = 0.85
"""Share of the card's memory that is free beside weights and the largest step; the rest is for what a step
gathers of long contexts, for captured steps, and for fragments."""
CUDA_SMALL_KV_SHARE = 0.1
"""Share of the whole card that the KV cache may take by itself where `max_sequences` contexts need less: kept
prefixes lie there, too."""
LEAST_STEP_TOKENS = 16
"""A step by default is not lowered below."""
HOST_KV_SHARE = 0.125
"""Share of the available host memory, less the KV cache where that lies there too."""
MOST_HOST_KV_BYTES = 4 * GIB


class CapacityRefused(Exception):
    """These sizes do not go together; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Sizes that depend on the kind of device only."""

    block_tokens: int
    max_sequences: int
    max_batched_tokens: int


DEFAULTS = {"cpu": DeviceDefaults(16, 32, 512), "cuda": DeviceDefaults(64, 256, 2048)}
"""By kind of device. A GPU's step takes hardly longer for some hundred tokens than for one; a CPU's does."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Where an engine computes, and what is free there once the weights are loaded."""

    device: str
    free_bytes: int
    free_host_bytes: int
    """The same number where the device is the CPU."""
    card_bytes: int = 0
    """Of a GPU, in all."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a model needs of a KV cache."""

    context_tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What one step may compute, with the reasons."""

    max_sequences: int
    max_batched_tokens: int
    reasons: dict[str, str]


@dataclass(frozen=True, slots=True)
class EngineSizes:
    context_tokens: int
    block_tokens: int
    block_bytes: int
    num_blocks: int
    num_host_blocks: int
    steps: StepSizes
    reasons: dict[str, str]

    def lines(self) -> list[str]:
        """One line a size, for logs and `fairgate doctor`."""
        values = {
            "context": f"{self.context_tokens} tokens",
            "kv_memory": size_text(self.num_blocks * self.block_bytes),
            "kv_blocks": f"{self.num_blocks} blocks, {self.num_blocks * self.block_tokens} tokens",
            "block_tokens": f"{self.block_tokens}",
            "max_sequences": f"{self.steps.max_sequences}",
            "max_batched_tokens": f"{self.steps.max_batched_tokens}",
            "host_kv_blocks": (
                f"{self.num_host_blocks} blocks, {size_text(self.num_host_blocks * self.block_bytes)}"
            ),
        }
        reasons = self.reasons | self.steps.reasons
        return [f"{name} {value} ({reasons[name]})" for name, value in values.items()]


def step_sizes(device: str, wanted: EngineSettings) -> StepSizes:
    """Sequences and tokens of a step: as set, else by device; each running sequence can have a token."""
    defaults = DEFAULTS[device]
    sequences, tokens = wanted.max_sequences, wanted.max_batched_tokens
    reasons = {
        "max_sequences": "engine.max_sequences" if sequences else f"by device: {device}",
        "max_batched_tokens": "engine.max_batched_tokens" if tokens else f"by device: {device}",
    }
    if not sequences:
        sequences = defaults.max_sequences
        if tokens and tokens < DECODE_TOKENS * sequences:
            sequences = tokens // DECODE_TOKENS
            reasons["max_sequences"] = "one token each of engine.max_batched_tokens"
    if not tokens:
        tokens = defaults.max_batched_tokens
        if tokens < DECODE_TOKENS * sequences:
            tokens = DECODE_TOKENS * sequences
            reasons["max_batched_tokens"] = "one token for each of engine.max_sequences"
    return StepSizes(sequences, tokens, reasons)


def engine_sizes(
    machine: MachineMemory,
    shape: KvShape,
    wanted: EngineSettings,
    free_beside: Callable[[int, int], int | None] | None = None,
) -> EngineSizes:
    """All sizes. `free_beside` says how many bytes are free beside a step of some sequences and tokens,
    None where it does not fit: what of these is not set is halved until it does, with one context of KV.
    Raises `CapacityRefused` for a context that the model or the KV cache does not have."""
    machine = _shared(machine, wanted.count)
    steps = step_sizes(machine.device, wanted)
    sizes = _sizes(machine, 0, shape, wanted, steps)
    if free_beside is None:
        return sizes
    while True:
        free_bytes = free_beside(steps.max_sequences, steps.max_batched_tokens)
        try:
            if free_bytes is None:
                raise CapacityRefused(_step_too_large(machine, steps))
            beside = replace(machine, free_bytes=free_bytes)
            return _sizes(beside, max(0, machine.free_bytes - free_bytes), shape, wanted, steps)
        except CapacityRefused:
            lower = _lowered(steps, wanted)
            if lower is None:
                raise
            steps = lower


def _shared(machine: MachineMemory, count: int) -> MachineMemory:
    """What one of `count` engines may take: each has a GPU of its own, and the host's memory is shared."""
    host_bytes = machine.free_host_bytes // count
    is_host = machine.device == "cpu"
    return replace(
        machine, free_bytes=host_bytes if is_host else machine.free_bytes, free_host_bytes=host_bytes
    )


def _lowered(steps: StepSizes, wanted: EngineSettings) -> StepSizes | None:
    """Half the sequences and tokens, where they are not set; None: less is not to be had."""
    sequences, tokens = steps.max_sequences, steps.max_batched_tokens
    reasons = dict(steps.reasons)
    if not wanted.max_sequences and sequences > 1:
        sequences //= 2
        reasons["max_sequences"] = "halved until a step fits the GPU"
    if not wanted.max_batched_tokens:
        tokens = min(tokens, max(LEAST_STEP_TOKENS, sequences, tokens // 2))
        reasons["max_batched_tokens"] = "halved until a step fits the GPU"
    lower = StepSizes(sequences, tokens, reasons)
    return lower if (sequences, tokens) != (steps.max_sequences, steps.max_batched_tokens) else None


def _step_too_large(machine: MachineMemory, steps: StepSizes) -> str:
    return (
        f"a step of {steps.max_batched_tokens} tokens in {steps.max_sequences} sequences does not fit the"
        f" {size_text(machine.free_bytes)} that the weights leave on the GPU: set less for"
        " engine.max_batched_tokens and engine.max_sequences, free memory there, or serve a smaller model"
    )


def _sizes(
    machine: MachineMemory, step_bytes: int, shape: KvShape, wanted: EngineSettings, steps: StepSizes
) -> EngineSizes:
    """`step_bytes`: what the largest step takes, which is not among the machine's free bytes."""
    context_tokens = wanted.context_tokens or shape.context_tokens
    if context_tokens > shape.context_tokens:
        raise CapacityRefused(
            f"engine.context is {context_tokens} tokens, but the model's context is {shape.context_tokens}:"
            " leave it out, or name at most that"
        )
    block_tokens = wanted.block_tokens or DEFAULTS[machine.device].block_tokens
    block_bytes = shape.token_bytes * block_tokens
    # The last token's own keys and values are never needed.
    least_blocks = max(1, blocks_for(context_tokens - 1, block_tokens))
    num_blocks, why = _num_blocks(machine, step_bytes, wanted, block_bytes, least_blocks, steps.max_sequences)
    if machine.device == "cuda" and num_blocks * block_bytes > machine.free_bytes:
        raise CapacityRefused(
            f"the KV cache would take {size_text(num_blocks * block_bytes)} ({why}), but"
            f" {size_text(machine.free_bytes)} are free on the GPU{_beside(step_bytes)}: set less"
        )
    if num_blocks < least_blocks:
        raise CapacityRefused(
            _too_small(wanted, num_blocks, why, block_tokens, block_bytes, context_tokens, least_blocks)
        )
    num_host_blocks, why_host = _num_host_blocks(machine, wanted, block_bytes, num_blocks)
    reasons = {
        "context": "engine.context" if wanted.context_tokens else "the model's",
        "kv_memory": why,
        "kv_blocks": "engine.kv_blocks" if wanted.num_blocks else "as many as kv_memory holds",
        "block_tokens": "engine.block_tokens" if wanted.block_tokens else f"by device: {machine.device}",
        "host_kv_blocks": why_host,
    }
    return EngineSizes(context_tokens, block_tokens, block_bytes, num_blocks, num_host_blocks, steps, reasons)


def _num_blocks(
    machine: MachineMemory,
    step_bytes: int,
    wanted: EngineSettings,
    block_bytes: int,
    least_blocks: int,
    max_sequences: int,
) -> tuple[int, str]:
    if wanted.num_blocks:
        return wanted.num_blocks, "engine.kv_blocks"
    if wanted.kv_memory_bytes:
        return wanted.kv_memory_bytes // block_bytes, "engine.kv_memory"
    free = machine.free_bytes
    least_bytes = least_blocks * block_bytes
    all_bytes = max_sequences * least_bytes
    if machine.device == "cuda":
        share_bytes, small_bytes = int(free * CUDA_KV_SHARE), int(machine.card_bytes * CUDA_SMALL_KV_SHARE)
        beside = _beside(step_bytes)
        if share_bytes <= max(all_bytes, small_bytes):
            why = f"{CUDA_KV_SHARE:.0%} of {size_text(free)} free on the GPU{beside}"
            return share_bytes // block_bytes, why
        if all_bytes < small_bytes:
            return small_bytes // block_bytes, f"{CUDA_SMALL_KV_SHARE:.0%} of the GPU{beside}"
        return all_bytes // block_bytes, f"the {max_sequences} whole contexts of engine.max_sequences{beside}"
    share_bytes = int(free * CPU_KV_SHARE)
    most_bytes = min(max(all_bytes, CPU_SMALL_KV_BYTES), max(CPU_MOST_KV_BYTES, least_bytes))
    if share_bytes >= most_bytes:
        if most_bytes < all_bytes:
            why = "the most that is taken by itself on a CPU"
        elif most_bytes > all_bytes:
            why = f"more than the {max_sequences} whole contexts of engine.max_sequences"
        else:
            why = f"the {max_sequences} whole contexts of engine.max_sequences"
        return most_bytes // block_bytes, why
    if share_bytes < least_bytes <= int(free * CPU_MOST_KV_SHARE):
        return least_blocks, f"one whole context, at most {CPU_MOST_KV_SHARE:.0%} of {size_text(free)} free"
    return share_bytes // block_bytes, f"{CPU_KV_SHARE:.0%} of {size_text(free)} free"


def _beside(step_bytes: int) -> str:
    return f", beside {size_text(step_bytes)} for the largest step" if step_bytes else ""


def _too_small(
    wanted: EngineSettings,
    num_blocks: int,
    why: str,
    block_tokens: int,
    block_bytes: int,
    context_tokens: int,
    least_blocks: int,
) -> str:
    """Why a KV cache is refused, and the ways out."""
    least = size_text(least_blocks * block_bytes)
    if wanted.num_blocks:
        more = f"set engine.kv_blocks to at least {least_blocks} ({least}), or leave it out"
    elif wanted.kv_memory_bytes:
        more = f"set engine.kv_memory to at least {least}, or leave it out"
    else:
        more = f"free memory, or set engine.kv_memory to at least {least}"
    tokens = num_blocks * block_tokens
    shorter = f"; or serve shorter contexts on purpose with --context {tokens}" if num_blocks else ""
    whose = "engine.context" if wanted.context_tokens else "the model's context"
    return (
        f"the KV cache holds {tokens} tokens ({num_blocks} blocks of {block_tokens}: {why}), but {whose} is"
        f" {context_tokens} tokens, which take {least_blocks} blocks: {more}{shorter}"
    )


def _num_host_blocks(
    machine: MachineMemory, wanted: EngineSettings, block_bytes: int, num_blocks: int
) -> tuple[int, str]:
    if wanted.num_host_blocks != AUTO_HOST_BLOCKS:
        return wanted.num_host_blocks, "engine.host_kv_blocks" + (
            "" if wanted.num_host_blocks else ": what gives way is computed again"
        )
    free = machine.free_host_bytes - (num_blocks * block_bytes if machine.device == "cpu" else 0)
    share = int(max(0, free) * HOST_KV_SHARE)
    most = min(num_blocks * block_bytes, MOST_HOST_KV_BYTES)
    if share < most:
        return share // block_bytes, f"{HOST_KV_SHARE:.1%} of {size_text(max(0, free))} free host memory"
    if most == MOST_HOST_KV_BYTES:
        return most // block_bytes, "the most that is taken by itself"
    return num_blocks, "as many as the KV cache has"


def size_text(number: int) -> str:
    """A number of bytes as a text for settings, rounded up, in a unit that leaves it whole or at least 10."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if number >= 10 * unit or (number and number % unit == 0):
            return f"{-(-number // unit)}{name}"
    return f"{number}B"
