"""Draws the pictures of the documents: `make pictures`.

Figures of benchmarks lie beside the documents (`docs/figures/`, as `--json-file` or `--json` writes them);
what is simulated is simulated anew, on virtual time. Both draw the same pictures on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ops.bench.estimates.calibration import reliability_charts
from ops.bench.versus.report import versus_charts
from ops.pages.charts import Chart
from ops.pages.page import svg
from ops.simulate.machines.machines import roofline_machine
from ops.simulate.report.charts import Curves, charts, curves
from ops.simulate.run import Scenario, simulate
from ops.simulate.traffic.generate import Generated, Spec

DOCUMENTS = Path(__file__).parents[1] / "docs"
FIGURES = DOCUMENTS / "figures"
FLOOD = "tenants=3,skew=0,rate=1,seconds=60,flooder=8"
POLICIES = ("fcfs", "vtc")


def beside_others() -> Sequence[Chart]:
    """Ratios with their spread, from `make bench-versus`."""
    return versus_charts(json.loads((FIGURES / "versus.json").read_text()))


def told_and_happened() -> Sequence[Chart]:
    """Estimated waits against real ones, from `fairgate bench calibration`."""
    return reliability_charts(json.loads((FIGURES / "calibration.json").read_text()))


def flood() -> Sequence[Chart]:
    """Three tenants and one that floods, under each policy; docs/simulating.md has the command."""
    scenario = Scenario(Generated(Spec.of(FLOOD), 0), roofline_machine("l40s", "8b", max_sequences=16))
    drawn: list[Curves] = []
    simulate(scenario, POLICIES, on_pool=lambda name, pool: drawn.append(curves(pool, scenario.slo)))
    first_token, _, *others = charts(drawn, scenario.slo)
    return [first_token, *others]


PICTURES: dict[str, Callable[[], Sequence[Chart]]] = {
    "versus.svg": beside_others,
    "calibration.svg": told_and_happened,
    "flood.svg": flood,
}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (DOCUMENTS / name).write_text(svg(drawn()), encoding="utf-8")
