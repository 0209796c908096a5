"""How does a Llama-like decoder run a step with as little between its matrix products as there can be?

transformers' modules cost a millisecond a step in Python and small operators. This is the same arithmetic
for the plain pre-norm decoders (`FAMILY`): merged query/key/value and gate/up products, four compiled passes
a layer between them (`kernels.cpu.layers`, `kernels.cpu.attention`), float32 residuals in buffers that
are kept, and, in the last layer, only the rows whose logits are wanted. transformers' forward pass is its
twin: a model is run this way only after it gave the twin's logits at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.model.attention import AttentionOptions, LayerCache, LayerShape
from engine.model.cpu.packed_linear import PackedLinear, PackedVerdict, probe_packed
from engine.model.cpu.report import Unsupported
from kernels.batch import Integers, PackedBatch, RowTables, array_of
from kernels.cpu.jit import use_threads

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose angles depend on the position alone."""
FIRST_BUFFER_ROWS = 64
MAX_KEPT_VIEWS = 4096
FIRST_POSITIONS = 1024
"""Positions whose angles are computed at once; the table doubles as contexts grow."""

Array = Any


class Product:
    """One or several linear layers that share their input, as one matrix product."""

    def __init__(self, modules: list[torch.nn.Linear], *, is_shared: bool = False) -> None:
        """`is_shared`: somebody else needs the (single) weight too, and so it stays where it is."""
        self._modules = modules
        self._is_shared = is_shared
        self.inputs = modules[0].in_features
        self.verdict: PackedVerdict | None = None
        self.not_packed = ""
        """Why the weight is not packed, where it is not."""
        weight, bias = merged(modules), merged_bias(modules)
        try:
            self.verdict = probe_packed(weight)
        except Unsupported as reason:
            self.not_packed = str(reason)
            self._multiply: Any = partial(torch.nn.functional.linear, weight=weight, bias=bias)
            self._hand_out(weight)
            return
        self._packed = PackedLinear(weight, bias, pad_single=self.verdict.pad_single)
        self._multiply = self._packed.forward
        if not is_shared:
            for module in modules:
                module.weight.data = weight.new_empty(0)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, inputs]` -> `[rows, all outputs]`."""
        product: torch.Tensor = self._multiply(rows)
        return product

    def restore(self) -> None:
        """The modules get their weights back."""
        if self.verdict is not None and not self._is_shared:
            self._hand_out(self._packed.plain_weight())

    def _hand_out(self, weight: torch.Tensor) -> None:
        """Makes the modules' weights views of the merged one."""
        if self._is_shared:
            return
        start = 0
        for module in self._modules:
            module.weight.data = weight[start : start + module.out_features]
            start += module.out_features


@dataclass(slots=True)
class Layer:
    """One decoder layer's products, weights and attention."""

    index: int
    heads: int
    scale: float
    sliding_window: int | None
    qkv: Product
    output: Product
    gate_and_up: Product
    down: Product
    norm_weight: Array
    norm_epsilon: Any
    mlp_norm_weight: Array
    mlp_norm_epsilon: Any
    query_norm_weight: Array
    key_norm_weight: Array
    head_norm_epsilon: Any


class Angles:
    """Cosines and sines of the first positions, `[positions, key_dim / 2]`, by the model's own module."""

    def __init__(self, rotary: Any) -> None:
        """Raises `Unsupported` for rotary positions that are laid out in another way."""
        self._rotary = rotary
        self.cosines: Array
        self.sines: Array
        self._compute(FIRST_POSITIONS)

    def cover(self, positions: int) -> bool:
        """Computes more if there are fewer than `positions`; whether it did."""
        if positions <= len(self.cosines):
            return False
        self._compute(2 * positions)
        return True

    def _compute(self, positions: int) -> None:
        with torch.inference_mode():
            cosines, sines = self._rotary(torch.zeros(1), torch.arange(positions)[None])
        half = cosines.shape[-1] // 2
        if not (torch.equal(cosines[..., :half], cosines[..., half:]) and cosines.dtype == torch.float32):
            raise Unsupported("its rotary positions are laid out in another way")
        self.cosines, self.sines = (
            np.ascontiguousarray(part[0, :, :half].numpy()) for part in (cosines, sines)
        )


class LeanForward:
    """Implements `engine.model.forward.Forward` for `FAMILY`, in float32 and bfloat16 on a CPU."""

    def __init__(
        self, model: Any, shapes: dict[int, LayerShape], options: dict[int, AttentionOptions]
    ) -> None:
        """Takes the weights over: until `restore`, the model's own modules need not run.

        Raises `Unsupported`, and leaves the model as it is, when it cannot be run this way.
        """
        from kernels.cpu import attention as numba_attention  # Numba may be missing: `kernels.dispatch` knows
        from kernels.cpu import layers

        refuse_others(model, shapes, options)
        self._attention, self._passes = numba_attention, layers
        self._array = array_of
        decoder = model.model
        self._embedding = self._array(decoder.embed_tokens.weight.data)
        self._angles = Angles(decoder.rotary_emb)
        self._layers = [
            self._layer(layer, index, shapes[index], options[index])
            for index, layer in enumerate(decoder.layers)
        ]
        self._final_weight = self._array(decoder.norm.weight.data)
        self._final_epsilon = np.float32(decoder.norm.variance_epsilon)
        tied = model.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
        self._head = Product([model.lm_head], is_shared=tied)
        self._nothing = self._embedding[:0]
        self._buffers = Buffers(model.dtype, shapes, self._embedding.shape[1], self._layers[0])

    @property
    def products(self) -> list[Product]:
        """All matrix products of a step."""
        return [
            product
            for layer in self._layers
            for product in (layer.qkv, layer.output, layer.gate_and_up, layer.down)
        ] + [self._head]

    def restore(self) -> None:
        """Gives the weights back to the model's own modules."""
        for product in self.products:
            product.restore()

    def __call__(
        self, batch: PackedBatch, token_ids: Integers, rows: Integers, caches: dict[int, LayerCache]
    ) -> torch.Tensor:
        """See `engine.model.forward.Forward`."""
        passes, workers = self._passes, use_threads(torch.get_num_threads())
        tables = batch.rows
        self._angles.cover(tables.most_context)
        step = self._buffers.views(batch.num_tokens)
        passes.take_rows(self._embedding, token_ids, step.residual, workers)
        addend = self._nothing
        for layer in self._layers:
            passes.add_and_normalize(
                step.residual, addend, layer.norm_weight, layer.norm_epsilon, step.normalized_array, workers
            )
            projected = self._array(layer.qkv(step.normalized))
            cache = caches[layer.index]
            keys, values = self._array(cache.keys), self._array(cache.values)
            passes.rotate_and_write(
                projected, layer.heads, self._angles.cosines, self._angles.sines, tables.contexts,
                tables.slots, keys, values, layer.query_norm_weight, layer.key_norm_weight,
                layer.head_norm_epsilon, workers,
            )  # fmt: skip
            if layer is self._layers[-1] and len(rows) < batch.num_tokens:
                # Nobody asks for the other rows any more: their keys and values are written.
                kept = step.residual[rows]
                step, tables, projected = self._buffers.views(len(rows)), tables.only(rows), projected[rows]
                step.residual[:] = kept
            addend = self._mix(layer, step, projected, keys, values, tables, workers)
        passes.add_and_normalize(
            step.residual, addend, self._final_weight, self._final_epsilon, step.normalized_array, workers
        )
        return self._head(step.normalized)

    def _mix(
        self,
        layer: Layer,
        step: StepViews,
        projected: Array,
        keys: Array,
        values: Array,
        tables: RowTables,
        workers: int,
    ) -> Array:
        """Attention and MLP of one layer; returns what is still to be added to the residual."""
        self._attention.attend_rows(
            projected, keys, values, tables, step.attended_array, heads=layer.heads, scale=layer.scale,
            sliding_window=layer.sliding_window, softcap=None, sinks=None, workers=workers,
        )  # fmt: skip
        self._passes.add_and_normalize(
            step.residual, self._array(layer.output(step.attended)), layer.mlp_norm_weight,
            layer.mlp_norm_epsilon, step.normalized_array, workers,
        )  # fmt: skip
        gate_and_up = self._array(layer.gate_and_up(step.normalized))
        self._passes.silu_and_multiply(gate_and_up, step.product_array, workers)
        return self._array(layer.down(step.product))

    def _layer(self, layer: Any, index: int, shape: LayerShape, options: AttentionOptions) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        no_norm = np.zeros(0, dtype=np.float32)
        return Layer(
            index=index,
            heads=attention.q_proj.out_features // shape.key_dim,
            scale=options.scale,
            sliding_window=options.sliding_window,
            qkv=Product([attention.q_proj, attention.k_proj, attention.v_proj]),
            output=Product([attention.o_proj]),
            gate_and_up=Product([mlp.gate_proj, mlp.up_proj]),
            down=Product([mlp.down_proj]),
            norm_weight=self._array(layer.input_layernorm.weight.data),
            norm_epsilon=np.float32(layer.input_layernorm.variance_epsilon),
            mlp_norm_weight=self._array(layer.post_attention_layernorm.weight.data),
            mlp_norm_epsilon=np.float32(layer.post_attention_layernorm.variance_epsilon),
            query_norm_weight=no_norm if query_norm is None else self._array(query_norm.weight.data),
            key_norm_weight=no_norm if key_norm is None else self._array(key_norm.weight.data),
            head_norm_epsilon=np.float32(0.0 if query_norm is None else query_norm.variance_epsilon),
        )


@dataclass(frozen=True, slots=True)
class StepViews:
    """The buffers' first rows: as tensors for the products, as arrays (of the same memory) for the rest."""

    residual: Array
    normalized: torch.Tensor
    normalized_array: Array
    attended: torch.Tensor
    attended_array: Array
    product: torch.Tensor
    product_array: Array


class Buffers:
    """What a step writes between its products, kept from step to step: fresh memory would have to be cleared
    by the system each time."""

    def __init__(self, dtype: torch.dtype, shapes: dict[int, LayerShape], hidden: int, layer: Layer) -> None:
        self._dtype = dtype
        self._widths = (hidden, layer.heads * shapes[0].value_dim, layer.down.inputs)
        self._rows = 0
        self._views: dict[int, StepViews] = {}

    def views(self, rows: int) -> StepViews:
        """The first `rows` rows of each buffer."""
        views = self._views.get(rows)
        if views is None:
            if rows > self._rows or len(self._views) >= MAX_KEPT_VIEWS:
                self._allocate(max(rows, 2 * self._rows, FIRST_BUFFER_ROWS))
            normalized, attended, product = (tensor[:rows] for tensor in self._tensors)
            views = self._views[rows] = StepViews(
                self._residual[:rows], normalized, array_of(normalized), attended, array_of(attended),
                product, array_of(product),
            )  # fmt: skip
        return views

    def _allocate(self, rows: int) -> None:
        self._rows = rows
        self._views = {}
        self._residual = np.zeros((rows, self._widths[0]), dtype=np.float32)
        self._tensors = [torch.zeros(rows, width, dtype=self._dtype) for width in self._widths]


def refuse_others(model: Any, shapes: dict[int, LayerShape], options: dict[int, AttentionOptions]) -> None:
    """Raises `Unsupported` for what this arithmetic is not that of."""
    config = model.config
    if config.model_type not in FAMILY:
        raise Unsupported(f"{config.model_type} is not one of {', '.join(FAMILY)}")
    if config.hidden_act != "silu":
        raise Unsupported(f"its activation is {config.hidden_act}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STEADY_ROPE:
        raise Unsupported(f"its rotary positions ({rope}) depend on more than the position")
    if sorted(shapes) != list(range(len(model.model.layers))):
        raise Unsupported("not every layer attends")
    if len({(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in shapes.values()}) > 1:
        raise Unsupported("its layers differ in shape")
    if shapes[0].key_dim % 2:
        raise Unsupported("its heads have an odd width")
    if any(option.softcap is not None or option.sinks is not None for option in options.values()):
        raise Unsupported("its attention caps scores or has sinks")


def merged(modules: list[torch.nn.Linear]) -> torch.Tensor:
    """The weights of layers that share their input, one below the other."""
    weights = [module.weight.data for module in modules]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def merged_bias(modules: list[torch.nn.Linear]) -> torch.Tensor | None:
    """Their biases, zero where a layer has none; None where no layer has one."""
    if all(module.bias is None for module in modules):
        return None
    parts = [
        module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.data
        for module in modules
    ]
    return torch.cat(parts)
