"""Errors of simulated figures against measured ones.

Throughput within 5 %, the median TTFT within 15 %, its 99th percentile within 25 % or one and a half times
what real runs differ by among themselves, and the same order of policies: by that percentile, of those that
lie further apart in reality than real runs of one of them do.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

THROUGHPUT = 0.05
TTFT_P50 = 0.15
TTFT_P99 = 0.25
SPREADS = 1.5


@dataclass(frozen=True, slots=True)
class Pair:
    """One real run and its simulation: figures as `ops.simulate.figures.figures` has them."""

    real: Mapping[str, Any]
    simulated: Mapping[str, Any]
    sent: int
    """Requests."""


def judge(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """By policy, one pair for each repetition."""
    rows = [_row(policy, its) for policy, its in pairs.items()]
    checks = []
    for row in rows:
        policy = row["policy"]
        p99 = max(TTFT_P99, SPREADS * row["real_ttft_p99_spread"])
        checks += [
            _within(f"{policy}, output tokens/s", row["throughput_ratio"], THROUGHPUT),
            _within(f"{policy}, TTFT p50", row["ttft_p50_ratio"], TTFT_P50),
            _within(f"{policy}, TTFT p99", row["ttft_p99_ratio"], p99),
            {
                "what": f"{policy}, requests that the record has",
                "value": row["requests"],
                "wanted": f"all {row['sent']}",
                "ok": row["requests"] == row["sent"],
            },
        ]
    wrong = [
        f"{one['policy']} and {other['policy']}"
        for one, other in combinations(rows, 2)
        if _swapped(one, other)
    ]
    checks.append(
        {
            "what": "order of policies by TTFT p99",
            "value": f"{', '.join(wrong)} the other way round" if wrong else "the same",
            "wanted": "the same",
            "ok": not wrong,
        }
    )
    return {"policies": rows, "checks": checks, "ok": all(check["ok"] for check in checks)}


def _row(policy: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    p99s = [pair.real["ttft_s"]["p99"] for pair in pairs]
    real_p99_s = statistics.median(p99s)
    return {
        "policy": policy,
        "requests": sum(pair.real["requests"] for pair in pairs),
        "sent": sum(pair.sent for pair in pairs),
        "throughput_ratio": statistics.median(
            pair.simulated["output_tokens_per_s"] / pair.real["output_tokens_per_s"] for pair in pairs
        ),
        "real_ttft_p50_s": statistics.median(pair.real["ttft_s"]["p50"] for pair in pairs),
        "ttft_p50_ratio": _ratio(pairs, "p50"),
        "real_ttft_p99_s": real_p99_s,
        "simulated_ttft_p99_s": statistics.median(pair.simulated["ttft_s"]["p99"] for pair in pairs),
        "ttft_p99_ratio": _ratio(pairs, "p99"),
        "real_ttft_p99_spread": (max(p99s) - min(p99s)) / real_p99_s,
    }


def _ratio(pairs: Sequence[Pair], quantile: str) -> float:
    ratios: list[float] = [
        pair.simulated["ttft_s"][quantile] / pair.real["ttft_s"][quantile] for pair in pairs
    ]
    return statistics.median(ratios)


def _within(what: str, ratio: float, most: float) -> dict[str, Any]:
    return {
        "what": what,
        "value": round(ratio, 4),
        "wanted": f"within {100 * most:.0f} %",
        "ok": abs(ratio - 1) <= most,
    }


def _swapped(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the two lie apart in reality, and the other way round in the simulation."""
    apart: float = one["real_ttft_p99_s"] - other["real_ttft_p99_s"]
    spread: float = max(each["real_ttft_p99_spread"] * each["real_ttft_p99_s"] for each in (one, other))
    simulated: float = one["simulated_ttft_p99_s"] - other["simulated_ttft_p99_s"]
    return abs(apart) > spread and apart * simulated < 0
