"""An entry of a queue, and what its tokens cost."""

from __future__ import annotations

import msgspec

INPUT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
"""Default cost of a request: computed input tokens + 2 x output tokens (VTC, OSDI 2024)."""
COUNTER_SCALE = 1_000_000
"""Counters are integers: cost x COUNTER_SCALE / weight, so that sums never drift."""


class QueueEntry(msgspec.Struct, frozen=True):
    """What an order may know of a waiting request or sequence."""

    entry_id: str
    tenant_id: str
    arrived_s: float
    input_tokens: int
    predicted_output_tokens: int
    """The whole output's median, whatever is out already."""
    tier: int = 1
    weight: float = 1.0
    predicted_high_tokens: int = 0
    """The whole output's 90th percentile; 0: not known."""
    deadline_s: float | None = None
    """When it should be complete, by the clock of `arrived_s`; None: no deadline."""
    emitted_tokens: int = 0
    """Output so far, of one that ran already."""
    computed_tokens: int = 0
    """Tokens in the cache now; a waiting one has none."""
    attained_tokens: int = 0
    """Service so far: prompt tokens computed once, and tokens emitted."""
    cached_tokens: int = 0
    """Part of the prompt that was found in the prefix cache when it arrived."""
    locality: int = 0
    """Entries of equal, non-zero locality share the start of their prompt."""
    yields_cost: int = 0
    """How far its tenant may fall behind those of small entries, in cost tokens; 0: it is small itself."""

    @property
    def predicted_cost(self) -> int:
        """Predicted service in cost tokens."""
        return self.input_tokens * INPUT_TOKEN_COST + self.predicted_output_tokens * OUTPUT_TOKEN_COST

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that are still to be computed, at least 1."""
        return max(1, self.input_tokens - max(self.cached_tokens, self.computed_tokens))

    @property
    def remaining_tokens(self) -> int:
        """Predicted tokens still to compute and to emit, at least 1."""
        ahead = max(0, self.input_tokens - max(self.cached_tokens, self.computed_tokens))
        return max(1, ahead + max(1, self.predicted_output_tokens - self.emitted_tokens))
