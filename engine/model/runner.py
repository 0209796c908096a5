"""`TorchRunner`: executes steps with torch and chooses their tokens.

All slices of a step are packed into one row and run through the model once; the paged attention finds each
sequence's context by its block table. Logits are computed only for the rows that choose a token. A launched
step asks nothing of the device: `collect` waits for one event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from engine.core.model_runner import Sampled, StepOutput, StepWork
from engine.messages import ModelInfo
from engine.model.attention import LayerCache, LayerShape
from engine.model.device import DeviceEvent, DeviceQueues, device_errors, mark, queues_of
from engine.model.forward import Forward
from engine.model.graphs import CapturedStep, StepGraphs
from engine.model.host_pool import HostPool, RoundTrip, untouched_zeros
from engine.model.length_probe.probe import LaunchedReadings, LengthReadings, StateReader
from engine.model.path_report import PathReport
from engine.model.rows import DeviceRows
from engine.model.sampler import Chosen, read
from engine.model.staging import StagedStep, on_host
from kernels.batch import pack
from kernels.torch_sdpa import sort_key

DEFAULT_ROWS = 64


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way through the device."""

    samples: list[bool]
    order: list[int] | None
    """Places of its slices in the work that was asked for; None: they are the same."""
    staged: StagedStep
    logits: torch.Tensor | None
    """While its tokens are still to be chosen."""
    captured: CapturedStep | None
    events: list[DeviceEvent | None]
    """Where what was launched of it begins and ends, in pairs."""
    chosen: Chosen | None = None
    readings: LaunchedReadings | None = None


def _reordered(work: StepWork, order: list[int]) -> StepWork:
    return StepWork(
        rows=[work.rows[place] for place in order],
        positions=[work.positions[place] for place in order],
        num_tokens=[work.num_tokens[place] for place in order],
        samples=[work.samples[place] for place in order],
        token_ids=[work.token_ids[place] for place in order],
        starts=work.starts,
        blocks=work.blocks,
        awaits_masks=work.awaits_masks,
    )


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
        num_rows: int = DEFAULT_ROWS,
        queues: DeviceQueues | None = None,
    ) -> None:
        """`num_rows`: most sequences that run; `queues`: None takes the device's own."""
        self.info = info
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.path_reports: tuple[PathReport, ...] = ()
        self.readings: LengthReadings | None = None
        self._forward = forward
        self._takes_order = not forward.captures  # what can be captured computes each sequence by itself
        self._device = device
        self._fallback_token_id = info.eos_token_ids[0] if info.eos_token_ids else 0
        self._caches = {
            index: LayerCache(
                keys=_zeros((num_blocks, block_tokens, shape.kv_heads, shape.key_dim), dtype, device),
                values=_zeros((num_blocks, block_tokens, shape.kv_heads, shape.value_dim), dtype, device),
            )
            for index, shape in sorted(shapes.items())
        }
        self.num_rows = num_rows
        self.graph_sizes: tuple[int, ...] = ()
        self.mixed_sizes: tuple[int, ...] = ()
        self._rows = DeviceRows(
            num_rows,
            vocabulary=info.vocabulary,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            context_tokens=info.context_tokens,
            device=device,
            tile_tokens=forward.tile_tokens,
            lists_fresh=not forward.captures,
        )
        self._graphs: StepGraphs | None = None
        self._queues = queues or queues_of(device)
        self.steps_ahead = 0 if self._queues is None else 1
        self.num_host_blocks = num_host_blocks
        self._host_pool = (
            HostPool(self._caches.values(), num_host_blocks, self._queues) if num_host_blocks else None
        )
        trip = RoundTrip(0.0, 0.0) if self._host_pool is None else self._host_pool.measure()
        self.swap_base_s, self.swap_block_s = trip.base_s, trip.block_s

    def capture(self, max_tokens: int) -> list[PathReport]:
        """Captures steps of up to `max_tokens` tokens where the device and the forward pass can; on a CPU
        there is nothing to say. Before the first step. Raises `DeviceLost`."""
        if self._queues is None:
            return []
        with device_errors(), torch.inference_mode():
            graphs = StepGraphs(
                self._forward, self._rows, self._caches, self._queues, self._fallback_token_id, max_tokens
            )
            reports = graphs.capture()
        if graphs.decode_sizes:
            self._graphs = graphs
            self.graph_sizes, self.mixed_sizes = graphs.decode_sizes, graphs.mixed_sizes
        return reports

    def launch(self, work: StepWork) -> LaunchedStep:
        """As `ModelRunner.launch`; also raises `ValueError` for a slice that cannot be computed."""
        order = self._order(work) if self._takes_order else None
        if order is not None:
            work = _reordered(work, order)
        with device_errors(), torch.inference_mode(), self._using(block for _, _, block in work.blocks):
            # After the wait for copies: that is no time in which the device computes for the step. Copies
            # beside it may slow it down, and that counts.
            began = self._mark()
            captured = None if self._graphs is None else self._graphs.fitting(work)
            if captured is None or self._graphs is None:
                staged = self._rows.stage(work)
                logits = self._forward(staged.batch, staged.token_ids, staged.last, self._caches)
            else:
                staged, logits = self._graphs.launch(captured, work)
            step = LaunchedStep(work.samples, order, staged, logits, captured, [began])
            if not work.awaits_masks:
                self._choose(step, {})
            if staged.sampling and self.readings is not None:
                step.readings = self.readings.launch(work, staged, self._rows)
        step.events.append(self._mark())
        return step

    def choose(self, ticket: LaunchedStep, masks: Mapping[int, np.ndarray]) -> None:
        """As `ModelRunner.choose`; also raises `ValueError` for a mask of another row or size."""
        with device_errors(), torch.inference_mode(), self._using(()):
            # Marked anew: the device may have waited for the masks.
            ticket.events.append(self._mark())
            self._choose(ticket, masks)
            ticket.events.append(self._mark())

    def collect(self, ticket: LaunchedStep) -> StepOutput:
        """As `ModelRunner.collect`."""
        device_s = None
        with device_errors():
            if events := [event for event in ticket.events if event is not None]:
                events[-1].synchronize()
                pairs = zip(events[::2], events[1::2], strict=True)
                device_s = sum(began.elapsed_time(ended) for began, ended in pairs) / 1e3
        results: list[Sampled | None] = []
        if ticket.chosen is not None:
            results += read(ticket.chosen, [params.logprobs for params in ticket.staged.sampling])
            if ticket.readings is not None and self.readings is not None:
                self.readings.note(ticket.readings, results)
        if len(results) < len(ticket.samples):
            sampled = iter(results)
            results = [next(sampled) if samples else None for samples in ticket.samples]
        if ticket.order is not None:
            back: list[Sampled | None] = [None] * len(results)
            for place, result in zip(ticket.order, results, strict=True):
                back[place] = result
            results = back
        return StepOutput(results, device_s)

    def _mark(self) -> DeviceEvent | None:
        """An event after what was launched so far."""
        return None if self._queues is None else mark(self._queues)

    @contextmanager
    def _using(self, blocks: Iterable[int]) -> Iterator[None]:
        """Launches what is inside after the copies of these blocks; if it fails, later copies wait for it."""
        pool = self._host_pool
        if pool is not None:
            pool.wait_for(blocks)
        try:
            yield
        except Exception:
            # Part of it may still run, and no step in flight keeps its blocks from being used again.
            if pool is not None:
                pool.follows_steps = True
            raise

    def _choose(self, step: LaunchedStep, masks: Mapping[int, np.ndarray]) -> None:
        """Chooses the tokens, a launch of its own after the forward pass, and puts them into their rows."""
        staged, logits, step.logits = step.staged, step.logits, None
        if not staged.sampling or logits is None:
            return
        self._rows.set_masks(masks)
        if masks:
            staged.wants = replace(staged.wants, mask=True)
        chosen = None
        if step.captured is not None and self._graphs is not None:
            chosen = self._graphs.choose(step.captured, staged)
        if chosen is None:
            chosen = self._rows.choose(staged, logits, self._fallback_token_id)
        count = len(staged.sampling)  # a captured choice has rows of padding beyond
        parts = {name: getattr(chosen, name) for name in Chosen.__slots__}
        step.chosen = Chosen(
            **{name: on_host(part[:count]) for name, part in parts.items() if part is not None}
        )

    def _order(self, work: StepWork) -> list[int] | None:
        """Decodes of similar contexts beside each other, prompts last; None: they are so already."""
        keys = [
            sort_key(count, position + count, self.block_tokens)
            for position, count in zip(work.positions, work.num_tokens, strict=True)
        ]
        if all(before <= after for before, after in pairwise(keys)):
            return None
        return sorted(range(len(keys)), key=keys.__getitem__)

    def state_reader(self) -> StateReader:
        return StateReader(self._caches, self.block_tokens)

    def logits(self, work: StepWork, rows: list[int]) -> torch.Tensor:
        """Computes a step's keys, values and, for the packed `rows`, the logits `[rows, vocabulary]`."""
        with torch.inference_mode():
            staged = self._rows.stage(work)
            wanted = torch.tensor(rows, dtype=torch.int64).to(self._device)
            return self._forward(staged.batch, staged.token_ids, wanted, self._caches)

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
        with self._using(block_table):
            for cache in self._caches.values():
                parts = [
                    tensor.view(-1, *tensor.shape[2:]).index_select(0, slots).view(-1).view(torch.uint8).cpu()
                    for tensor in (cache.keys, cache.values)
                ]
                entries.append(b"".join(part.numpy().tobytes() for part in parts))
        return entries

    @device_errors()
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
        with torch.inference_mode(), self._using(block_table):
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
