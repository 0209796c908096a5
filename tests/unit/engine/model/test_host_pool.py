"""Whole blocks return from host memory bit for bit; wrong sizes are refused."""

from __future__ import annotations

import pytest
import torch

from engine.model.attention import LayerCache
from engine.model.device import queues_of
from engine.model.host_pool import HostPool, RoundTrip

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
    ),
]
BLOCKS, BLOCK_TOKENS = 11, 4


def caches(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    """Three layers, no two tensors of one shape, filled with bit patterns (not-a-numbers among them)."""
    torch.manual_seed(3)
    return [
        LayerCache(*(_noise(kv_heads, dim, dtype).to(device) for dim in dims))
        for kv_heads, dims in ((2, (8, 8)), (1, (6, 10)), (3, (4, 16)))
    ]


def _noise(kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (BLOCKS, BLOCK_TOKENS, kv_heads, dim * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


def bits(layers: list[LayerCache]) -> list[torch.Tensor]:
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return [tensor.contiguous().view(torch.uint8).cpu().clone() for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_equal_bit_for_bit_and_touches_nothing_else(device: str, dtype: torch.dtype) -> None:
    layers = caches(device, dtype)
    pool = HostPool(layers, 7, queues_of(torch.device(device)))
    before = bits(layers)
    # Neighbours, a gap, and neither in order.
    out = [(8, 3), (2, 2), (5, 6), (0, 4)]
    pool.copy_out(out)
    assert all(torch.equal(a, b) for a, b in zip(bits(layers), before, strict=True))
    pool.wait_for(range(BLOCKS))
    for layer in layers:
        layer.keys.zero_()
        layer.values.zero_()
    pool.follows_steps = True
    # To other blocks than they came from.
    back = [(6, 1), (2, 9), (4, 10), (3, 0)]
    pool.copy_in(back)
    pool.wait_for(range(BLOCKS))
    came_from = {host: device_block for device_block, host in out}
    moved = {device_block: came_from[host] for host, device_block in back}
    for after, original in zip(bits(layers), before, strict=True):
        for block in range(BLOCKS):
            expected = original[moved[block]] if block in moved else torch.zeros_like(original[block])
            assert torch.equal(after[block], expected)


def test_one_gather_and_one_copy_a_run_move_many_blocks() -> None:
    layers = caches()
    pool = HostPool(layers, BLOCKS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pool.copy_out([(block, BLOCKS - 1 - block) for block in range(BLOCKS)])
        pool.copy_in([(block, block) for block in range(BLOCKS)])
    calls = {event.key: event.count for event in profile.key_averages()}
    tensors = 2 * len(layers)
    assert calls["aten::index_select"] == tensors
    assert calls["aten::index_copy_"] == tensors
    assert calls["aten::copy_"] == 2 * tensors


def test_nothing_to_copy_is_no_error() -> None:
    layers = caches()
    before = bits(layers)
    pool = HostPool(layers, 2)
    pool.copy_out([])
    pool.copy_in([])
    assert all(torch.equal(a, b) for a, b in zip(bits(layers), before, strict=True))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(BLOCKS, 0)], f"device blocks 1 to {BLOCKS} do not lie in the pool's 0 to {BLOCKS - 1}"),
        ([(0, 3)], "host blocks 1 to 3 do not lie in the pool's 0 to 2"),
        ([(-1, 0)], "device blocks -1"),
        ([(0, -1)], "host blocks -1"),
    ],
)
def test_blocks_outside_of_the_pools_are_refused(pairs: list[tuple[int, int]], message: str) -> None:
    layers = caches()
    before = bits(layers)
    pool = HostPool(layers, 3)
    with pytest.raises(ValueError, match=message):
        pool.copy_out([(1, 1), *pairs])
    with pytest.raises(ValueError, match=message):
        pool.copy_in([(1, 1), *((host, device) for device, host in pairs)])
    assert all(torch.equal(a, b) for a, b in zip(bits(layers), before, strict=True))


def test_a_block_cannot_be_written_twice_by_one_batch() -> None:
    pool = HostPool(caches(), 3)
    with pytest.raises(ValueError, match="a host block is written twice"):
        pool.copy_out([(0, 1), (1, 1)])
    with pytest.raises(ValueError, match="a device block is written twice"):
        pool.copy_in([(0, 1), (1, 1)])


def test_sizes_that_do_not_match_are_refused() -> None:
    layers = caches()
    layers[1].values = layers[1].values[:-1]
    with pytest.raises(ValueError, match="differ in"):
        HostPool(layers, 3)
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        HostPool(caches(), 0)
    with pytest.raises(ValueError, match="without layers"):
        HostPool([], 3)


def test_the_memory_it_takes_is_that_of_its_blocks() -> None:
    elements_per_token = 2 * 16 + 1 * 16 + 3 * 20
    assert HostPool(caches(), 7).num_bytes == 7 * BLOCK_TOKENS * elements_per_token * 4


def test_what_is_read_is_what_was_copied_out_token_by_token() -> None:
    layers = caches()
    pool = HostPool(layers, 4)
    pool.copy_out([(3, 0), (1, 2)])
    tokens = BLOCK_TOKENS + 1
    entries = pool.read([2, 0], tokens)
    device = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    assert len(entries) == len(device)
    for entry, tensor in zip(entries, device, strict=True):
        expected = torch.cat([tensor[1], tensor[3]])[:tokens].reshape(-1)
        assert entry == expected.view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize(
    ("blocks", "tokens", "message"),
    [
        ([0], BLOCK_TOKENS + 1, "do not lie in 1 blocks"),
        ([0], 0, "0 tokens do not lie"),
        ([4], 1, "host blocks 4 to 4 do not lie in the pool's 0 to 3"),
        ([-1], 1, "host blocks -1 to -1"),
    ],
)
def test_what_is_not_there_is_not_read(blocks: list[int], tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostPool(caches(), 4).read(blocks, tokens)


def test_a_round_trips_cost_is_a_base_and_so_much_a_block() -> None:
    layers = caches()
    before = bits(layers)
    pool = HostPool(layers, 5)
    now_s = 0.0
    reads = 0

    def clock() -> float:
        """A copy of one block takes 3 s, one of five 7 s; the first of each takes longer."""
        nonlocal now_s, reads
        trip, is_end = divmod(reads, 2)
        reads += 1
        if is_end:
            now_s += (3.0 if trip < 3 else 7.0) + (10.0 if trip in (0, 3) else 0.0)
        return now_s

    assert pool.measure(repetitions=2, clock=clock) == RoundTrip(base_s=2.0, block_s=1.0)
    assert all(torch.equal(a, b) for a, b in zip(bits(layers), before, strict=True))
    real = HostPool(layers, 1).measure()
    assert real.base_s == 0.0
    assert real.block_s > 0.0
