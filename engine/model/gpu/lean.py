"""A Llama-like decoder by few launches: merged products, the operators of `kernels.gpu`, nothing between.

Nothing in a step depends on what the host knows but the shapes, and nothing waits: a step can be captured.
transformers' forward pass is its twin: a model runs this way only if it gives the twin's logits at load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.attention import AttentionOptions, LayerCache, LayerShape
from engine.model.family import merged, merged_bias, refuse_unsupported, rotary_angles
from engine.model.path_report import Unsupported
from kernels.batch import PackedBatch
from kernels.dispatch import AttentionKernel
from kernels.gpu.attention import paged_attention


class MergedLinear:
    """Linear layers that share their input, as one product. Their weights become parts of the merged one, so
    that the model computes as before and nothing is kept twice."""

    def __init__(self, *modules: torch.nn.Linear) -> None:
        whole = merged(list(modules))
        self._weight, self._bias = whole.t(), merged_bias(list(modules))
        if len(modules) > 1:
            parts = whole.split([module.out_features for module in modules])
            for module, part in zip(modules, parts, strict=True):
                module.weight = torch.nn.Parameter(part, requires_grad=False)
        self.outputs = whole.shape[0]

    def __call__(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """`[tokens, inputs]` to `[tokens, outputs]`, in `out` where that is given."""
        if self._bias is None:
            return torch.mm(values, self._weight, out=out)
        return torch.addmm(self._bias, values, self._weight, out=out)


class LeanLayer:
    """The parts of a decoder layer and the norm that follows it: the next one's first, or the last of all."""

    def __init__(self, layer: Any, options: AttentionOptions, next_norm: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = MergedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = MergedLinear(attention.o_proj)
        self.gate_up = MergedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = MergedLinear(mlp.down_proj)
        self.options, self.mlp_norm, self.next_norm = options, layer.post_attention_layernorm, next_norm
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        weights = (getattr(norm, "weight", None) for norm in norms)
        self.head_norms = (*weights, getattr(norms[0], "variance_epsilon", 0.0))
        """Weights of the RMSNorm of each query and key head, and its epsilon."""


class LeanForward:
    """Implements `engine.model.forward.Forward` for `engine.model.family.FAMILY` on the kernel "triton"."""

    name, captures = "lean", True

    def __init__(
        self,
        model: Any,
        kernel: AttentionKernel,
        shapes: dict[int, LayerShape],
        options: dict[int, AttentionOptions],
    ) -> None:
        """The model's weights become parts of the merged ones; it stays usable. Raises `Unsupported`, with
        the model left as it was."""
        refuse_unsupported(model, shapes, options)
        if shapes[0].key_dim != shapes[0].value_dim:
            raise Unsupported("its keys and values differ in width")
        decoder = model.model
        self.tile_tokens = kernel.tile_tokens
        positions = model.config.max_position_embeddings
        self._angles = rotary_angles(decoder.rotary_emb, positions, model.device)
        self._embedding = decoder.embed_tokens.weight.detach()
        self._head_dim, self._kv_heads = shapes[0].key_dim, shapes[0].kv_heads
        self._first_norm = decoder.layers[0].input_layernorm
        norms = [*(layer.input_layernorm for layer in decoder.layers[1:]), decoder.norm]
        parts = zip(decoder.layers, norms, strict=True)
        self._layers = [LeanLayer(layer, options[index], norm) for index, (layer, norm) in enumerate(parts)]
        self._head = MergedLinear(model.lm_head)
        torch.cuda.empty_cache()  # What was merged leaves gaps, which the KV cache can use.
        self._kept = self._buffers(0)

    def reserve(self, tokens: int) -> None:
        """Steps of up to `tokens` use buffers that never move, unless more are reserved."""
        if tokens > len(self._kept[0]):
            self._kept = self._buffers(tokens)

    def __call__(
        self,
        batch: PackedBatch,
        token_ids: Tensor,
        rows: Tensor | None,
        caches: dict[int, LayerCache],
        out: Tensor | None = None,
    ) -> Tensor:
        """As `Forward`; `rows` are no more than the tokens."""
        tokens = len(token_ids)
        buffers = self._kept if tokens <= len(self._kept[0]) else self._buffers(tokens)
        residual, normed, delta, qkv, attended, gate_up, activated = (each[:tokens] for each in buffers)
        query = qkv.view(tokens, -1, self._head_dim)[:, : -2 * self._kv_heads]
        by_head = attended.view(query.shape)
        torch.index_select(self._embedding, 0, token_ids, out=residual)
        _add_norm(None, residual, self._first_norm, normed)
        for index, layer in enumerate(self._layers):
            keys, values = caches[index].keys, caches[index].values
            layer.qkv(normed, qkv)
            torch.ops.fairgate.rotary_write(
                qkv, keys, values, *self._angles, batch.token_contexts, batch.slots, *layer.head_norms
            )
            scale, window = layer.options.scale, layer.options.sliding_window
            paged_attention(query, keys, values, batch, scale=scale, sliding_window=window, out=by_head)
            if rows is not None and layer is self._layers[-1]:
                # What follows is of the wanted rows alone.
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
                _, normed, delta, _, _, gate_up, activated = (each[: len(rows)] for each in buffers)
            layer.output(attended, delta)
            _add_norm(delta, residual, layer.mlp_norm, normed)
            layer.gate_up(normed, gate_up)
            torch.ops.fairgate.silu_multiply(gate_up, activated)
            layer.down(activated, delta)
            _add_norm(delta, residual, layer.next_norm, normed)
        return self._head(normed, out)

    def _buffers(self, tokens: int) -> list[Tensor]:
        """Activations, in the order of `__call__`."""
        layer, hidden = self._layers[0], self._embedding.shape[1]
        qkv, gate_up = layer.qkv.outputs, layer.gate_up.outputs
        attended = qkv - 2 * self._kv_heads * self._head_dim
        widths = (hidden, hidden, hidden, qkv, attended, gate_up, gate_up // 2)
        return [self._embedding.new_empty(tokens, width) for width in widths]


def _add_norm(delta: Tensor | None, residual: Tensor, norm: Any, out: Tensor) -> None:
    torch.ops.fairgate.add_norm(delta, residual, norm.weight, out, norm.variance_epsilon)
