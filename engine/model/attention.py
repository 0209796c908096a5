"""Attention function of transformers models over the paged cache.

One function is registered with transformers' attention interface, and no mask function, so that no mask is
built. The step's context (batch, caches, kernel) comes from a context variable, because some architectures
drop keyword arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface

from kernels.batch import PackedBatch
from kernels.dispatch import AttentionKernel
from kernels.machine import LayerNeeds
from kernels.reference import causal_mask, dense_attention

ATTENTION_NAME = "fairgate_paged"

_ABSENT: Final = object()


class AttentionUnsupported(RuntimeError):
    """The model needs an attention that a paged causal cache cannot compute."""


class AttentionContext(Protocol):
    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """`query` `[tokens, heads, key_dim]`, `key` and `value` `[tokens, kv_heads, dim]` of one layer;
        returns `[tokens, heads, value_dim]`."""
        ...


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of what one layer keeps for each token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(slots=True)
class LayerCache:
    """One layer's keys and values, each `[blocks, block_tokens, kv_heads, dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class PagedContext:
    """Writes a step's keys and values to the paged cache, then attends to it."""

    batch: PackedBatch
    caches: dict[int, LayerCache]
    kernel: AttentionKernel

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        cache = self.caches[layer_index]
        self.kernel.write_kv(cache.keys, cache.values, key, value, self.batch)
        return self.kernel.attend(
            query,
            cache.keys,
            cache.values,
            self.batch,
            scale=options.scale,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )


class ProbeContext:
    """Attends to one sequence without a cache; records each layer's shape and options, and each kind of
    layer once."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.options: dict[int, AttentionOptions] = {}
        self.kinds: dict[LayerNeeds, None] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        shape = LayerShape(kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2])
        if self.shapes.setdefault(layer_index, shape) != shape:
            raise AttentionUnsupported(f"layer {layer_index} attends with keys of different shapes")
        self.options[layer_index] = options
        window, softcap, sinks = options.sliding_window, options.softcap, options.sinks is not None
        dims = (shape.kv_heads, shape.key_dim, shape.value_dim)
        self.kinds[LayerNeeds(query.shape[1], *dims, window, softcap, sinks)] = None
        tokens = query.shape[0]
        attended = dense_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            causal_mask(tokens, tokens, options.sliding_window, query.device),
            scale=options.scale,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        return attended[0].transpose(0, 1)


_current: ContextVar[AttentionContext | None] = ContextVar("fairgate_attention", default=None)


@contextmanager
def attending(context: AttentionContext) -> Iterator[None]:
    """Context manager: forward passes inside attend with `context`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def paged_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: Any = _ABSENT,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function, with its parameter names: `query` `[1, heads, tokens, dim]` -> `[1,
    tokens, heads, dim]`. `sliding_window` None: full attention; not passed: the module's own."""
    context = _current.get()
    if context is None:
        raise RuntimeError(f"{ATTENTION_NAME} attention was called outside of a step")
    if attention_mask is not None:
        raise AttentionUnsupported("the model makes an attention mask of its own")
    if position_bias is not None:
        raise AttentionUnsupported("the model adds a position bias to its attention scores")
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise AttentionUnsupported("the model attends to later tokens (it is not causal)")
    layer_index = getattr(module, "layer_idx", None)
    if layer_index is None:
        raise AttentionUnsupported(f"{type(module).__name__} does not know which layer it is")
    if sliding_window is _ABSENT:
        sliding_window = getattr(module, "sliding_window", None)
    attended = context.attend(
        layer_index,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(
            query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux
        ),
    )
    return attended[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
