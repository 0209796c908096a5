"""The page of targets: error budgets, burn rates, and misses by cause over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Response

from gateway.console import formats
from gateway.console.access import page, visit_of
from gateway.console.pages.filters import FILTER_ERRORS, Filters, filters_of, tenant_scope
from gateway.console.pages.requests.misses_shown import METRICS
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.admin.admin import Admin
from tenants.outcomes import Cause
from tenants.people.roles import Act
from tenants.resources.records.misses import MISSES
from tenants.slo.slo import DAY_S, PERIOD_DAYS, Burning, SloReport
from tenants.types import Tier

PATH = "/console/slo"
NAMES = ("tenant", "tier")
MOST_SHOWN = 200
"""Least budget left first."""


def target_shown(report: SloReport, least_misses: int) -> dict[str, Any]:
    """One tenant's requests of one tier against one target. With fewer misses than `least_misses`
    (an alert's) no budget is called overdrawn."""
    slo, period = report.slo, report.period
    return {
        "tenant": report.tenant_name,
        "tier": slo.tier.value,
        "metric": METRICS.get(slo.metric, slo.metric),
        "target": f"{slo.per_mille / 10:g} % within {formats.seconds(slo.target_s)}",
        "requests": period.total,
        "missed": period.missed,
        "attainment": 1 - period.missed / period.total if period.total else None,
        "budget_left": period.budget_left(slo.per_mille),
        "burning": [(burn_words(burn), burn) for burn in report.burning],
        "causes": list(report.causes.items()),
        "not_judged": max(0, period.missed - sum(report.causes.values())),
        "has_few": 0 < period.missed < least_misses,
    }


def burn_words(burn: Burning) -> str:
    """Burn rates in the windows of one alert, which fires if both reach its own."""
    long, short = (_rate(rate) for rate in (burn.long_rate, burn.short_rate))
    windows = f"{formats.seconds(burn.alert.long_s)} {long}, {formats.seconds(burn.alert.short_s)} {short}"
    return f"{windows} (alert at {burn.alert.rate:g})"


def _rate(rate: float | None) -> str:
    if rate is None:
        return formats.NONE
    return "∞" if rate == float("inf") else f"{rate:.1f}×"


def worst_first(reports: Sequence[SloReport], least_misses: int) -> list[dict[str, Any]]:
    """Least budget left first, those with few misses behind, and those without requests last."""

    def left(target: dict[str, Any]) -> tuple[bool, float]:
        budget_left: float | None = target["budget_left"]
        return target["has_few"], float("inf") if budget_left is None else budget_left

    shown = sorted((target_shown(report, least_misses) for report in reports), key=left)
    return sorted(shown, key=lambda target: target["budget_left"] is None)


def days_shown(by_day: Mapping[int, Mapping[str, int]]) -> tuple[list[str], list[tuple[int, list[int]]]]:
    """The causes, and their misses by day (start in Unix seconds); for the chart also days without any."""
    present = {cause for counts in by_day.values() for cause in counts}
    causes = [cause.value for cause in Cause if cause in present] + sorted(present - set(Cause))
    days = range(min(by_day), max(by_day) + 1, DAY_S) if by_day else range(0)
    return causes, [(day, [by_day.get(day, {}).get(cause, 0) for cause in causes]) for day in days]


async def _read(
    admin: Admin, tenant: str | None, tier: str | None
) -> tuple[list[SloReport], dict[int, dict[str, int]]]:
    return await admin.slos.report(tenant, tier), await admin.slos.causes_by_day(tenant, tier)


@page(PATH, act=Act.READ_TENANT)
async def slo_page(request: Request) -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    filters: Filters = filters_of(request, PATH, NAMES)
    scope = await tenant_scope(request, filters.get("tenant"))
    targets: list[dict[str, Any]] = []
    by_day: Mapping[int, Mapping[str, int]] = {}
    problem = None
    try:
        asked = scope.wanted, filters.get("tier")
        reports, by_day = await admin.in_one_snapshot(lambda opened: _read(opened, *asked))
        targets = worst_first(reports, admin.transactions.alert_misses)
    except FILTER_ERRORS as error:
        problem = filters.problem(error)
    causes, days = days_shown(by_day)
    return page_response(
        "requests/slo.html",
        visit,
        problem=problem,
        targets=targets[:MOST_SHOWN],
        num_hidden=max(0, len(targets) - MOST_SHOWN),
        causes=causes,
        columns=[(cause, "number") for cause in causes],
        days=days,
        filters=filters,
        scope=scope,
        tiers=list(Tier),
        period_days=PERIOD_DAYS,
        misses_path=MISSES.page_path,
        reads_platform=visit.person.may(Act.READ_PLATFORM),
        may_change=visit.person.may(Act.CHANGE_PLATFORM),
    )


HANDLERS = [slo_page]
