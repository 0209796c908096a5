"""Steps over a poisoned paged cache, and the Triton attention kernels beside their twins on them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.configurations import tile_tokens

NAN = float("nan")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 21},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 9, "softcap": 1.5, "sinks": True},
}


@dataclass(frozen=True)
class Step:
    """What the operators take. NaN: every slot that no sequence has, block 0 among them, and every number of
    the merged rows that is no query's. The tables are shuffled, and end in a -1 that is not theirs."""

    places: tuple[Tensor, ...]
    tiles: Tensor

    def beside_twin(
        self, name: str, *, window: int = 0, softcap: float = 0.0, sinks: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What the kernel and its twin write to a poisoned output, whose rows lie apart."""
        query, _, value_cache = self.places[:3]
        tokens, heads = query.shape[:2]
        tiles = (self.tiles,) if name == "varlen_attention" else ()
        logits = torch.linspace(-2, 3, heads) if sinks else None
        outputs = []
        for function in (getattr(import_module(f"kernels.gpu.{name}"), name), getattr(reference, name)):
            out = torch.full((tokens, heads + 1, value_cache.shape[3]), NAN, dtype=query.dtype)
            function(*self.places, *tiles, out[:, :heads], 0.2, window, softcap, logits)
            assert out[:, heads:].isnan().all()
            outputs.append(out[:, :heads])
        return outputs[0], outputs[1]

    def assert_as_twin(self, name: str, **options: Any) -> None:
        """A row that is not written stays NaN in both."""
        got, expected = self.beside_twin(name, **options)
        tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def make_step(
    lens: list[tuple[int, int]], *, group: int, head_dim: int, block_tokens: int, dtype: torch.dtype,
    kv_heads: int = 2, value_dim: int | None = None, most_in_tile: int = 1 << 30,
) -> Step:  # fmt: skip
    """`lens`: tokens computed now, and tokens of context, of each sequence; a context of 0: padding."""
    generator = torch.Generator().manual_seed(len(lens) + head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    needed = [-(-context // block_tokens) for _, context in lens]
    order = (1 + torch.randperm(sum(needed) + 2, generator=generator)).tolist()
    caches = [
        torch.full((len(order) + 1, block_tokens, kv_heads, dim), NAN, dtype=dtype)
        for dim in (head_dim, value_dim or head_dim)
    ]
    tables: list[int] = []
    starts, contexts, tiles = [], [], []
    at_once = min(most_in_tile, tile_tokens(group, max(head_dim, value_dim or 0)))
    firsts = accumulate((new for new, _ in lens), initial=0)
    for (new, context), blocks, first in zip(lens, needed, firsts, strict=False):
        table = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int64)
        positions = torch.arange(context)
        for cache in caches:
            written = random(context, *cache.shape[2:])
            cache[table[positions // block_tokens], positions % block_tokens] = written
        starts += [len(tables)] * new
        tables += [*table.tolist(), -1]
        contexts += range(context - new + 1, context + 1) if context else [0]
        tiles += [(first + place, min(at_once, new - place)) for place in range(0, new, at_once) if context]
    heads = group * kv_heads
    merged = torch.full((len(contexts), (heads + 2) * head_dim), NAN, dtype=dtype)
    query = merged[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    query.copy_(random(*query.shape))
    indices = [torch.tensor(each, dtype=torch.int64) for each in (tables, starts, contexts)]
    return Step((query, *caches, *indices), torch.tensor([*tiles, (0, 0)], dtype=torch.int64))
