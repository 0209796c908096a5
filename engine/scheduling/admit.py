"""Admit: does the next sequence fit into memory?

A choice says how much memory to set aside for output that is yet to come. Reserving nothing (prompt only)
admits most and pays with evictions and recomputation under pressure; reserving the full `max_tokens` leaves
memory unused whenever answers are shorter; a part of the predicted remainder does neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Sequence


class Admit(Protocol):
    """How many tokens of future output to set memory aside for."""

    def reserve_tokens(self, sequence: Sequence) -> int:
        """Never negative, and never past what the sequence can still emit."""
        ...


@dataclass(frozen=True, slots=True)
class PromptOnly:
    """Sets nothing aside: the most concurrency, paid for with evictions."""

    def reserve_tokens(self, sequence: Sequence) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True, slots=True)
class PredictedReserve:
    """Sets aside a part of the predicted remaining output."""

    permille: int = 500

    def reserve_tokens(self, sequence: Sequence) -> int:
        """`permille` / 1000 of what the prediction says is still to come."""
        remaining = sequence.predicted_output_tokens - sequence.emitted_tokens
        return max(0, remaining) * self.permille // 1000


def blocks_still_wanted(admit: Admit, sequence: Sequence, block_tokens: int) -> int:
    """Blocks a sequence wants beyond those it holds: for its known tokens and for the reserve."""
    tokens = min(sequence.total_tokens + admit.reserve_tokens(sequence), sequence.most_tokens)
    wanted = -(-max(tokens, sequence.total_tokens) // block_tokens)
    return max(0, wanted - len(sequence.block_table))


def blocks_promised(admit: Admit, running: Iterable[Sequence], block_tokens: int) -> int:
    """Blocks set aside for the sequences that run already; a new one fits into what then is left."""
    return sum(blocks_still_wanted(admit, sequence, block_tokens) for sequence in running)
