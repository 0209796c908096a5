"""Weighted tokens, as limits count them.

A token counts as one unless the price book weights a model's tokens in a tier: cached input may count less, a
large model's tokens more. Holds, top-ups and settlements of limits use these units; bills and usage the real
tokens.
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
    """A request as limits count it: weighted tokens, each sum rounded up once, and its cost.

    `cached_tokens` are part of the input, `reasoning_tokens` of the output. Monotone in tokens, also when
    cached or reasoning tokens turn out to be ordinary ones: the value for `cached_tokens=0,
    reasoning_tokens=0` bounds the charge. Raises `UnknownPrice`, or `Invalid` for impossible counts.
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
