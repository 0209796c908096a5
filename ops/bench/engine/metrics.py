"""Rates and latencies of the engine benchmark's runs, their ratios, and how far greedy tokens agree. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ops.bench.common.report import spread
from ops.reporting import plain, quantile

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


class BadAnswers(Exception):
    """An engine's answers do not fit its requests; the message names the request."""


def measure(orders: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run's figures: TTFT and E2E from the request's arrival, TPOT a request's time after its first token
    over its further tokens, ITL each gap between two. Raises `BadAnswers` for an answer of another length."""
    if len(answers) != len(orders):
        raise BadAnswers(f"{len(orders)} requests, {len(answers)} answers")
    times_s: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for number, (order, answer) in enumerate(zip(orders, answers, strict=True)):
        times = answer["token_s"]
        if not len(answer["token_ids"]) == len(times) == order["output_tokens"]:
            raise BadAnswers(
                f"request {number} wants {order['output_tokens']} tokens; the answer has "
                f"{len(answer['token_ids'])} tokens and {len(times)} times"
            )
        times_s["ttft_s"].append(times[0] - order["arrival_s"])
        times_s["e2e_s"].append(times[-1] - order["arrival_s"])
        if len(times) > 1:
            times_s["tpot_s"].append((times[-1] - times[0]) / (len(times) - 1))
            times_s["itl_s"] += [later - earlier for earlier, later in pairwise(times)]
    output_tokens = sum(order["output_tokens"] for order in orders)
    wall_s = max(answer["token_s"][-1] for answer in answers)
    return {
        "requests": len(orders),
        "prompt_tokens": sum(len(order["prompt_token_ids"]) for order in orders),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "output_tokens_per_s": output_tokens / wall_s,
        **{
            name: {
                "mean": statistics.fmean(values) if values else None,
                "p50": plain(quantile(values, 0.5)),
                "p99": plain(quantile(values, 0.99)),
            }
            for name, values in times_s.items()
        },
    }


def ratios(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ours over theirs, of runs of equal number: throughput (more is better), latencies (less is better)."""
    pairs = list(zip(ours, theirs, strict=True))
    over = {
        "output_tokens_per_s": spread(
            [mine["output_tokens_per_s"] / other["output_tokens_per_s"] for mine, other in pairs]
        )
    }
    for name in LATENCIES:
        for point in ("p50", "p99"):
            values = [
                mine[name][point] / other[name][point]
                for mine, other in pairs
                if mine[name][point] is not None and other[name][point]
            ]
            if len(values) == len(pairs):
                over[f"{name.removesuffix('_s')}_{point}"] = spread(values)
    return over


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Request by request, up to the first token that differs: after that the contexts differ."""
    first = [_first_difference(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    compared = sum(len(mine) if place is None else place + 1 for mine, place in zip(ours, first, strict=True))
    diverged = [place for place in first if place is not None]
    return {
        "requests": len(first),
        "identical_requests": len(first) - len(diverged),
        "divergences": len(diverged),
        "compared_tokens": compared,
        "divergences_per_token": len(diverged) / compared if compared else 0.0,
        "first_divergences": [
            {"request": number, "token": place} for number, place in enumerate(first) if place is not None
        ],
        "distinct_tokens": len({token_id for tokens in ours for token_id in tokens}),
    }


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
