"""Charts that compare policies: TTFT and TPOT, goodput over time, and attainment by tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ops.pages.charts import Bar, BarChart, Chart, ChartLine, LineChart
from ops.simulate.pool import SimulatedPool
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits

POINTS = 200
BINS = 60
TENANTS = 8


@dataclass(frozen=True, slots=True)
class Curves:
    policy: str
    span_s: float
    ttft_s: list[float] = field(repr=False)
    """`POINTS` quantiles, evenly from the least to the most; infinite ones left out at the end."""
    tpot_s: list[float] = field(repr=False)
    arrived_per_s: list[float] = field(repr=False)
    """In `BINS` equal parts of the span."""
    met_per_s: list[float] = field(repr=False)
    """Requests that ended in each part and had met the SLO, a second."""
    attainment: dict[str, float]
    service_per_s: dict[str, list[float]] = field(repr=False)
    """Input and output tokens of answers, spread evenly from the first token to the last."""


def curves(pool: SimulatedPool, slo: SloLimits) -> Curves:
    records = pool.records
    span_s = max(pool.now_s, 1e-9)
    rows = range(len(records))
    met = [slo.met(records, row) for row in rows]
    arrived, good = [0] * BINS, [0] * BINS
    for row in rows:
        arrived[_bin(records.arrival_s[row], span_s)] += 1
        if met[row]:
            good[_bin(records.last_s[row], span_s)] += 1
    by_tenant = sorted(records.rows_by_tenant().items(), key=lambda item: -len(item[1]))[:TENANTS]
    width_s = span_s / BINS
    return Curves(
        pool.policy,
        span_s,
        _quantiles(records, "ttft_s"),
        _quantiles(records, "tpot_s"),
        [count / width_s for count in arrived],
        [count / width_s for count in good],
        {tenant: sum(met[row] for row in its) / len(its) for tenant, its in by_tenant},
        {tenant: _service(records, its, span_s) for tenant, its in by_tenant},
    )


def _service(records: Records, rows: list[int], span_s: float) -> list[float]:
    width_s = span_s / BINS
    tokens = [0.0] * BINS
    for row in rows:
        first_s, last_s = records.first_s[row], records.last_s[row]
        if not first_s <= last_s < float("inf"):
            continue
        first, last = _bin(first_s, span_s), _bin(last_s, span_s)
        share = (records.input_tokens[row] + records.output_tokens[row]) / (last - first + 1)
        for place in range(first, last + 1):
            tokens[place] += share
    return [count / width_s for count in tokens]


def _bin(at_s: float, span_s: float) -> int:
    return min(BINS - 1, int(at_s / span_s * BINS))


def _quantiles(records: Records, name: str) -> list[float]:
    of = getattr(records, name)
    ordered = sorted(map(of, range(len(records))))
    if not ordered:
        return []
    picked = [ordered[min(len(ordered) - 1, place * len(ordered) // POINTS)] for place in range(POINTS)]
    return [value for value in picked if value != float("inf")]


def charts(drawn: Sequence[Curves], slo: SloLimits) -> list[Chart]:
    if not drawn:
        return []
    longest = max(drawn, key=lambda policy: policy.span_s)
    arrived = ChartLine("arrived", _over_time(longest, longest.arrived_per_s))
    met = [ChartLine(policy.policy, _over_time(policy, policy.met_per_s)) for policy in drawn]
    return [
        _distribution("Time to the first token", {one.policy: one.ttft_s for one in drawn}, slo.ttft_s),
        _distribution("Time per output token", {one.policy: one.tpot_s for one in drawn}, slo.tpot_s),
        LineChart("Requests that met the SLO", "time, s", "requests a second", [*met, arrived]),
        *(
            LineChart(
                f"Service by tenant under {one.policy}",
                "time, s",
                "tokens a second",
                [ChartLine(tenant, _over_time(one, values)) for tenant, values in one.service_per_s.items()],
            )
            for one in drawn
            if len(one.service_per_s) > 1
        ),
        BarChart(
            "Met the SLO, by tenant with the most requests",
            [
                Bar(f"{tenant}, {one.policy}", share, f"{100 * share:.1f} %", number)
                for tenant in drawn[0].attainment
                for number, one in enumerate(drawn)
                for share in [one.attainment.get(tenant, 0.0)]
            ],
        ),
    ]


def _distribution(title: str, values: dict[str, list[float]], target_s: float) -> LineChart:
    """`values`: quantiles by policy."""
    lines = [
        ChartLine(policy, [(value, 100 * place / POINTS) for place, value in enumerate(quantiles)])
        for policy, quantiles in values.items()
    ]
    target = target_s if 0 < target_s < float("inf") else None
    return LineChart(
        title, "seconds", "requests served within, %", lines, is_logarithmic=True, target=target, y_most=100.0
    )


def _over_time(curves: Curves, values: Sequence[float]) -> list[tuple[float, float]]:
    width_s = curves.span_s / len(values)
    return [((number + 0.5) * width_s, value) for number, value in enumerate(values)]
