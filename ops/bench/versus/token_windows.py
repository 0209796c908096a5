"""Shares of tokens over windows of a thousand steps, from what clients counted. Pure.

While more streams compete than fit, every step emits a token for each of its slots: a number of tokens is a
number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

Sample = tuple[int, int]
"""Tokens of the lighter and of the heavier tenant so far."""


def window_ratios(samples: Sequence[Sample], window_tokens: int) -> list[float]:
    """Heavier over lighter in each shortest run of samples with at least `window_tokens` of both together. A
    window without a token of the lighter one is infinite. Empty: no window is as long."""
    ratios: list[float] = []
    last = 0
    for first, (light, heavy) in enumerate(samples):
        last = max(last, first)
        while last < len(samples) and sum(samples[last]) - light - heavy < window_tokens:
            last += 1
        if last == len(samples):
            break
        lighter = samples[last][0] - light
        ratios.append((samples[last][1] - heavy) / lighter if lighter else float("inf"))
    return ratios


def furthest_off(ratios: Sequence[float], wanted: float) -> float:
    """Largest deviation from `wanted`, as a part of it. Raises `ValueError` for no window."""
    if not ratios:
        raise ValueError("the measurement was shorter than one window")
    return max(abs(ratio / wanted - 1.0) for ratio in ratios)


def fluid_ratio(light_streams: int, heavy_streams: int, weight: float, slots: int) -> float:
    """Heavier over lighter by the fluid share, weights 1 and `weight`: each stream takes one slot at most,
    and what one tenant cannot use is the other's."""
    heavy = min(float(heavy_streams), slots * weight / (1.0 + weight))
    light = min(float(light_streams), slots - heavy)
    heavy = min(float(heavy_streams), slots - light)
    return heavy / light
