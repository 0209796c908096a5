"""Sizes of an engine: what settings name counts, the rest follows from device, model and free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.process.capacity import (
    CPU_MOST_KV_BYTES,
    CPU_SMALL_KV_BYTES,
    GIB,
    MIB,
    MOST_HOST_KV_BYTES,
    CapacityRefused,
    EngineSizes,
    KvShape,
    MachineMemory,
    engine_sizes,
    size_text,
    step_sizes,
)
from engine.process.options import EngineSettings

DEMO = KvShape(context_tokens=2048, token_bytes=3072)
"""48 KiB a block of 16, 6 MiB a context."""
LARGE = KvShape(context_tokens=32_768, token_bytes=2**17)
"""4 GiB a context."""


def cpu(free_bytes: int) -> MachineMemory:
    return MachineMemory("cpu", free_bytes, free_bytes)


def sizes(machine: MachineMemory, shape: KvShape = DEMO, **wanted: Any) -> EngineSizes:
    return engine_sizes(machine, shape, EngineSettings(**wanted))


def refusal(machine: MachineMemory, shape: KvShape = DEMO, **wanted: Any) -> str:
    with pytest.raises(CapacityRefused) as caught:
        sizes(machine, shape, **wanted)
    return str(caught.value)


def test_a_cpu_with_much_memory_gives_each_sequence_a_whole_context_and_no_more() -> None:
    found = sizes(cpu(16 * GIB), max_sequences=64)
    assert (found.num_blocks, found.block_tokens, found.context_tokens) == (64 * 128, 16, 2048)
    assert found.num_host_blocks == found.num_blocks
    assert found.reasons["kv_memory"] == "the 64 whole contexts of engine.max_sequences"


def test_small_contexts_have_room_for_more() -> None:
    """For what is sent ahead of its turn, and for cached prefixes."""
    for wanted in ({}, {"max_sequences": 1}):
        assert sizes(cpu(16 * GIB), **wanted).num_blocks == CPU_SMALL_KV_BYTES // (16 * 3072)


def test_a_cpu_with_little_memory_gives_a_quarter_of_it() -> None:
    found = sizes(cpu(64 * MIB))
    assert found.num_blocks == 16 * MIB // found.block_bytes
    assert "25% of 64MiB free" in found.reasons["kv_memory"]
    # An eighth of what the KV cache leaves.
    assert (
        found.num_host_blocks == (64 * MIB - found.num_blocks * found.block_bytes) // 8 // found.block_bytes
    )


def test_one_whole_context_may_take_up_to_half_of_the_memory() -> None:
    assert sizes(cpu(12 * MIB)).num_blocks == 128
    assert sizes(cpu(24 * MIB)).num_blocks == 128


def test_a_big_machine_is_not_eaten_up() -> None:
    found = sizes(cpu(512 * GIB), LARGE)
    assert found.num_blocks * found.block_bytes == CPU_MOST_KV_BYTES
    assert found.num_host_blocks * found.block_bytes == MOST_HOST_KV_BYTES
    # Unless one context needs more.
    huge = KvShape(context_tokens=2**18, token_bytes=2**17)
    assert sizes(cpu(512 * GIB), huge).num_blocks == 2**14


def gpu(free_bytes: int, card_bytes: int = 80 * GIB) -> MachineMemory:
    return MachineMemory("cuda", free_bytes, 64 * GIB, card_bytes)


class Card:
    """A card on which a step takes `bytes_of` (sequences, tokens); notes what was tried."""

    def __init__(self, free_bytes: int, bytes_of: Callable[[int, int], int]) -> None:
        self.machine = gpu(free_bytes)
        self.bytes_of = bytes_of
        self.tried: list[tuple[int, int]] = []

    def free_beside(self, sequences: int, tokens: int) -> int | None:
        self.tried.append((sequences, tokens))
        left = self.machine.free_bytes - self.bytes_of(sequences, tokens)
        return left if left >= 0 else None

    def sizes(self, shape: KvShape = LARGE, **wanted: Any) -> EngineSizes:
        return engine_sizes(self.machine, shape, EngineSettings(**wanted), self.free_beside)


def test_a_gpu_gives_most_of_what_the_weights_left() -> None:
    found = sizes(gpu(40 * GIB), LARGE)
    assert (found.block_tokens, found.num_blocks) == (64, int(40 * GIB * 0.85) // found.block_bytes)
    assert (found.steps.max_sequences, found.steps.max_batched_tokens) == (256, 2048)
    assert found.num_host_blocks * found.block_bytes == MOST_HOST_KV_BYTES
    assert "85% of 40GiB free on the GPU" in found.reasons["kv_memory"]


def test_a_gpu_gives_no_more_than_can_be_used_or_a_tenth_of_it() -> None:
    found = sizes(gpu(70 * GIB), max_sequences=2000)
    assert found.num_blocks == 2000 * 32
    assert found.reasons["kv_memory"] == "the 2000 whole contexts of engine.max_sequences"
    found = sizes(gpu(70 * GIB))
    assert found.num_blocks == 8 * GIB // found.block_bytes
    assert found.reasons["kv_memory"] == "10% of the GPU"
    assert sizes(gpu(GIB)).num_blocks == int(0.85 * GIB) // found.block_bytes


def test_a_step_that_does_not_fit_is_halved_until_it_leaves_room_for_a_context() -> None:
    card = Card(6 * GIB, lambda sequences, tokens: 4 * tokens * MIB)
    found = card.sizes()
    assert found.num_blocks == int(5 * GIB * 0.85) // found.block_bytes
    assert found.reasons["kv_memory"] == "85% of 5GiB free on the GPU, beside 1GiB for the largest step"
    assert card.tried == [(256, 2048), (128, 1024), (64, 512), (32, 256)], "2 and 1 GiB do not hold 4 GiB"
    assert (found.steps.max_sequences, found.steps.max_batched_tokens) == (32, 256)
    assert "max_batched_tokens 256 (halved until a step fits the GPU)" in found.lines()
    assert "max_sequences 32 (halved until a step fits the GPU)" in found.lines()


def test_a_step_is_never_lowered_below_what_is_set_and_the_refusal_has_the_numbers() -> None:
    card = Card(6 * GIB, lambda sequences, tokens: 6 * tokens * MIB)
    assert card.sizes(max_sequences=200).steps.max_batched_tokens == 200, "a half of 256 would be too few"
    with pytest.raises(CapacityRefused, match="a step of 2048 tokens in 16 sequences does not fit the 6GiB"):
        card.sizes(max_sequences=16, max_batched_tokens=2048)
    card = Card(6 * GIB, lambda sequences, tokens: 7 * GIB)
    with pytest.raises(CapacityRefused, match="a step of 16 tokens in 1 sequences does not fit the 6GiB"):
        card.sizes()
    assert card.tried[-1] == (1, 16)


def test_a_gpu_without_room_for_kv_or_for_the_kv_that_is_set_is_refused_with_the_numbers() -> None:
    card = Card(3 * GIB, lambda sequences, tokens: 0)
    with pytest.raises(CapacityRefused, match=r"holds 20864 tokens .*85% of 3GiB free on the GPU.* is 32768"):
        card.sizes()
    with pytest.raises(CapacityRefused, match=r"would take 90GiB \(engine.kv_memory\), but 3GiB are free"):
        card.sizes(kv_memory_bytes=90 * GIB)
    assert card.tried == [], "nothing is tried for what cannot be"


def test_what_is_set_counts() -> None:
    found = sizes(
        cpu(16 * GIB), kv_memory_bytes=8 * MIB, num_host_blocks=0, block_tokens=8, max_sequences=3,
        max_batched_tokens=64, context_tokens=1000,
    )  # fmt: skip
    assert (found.num_blocks, found.block_tokens, found.num_host_blocks) == (8 * MIB // 24_576, 8, 0)
    assert (found.steps.max_sequences, found.steps.max_batched_tokens) == (3, 64)
    assert found.context_tokens == 1000
    assert {name for name, reason in found.reasons.items() if "engine." in reason} == {
        "context", "kv_memory", "block_tokens", "host_kv_blocks",
    }  # fmt: skip
    # Blocks go before bytes.
    assert sizes(cpu(16 * GIB), num_blocks=200, kv_memory_bytes=8 * MIB).num_blocks == 200


def test_a_cache_smaller_than_one_context_is_refused_with_the_numbers_and_both_ways_out() -> None:
    message = refusal(cpu(16 * GIB), num_blocks=10)
    assert "holds 160 tokens (10 blocks of 16" in message
    assert "the model's context is 2048 tokens, which take 128 blocks" in message
    assert "engine.kv_blocks to at least 128 (6MiB)" in message
    assert "--context 160" in message
    assert sizes(cpu(16 * GIB), num_blocks=10, context_tokens=161).context_tokens == 161
    assert "engine.context is 162 tokens" in refusal(cpu(16 * GIB), num_blocks=10, context_tokens=162)


def test_each_way_to_say_the_size_is_told_what_to_change() -> None:
    assert "set engine.kv_memory to at least 6MiB" in refusal(cpu(16 * GIB), kv_memory_bytes=5 * MIB)
    assert "free memory, or set engine.kv_memory to at least 6MiB" in refusal(cpu(10 * MIB))
    # Not one block: there is no shorter context to offer.
    assert "--context" not in refusal(cpu(0))


def test_the_last_tokens_own_keys_need_no_place() -> None:
    assert sizes(cpu(16 * GIB), num_blocks=1, context_tokens=17).num_blocks == 1
    assert "take 2 blocks" in refusal(cpu(16 * GIB), num_blocks=1, context_tokens=18)


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert "engine.context is 4096 tokens, but the model's context is 2048" in refusal(
        cpu(16 * GIB), context_tokens=4096
    )


def test_a_step_always_has_a_token_for_each_sequence() -> None:
    def of(**wanted: Any) -> tuple[int, int]:
        found = step_sizes("cpu", EngineSettings(**wanted))
        return found.max_sequences, found.max_batched_tokens

    assert of() == (32, 512)
    assert of(max_sequences=600) == (600, 600)
    assert of(max_batched_tokens=16) == (16, 16)
    # Both are set: the engine's own check judges them.
    assert of(max_sequences=64, max_batched_tokens=32) == (64, 32)


def test_every_size_has_a_line_with_its_reason() -> None:
    lines = sizes(cpu(16 * GIB)).lines()
    assert lines[1] == "kv_memory 256MiB (more than the 32 whole contexts of engine.max_sequences)"
    assert len(lines) == 7
    assert all("(" in line for line in lines)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0B"), (5, "5B"), (2048, "2KiB"), (10 * MIB + 1, "11MiB"), (GIB, "1GiB"), (3 * GIB + 1, "3073MiB")],
)
def test_sizes_are_said_as_settings_take_them(number: int, text: str) -> None:
    assert size_text(number) == text
