"""Questions of the budget benchmark, whose answers have different lengths."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from ops.demo.prompts.instructions import prompt_for_lengths

QUESTIONS = 40
SEED = 4
PROMPT_TOKENS = 32
ANSWER_TOKENS = (6, 10, 16, 24, 36, 52, 76, 110)
"""Wished for in turn: a few long answers among many short ones, as in most traces."""


def make(model_dir: Path) -> list[list[dict[str, str]]]:
    """Conversations for the shipped model, which ends them by itself; its own tokenizer counts."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    rng = random.Random(SEED)
    lengths = [ANSWER_TOKENS[number % len(ANSWER_TOKENS)] for number in range(QUESTIONS)]
    return [prompt_for_lengths(rng, PROMPT_TOKENS, length, count_tokens).chat() for length in lengths]
