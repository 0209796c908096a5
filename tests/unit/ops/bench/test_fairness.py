"""Do the fairness benchmarks' tables say what their reports hold?"""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.fairness import live as fairness_pool
from ops.bench.fairness import weights_live


def pool_report(ratio: float) -> dict[str, Any]:
    row = {"requests": 2000, "unsent": 7, "ttft_p50_s": 0.05, "account_ttft_p99_s": 0.1}
    return {
        "cores": {"engine": 1, "others": 1},
        "requests_per_s": 50.0,
        "cost_per_s": 2500,
        "flood": {
            "rows": {
                "equal half": row | {"other_share": 0.5, "ttft_p99_s": 0.2},
                "flood": row | {"other_share": 5.0, "ttft_p99_s": 0.2 * ratio},
            },
            "ratio": ratio,
            "ok": ratio <= fairness_pool.MAX_RATIO,
        },
        "tiers": {
            "interactive_requests": 300,
            "interactive_ttft_p50_s": 0.05,
            "interactive_ttft_p99_s": 0.1,
            "batch_ttft_p50_s": 2.0,
            "batch_share_of_service": 0.7,
            "places_taken": 250,
            "ok": True,
        },
        "reservations": {
            "reserved_cost_per_s": 750,
            "served_of_reserved": 0.99,
            "without_reservation": 0.01,
            "ok": True,
        },
    }


@pytest.mark.parametrize(("ratio", "verdict"), [(1.2, ": ok"), (1.6, ": NOT ok")])
def test_a_flood_is_judged_by_its_ratio(
    capsys: pytest.CaptureFixture[str], ratio: float, verdict: str
) -> None:
    fairness_pool.show(pool_report(ratio))
    said = capsys.readouterr().out
    (line,) = [each for each in said.splitlines() if each.startswith("flood over equal half")]
    assert line == f"flood over equal half: {ratio:.3f}, at most 1.5{verdict}"
    assert "250 places taken" in said
    assert "99.0%" in said


def test_parts_that_were_not_measured_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report = pool_report(1.0)
    del report["tiers"], report["reservations"]
    fairness_pool.show(report)
    said = capsys.readouterr().out
    assert "tiers" not in said
    assert "reservations" not in said


def test_weights_are_shown_with_jains_index_and_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    one = {
        "light_cost_tokens": 33_000,
        "heavy_cost_tokens": 99_000,
        "ratio": 3.0,
        "deviation": 0.0,
        "seconds": 40.0,
        "least_queued": {"light": 300, "heavy": 20},
    }
    weights_live.show(
        {
            "runs": [one],
            "median_ratio": 3.0,
            "least_ratio": 3.0,
            "most_ratio": 3.0,
            "worst_deviation": 0.0,
            "least_jain_index": 0.999999,
            "widest_gap_over_bound": 0.031,
            "ok": True,
        }
    )
    said = capsys.readouterr().out
    assert "Jain index 0.999999" in said
    assert "0.031 of the bound 2U: ok" in said
