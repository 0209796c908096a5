"""`HostPool`: KV blocks in host memory, and the copies to and from the device.

One tensor for each of the cache's, laid out like it, `[blocks, block_tokens, kv_heads, dim]`. All of a step's
blocks are copied together: gathered (scattered) on the device once a layer and tensor, and each run of
neighbouring host blocks is one copy.

Where the device has a queue of copies, neither the host nor a step waits for them by itself. Copies are done
in the order of the calls; `wait_for` orders what uses their blocks on the device, `read` waits on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from engine.model.attention import LayerCache
from engine.model.device import DeviceEvent, DeviceQueues, mark

ALIGNMENT_BYTES = 64
"""Of a cache line; torch's own tensors begin at one, too."""


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory that take memory only where they are written: a pool costs what is used of it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    # torch.zeros writes the zeros; numpy leaves that to the kernel.
    memory = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8))
    start = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[start : start + num_bytes].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Time of copying blocks to host memory and back: `base_s + blocks * block_s`."""

    base_s: float
    block_s: float


@dataclass(frozen=True, slots=True)
class PendingCopies:
    """Copies on their way; `ended` is the event after them."""

    ended: DeviceEvent
    blocks: frozenset[int]
    """Of the device."""


class HostPool:
    """Host memory for `num_blocks` blocks of every layer. `engine.kv.host` tracks their use."""

    def __init__(
        self, caches: Iterable[LayerCache], num_blocks: int, queues: DeviceQueues | None = None
    ) -> None:
        """`caches`: the device's, one for each layer. Memory of a CUDA device's pool is pinned. Without
        `queues` copies are done when the call returns. Raises ValueError when there is nothing to allocate,
        or when the layers differ in their blocks."""
        self._device = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        if not self._device:
            raise ValueError("a model without layers has no KV to keep")
        shapes = {tuple(tensor.shape[:2]) for tensor in self._device}
        if len(shapes) > 1:
            raise ValueError(f"the layers' caches differ in [blocks, block_tokens]: {sorted(shapes)}")
        self.follows_steps = False
        """The next copies in wait for all that was launched, too: part of it belongs to no step that the
        engine waits for before it uses the blocks again (a launch that failed, blocks that were written)."""
        self._queues = queues
        self._pending: list[PendingCopies] = []
        self._last: DeviceEvent | None = None
        self.num_blocks = num_blocks
        self.num_device_blocks = self._device[0].shape[0]
        self._host = [
            torch.zeros(shape, dtype=tensor.dtype, pin_memory=True)
            if tensor.device.type == "cuda"
            else untouched_zeros(shape, tensor.dtype)
            for tensor in self._device
            for shape in ((num_blocks, *tensor.shape[1:]),)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._host)

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, each pair `(device block, host block)`, to host memory, after all that
        was launched. Raises ValueError for a block outside of the pools or a host block named twice; nothing
        is copied."""
        # In the host's order: neighbours there are one copy.
        pairs = sorted(pairs, key=lambda pair: pair[1])
        device, host = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if not self._check(device, host, "host", host):
            return
        with torch.inference_mode(), self._copying(device, follows_steps=True) as in_background:
            index = self._index(device)
            for source, target in zip(self._device, self._host, strict=True):
                gathered = source.index_select(0, index)
                for start, end, first in _runs(host):
                    target[first : first + end - start].copy_(gathered[start:end], non_blocking=in_background)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole `(host block, device block)` pairs back, while steps run that do not name the device
        blocks. Raises ValueError as `copy_out` does."""
        pairs = sorted(pairs)
        host, device = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if not self._check(device, host, "device", device):
            return
        with torch.inference_mode(), self._copying(device, follows_steps=self.follows_steps) as in_background:
            index = self._index(device)
            for source, target in zip(self._host, self._device, strict=True):
                gathered = torch.empty(
                    (len(pairs), *target.shape[1:]), dtype=target.dtype, device=target.device
                )
                for start, end, first in _runs(host):
                    part = source[first : first + end - start]
                    gathered[start:end].copy_(part, non_blocking=in_background)
                target.index_copy_(0, index, gathered)

    def wait_for(self, blocks: Iterable[int]) -> None:
        """What is launched from now on waits for the copies of these device blocks, and for no others."""
        while self._pending and self._pending[0].ended.query():
            del self._pending[0]
        if self._queues is None or not self._pending:
            return
        blocks = frozenset(blocks)
        for copies in reversed(self._pending):
            if not blocks.isdisjoint(copies.blocks):
                # Those before are done earlier.
                self._queues.wait_for(copies.ended)
                return

    def read(self, blocks: Sequence[int], num_tokens: int) -> list[bytes]:
        """The first `num_tokens` tokens of host blocks: an entry a tensor, layer by layer keys, then values.
        Raises ValueError for a block outside of the pool, or for too many tokens."""
        block_tokens = self._host[0].shape[1]
        if not 0 < num_tokens <= len(blocks) * block_tokens:
            raise ValueError(f"{num_tokens} tokens do not lie in {len(blocks)} blocks of {block_tokens}")
        self._check_range("host", blocks, self.num_blocks)
        self._finish()
        index = torch.tensor(blocks, dtype=torch.int64)
        entries = []
        for tensor in self._host:
            tokens = tensor.index_select(0, index).flatten(0, 1)[:num_tokens]
            entries.append(tokens.reshape(-1).view(torch.uint8).numpy().tobytes())
        return entries

    def measure(
        self, *, blocks: int = 32, repetitions: int = 5, clock: Callable[[], float] = perf_counter
    ) -> RoundTrip:
        """Times the quickest round trips of one and of several blocks. At load: overwrites host blocks."""
        most = min(blocks, self.num_blocks, self.num_device_blocks)
        one_s = self._quickest_s(1, repetitions, clock)
        if most == 1:
            return RoundTrip(base_s=0.0, block_s=one_s)
        block_s = max(0.0, self._quickest_s(most, repetitions, clock) - one_s) / (most - 1)
        return RoundTrip(base_s=max(0.0, one_s - block_s), block_s=block_s)

    def _quickest_s(self, blocks: int, repetitions: int, clock: Callable[[], float]) -> float:
        pairs = [(block, block) for block in range(blocks)]
        times = []
        # The first round trip touches the memory for the first time.
        for _ in range(repetitions + 1):
            started_s = clock()
            self.copy_out(pairs)
            self.copy_in(pairs)
            self._finish()
            times.append(clock() - started_s)
        return min(times[1:])

    def _check(self, device: list[int], host: list[int], target: str, targets: list[int]) -> bool:
        """Validates pairs; False: nothing to copy."""
        if not device:
            return False
        for name, blocks, limit in (
            ("device", device, self.num_device_blocks),
            ("host", host, self.num_blocks),
        ):
            self._check_range(name, blocks, limit)
        if len(set(targets)) < len(targets):
            raise ValueError(f"a {target} block is written twice by the same copies")
        return True

    def _check_range(self, name: str, blocks: Sequence[int], limit: int) -> None:
        if min(blocks) < 0 or max(blocks) >= limit:
            raise ValueError(
                f"{name} blocks {min(blocks)} to {max(blocks)} do not lie in the pool's 0 to {limit - 1}"
            )

    @contextmanager
    def _copying(self, blocks: list[int], *, follows_steps: bool) -> Iterator[bool]:
        """Puts copies of these device blocks into the queue of copies; false: there is none."""
        if self._queues is None:
            yield False
            return
        steps = mark(self._queues) if follows_steps else None
        with self._queues.copying():
            if steps is not None:
                self._queues.wait_for(steps)
                self.follows_steps = False
            try:
                yield True
            finally:
                # Also after an error: some copies may be on their way.
                self._last = mark(self._queues)
                self._pending.append(PendingCopies(self._last, frozenset(blocks)))

    def _finish(self) -> None:
        """Waits on the host until all copies are done."""
        if self._last is not None:
            self._last.synchronize()

    def _index(self, blocks: list[int]) -> torch.Tensor:
        device = self._device[0].device
        index = torch.tensor(blocks, dtype=torch.int64, pin_memory=device.type == "cuda")
        return index.to(device, non_blocking=self._queues is not None)


def _runs(blocks: list[int]) -> list[tuple[int, int, int]]:
    """Neighbours in sorted `blocks`: (start, end) in the list, and the first block of each run."""
    runs: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        start = runs[-1][0] if runs else 0
        if runs and block == runs[-1][2] + index - start:
            runs[-1] = (start, index + 1, runs[-1][2])
        else:
            runs.append((index, index + 1, block))
    return runs
