"""A Llama-like decoder as one compiled call per step.

For the plain pre-norm decoders (`engine.model.family`): merged query/key/value and gate/up products over
weights laid out in panels (`kernels.cpu.products`), float32 activations in kept buffers, and in the last
layer only the rows whose logits are wanted (`kernels.cpu.decoder`). transformers' forward pass is its twin:
a model is run this way only if it gives the twin's logits at load.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.model.attention import AttentionOptions, LayerCache, LayerShape
from engine.model.cpu.packed_linear import (
    MAX_DIFFERENCE,
    NEGLIGIBLE_S,
    PROBED_ROWS,
    TIMED_ROWS,
    PackedLinear,
    fastest_s,
)
from engine.model.family import merged, merged_bias, refuse_unsupported, rotary_angles
from engine.model.path_report import Unsupported
from kernels.batch import PackedBatch, array_of
from kernels.cpu.jit import use_threads

FIRST_POSITIONS = 1024
"""Positions whose angles are computed at first; the table doubles as contexts grow."""
FIRST_BUFFER_ROWS = 64
MAX_SLOWDOWN = 1.2
"""Of a product by panels against torch's best; refused only if slower by `NEGLIGIBLE_S` as well."""
TIMINGS = 4
"""Most timings of both before a product is refused; the fastest count: a busy machine may delay some."""

Array = Any


class Panels:
    """The merged linear layers of one kind, of all decoder layers, in panels; `restore` undoes it."""

    def __init__(self, layers: list[list[torch.nn.Linear]], *, is_shared: bool = False) -> None:
        """`layers[i]` share their input. Takes their weights, unless `is_shared`: another user has them."""
        from kernels.cpu.products import PANEL, lay_out, padded

        self._layers = layers
        self._is_shared = is_shared
        self.inputs = layers[0][0].in_features
        self.outputs = sum(module.out_features for module in layers[0])
        self.width = padded(self.outputs)
        shape = (len(layers), self.width // PANEL, self.inputs, PANEL)
        dtype = array_of(layers[0][0].weight.data[:0]).dtype
        self.array: Array = np.empty(shape, dtype=dtype)
        self.bias: Array = np.zeros((len(layers), self.width), dtype=np.float32)
        for index, modules in enumerate(layers):
            self.array[index] = lay_out(array_of(merged(modules)))
            bias = merged_bias(modules)
            if bias is not None:
                self.bias[index, : self.outputs] = bias.float().numpy()
            if not is_shared:
                for module in modules:
                    module.weight.data = module.weight.new_empty(0)

    def restore(self) -> None:
        from kernels.cpu.products import plain_weight

        if self._is_shared:
            return
        for index, modules in enumerate(self._layers):
            whole = torch.from_numpy(plain_weight(self.array[index], self.outputs))
            start = 0
            for module in modules:
                part = whole[start : start + module.out_features]
                module.weight.data = part.view(torch.bfloat16) if part.dtype == torch.uint16 else part
                start += module.out_features


_times: dict[tuple[int, int, torch.dtype, int], tuple[float, float]] = {}


def probe_panels(outputs: int, inputs: int, dtype: torch.dtype) -> float:
    """Tries a product by panels on random numbers; returns its speedup over torch's best, cached. Raises
    `Unsupported` when it differs from the plain product, depends on the number of rows, or is slower."""
    key = (outputs, inputs, dtype, torch.get_num_threads())
    if key not in _times:
        _times[key] = _probe(outputs, inputs, dtype)
    ours_s, theirs_s = _times[key]
    if _is_slow(ours_s, theirs_s):
        slowdown = ours_s / theirs_s
        raise Unsupported(
            f"products with a {outputs} x {inputs} weight would take {slowdown:.1f} times as long"
        )
    return theirs_s / ours_s


def _is_slow(ours_s: float, theirs_s: float) -> bool:
    return ours_s > max(MAX_SLOWDOWN * theirs_s, theirs_s + NEGLIGIBLE_S)


def _probe(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds for one product with each of `TIMED_ROWS`, by panels and by torch's best."""
    from kernels.cpu.products import lay_out, multiply, padded

    if dtype not in MAX_DIFFERENCE:
        raise Unsupported(f"{str(dtype).removeprefix('torch.')} weights are not laid out in panels")
    workers = use_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
    rows = torch.randn(max(PROBED_ROWS), inputs, generator=generator)
    panels, bias = lay_out(array_of(weight)), np.zeros(padded(outputs), dtype=np.float32)

    def product(count: int) -> Array:
        whole = np.empty((count, padded(outputs)), dtype=np.float32)
        multiply(rows[:count].numpy(), panels, bias, whole, workers)
        return whole[:, :outputs]

    whole = product(len(rows))
    expected = torch.nn.functional.linear(rows, weight.float())
    difference = float((torch.from_numpy(whole) - expected).norm() / expected.norm())
    if not difference <= MAX_DIFFERENCE[torch.float32]:
        raise Unsupported(f"products by panels differ from plain ones by {difference:.1e}")
    if not all(np.array_equal(product(count), whole[:count]) for count in PROBED_ROWS):
        raise Unsupported("products by panels depend on the number of rows")
    with torch.inference_mode():
        calls: list[Any] = [partial(torch.nn.functional.linear, weight=weight)]
        # A private call of torch's: see `engine.model.cpu.packed_linear`.
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            calls.append(PackedLinear(weight, None, pad_single=False).forward)
        ours, theirs = dict.fromkeys(TIMED_ROWS, math.inf), dict.fromkeys(TIMED_ROWS, math.inf)
        for _ in range(TIMINGS):
            for count in TIMED_ROWS:
                part = rows[:count].to(dtype)
                ours[count] = min(ours[count], fastest_s(partial(product, count)))
                theirs[count] = min(theirs[count], *(fastest_s(partial(call, part)) for call in calls))
            ours_s, theirs_s = math.fsum(ours.values()), math.fsum(theirs.values())
            if not _is_slow(ours_s, theirs_s):
                break
    return ours_s, theirs_s


class Angles:
    """Cosines and sines of the first positions, `[positions, key_dim / 2]`, by the model's own module."""

    def __init__(self, rotary: Any) -> None:
        """Raises `Unsupported` for rotary positions that are laid out in another way."""
        self._rotary = rotary
        self.cosines: Array
        self.sines: Array
        self._compute(FIRST_POSITIONS)

    def cover(self, positions: int) -> bool:
        """Extends the table if it has fewer than `positions`; returns whether it did."""
        if positions <= len(self.cosines):
            return False
        self._compute(2 * positions)
        return True

    def _compute(self, positions: int) -> None:
        cosines, sines = rotary_angles(self._rotary, positions, torch.device("cpu"))
        self.cosines, self.sines = cosines.numpy(), sines.numpy()


class CompiledForward:
    """Implements `engine.model.forward.Forward` for `FAMILY`, in float32 and bfloat16 on a CPU."""

    name, tile_tokens, captures = "compiled", 0, False

    def __init__(
        self, model: Any, shapes: dict[int, LayerShape], options: dict[int, AttentionOptions]
    ) -> None:
        """Takes the weights over until `restore`. Raises `Unsupported`, with the model left as it was."""
        from kernels.cpu import decoder as numba_decoder  # Numba may be missing: see `kernels.dispatch`
        from kernels.cpu.attention import NO_WINDOW

        refuse_unsupported(model, shapes, options)
        decoder = model.model
        mlp = decoder.layers[0].mlp
        self.speedup = probe_panels(2 * mlp.gate_proj.out_features, mlp.gate_proj.in_features, model.dtype)
        """Of a product over torch's best."""
        self._angles = Angles(decoder.rotary_emb)
        self._numba = numba_decoder
        self._vocabulary = model.lm_head.out_features
        attentions = [layer.self_attn for layer in decoder.layers]
        mlps = [layer.mlp for layer in decoder.layers]
        self._heads = attentions[0].q_proj.out_features // shapes[0].key_dim
        tied = model.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
        self._embedding = array_of(decoder.embed_tokens.weight.data)
        self._qkv = Panels(
            [[attention.q_proj, attention.k_proj, attention.v_proj] for attention in attentions]
        )
        self._output = Panels([[attention.o_proj] for attention in attentions])
        self._gate_and_up = Panels([[mlp.gate_proj, mlp.up_proj] for mlp in mlps])
        self._down = Panels([[mlp.down_proj] for mlp in mlps])
        self._head = Panels([[model.lm_head]], is_shared=tied)
        head_norms = [
            [getattr(attention, name, None) for attention in attentions] for name in ("q_norm", "k_norm")
        ]
        windows = [options[index].sliding_window for index in range(len(attentions))]
        self._weights = numba_decoder.DecoderWeights(
            qkv=self._qkv.array,
            qkv_bias=self._qkv.bias,
            output=self._output.array,
            output_bias=self._output.bias,
            gate_and_up=self._gate_and_up.array,
            gate_and_up_bias=self._gate_and_up.bias,
            down=self._down.array,
            down_bias=self._down.bias,
            norm=_stacked([layer.input_layernorm for layer in decoder.layers]),
            norm_epsilon=_epsilons([layer.input_layernorm for layer in decoder.layers]),
            mlp_norm=_stacked([layer.post_attention_layernorm for layer in decoder.layers]),
            mlp_norm_epsilon=_epsilons([layer.post_attention_layernorm for layer in decoder.layers]),
            query_norm=_stacked(head_norms[0]),
            key_norm=_stacked(head_norms[1]),
            head_epsilon=_epsilons(head_norms[0]),
            scale=np.array([options[index].scale for index in range(len(attentions))], dtype=np.float32),
            window=np.array([NO_WINDOW if window is None else window for window in windows], dtype=np.int64),
        )
        self._norm = decoder.norm
        self._value_width = self._heads * shapes[0].value_dim
        self._buffers: Any = None
        self._caches: tuple[Any, Any] = (None, None)
        self._ends: Any = None

    @property
    def products(self) -> list[Panels]:
        return [self._qkv, self._output, self._gate_and_up, self._down, self._head]

    def restore(self) -> None:
        for product in self.products:
            product.restore()

    def reserve(self, tokens: int) -> None:
        pass

    def __call__(
        self,
        batch: PackedBatch,
        token_ids: torch.Tensor,
        rows: torch.Tensor | None,
        caches: dict[int, LayerCache],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        wanted = np.arange(batch.num_tokens) if rows is None else rows.numpy()
        logits = np.empty((len(wanted), self._head.width), dtype=np.float32)
        if self._angles.cover(batch.rows.most_context) or self._ends is None:
            self._ends = self._numba.Ends(
                self._embedding,
                self._norm.weight.data.float().numpy(),
                np.float32(self._norm.variance_epsilon),
                self._head.array[0],
                self._head.bias[0],
                self._angles.cosines,
                self._angles.sines,
            )
        if self._buffers is None or batch.num_tokens > len(self._buffers.residual):
            self._buffers = self._allocate(batch.num_tokens)
        if self._caches[0] is not caches:
            self._caches = (caches, self._located(caches))
        self._numba.run(
            self._weights, self._ends, self._buffers, self._caches[1], token_ids.numpy(), batch.rows, wanted,
            logits, heads=self._heads, workers=use_threads(torch.get_num_threads()),
        )  # fmt: skip
        return torch.from_numpy(logits)[:, : self._vocabulary]

    def _located(self, caches: dict[int, LayerCache]) -> Any:
        layers = [caches[index] for index in range(len(caches))]
        return self._numba.Caches(
            np.array([cache.keys.data_ptr() for cache in layers], dtype=np.int64),
            np.array([cache.values.data_ptr() for cache in layers], dtype=np.int64),
            array_of(layers[0].keys),
            array_of(layers[0].values),
        )

    def _allocate(self, rows: int) -> Any:
        """Allocates buffers, kept from step to step: the system would have to clear fresh memory."""
        known = 0 if self._buffers is None else len(self._buffers.residual)
        rows = max(rows, 2 * known, FIRST_BUFFER_ROWS)
        widths = (
            self._qkv.inputs, self._qkv.inputs, self._qkv.width, self._value_width, self._output.width,
            self._gate_and_up.width, self._down.inputs,
        )  # fmt: skip
        return self._numba.Buffers(*(np.zeros((rows, width), dtype=np.float32) for width in widths))


def _stacked(norms: list[Any]) -> Array:
    """The weights of one norm of each layer; of width 0 where there are none."""
    rows = [
        np.zeros(0, dtype=np.float32) if norm is None else norm.weight.data.float().numpy() for norm in norms
    ]
    return np.stack(rows)


def _epsilons(norms: list[Any]) -> Array:
    return np.array([0.0 if norm is None else norm.variance_epsilon for norm in norms], dtype=np.float32)
