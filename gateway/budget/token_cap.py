"""Output cap (`max_tokens`) of a request to a server without leases.

The most that could be held when the request is sent: a server that stops there has generated nothing unpaid,
and its token count of the answer is complete. Budget released later is ignored. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.budget.lease import Sizes, largest
from tenants.quota.store import LimitState
from tenants.types import Amounts, LimitMode, Meter

_OUTPUT_METERS = (Meter.TOTAL_TOKENS, Meter.OUTPUT_TOKENS, Meter.COST_NANOUSD)


def most_tokens(
    covered: Amounts,
    covered_tokens: int,
    states: Sequence[LimitState],
    sizes: Sizes,
    sequences: int,
    most_each: int,
) -> int:
    """The cap of each sequence; `covered` is held, enough for `covered_tokens` of all. Token buckets bound
    nothing, as they refill. Do not cap a request whose worst case is promised."""
    windows = [
        state
        for state in states
        if state.limit.mode is LimitMode.HARD
        and not state.limit.is_bucket
        and state.limit.meter in _OUTPUT_METERS
    ]

    def fits(tokens: int) -> bool:
        size = sizes(tokens)
        return all(
            size.of(state.limit.meter) <= covered.of(state.limit.meter) + state.available for state in windows
        )

    least = min(covered_tokens, sequences * most_each)
    # Rounded down: all sequences share what could be held.
    return max(1, min(most_each, largest(least, sequences * most_each, fits) // sequences))
