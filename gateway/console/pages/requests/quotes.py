"""The page of quotes: how often they held, and what was credited."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from litestar import Response

from engine.forecast.calibration import longest_wait_s
from gateway.console import formats
from gateway.console.access import page, visit_of
from gateway.console.pages.filters import FILTER_ERRORS, Filters, checked, filters_of
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.admin.admin import Admin
from tenants.counts.calibration import FIGURES, KINDS
from tenants.errors import Invalid
from tenants.instants import from_us, to_us
from tenants.nouns import checks
from tenants.people.roles import Act
from tenants.resources.reading import read_page
from tenants.resources.records.counts import CALIBRATION, USUAL_CALIBRATION_S, CalibrationQuery
from tenants.resources.records.usage import UsageAsked, usage_page
from tenants.types import Tier

PATH = "/console/quotes"
NAMES = ("figure", "model", "tier", "kind", "from", "to")
HOUR_US = 3_600_000_000
FIRST_US = 946_684_800_000_000
"""The year 2000; earlier times have no span before them."""
MOST_GROUPS = 1_000
WORDS = {"wait": "Wait", "ttft": "Time to the first token", "e2e": "Whole time", "output": "Output tokens"}


@dataclass(frozen=True)
class Span:
    since_us: int
    until_us: int

    @property
    def as_filters(self) -> dict[str, str]:
        return {"from": from_us(self.since_us).isoformat(), "to": from_us(self.until_us).isoformat()}


FEWEST = 30
"""Below this no share is shown: around a half its interval is a third of the scale."""
Z_95 = 1.959964
OFF = 0.05
"""A share this far from the stated one, and surely not it, is marked."""


def wilson(within: int, requests: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of a share of at least one request, within 0 and 1 also for few requests and shares near
    1. E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927)."""
    share = within / requests
    middle = share + z * z / (2 * requests)
    half = z * math.sqrt(share * (1 - share) / requests + z * z / (4 * requests * requests))
    whole = 1 + z * z / requests
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


@dataclass(frozen=True)
class KeptShare:
    """How many requests stayed within a stated figure."""

    told: float
    """The share that should: 0.5 or 0.9."""
    within: int
    requests: int

    @property
    def is_enough(self) -> bool:
        return self.requests >= FEWEST

    @property
    def share(self) -> float:
        return self.within / self.requests

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.within, self.requests)

    @property
    def is_off(self) -> bool:
        low, high = self.interval
        return self.is_enough and abs(self.share - self.told) > OFF and not low <= self.told <= high


@dataclass(frozen=True)
class KeptFigure:
    p50: KeptShare
    p90: KeptShare

    @property
    def requests(self) -> int:
        return self.p50.requests


def kept_figure(row: Mapping[str, Any]) -> KeptFigure:
    requests = row["requests"]
    return KeptFigure(
        KeptShare(0.5, row["within_p50"], requests), KeptShare(0.9, row["within_p90"], requests)
    )


def span_of(filters: Filters, now: datetime) -> Span:
    def typed_us(name: str) -> int | None:
        text = filters.instant(name)
        at_us = None if text is None else to_us(checks.instant(name, text))
        if at_us is not None and at_us < FIRST_US:
            raise Invalid(name, "lies before 2000: nothing was counted then")
        return at_us

    until, since = typed_us("to"), typed_us("from")
    until_us = -(-(to_us(now) if until is None else until) // HOUR_US) * HOUR_US
    if since is None:
        return Span(until_us - USUAL_CALIBRATION_S * 1_000_000, until_us)
    return Span(since // HOUR_US * HOUR_US, until_us)


def bucket_words(wait_bucket: int) -> str:
    longest_s = longest_wait_s(wait_bucket)
    if longest_s == float("inf"):
        return f"more than {formats.seconds(longest_wait_s(wait_bucket - 1))}"
    return f"up to {formats.seconds(longest_s)}"


NOTHING: dict[str, Any] = {"by_figure": [], "by_wait": [], "by_day": [], "by_kind": [], "credits": []}


async def read_quotes(admin: Admin, filters: Filters, span: Span) -> dict[str, Any]:
    figure = checked("figure", filters.get("figure"), FIGURES) or FIGURES[0]
    same = {
        "model": filters.get("model"),
        "tier": filters.get("tier"),
        "kind": filters.get("kind"),
        "since": span.as_filters["from"],
        "until": span.as_filters["to"],
    }

    async def groups(group_by: str, of: str | None = figure) -> Iterable[Mapping[str, Any]]:
        query = CalibrationQuery(group_by=group_by, figure=of, **same)
        page = await read_page(admin, CALIBRATION, query, limit=MOST_GROUPS)
        return [row.shown for row in page.rows]

    figures = {row["figure"]: kept_figure(row) for row in await groups("figure", None)}
    days = await groups("day")
    asked = UsageAsked(
        since=same["since"],
        until=same["until"],
        group_by="model,tier",
        model=same["model"],
        tier=same["tier"],
    )
    usage = (await usage_page(admin, asked, limit=MOST_GROUPS)).as_json()["data"]
    return {
        "by_figure": [(figure, figures[figure]) for figure in FIGURES if figure in figures],
        "by_wait": [(bucket_words(row["wait_bucket"]), kept_figure(row)) for row in await groups("wait")],
        "by_day": [(to_us(datetime.fromisoformat(row["start"])), kept_figure(row)) for row in days],
        "by_kind": [
            (row["model"], row["tier"], row["kind"], kept_figure(row))
            for row in await groups("model,tier,kind")
        ],
        "credits": [
            (row["model"], row["tier"], row["credit_nanousd"]) for row in usage if row["credit_nanousd"]
        ],
    }


@page(PATH, act=Act.READ_PLATFORM)
async def quotes_page(request: Request) -> Response[str]:
    deps = gateway_of(request).deps
    filters = filters_of(request, PATH, NAMES)
    now = datetime.fromtimestamp(deps.wall_clock(), UTC) + timedelta(microseconds=1)
    shares, problem, span = NOTHING, None, span_of(Filters(PATH, {}), now)
    try:
        span = span_of(filters, now)
        shares = await read_quotes(deps.admin, filters, span)
    except FILTER_ERRORS as error:
        problem = filters.problem(error)
    return page_response(
        "requests/quotes.html",
        visit_of(request),
        problem=problem,
        found=shares,
        filters=filters,
        figure=filters.get("figure") or FIGURES[0],
        words=WORDS,
        span=span,
        figures=FIGURES,
        tiers=list(Tier),
        kinds=KINDS,
        fewest=FEWEST,
    )


HANDLERS = [quotes_page]
