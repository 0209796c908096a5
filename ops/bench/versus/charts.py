"""The comparison as charts: bars of each measured line, medians with their spread, the ideal dashed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.bench.versus.figures import LINES
from ops.pages.charts import Bar, BarChart

TITLES = {
    "flood_ratio": "First token (p99) beside a flood, over alone",
    "weights_ratio": "Tokens by weight, 1:3",
    "overshoot_tokens": "Tokens over a hard limit",
    "uncharged_tokens": "Tokens delivered, on no bill after kill -9",
}


def versus_charts(report: Mapping[str, Any]) -> list[BarChart]:
    """One for each line of a report's summary."""
    return [
        BarChart(
            TITLES[line.key],
            [
                Bar(
                    name,
                    each[line.key]["median"],
                    format(each[line.key]["median"], line.spec),
                    number,
                    each[line.key]["least"],
                    each[line.key]["most"],
                )
                for number, (name, each) in enumerate(report["summary"].items())
            ],
            float(line.wanted),
        )
        for line in LINES
    ]
