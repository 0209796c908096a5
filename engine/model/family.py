"""The plain pre-norm decoders (Llama and its kin) that have forward passes of their own, and their parts."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.attention import AttentionOptions, LayerShape
from engine.model.path_report import Unsupported

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
STEADY_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose angles depend on the position alone."""


def refuse_unsupported(
    model: Any, shapes: dict[int, LayerShape], options: dict[int, AttentionOptions]
) -> None:
    """Raises `Unsupported` for a model whose arithmetic differs from the family's."""
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
    weights = [module.weight.detach() for module in modules]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def merged_bias(modules: list[torch.nn.Linear]) -> torch.Tensor | None:
    """Their biases, zero where a layer has none; None where no layer has one."""
    if all(module.bias is None for module in modules):
        return None
    parts = [
        module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()
        for module in modules
    ]
    return torch.cat(parts)


def rotary_angles(rotary: Any, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the first positions, each `[positions, key_dim / 2]` float32, by the model's own
    module. Raises `Unsupported` for rotary positions that are laid out in another way."""
    with torch.inference_mode():
        both = rotary(torch.zeros(1, device=device), torch.arange(positions, device=device)[None])
    half = both[0].shape[-1] // 2
    if both[0].dtype != torch.float32 or not all(
        torch.equal(part[..., :half], part[..., half:]) for part in both
    ):
        raise Unsupported("its rotary positions are laid out in another way")
    cosines, sines = (part[0, :, :half].contiguous() for part in both)
    return cosines, sines
