"""`QueueEntry`, and the cost of tokens."""

from __future__ import annotations

import msgspec

INPUT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
"""Default cost of a request: computed input tokens + 2 x output tokens (VTC, OSDI 2024)."""
COUNTER_SCALE = 1_000_000
"""Counters are integers: cost x COUNTER_SCALE / weight, so that sums never drift."""


def cost_of(input_tokens: int, output_tokens: int) -> int:
    """Cost tokens."""
    return input_tokens * INPUT_TOKEN_COST + output_tokens * OUTPUT_TOKEN_COST


class QueueEntry(msgspec.Struct, frozen=True):
    """A waiting request or sequence, as orders see it."""

    entry_id: str
    tenant_id: str
    arrived_s: float
    input_tokens: int
    predicted_output_tokens: int
    """Predicted median of the whole output, emitted tokens included."""
    tier: int = 1
    weight: float = 1.0
    predicted_high_tokens: int = 0
    """Predicted 90th percentile of the whole output; 0: unknown."""
    deadline_s: float | None = None
    """Deadline for completion, on the clock of `arrived_s`; None: none."""
    own_deadline_s: float | None = None
    """Its client's own, which orders its tenant's entries among themselves; None: as `deadline_s`."""
    emitted_tokens: int = 0
    """Tokens emitted before a preemption."""
    computed_tokens: int = 0
    """Tokens in the cache now; a waiting one has none."""
    attained_tokens: int = 0
    """Service so far: prompt tokens computed once, and tokens emitted."""
    cached_tokens: int = 0
    """Prompt tokens in the prefix cache on arrival."""
    locality: int = 0
    """Entries of equal, non-zero locality share the start of their prompt."""
    yields_cost: int = 0
    """How far its tenant may fall behind tenants of small entries, in cost tokens; 0: it is small itself."""

    @property
    def predicted_cost(self) -> int:
        return cost_of(self.input_tokens, self.predicted_output_tokens)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens left to compute, at least 1."""
        return max(1, self.input_tokens - max(self.cached_tokens, self.computed_tokens))

    @property
    def remaining_tokens(self) -> int:
        """Predicted tokens left to compute and to emit, at least 1."""
        ahead = max(0, self.input_tokens - max(self.cached_tokens, self.computed_tokens))
        return max(1, ahead + max(1, self.predicted_output_tokens - self.emitted_tokens))
