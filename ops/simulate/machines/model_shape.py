"""The shape of a model: what its steps read and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder-only model computes and reads, per token."""

    body_parameters: int
    """Weights of the layers' matrix products."""
    head_parameters: int
    """Weights of the product with the vocabulary."""
    attention_width: int
    """Query heads x head size, summed over the layers."""
    kv_width: int
    """Key and value numbers kept for one token, in all layers."""

    @staticmethod
    def of(config: dict[str, Any]) -> ModelShape:
        """From a Llama-like config.json."""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or hidden // heads
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        return ModelShape(
            body_parameters=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_parameters=hidden * config["vocab_size"],
            attention_width=layers * heads * head,
            kv_width=layers * 2 * kv_heads * head,
        )

    @property
    def step_parameters(self) -> int:
        """Weights that a decode step reads."""
        return self.body_parameters + self.head_parameters

    def prefill_flops(self, prompt_tokens: int) -> int:
        """A whole prompt, and its last token's logits."""
        attended = prompt_tokens * (prompt_tokens + 1) // 2
        return (
            2 * self.body_parameters * prompt_tokens
            + 4 * self.attention_width * attended
            + 2 * self.head_parameters
        )

    def decode_flops(self, context_tokens: int) -> int:
        """One token that attends to `context_tokens`."""
        return 2 * self.step_parameters + 4 * self.attention_width * context_tokens
