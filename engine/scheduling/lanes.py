"""Which requests are large beside the cache, and how far behind may they fall for small ones?

Where memory is short the first in line holds it up for everybody: a large request waits until much is free,
and what is freed meanwhile is kept for it. Small ones need little and give it back soon; let past, they
hardly delay the large one, and it would have delayed them by many times what they take. So small and large
requests wait in lanes of their own (`orders/hybrid.py`), and of the memory that is promised to large ones for
later small ones may take a little now (`admits/reserve.py`).

Only who knows the cache can tell: an engine. In front of one (in a gateway) nobody is large.
"""

from __future__ import annotations

from engine.scheduling.order import OUTPUT_TOKEN_COST

SMALL_PERMILLE = 25
"""Of the cache. Small is what at least forty of fit in."""
YIELDS_PERMILLE = 400
"""Of U, the cost of all tokens that the cache holds: VTC's bound on the difference of tenants is 2U."""


def yields_cost(total_tokens: int, cache_tokens: int) -> int:
    """How many cost tokens the tenant of a request may fall behind those of small ones; 0: it is small.

    `total_tokens`: its prompt and predicted output; `cache_tokens`: what the KV cache holds.
    """
    if total_tokens * 1000 <= cache_tokens * SMALL_PERMILLE:
        return 0
    return OUTPUT_TOKEN_COST * cache_tokens * YIELDS_PERMILLE // 1000
