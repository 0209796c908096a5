"""Compose: which running sequences get tokens this step, and how many?

Decode first, then unfinished prefills in chunks (Sarathi-Serve, OSDI 2024): a decoding stream never waits for
somebody else's prompt, and a prompt takes what the step's token budget leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Sequence


class Compose(Protocol):
    """Contract: the shares sum to at most `budget`; no sequence appears twice; each share is between 1
    and what the sequence has left to compute.
    """

    def shares(self, running: Iterable[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """Tokens for the running sequences, in the order in which they claim memory."""
        ...

    def first_chunk(self, tokens_left: int, budget: int) -> int:
        """Tokens for a sequence that is just being admitted."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """One token for each decoding sequence; then prefills, by tier and by admission.

    `max_chunk_tokens` bounds one prompt's part of a step, so that several prompts advance together; 0: none.
    """

    max_chunk_tokens: int = 0

    def shares(self, running: Iterable[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """See `Compose`."""
        shares: list[tuple[Sequence, int]] = []
        prefills: list[tuple[Sequence, int]] = []
        for sequence in running:
            left = len(sequence.token_ids) - sequence.computed_tokens
            if left > 1:
                prefills.append((sequence, left))
            elif budget > 0:
                shares.append((sequence, 1))
                budget -= 1
        prefills.sort(key=lambda prefill: prefill[0].submit.tier)
        for sequence, left in prefills:
            if budget == 0:
                break
            tokens = self.first_chunk(left, budget)
            shares.append((sequence, tokens))
            budget -= tokens
        return shares

    def first_chunk(self, tokens_left: int, budget: int) -> int:
        """As much as is left, the budget allows and one chunk may have."""
        tokens = min(tokens_left, budget)
        return min(tokens, self.max_chunk_tokens) if self.max_chunk_tokens else tokens
