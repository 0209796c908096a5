"""The page of one tenant: its rights, tightest limit, usage and service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import page, tenant_shown, visit_of
from gateway.console.pages.tenant_parts.acts import in_flight, said
from gateway.console.pages.tenant_parts.limit_rows import binding, rows_of_tenant
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.admin.admin import Admin
from tenants.nouns.tenant import tier_names
from tenants.people.roles import Act
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.reading import read_page
from tenants.resources.records.minutes import FLOW, FlowQuery, FlowRow
from tenants.resources.records.usage import DEFAULT_DAYS, UsageAsked, UsagePage, usage_page
from tenants.usage.sums import AMOUNTS

PATH = f"{LIST}/{{tenant:str}}"
DONE = {
    "made": "The tenant is made. Without a limit it may use what it likes: set one, then make a key.",
    "changed": "The change is stored.",
    "suspended": "The tenant is suspended: its keys are refused.",
    "resumed": "The tenant's keys work again.",
}
MOST_LIMITS = 50
MOST_GROUPS = 50
DAYS = DEFAULT_DAYS["total"]


def fair_hours(rows: Iterable[FlowRow]) -> list[tuple[int, int, int]]:
    """Start, service and fair share of each hour in cost tokens, over pools and tiers, oldest first."""
    served: dict[int, tuple[int, int]] = {}
    for row in rows:
        had, fair = served.get(row.key.minute_us, (0, 0))
        served[row.key.minute_us] = (had + row.counts.served_tokens, fair + row.counts.fair_tokens)
    return [(start_us, *tokens) for start_us, tokens in sorted(served.items())]


UsageLine = tuple[str, str, Mapping[str, Any]]
"""Name, reference (the key's id; the model's name) and sums of one key or model."""


def usage_lines(rows: Sequence[Mapping[str, Any]], field: str, name: str) -> list[UsageLine]:
    """Most tokens first. `field`, `name`: keys of the reference and the name."""
    lines = [(row[name] or row[field] or "–", row[field] or "", row) for row in rows]
    return sorted(lines, key=lambda line: -(line[2]["input_tokens"] + line[2]["output_tokens"]))


@dataclass(frozen=True)
class TenantSums:
    """Usage of one instant: cards and tables agree while requests end."""

    total: UsagePage
    by_key: UsagePage
    keys: list[UsageLine]
    models: list[UsageLine]


async def sums_of(admin: Admin, tenant: str) -> TenantSums:
    total = await usage_page(admin, UsageAsked(tenant=tenant))
    by_key = await usage_page(admin, UsageAsked(tenant=tenant, group_by="key"), limit=MOST_GROUPS)
    by_model = await usage_page(admin, UsageAsked(tenant=tenant, group_by="model"), limit=MOST_GROUPS)
    return TenantSums(
        total,
        by_key,
        await _lines(admin, by_key, "key_id", "key_name"),
        await _lines(admin, by_model, "model", "model"),
    )


async def _lines(admin: Admin, usage: UsagePage, field: str, name: str) -> list[UsageLine]:
    return usage_lines(await admin.with_names(usage.as_json()["data"]), field, name)


@page(PATH, act=Act.READ_TENANT)
async def tenant_page(request: Request, tenant: FromPath[str]) -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    owner = await tenant_shown(request, tenant)
    name, person = owner.name, visit.person
    limits = await read_page(admin, LIMITS, LimitQuery(tenant=name), limit=MOST_LIMITS)
    usage = await admin.in_one_snapshot(lambda opened: sums_of(opened, name))
    flow = await read_page(admin, FLOW, FlowQuery(window="hour", tenant=name), limit=1_000)
    slos = await admin.slos.report(name)
    live = await in_flight(request, owner.tenant_id)
    rows = await rows_of_tenant(request, owner, limits.rows, shows_reasons=person.may(Act.READ_PLATFORM))
    totals = usage.total.rows
    sums = dict(zip(AMOUNTS, totals[0].amounts, strict=True)) if totals else dict.fromkeys(AMOUNTS, 0)
    return page_response(
        "tenants/tenant.html",
        visit,
        done=said(request, DONE),
        found=owner,
        tiers=tier_names(owner.tiers),
        limits=rows,
        binding=binding(rows),
        has_more_limits=limits.next_cursor is not None,
        live=live,
        days=DAYS,
        sums=sums,
        by_key=usage.keys,
        has_more_keys=usage.by_key.next_cursor is not None,
        by_model=usage.models,
        fair=fair_hours(flow.rows),
        has_more_hours=flow.next_cursor is not None,
        slos=[slo.as_json() for slo in slos],
        of_tenant=with_query("", {"tenant": name}),
        may_change=person.may(Act.CHANGE_TENANT, owner.tenant_id),
        may_read_platform=person.may(Act.READ_PLATFORM),
    )


HANDLERS = [tenant_page]
