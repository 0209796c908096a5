"""The model that tests of processes serve, where the text does not matter.

A Llama with random weights, initialised wide enough that its outputs vary, and a byte-level tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 8192
EOS_TOKEN_ID = 0


def _letters() -> Tokenizer:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS_TOKEN_ID} | {letter: 1 + index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def save_tiny_model(
    model_dir: Path, tokenizer: Tokenizer | None = None, context_tokens: int = CONTEXT_TOKENS
) -> Path:
    """Writes config, weights and tokenizer; returns `model_dir`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer or _letters()
    torch.manual_seed(20)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=context_tokens, initializer_range=0.3, bos_token_id=None,
            eos_token_id=EOS_TOKEN_ID, pad_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(model_dir)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    return model_dir
