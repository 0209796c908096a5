"""The live overview: shares, queues, replicas, misses and refusals."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from litestar import Response
from litestar.types import ASGIApp

from gateway.console.access import page, visit_of
from gateway.console.live.held_rows import held
from gateway.console.live.stream import LIVE, Texts, hub_of, live_region
from gateway.console.pages.live.figures import Overview, ShareRow, SlowFigures, overview_of
from gateway.console.pages.live.past_hour import read_past_hour
from gateway.console.rendering import page_response, render
from gateway.gateway import Gateway
from gateway.http.asgi import Request
from gateway.pools.live_counters import FleetNow
from gateway.routes.context import gateway_of
from gateway.routes.views.policy_view import tenant_names
from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.errors import DatabaseUnavailable
from tenants.people.roles import Act
from tenants.resources.reading import read_page
from tenants.resources.records.counts import REFUSAL_COUNTS, GroupedRow, RefusalCountQuery
from tenants.resources.records.usage import UsageAsked, UsagePage, usage_page
from tenants.slo.slo import PERIOD_DAYS, SloReport

SLOW_EVERY_S = 10.0
REFUSALS = RefusalCountQuery(window="hour", group_by="code")
"""Of the last day, in whole hours."""


async def _read(admin: Admin, today: str) -> tuple[UsagePage, list[SloReport], Page[GroupedRow]]:
    return (
        await usage_page(admin, UsageAsked(since=today), limit=1),
        await admin.slos.report(),
        await read_page(admin, REFUSAL_COUNTS, REFUSALS, limit=MAX_PAGE),
    )


async def read_slow_figures(admin: Admin, earlier: SlowFigures, now_s: float) -> SlowFigures:
    """The figures at `now_s` (Unix seconds); the earlier ones if the database does not answer."""
    today = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    try:
        usage, reports, refused = await admin.in_one_snapshot(lambda opened: _read(opened, today))
    except DatabaseUnavailable:
        return earlier
    refusals: Counter[str] = Counter()
    for row in refused.rows:
        refusals[row.shown["code"]] += row.shown["count"]
    judged = sum(report.period.total for report in reports)
    missed = sum(report.period.missed for report in reports)
    return SlowFigures(
        sum(row["cost_nanousd"] for row in usage.as_json()["data"]),
        1 - missed / judged if judged else None,
        missed,
        judged,
        dict(sorted(refusals.items())),
        round(now_s * 1e6),
    )


PATH = "/console/overview"
TOPIC = ("overview",)
MOST_ROWS = 100
RATE_S = 10.0
"""Longest time between the two snapshots of a rate."""


class OverviewMaker:
    """Takes snapshots of all gateways. Use from one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._before: FleetNow | None = None
        self._before_s = 0.0
        self._slow = SlowFigures()
        self._slow_s: float | None = None

    async def make(self) -> Overview:
        gateway, deps = self._gateway, self._gateway.deps
        fleet = await gateway.fleet.now()
        now_s = deps.clock()
        if self._slow_s is None or now_s - self._slow_s >= SLOW_EVERY_S:
            self._slow_s = now_s
            self._slow = await read_slow_figures(deps.admin, self._slow, deps.wall_clock())
        names = tenant_names(gateway, (row.tenant_id for row in fleet.tenants))
        before = self._before if now_s - self._before_s <= RATE_S else None
        self._before, self._before_s = fleet, now_s
        return overview_of(fleet, before, names, self._slow, round(deps.wall_clock() * 1e6))


def maker_of(request: Request) -> OverviewMaker:
    """This gateway's maker: rates need the previous snapshot."""
    state = request.app.state
    if "overview" not in state:
        state["overview"] = OverviewMaker(gateway_of(request))
    made: OverviewMaker = state["overview"]
    return made


class OverviewWriter:
    """Renders the live part for one reader, whose rows hold still."""

    def __init__(self) -> None:
        self._first: tuple[ShareRow, ...] | None = None
        self._ids: tuple[str, ...] = ()

    def shown(self, overview: Overview) -> dict[str, Any]:
        if self._first is None:
            self._first = overview.tenants[:MOST_ROWS]
            self._ids = tuple(row.row_id for row in self._first)
        return {
            "period_days": PERIOD_DAYS,
            "now": overview,
            "tenants": held(self._first, overview.tenants, lambda row: row.row_id),
        }

    def text(self, overview: Overview, texts: Texts) -> str:
        """Readers with the same rows share its text."""
        shown = self.shown(overview)
        if self._ids not in texts:
            texts[self._ids] = render("live/overview_now.html", None, **shown)
        return texts[self._ids]


@page(PATH, act=Act.READ_PLATFORM)
async def overview_page(request: Request) -> Response[str]:
    hub, deps = hub_of(request), gateway_of(request).deps
    shown = OverviewWriter().shown(await hub.look(TOPIC, maker_of(request).make))
    past = await read_past_hour(deps.admin, deps.directory, shown["now"].at_us)
    return page_response(
        "live/overview.html",
        visit_of(request),
        full=hub.refusal(visit_of(request).person),
        past=past,
        **shown,
    )


@page(f"{PATH}{LIVE}", act=Act.READ_PLATFORM)
async def overview_live(request: Request) -> ASGIApp:
    return await live_region(request, TOPIC, maker_of(request).make, OverviewWriter().text, PATH)


HANDLERS = [overview_page, overview_live]
