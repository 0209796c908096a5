"""The reliability curves of a calibration report as charts."""

from __future__ import annotations

from typing import Any

from ops.bench.estimates.calibration import HELD_TO
from ops.pages.charts import ChartLine, LineChart

WHAT = {"ttft": "Time to the first token", "e2e": "Time to the last token"}


def reliability_charts(report: dict[str, Any]) -> list[LineChart]:
    """For each time the told quantile across, the share of requests at or under it up; the diagonal is what
    was told."""
    return [
        LineChart(
            WHAT[what],
            "told quantile",
            "share at or under it",
            [
                ChartLine(f"{scenario['name']}, {group}", [tuple(point) for point in figures[what]["curve"]])
                for scenario in report["scenarios"]
                for group, figures in scenario["groups"].items()
            ],
            y_most=1.0,
            has_diagonal=True,
        )
        for what in HELD_TO
    ]
