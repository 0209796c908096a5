"""The start page: the live overview of the platform, or of a member's tenants; the first steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from litestar import Response
from litestar.types import ASGIApp

from gateway.console.access import page, visit_of
from gateway.console.live.stream import LIVE, Texts, hub_of, live_region
from gateway.console.pages.live.figures import (
    Need,
    Overview,
    RefusalLine,
    SlowFigures,
    TightLimit,
    overview_of,
    scale_of,
    share_text,
    tiers_of,
)
from gateway.console.pages.live.first_steps import first_steps
from gateway.console.pages.live.past_hour import HourEvent, PastHour, read_past_hour
from gateway.console.pages.requests.ways_out import cause_of
from gateway.console.pages.tenant_parts.amounts import amount_text, in_short, what_of
from gateway.console.rendering import page_response, redirect, render
from gateway.console.return_path import START, with_query
from gateway.gateway import Gateway
from gateway.http.asgi import Request
from gateway.pools.live_counters import FleetNow
from gateway.routes.context import gateway_of
from gateway.routes.views.limits_view import states_to_exhaust
from gateway.routes.views.policy_view import tenant_names
from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE
from tenants.errors import DatabaseUnavailable
from tenants.outbox.kinds import REPLICA_DOWN
from tenants.people.roles import Act
from tenants.quota import pressure
from tenants.quota.pressure import Level, LimitPressure
from tenants.quota.store import LimitState
from tenants.resources.reading import read_page
from tenants.resources.records.counts import REFUSAL_COUNTS, RefusalCountQuery
from tenants.resources.records.usage import UsageAsked, UsagePage, usage_page
from tenants.slo.slo import PERIOD_DAYS, SloReport
from tenants.types import Limit

SLOW_EVERY_S = 10.0
WRITTEN_S = 8.0
"""After a minute, until all gateways have written it."""
MOST_ROWS = 15
"""Without a filter and without "all"."""
MOST_REFUSAL_PAGES = 5
MOST_REFUSALS = 5
MOST_TIGHT = 20
MOST_ALERTS = 100
RATE_S = 10.0
"""Longest time between the two snapshots of a rate."""


async def _read(
    admin: Admin, now_s: float, states: Sequence[LimitState], tenant_id: str | None
) -> tuple[UsagePage, list[SloReport], list[Mapping[str, Any]], list[LimitPressure]]:
    today = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    return (
        await usage_page(admin, UsageAsked(since=today, tenant=tenant_id), limit=1),
        await admin.slos.report(tenant_id),
        await _refusals(admin, tenant_id),
        await admin.transactions.read(lambda one: pressure.read(one, states, round(now_s * 1e6))),
    )


async def read_slow_figures(
    gateway: Gateway, earlier: SlowFigures, now_s: float, tenant_id: str | None = None
) -> SlowFigures:
    """The figures at `now_s` (Unix seconds), of all or one tenant; the earlier ones if the database does not
    answer."""
    admin, whose = gateway.deps.admin, None if tenant_id is None else frozenset({tenant_id})
    states = await states_to_exhaust(gateway, whose)
    try:
        usage, reports, refused, tight = await admin.in_one_snapshot(
            lambda one: _read(one, now_s, states, tenant_id)
        )
        alerts = await admin.webhooks.alerts(whose, fires=True, most=MOST_ALERTS)
    except DatabaseUnavailable:
        return earlier
    tenant_ids = {each.limit.tenant_id for each in tight} | {one.tenant_id for one in alerts}
    names = tenant_names(gateway, tenant_ids)
    # Several windows of one target are one problem; `page` before `ticket`.
    by_problem = {one.problem: one for one in sorted(alerts, key=lambda one: one.severity == "page")}
    problems = [one for one in by_problem.values() if one.silence is None]
    judged = sum(report.period.total for report in reports)
    missed = sum(report.period.missed for report in reports)
    limits = {limit.limit_id: limit for limit in gateway.deps.directory.limits(now_s)}
    return SlowFigures(
        sum(row["cost_nanousd"] for row in usage.as_json()["data"]),
        1 - missed / judged if judged else None,
        missed,
        judged,
        sum(row["count"] for row in refused),
        refusal_lines(refused, limits)[:MOST_REFUSALS],
        tuple(_tight(each, names) for each in tight[:MOST_TIGHT]),
        len(problems),
        tuple(
            (f"{name}: {one.summary}" if (name := names.get(one.tenant_id)) else one.summary, one.page)
            for one in problems
            if one.severity == "page" and one.subject != REPLICA_DOWN.subject
        ),
        round(now_s * 1e6),
    )


async def _refusals(admin: Admin, tenant_id: str | None) -> list[Mapping[str, Any]]:
    """By tenant, code and limit: the last day, in whole hours."""
    rows: list[Mapping[str, Any]] = []
    cursor, query = None, RefusalCountQuery(window="total", tenant=tenant_id)
    for _ in range(MOST_REFUSAL_PAGES):
        found = await read_page(admin, REFUSAL_COUNTS, query, cursor=cursor, limit=MAX_PAGE)
        rows += await admin.with_names(row.shown for row in found.rows)
        cursor = found.next_cursor
        if cursor is None:
            break
    return rows


def refusal_lines(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Limit]) -> tuple[RefusalLine, ...]:
    """Most refusals first; those of one limit in one line. Pure."""
    counts: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = Counter()
    for row in rows:
        limit = limits.get(row["limit_id"])
        cause = cause_of(row["code"]) if limit is None else in_short(limit)
        of_limit = {"code": row["code"]} if limit is None else {"limit_id": limit.limit_id}
        asked = {"tenant": row["tenant_id"]} | of_limit
        counts[row["tenant"] or row["tenant_id"], cause, tuple(asked.items())] += row["count"]
    lines = [
        RefusalLine(name, count, cause, with_query("/console/refusals", dict(asked)))
        for (name, cause, asked), count in counts.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-line.count, line.name, line.cause)))


def _tight(each: LimitPressure, names: Mapping[str, str]) -> TightLimit:
    limit = each.limit
    owner = names.get(limit.tenant_id)
    return TightLimit(
        "" if owner is None else limit.tenant_id,
        owner or "all tenants",
        limit.limit_id,
        f"{amount_text(limit.meter, limit.amount)} {what_of(limit)}",
        each.level is Level.EXHAUSTED,
        each.taken,
        each.refused,
        each.since_us,
    )


class OverviewMaker:
    """Takes snapshots of all gateways. Use from one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before: FleetNow | None = None
        self._before_s = 0.0
        self._slow = SlowFigures()
        self._slow_s: float | None = None
        self._hour = PastHour()
        self._minute = -1
        """The last one that the hour was read after."""

    async def make(self) -> Overview:
        gateway, deps = self._gateway, self._gateway.deps
        fleet = await gateway.fleet.now()
        now_s, wall_s = deps.clock(), deps.wall_clock()
        if self._slow_s is None or now_s - self._slow_s >= SLOW_EVERY_S:
            self._slow_s = now_s
            self._slow = await read_slow_figures(gateway, self._slow, wall_s)
            await self._read_hour(wall_s)
        names = tenant_names(gateway, (row.tenant_id for row in fleet.tenants))
        before = self._before if now_s - self._before_s <= RATE_S else None
        self._before, self._before_s = fleet, now_s
        made = overview_of(fleet, before, names, self._slow, round(wall_s * 1e6), self._brakes())
        return replace(made, hour=self._hour)

    async def _read_hour(self, wall_s: float) -> None:
        minute = int((wall_s - WRITTEN_S) // 60)
        if minute != self._minute:
            exhausted = [
                HourEvent(limit.since_us, f"{limit.name}: {limit.words} exhausted", limit.href)
                for limit in self._slow.tight
                if limit.since_us is not None
            ]
            try:
                self._hour = await read_past_hour(self._gateway.deps, exhausted, round(wall_s * 1e6))
            except DatabaseUnavailable:
                return
            self._minute = minute

    def _brakes(self) -> list[Need]:
        return [
            Need(
                f"Brake on {brake.tier.value}: at most {share_text(brake.share)} of each engine"
                + (f" ({brake.reason})" if brake.reason else ""),
                "Policy",
                "/console/policy",
                is_bad=False,
            )
            for brake in self._gateway.brakes.now
        ]


def maker_of(request: Request) -> OverviewMaker:
    """This gateway's maker: rates need the previous snapshot."""
    state = request.app.state
    if "overview" not in state:
        state["overview"] = OverviewMaker(gateway_of(request))
    made: OverviewMaker = state["overview"]
    return made


@dataclass(frozen=True, slots=True)
class OverviewWriter:
    """Renders the live part of the platform. Readers with the same question share its text."""

    wanted: str = ""
    """Part of a tenant's name."""
    all: bool = False

    def shown(self, overview: Overview) -> dict[str, Any]:
        tiers = tiers_of(overview, self.wanted, None if self.all or self.wanted else MOST_ROWS)
        rows = [row for tier in tiers for row in tier.rows]
        return {
            "now": overview,
            "tiers": tiers,
            "scale": scale_of(rows),
            "wanted": self.wanted,
            "all": self.all,
            "more": 0 if self.wanted else len(overview.rows) - len(rows),
            "days": PERIOD_DAYS,
        }

    def text(self, overview: Overview, texts: Texts) -> str:
        if self not in texts:
            texts[self] = render("live/overview_now.html", None, **self.shown(overview))
        return texts[self]


class TenantsMaker:
    """Adds a member's slow figures to the platform's snapshots."""

    def __init__(self, request: Request, tenant_ids: Sequence[str]) -> None:
        self._gateway, self._hub, self._platform = gateway_of(request), hub_of(request), maker_of(request)
        self._slow = {tenant_id: SlowFigures() for tenant_id in tenant_ids}
        self._slow_s: float | None = None

    async def make(self) -> tuple[Overview, dict[str, SlowFigures]]:
        deps = self._gateway.deps
        overview = await self._hub.look(TOPIC, self._platform.make)
        if self._slow_s is None or deps.clock() - self._slow_s >= SLOW_EVERY_S:
            self._slow_s = deps.clock()
            for tenant_id, earlier in self._slow.items():
                self._slow[tenant_id] = await read_slow_figures(
                    self._gateway, earlier, deps.wall_clock(), tenant_id
                )
        return overview, dict(self._slow)


@dataclass(frozen=True, slots=True)
class TenantsWriter:
    """Renders the live part of a member's tenants."""

    names: tuple[tuple[str, str], ...]
    """Ids and names."""

    def shown(self, made: tuple[Overview, dict[str, SlowFigures]]) -> dict[str, Any]:
        overview, slow = made
        rows = [row for row in overview.rows if row.tenant_id in slow]
        tenants = [
            (tenant_id, name, [row for row in rows if row.tenant_id == tenant_id], slow[tenant_id])
            for tenant_id, name in self.names
        ]
        return {"at_us": overview.at_us, "tenants": tenants, "scale": scale_of(rows), "days": PERIOD_DAYS}

    def text(self, made: tuple[Overview, dict[str, SlowFigures]], texts: Texts) -> str:
        if self not in texts:
            texts[self] = render("live/tenants_now.html", None, **self.shown(made))
        return texts[self]


PATH = START
TOPIC = ("overview",)


def _writer(request: Request) -> OverviewWriter:
    query = request.query_params
    return OverviewWriter(query.get("tenant", "").strip()[:64], query.get("all") == "yes")


def _tenants_of(request: Request) -> tuple[TenantsMaker, TenantsWriter, tuple[object, ...]]:
    person = visit_of(request).person
    names = tenant_names(gateway_of(request), person.tenants)
    ids = sorted(names, key=lambda one: names[one])
    return (
        TenantsMaker(request, ids),
        TenantsWriter(tuple((one, names[one]) for one in ids)),
        ("overview of tenants", *ids),
    )


@page(PATH)
async def overview_page(request: Request) -> Response[str]:
    visit, hub = visit_of(request), hub_of(request)
    live, steps = f"{PATH}{LIVE}", None
    if visit.person.may(Act.READ_PLATFORM):
        writer = _writer(request)
        shown = writer.shown(await hub.look(TOPIC, maker_of(request).make))
        live = with_query(live, {"tenant": writer.wanted, "all": "yes" if writer.all else ""})
        steps = await first_steps(request)
    else:
        maker, of_tenants, key = _tenants_of(request)
        shown = of_tenants.shown(await hub.look(key, maker.make))
    full = hub.refusal(visit.person)
    return page_response("live/overview.html", visit, full=full, live=live, steps=steps, **shown)


@page(f"{PATH}{LIVE}")
async def overview_live(request: Request) -> ASGIApp:
    if not visit_of(request).person.may(Act.READ_PLATFORM):
        maker, of_tenants, key = _tenants_of(request)
        return await live_region(request, key, maker.make, of_tenants.text, PATH)
    return await live_region(request, TOPIC, maker_of(request).make, _writer(request).text, PATH)


@page(f"{PATH}/overview")
async def earlier_address(request: Request) -> Response[str]:
    return redirect(with_query(PATH, dict(request.query_params)))


HANDLERS = [overview_page, overview_live, earlier_address]
