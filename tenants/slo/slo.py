"""SLO targets, error budgets and burn-rate alerts.

A target applies to a metric (TTFT, TPOT, end-to-end latency) of a tenant's requests in a tier: a given
percentage of them must stay within a given time. The rest is the error budget. At burn rate 1 it is used up
exactly at the end of its period. An alert fires on a high rate over both a long and a short window, so that
it is significant and still going on (Google, The Site Reliability Workbook, chapter 5). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tenants.slo.target import Slo
from tenants.types import Tier

PERIOD_DAYS = 30
SPAN_S = 300
"""Granularity of the windows."""
DAY_S = 86_400
KEPT_SPANS_S = 3 * DAY_S + 2 * SPAN_S


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires at a burn rate of `rate` or more over both windows."""

    long_s: int
    short_s: int
    rate: float
    severity: str
    """`page`: react now; `ticket`: within days."""


ALERTS = (
    Alert(3_600, 300, 14.4, "page"),
    Alert(6 * 3_600, 1_800, 6.0, "page"),
    Alert(3 * DAY_S, 6 * 3_600, 1.0, "ticket"),
)
"""Table 5-8 of the workbook: 2 % of the budget in an hour, 5 % in six, 10 % in three days."""
WINDOWS_S = tuple(sorted({seconds for alert in ALERTS for seconds in (alert.short_s, alert.long_s)}))
DEFAULT_LEAST_MISSES = 10
"""In an alert's long window. With fewer it does not fire, which is the workbook's warning of low traffic."""


class SloBook:
    def __init__(self, slos: Iterable[Slo] = ()) -> None:
        self._by: dict[tuple[str, Tier], dict[str, Slo]] = {}
        for slo in slos:
            self._by.setdefault((slo.tenant_id, slo.tier), {})[slo.metric] = slo
        self._found: dict[tuple[str, Tier], tuple[Slo, ...]] = {}
        self._targets_s: dict[tuple[str, Tier], Mapping[str, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._by)

    def of(self, tenant_id: str, tier: Tier) -> tuple[Slo, ...]:
        """Targets of a request: for each metric its tenant's own, or the tier's default."""
        targets = self._found.get((tenant_id, tier))
        if targets is None:
            merged = self._by.get(("", tier), {}) | self._by.get((tenant_id, tier), {})
            targets = self._found[tenant_id, tier] = tuple(merged[metric] for metric in sorted(merged))
        return targets

    def targets_s(self, tenant_id: str, tier: Tier) -> Mapping[str, float]:
        targets = self._targets_s.get((tenant_id, tier))
        if targets is None:
            targets = self._targets_s[tenant_id, tier] = {
                slo.metric: slo.target_s for slo in self.of(tenant_id, tier)
            }
        return targets


@dataclass(frozen=True, slots=True)
class SloTally:
    total: int = 0
    missed: int = 0

    def __add__(self, other: SloTally) -> SloTally:
        return SloTally(self.total + other.total, self.missed + other.missed)

    def burn_rate(self, per_mille: int) -> float | None:
        """Misses per allowed miss; None: no requests; infinite: any miss where none is allowed."""
        if not self.total:
            return None
        allowed = (1000 - per_mille) / 1000
        share = self.missed / self.total
        return share / allowed if allowed else (float("inf") if share else 0.0)

    def budget_left(self, per_mille: int) -> float | None:
        """Remaining share of the error budget; negative when overdrawn."""
        rate = self.burn_rate(per_mille)
        return None if rate is None else 1 - rate


@dataclass(frozen=True, slots=True)
class Burning:
    alert: Alert
    long_rate: float | None
    short_rate: float | None
    has_enough: bool = True
    """Misses in the long window."""

    @property
    def fires(self) -> bool:
        rates = (self.long_rate, self.short_rate)
        return self.has_enough and all(rate is not None and rate >= self.alert.rate for rate in rates)

    def as_json(self) -> dict[str, Any]:
        return {
            "long_s": self.alert.long_s,
            "short_s": self.alert.short_s,
            "long_rate": _finite(self.long_rate),
            "short_rate": _finite(self.short_rate),
            "fires_at": self.alert.rate,
            "severity": self.alert.severity,
            "fires": self.fires,
        }


def burning(
    spans: Mapping[int, SloTally], per_mille: int, now_s: float, least_misses: int = DEFAULT_LEAST_MISSES
) -> list[Burning]:
    """Burn rates of every alert. `spans`: tallies by the start of their `SPAN_S`, seconds since 1970. Windows
    are whole spans, including the current one."""

    return burning_over(
        {
            window_s: sum(
                (tally for start_s, tally in spans.items() if start_s >= window_since_s(window_s, now_s)),
                SloTally(),
            )
            for window_s in WINDOWS_S
        },
        per_mille,
        least_misses,
    )


def window_since_s(window_s: int, now_s: float) -> int:
    """Start of the first span of a window that ends now."""
    return int(now_s) // SPAN_S * SPAN_S - (window_s - SPAN_S)


def burning_over(
    windows: Mapping[int, SloTally], per_mille: int, least_misses: int = DEFAULT_LEAST_MISSES
) -> list[Burning]:
    """From the tallies of each of `WINDOWS_S`."""
    rows = [(alert, windows[alert.long_s], windows[alert.short_s]) for alert in ALERTS]
    return [
        Burning(alert, long.burn_rate(per_mille), short.burn_rate(per_mille), long.missed >= least_misses)
        for alert, long, short in rows
    ]


@dataclass(frozen=True, slots=True)
class SloReport:
    """Attainment of one target by one tenant's requests in one tier, over the period."""

    slo: Slo
    tenant_id: str
    tenant_name: str
    period: SloTally
    burning: tuple[Burning, ...]
    causes: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        total, missed = self.period.total, self.period.missed
        return {
            **self.slo.as_json(),
            "tenant_id": self.tenant_id,
            "tenant": self.tenant_name,
            "period_days": PERIOD_DAYS,
            "requests": total,
            "missed": missed,
            "attainment": None if not total else round(1 - missed / total, 6),
            "budget_left": _finite(self.period.budget_left(self.slo.per_mille)),
            "burn": [burn.as_json() for burn in self.burning],
            "causes": dict(self.causes),
        }


@dataclass(frozen=True, slots=True)
class Missed:
    request_id: str
    tenant_id: str
    tier: str
    metric: str
    cause: str
    target_us: int
    actual_us: int | None
    """None: never reached."""
    at_us: int
    """When the request ended; microseconds since 1970."""
    evidence: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "tenant_id": self.tenant_id,
            "tier": self.tier,
            "metric": self.metric,
            "cause": self.cause,
            "target_s": self.target_us / 1e6,
            "actual_s": None if self.actual_us is None else self.actual_us / 1e6,
            "ended_us": self.at_us,
            "evidence": dict(self.evidence),
        }


def _finite(value: float | None) -> float | None:
    if value is None or value in (float("inf"), float("-inf")):
        return None
    return round(value, 4)
