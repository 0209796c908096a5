"""Share of padding in a batch that runs to completion.

A static batch with padded shapes computes every prompt up to the longest, and keeps the row of a member that
has finished until the last one has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaddingWaste:
    """Tokens of batches: those wanted, and those that only fill the shape."""

    batches: int = 0
    useful_tokens: int = 0
    prompt_padding_tokens: int = 0
    output_padding_tokens: int = 0

    def __add__(self, other: PaddingWaste) -> PaddingWaste:
        return PaddingWaste(
            self.batches + other.batches,
            self.useful_tokens + other.useful_tokens,
            self.prompt_padding_tokens + other.prompt_padding_tokens,
            self.output_padding_tokens + other.output_padding_tokens,
        )

    @property
    def padding_tokens(self) -> int:
        """All that is wasted."""
        return self.prompt_padding_tokens + self.output_padding_tokens

    @property
    def share(self) -> float:
        """Padding among all tokens, 0 to 1."""
        total = self.useful_tokens + self.padding_tokens
        return self.padding_tokens / total if total else 0.0


def batch_waste(members: Iterable[tuple[int, int]]) -> PaddingWaste:
    """The waste of one batch, of each member's (prompt tokens, output tokens)."""
    lengths: Sequence[tuple[int, int]] = list(members)
    if not lengths:
        return PaddingWaste()
    prompts = [prompt for prompt, _ in lengths]
    outputs = [output for _, output in lengths]
    return PaddingWaste(
        batches=1,
        useful_tokens=sum(prompts) + sum(outputs),
        prompt_padding_tokens=max(prompts) * len(prompts) - sum(prompts),
        output_padding_tokens=max(outputs) * len(outputs) - sum(outputs),
    )
