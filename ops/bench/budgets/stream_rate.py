"""How fast did a stream come? Pure."""

from __future__ import annotations

from collections.abc import Sequence


def tokens_per_s(times_s: Sequence[float], first: int) -> float:
    """The slope of tokens over time from token `first` on, by least squares. Raises `ValueError` for fewer
    than two tokens, or when all came at once."""
    points = list(enumerate(times_s))[first:]
    if len(points) < 2:
        raise ValueError(f"{len(times_s)} tokens: no slope from token {first} on")
    mean_s = sum(at_s for _, at_s in points) / len(points)
    mean = sum(number for number, _ in points) / len(points)
    spread = sum((at_s - mean_s) ** 2 for _, at_s in points)
    if spread == 0:
        raise ValueError("all tokens came at once")
    return sum((at_s - mean_s) * (number - mean) for number, at_s in points) / spread
