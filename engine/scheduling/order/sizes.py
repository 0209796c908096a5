"""Size of an entry, as one number to rank by.

Between the median and the 90th percentile of the predicted output, so that of two entries with one median the
more certain one goes first (S3 and TRAIL rank by a point; ProD, arXiv 2604.07931, shows how wide the
distribution is).
"""

from __future__ import annotations

from engine.entry import QueueEntry

CAUTION = 0.5
"""0: the median; 1: the 90th percentile."""


def predicted_output_tokens(entry: QueueEntry, caution: float = CAUTION) -> float:
    """The whole output, cautiously; the median where nothing else is known."""
    median = entry.predicted_output_tokens
    return median + caution * max(0, entry.predicted_high_tokens - median)


def remaining_tokens(entry: QueueEntry, caution: float = CAUTION) -> float:
    """Prompt tokens to compute plus output tokens to come, at least 1. One that has outgrown its prediction
    counts as nearly done: letting it end frees its memory soonest."""
    prompt = max(0, entry.input_tokens - max(entry.cached_tokens, entry.computed_tokens))
    return max(1.0, prompt + max(1.0, predicted_output_tokens(entry, caution) - entry.emitted_tokens))
