"""The demo's prompts: one for each request of the slice, of the wanted lengths."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ops.demo.prompts.instructions import prompt_for_lengths
from ops.demo.trace import LENGTH_FACTOR, TraceRequest, scale_lengths

MAX_TOKENS = 300
"""Asked for with every request. The longest wanted answer is shorter: the model ends them all by itself."""


def chats_of(model: Path, seed: int, lengths: Iterable[tuple[int, int]]) -> list[list[dict[str, str]]]:
    """A conversation for each wanted length of prompt and answer; the model ends its answer by itself."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    rng = random.Random(seed)
    return [prompt_for_lengths(rng, prompt, answer, count_tokens).chat() for prompt, answer in lengths]


@dataclass(frozen=True)
class Prompts:
    """The slice, and a conversation for each of its requests."""

    trace: Sequence[TraceRequest]
    chats: Sequence[list[dict[str, str]]]

    @staticmethod
    def make(model: Path, trace: Sequence[TraceRequest], seed: int) -> Prompts:
        """Some seconds of work for the whole slice."""
        scaled = scale_lengths(trace, LENGTH_FACTOR)
        lengths = [(request.input_tokens, request.output_tokens) for request in scaled]
        return Prompts(trace, chats_of(model, seed, lengths))

    def body(self, place: int, model: str) -> dict[str, Any]:
        return {"model": model, "messages": self.chats[place], "max_tokens": MAX_TOKENS, "temperature": 0}

    def spread(self, number: int) -> list[int]:
        step = max(1, len(self.chats) // number)
        return list(range(0, len(self.chats), step))[:number]
