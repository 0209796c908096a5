"""How many tokens may a server without leases be asked for?

As many as could be held for the request by the time it is sent: a server that stops there by itself has
generated nothing that nobody pays for, and its own count of the whole answer comes. What other requests give
back later is not waited for. Pure.
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
    """For each of `sequences`. `covered` is held already, which is enough for `covered_tokens` of all
    together; `states` are the limits after the hold. Rates bound nothing: they refill. A request whose worst
    case is promised to it may hold all of it, whatever the states say; its caller knows."""
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
    # Rounded down: what could be held is shared by all of them.
    return max(1, min(most_each, largest(least, sequences * most_each, fits) // sequences))
