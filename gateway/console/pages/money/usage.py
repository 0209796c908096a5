"""The page of usage: what was charged, by any two groups and over time, beside the period before."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
from litestar import Response

from gateway.console.access import own_tenants, page, tenant_shown, visit_of
from gateway.console.csv_file import csv_list
from gateway.console.form_errors import FormProblem
from gateway.console.formats import exact_dollars
from gateway.console.pages.filters import (
    FILTER_ERRORS,
    Filters,
    TenantScope,
    asked_of,
    cursor_of,
    known_values,
)
from gateway.console.pages.money.amounts import MEASURES, change
from gateway.console.pages.money.usage_reads import UsageRead, read_usage
from gateway.console.pages.money.usage_view import REQUESTS, Row, group_sums, over_time, window_words
from gateway.console.pages.periods import period_links
from gateway.console.rendering import SECURITY_HEADERS, page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.instants import from_us
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.query import filters_of
from tenants.resources.reading import query_of
from tenants.resources.records.usage import UsageAsked, shown_usage
from tenants.resources.records.usage_export import columns_of
from tenants.types import Tier
from tenants.usage.query import GROUPS, LABEL, WINDOWS, edges

PATH = "/console/usage"
FILTERS = ("tenant", "project", "key", "model", "tier", "outcome", "label")
FIELDS = ("from", "to", "window", "time_zone", "group", "then", "show", *FILTERS)
MONEY = {"charged_usd": "cost_nanousd", "credited_usd": "credit_nanousd"}
"""Columns of the file in dollars, and the fields that hold their nano-dollars."""
MOST_LABELS = 30
"""Names of labels to choose from: those that the most tenants have declared."""
MOST_BARS = 12


def usage_asked(asked: dict[str, str], tenant: str | None) -> UsageAsked:
    """The question of the page's fields; by day, and by tenant or model, where they do not say."""
    groups = dict.fromkeys(group for group in (asked["group"], asked["then"]) if group)
    own = {"tenant": tenant, "group_by": ",".join(groups), "labels": tuple(filter(None, [asked["label"]]))}
    given = {one.field: asked.get(one.name) or None for one in filters_of(UsageAsked)}
    return query_of(UsageAsked, given | own)


def labels_of(tenants: list[Tenant]) -> list[str]:
    """Names of labels that these tenants have declared, the commonest first."""
    names = Counter(name for tenant in tenants for name in tenant.labels)
    return [name for name, _ in names.most_common(MOST_LABELS)]


def _tenants(request: Request) -> list[Tenant]:
    own, directory = own_tenants(visit_of(request).person), gateway_of(request).deps.directory
    if own is None:
        return directory.tenants()
    tenants = (directory.tenant(name) for name in own)
    return sorted((tenant for tenant in tenants if tenant is not None), key=lambda tenant: tenant.name)


def _asked(request: Request) -> dict[str, str]:
    asked, sees_all = asked_of(request, *FIELDS), own_tenants(visit_of(request).person) is None
    if "group" not in request.query_params:
        asked["group"] = "tenant" if sees_all and not asked["tenant"] else "model"
    if not sees_all and not asked["tenant"]:
        asked["tenant"] = next((tenant.name for tenant in _tenants(request)), "")
    asked["show"] = asked["show"] if asked["show"] in MEASURES else "charged"
    return asked | {"window": asked["window"] or "day", "time_zone": asked["time_zone"] or "UTC"}


async def _tenant_of(request: Request, asked: dict[str, str]) -> str | None:
    """The id of the tenant that is asked about; None: all, which members do not see. Raises `NotFound`."""
    if not asked["tenant"] and own_tenants(visit_of(request).person) is None:
        return None
    return (await tenant_shown(request, asked["tenant"])).tenant_id


@page(PATH, act=Act.READ_TENANT)
async def usage_page(request: Request) -> Response[str]:
    admin, asked = admin_of(request), _asked(request)
    try:
        question = usage_asked(asked, await _tenant_of(request, asked))
        cursor = cursor_of(request)
        usage = await admin.in_one_snapshot(lambda opened: read_usage(opened, question, cursor))
    except FILTER_ERRORS as error:
        return await _shown(request, asked, problem=Filters(PATH, asked).problem(error))
    return await _shown(request, asked, usage)


async def _shown(
    request: Request,
    asked: dict[str, str],
    found: UsageRead | None = None,
    problem: FormProblem | None = None,
) -> Response[str]:
    gateway, person, tenants = gateway_of(request), visit_of(request).person, _tenants(request)
    names = [*GROUPS, *(f"{LABEL}{name}" for name in labels_of(tenants))]
    filters = Filters(PATH, asked)
    names += [group for group in (asked["group"], asked["then"]) if group and group not in names]
    return page_response(
        "money/usage.html",
        visit_of(request),
        problem=problem,
        asked=asked,
        windows=[(window, "whole period" if window == "total" else window) for window in WINDOWS],
        groups=[(name, name.replace(LABEL, "label ")) for name in names],
        measures=[(name, measure.words) for name, measure in MEASURES.items()],
        tiers=[("", "all"), *((tier.value, tier.value) for tier in Tier)],
        filters=filters,
        period_links=period_links(filters, gateway.deps.wall_clock(), asked["time_zone"])[1:],
        known_values=await known_values(request, TenantScope(None, asked["tenant"], ())),
        own=None if own_tenants(person) is None else [(tenant.name, tenant.name) for tenant in tenants],
        csv=with_query(f"{PATH}/csv", asked),
        json=with_query(f"{PATH}/json", asked),
        sees_platform=person.may(Act.READ_PLATFORM),
        checked=gateway.usage_check.last,
        found=None if found is None else _answer(asked, found),
    )


def _answer(asked: dict[str, str], found: UsageRead) -> dict[str, Any]:
    query, measure = found.query, MEASURES[asked["show"]]
    period = {"from": from_us(query.from_us).isoformat(), "to": from_us(query.to_us).isoformat()}
    filters = {name: asked[name] for name in FILTERS} | period
    groups = group_sums(
        found.rows, query.group_by, found.before.groups, measure, filters, is_whole=found.is_whole
    )
    by_time = query.group_by if found.is_whole else ()
    windows = pairwise(edges(query))
    chart = over_time(found.over_time, by_time, measure, windows) if query.window != "total" else None
    following = asked | period | {"cursor": found.next_cursor or ""}
    return {
        "query": query,
        "measure": measure,
        "groups": groups,
        "heads": [group.replace(LABEL, "label ") for group in query.group_by],
        "bars": [
            (
                " · ".join(group.names)[:26],
                measure.of(group.now),
                "fill-1",
                measure.shown(measure.of(group.now)),
            )
            for group in groups[:MOST_BARS]
        ],
        "chart": chart,
        "at": partial(window_words, window=query.window, time_zone=query.time_zone),
        "empty_windows": 0 if chart is None else sum(not any(row.values) for row in chart.rows),
        "columns": [(name, "number") for name in chart.columns] if chart else [],
        "total": found.total,
        "before": found.before,
        "change": change,
        "is_whole": found.is_whole,
        "folded_us": found.folded_us,
        "includes_unfolded": found.includes_unfolded,
        "requests": "" if asked["label"] else with_query(REQUESTS, filters),
        "next_page": with_query(PATH, following) if found.next_cursor else "",
    }


@page(f"{PATH}/json", act=Act.READ_TENANT)
async def usage_json(request: Request) -> Response[Any]:
    """The same as `GET /admin/v1/usage` answers, one page of it."""
    admin, asked = admin_of(request), _asked(request)
    try:
        question = usage_asked(asked, await _tenant_of(request, asked))
        answer = await shown_usage(admin, question, cursor_of(request), MAX_PAGE)
    except FILTER_ERRORS as error:
        return await _shown(request, asked, problem=Filters(PATH, asked).problem(error))
    return Response(msgspec.json.encode(answer), headers=SECURITY_HEADERS, media_type="application/json")


@page(f"{PATH}/csv", act=Act.READ_TENANT)
async def usage_file(request: Request) -> Response[str]:
    admin, asked = admin_of(request), _asked(request)
    try:
        question = usage_asked(asked, await _tenant_of(request, asked))

        async def read(cursor: str | None) -> Page[dict[str, object]]:
            answer = await shown_usage(admin, question, cursor, MAX_PAGE)
            return Page([_file_row(row) for row in answer["data"]], answer["next_cursor"])

        return await csv_list(
            "usage",
            [*columns_of(question.groups), *MONEY],
            read,
            cursor_of(request),
            lambda cursor: with_query(f"{PATH}/csv", asked | {"cursor": cursor}),
        )
    except FILTER_ERRORS as error:
        return await _shown(request, asked, problem=Filters(PATH, asked).problem(error))


def _file_row(row: Row) -> dict[str, object]:
    return dict(row) | {name: exact_dollars(row[nano]) for name, nano in MONEY.items()}


HANDLERS = [usage_page, usage_json, usage_file]
