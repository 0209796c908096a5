"""`TorchRunner`: executes a step with torch and samples its tokens.

All slices of a step are packed into one row and run through the model once; the paged attention finds
each sequence's context by its block table. Logits are computed only for the rows that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from engine.core.model_runner import Sampled, SequenceSlice
from engine.messages import ModelInfo
from engine.model.attention import LayerCache, LayerShape
from engine.model.device_errors import device_errors
from engine.model.forward import Forward
from engine.model.host_pool import HostPool, RoundTrip, untouched_zeros
from engine.model.length_probe.probe import LengthReadings, StateReader
from engine.model.path_report import PathReport
from engine.model.sampler import SamplingRow, sample
from kernels.batch import pack


class TorchRunner:
    """A model's forward pass and paged cache, a `ModelRunner`; made by `engine.model.loader.load_runner`."""

    def __init__(
        self,
        forward: Forward,
        info: ModelInfo,
        shapes: dict[int, LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_tokens: int,
        num_host_blocks: int = 0,
        path_reports: tuple[PathReport, ...] = (),
    ) -> None:
        self.info = info
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.path_reports = path_reports
        self.readings: LengthReadings | None = None
        self._forward = forward
        self._device = device
        self._fallback_token_id = info.eos_token_ids[0] if info.eos_token_ids else 0
        self._caches = {
            index: LayerCache(
                keys=_zeros((num_blocks, block_tokens, shape.kv_heads, shape.key_dim), dtype, device),
                values=_zeros((num_blocks, block_tokens, shape.kv_heads, shape.value_dim), dtype, device),
            )
            for index, shape in sorted(shapes.items())
        }
        self.num_host_blocks = num_host_blocks
        self._host_pool = HostPool(self._caches.values(), num_host_blocks) if num_host_blocks else None
        trip = RoundTrip(0.0, 0.0) if self._host_pool is None else self._host_pool.measure()
        self.swap_base_s, self.swap_block_s = trip.base_s, trip.block_s

    @device_errors()
    def execute(self, slices: Sequence[SequenceSlice]) -> list[Sampled | None]:
        """As `ModelRunner.execute`; also raises `ValueError` for a slice that cannot be computed."""
        if not slices:
            return []
        ends = accumulate(piece.num_tokens for piece in slices)
        rows = [end - 1 for piece, end in zip(slices, ends, strict=True) if piece.sample]
        choices = [
            SamplingRow(piece.token_ids, piece.num_prompt_tokens, piece.sampling, piece.seed)
            for piece in slices
            if piece.sample
        ]
        with torch.inference_mode():
            logits = self.forward(slices, rows)
            if not choices:
                return [None] * len(slices)
            chosen = sample(logits.float(), choices, fallback_token_id=self._fallback_token_id)
            if len(chosen) == len(slices):
                results: list[Sampled | None] = list(chosen)
            else:
                sampled = iter(chosen)
                results = [next(sampled) if piece.sample else None for piece in slices]
            if self.readings is not None:
                self.readings.note(slices, results)
        return results

    def state_reader(self) -> StateReader:
        return StateReader(self._caches, self.block_tokens)

    def forward(self, slices: Sequence[SequenceSlice], rows: list[int]) -> torch.Tensor:
        """Computes the slices' keys, values and, for the packed `rows`, the logits `[rows, vocabulary]`."""
        token_ids: list[int] = []
        for piece in slices:
            token_ids += piece.token_ids[piece.position : piece.position + piece.num_tokens]
        fed = np.array(token_ids, dtype=np.int64)
        query_lens = [piece.num_tokens for piece in slices]
        if len(fed) != sum(query_lens) or not 0 <= fed.min() <= fed.max() < self.info.vocabulary:
            raise ValueError(
                "a slice reaches past its sequence's tokens, or holds a token id outside of "
                f"0..{self.info.vocabulary - 1}"
            )
        batch = pack(
            query_lens,
            [piece.position + piece.num_tokens for piece in slices],
            [piece.block_table for piece in slices],
            block_tokens=self.block_tokens,
            device=self._device,
        )
        tables = batch.rows.tables
        if not 0 <= tables.min() <= tables.max() < self.num_blocks:
            # A compiled kernel would write there without an error.
            raise ValueError(f"a block table names blocks outside of 0..{self.num_blocks - 1}")
        return self._forward(batch, fed, np.array(rows, dtype=np.int64), self._caches)

    @device_errors()
    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._hosts().copy_out(list(pairs))

    @device_errors()
    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._hosts().copy_in(list(pairs))

    @device_errors()
    def read_kv(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        """One entry a layer: the keys of all tokens, then their values, as the cache's own numbers."""
        slots = self._slots(block_table, num_tokens)
        entries = []
        for cache in self._caches.values():
            parts = [
                tensor.view(-1, *tensor.shape[2:]).index_select(0, slots).view(-1).view(torch.uint8).cpu()
                for tensor in (cache.keys, cache.values)
            ]
            entries.append(b"".join(part.numpy().tobytes() for part in parts))
        return entries

    def read_host_kv(self, host_blocks: list[int], num_tokens: int) -> list[bytes]:
        """As `read_kv`, of what was copied out. Raises ValueError, as `HostPool.read`."""
        parts = self._hosts().read(host_blocks, num_tokens)
        return [keys + values for keys, values in zip(parts[::2], parts[1::2], strict=True)]

    @device_errors()
    def write_kv(self, block_table: list[int], num_tokens: int, kv: list[bytes]) -> None:
        """The inverse of `read_kv`. Raises `ValueError` when the sizes differ; nothing is written then."""
        slots = self._slots(block_table, num_tokens)
        blocks = slots[:: self.block_tokens] // self.block_tokens
        if len(kv) != len(self._caches):
            raise ValueError(f"keys and values of {len(kv)} layers, but the model has {len(self._caches)}")
        for entry, cache in zip(kv, self._caches.values(), strict=True):
            expected = num_tokens * (_token_bytes(cache.keys) + _token_bytes(cache.values))
            if len(entry) != expected:
                raise ValueError(f"a layer's keys and values are {len(entry)} bytes, expected {expected}")
        with torch.inference_mode():
            for entry, cache in zip(kv, self._caches.values(), strict=True):
                offset = 0
                for tensor in (cache.keys, cache.values):
                    size = num_tokens * _token_bytes(tensor)
                    part = torch.frombuffer(bytearray(entry[offset : offset + size]), dtype=tensor.dtype)
                    offset += size
                    tensor.index_fill_(0, blocks, 0)
                    flat = tensor.view(-1, *tensor.shape[2:])
                    flat.index_copy_(0, slots, part.view(num_tokens, *tensor.shape[2:]).to(tensor.device))

    def _hosts(self) -> HostPool:
        if self._host_pool is None:
            raise ValueError("no blocks move: the runner was made with num_host_blocks 0")
        return self._host_pool

    def _slots(self, block_table: list[int], num_tokens: int) -> torch.Tensor:
        if not 0 < num_tokens <= len(block_table) * self.block_tokens:
            raise ValueError(
                f"{num_tokens} tokens do not lie in {len(block_table)} blocks of {self.block_tokens}"
            )
        batch = pack(
            [num_tokens], [num_tokens], [block_table], block_tokens=self.block_tokens, device=self._device
        )
        return batch.slots


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return untouched_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _token_bytes(tensor: torch.Tensor) -> int:
    size: int = tensor.shape[2] * tensor.shape[3] * tensor.element_size()
    return size
