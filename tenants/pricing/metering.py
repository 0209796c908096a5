"""How much of a limit does a token count?

One, unless the price book weights a model's tokens in a tier: cached input may count less, a large model's
tokens more. Holds, top-ups and settlements of limits are all in these counted units; bills and usage keep
the tokens themselves.
"""

from __future__ import annotations

from tenants.pricing.pricing import PriceBook, check_counts
from tenants.types import Amounts, Tier


def counted(
    book: PriceBook,
    model: str,
    tier: Tier | str,
    *,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    requests: int = 1,
    gpu_ms: int = 0,
) -> Amounts:
    """What limits count of a request: weighted tokens, each sum rounded up once, and its cost.

    `cached_tokens` are part of the input, `reasoning_tokens` of the output. The answer never falls when
    tokens are added, nor when cached or reasoning tokens turn out to be ordinary ones: what is held for
    `cached_tokens=0, reasoning_tokens=0` bounds what is charged. Raises `UnknownPrice`, or `Invalid` for
    impossible counts.
    """
    check_counts(input_tokens, cached_tokens, output_tokens, reasoning_tokens)
    entry = book.entry(model, tier)
    weights = entry.weights
    inputs = (input_tokens - cached_tokens) * weights.input + cached_tokens * weights.cached_input
    outputs = (output_tokens - reasoning_tokens) * weights.output + reasoning_tokens * weights.reasoning
    return Amounts(
        input_tokens=-(-inputs // 1_000),
        output_tokens=-(-outputs // 1_000),
        cost_nanousd=entry.cost_nanousd(input_tokens, cached_tokens, output_tokens),
        requests=requests,
        gpu_ms=gpu_ms,
    )
