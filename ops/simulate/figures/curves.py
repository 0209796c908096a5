"""Samples of a run's requests for its plots: a few hundred numbers, whatever the number of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ops.simulate.pool import SimulatedPool
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits

POINTS = 200
BINS = 60
TENANTS = 8


@dataclass(frozen=True, slots=True)
class Curves:
    """One policy's."""

    policy: str
    span_s: float
    ttft_s: list[float] = field(repr=False)
    """Quantiles, `POINTS` of them evenly from the least to the most; infinite ones left out at the end."""
    tpot_s: list[float] = field(repr=False)
    arrived_per_s: list[float] = field(repr=False)
    """In `BINS` equal parts of the span."""
    met_per_s: list[float] = field(repr=False)
    """Of those that ended in each part: how many a second had met the SLO."""
    attainment: dict[str, float]
    """Of the tenants with the most requests."""
    service_per_s: dict[str, list[float]] = field(repr=False)
    """Of these tenants, by the same parts of the span: input and output tokens of answers, spread evenly from
    the first token to the last."""


def curves(pool: SimulatedPool, slo: SloLimits) -> Curves:
    """Of a run that is over."""
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
    return [each / width_s for each in tokens]


def _bin(at_s: float, span_s: float) -> int:
    return min(BINS - 1, int(at_s / span_s * BINS))


def _quantiles(records: Records, name: str) -> list[float]:
    of = getattr(records, name)
    ordered = sorted(map(of, range(len(records))))
    if not ordered:
        return []
    picked = [ordered[min(len(ordered) - 1, place * len(ordered) // POINTS)] for place in range(POINTS)]
    return [value for value in picked if value != float("inf")]
