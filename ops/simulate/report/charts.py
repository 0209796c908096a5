"""Charts that compare policies: distributions of TTFT and TPOT with their targets, requests a second that met
the SLO over time beside those that arrived, and attainment by tenant."""

from __future__ import annotations

from collections.abc import Sequence

from ops.pages.charts import Bar, BarChart, Chart, ChartLine, LineChart
from ops.simulate.figures.curves import POINTS, Curves
from ops.simulate.slo import SloLimits


def charts(found: Sequence[Curves], slo: SloLimits) -> list[Chart]:
    """Of one simulation; the curves of each policy in the same colour."""
    if not found:
        return []
    longest = max(found, key=lambda each: each.span_s)
    arrived = ChartLine("arrived", _over_time(longest, longest.arrived_per_s))
    met = [ChartLine(each.policy, _over_time(each, each.met_per_s)) for each in found]
    return [
        _distribution("Time to the first token", found, [each.ttft_s for each in found], slo.ttft_s),
        _distribution("Time per output token", found, [each.tpot_s for each in found], slo.tpot_s),
        LineChart("Requests that met the SLO", "time, s", "requests a second", [*met, arrived]),
        *(
            LineChart(
                f"Service by tenant under {each.policy}",
                "time, s",
                "tokens a second",
                [
                    ChartLine(tenant, _over_time(each, values))
                    for tenant, values in each.service_per_s.items()
                ],
            )
            for each in found
            if len(each.service_per_s) > 1
        ),
        BarChart(
            "Met the SLO, by tenant with the most requests",
            [
                Bar(f"{tenant}, {each.policy}", share, f"{100 * share:.1f} %", number)
                for tenant in found[0].attainment
                for number, each in enumerate(found)
                for share in [each.attainment.get(tenant, 0.0)]
            ],
        ),
    ]


def _distribution(
    title: str, found: Sequence[Curves], values: Sequence[list[float]], target_s: float
) -> LineChart:
    lines = [
        ChartLine(each.policy, [(value, 100 * place / POINTS) for place, value in enumerate(quantiles)])
        for each, quantiles in zip(found, values, strict=True)
    ]
    target = target_s if 0 < target_s < float("inf") else None
    return LineChart(
        title, "seconds", "requests served within, %", lines, is_logarithmic=True, target=target, y_most=100.0
    )


def _over_time(each: Curves, values: Sequence[float]) -> list[tuple[float, float]]:
    width_s = each.span_s / len(values)
    return [((number + 0.5) * width_s, value) for number, value in enumerate(values)]
