"""The page of tenants: search, and a new one."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import form, own_tenants, page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done
from gateway.console.pages.tenant_parts.tenant_form import (
    FIELDS,
    NEW_TENANT,
    RESERVED_TIERS,
    create_of,
    errors_by_field,
)
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.directory.records import Tenant
from tenants.people.roles import Act
from tenants.types import OnLowBudget, Tier

PATH = "/console/tenants"
FILE = f"{PATH}.csv"
COLUMNS = (
    *("id", "name", "status", "weight", "default_tier", "tiers", "models", "on_low_budget"),
    *("reserved_tokens_per_s", "reserved_tier", "labels", "created_at"),
)
MOST_SHOWN = 50


@page(PATH, act=Act.READ_TENANT)
async def tenants_page(request: Request) -> Response[str]:
    return await _shown(request, typed_fields(NEW_TENANT, *FIELDS))


@form(PATH, act=Act.CHANGE_TENANT)
async def new_tenant(request: Request) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    try:
        made = await deps.admin.tenants.create(visit.actor, create_of(visit.form))
    except FORM_ERRORS as error:
        problem = errors_by_field(problem_of(error, fields=(*FIELDS, "tier", "tiers")))
        return await _shown(request, typed_fields(visit.form, *FIELDS), problem)
    return await done(request, f"{PATH}/{made.name}", "made")


@page(FILE, act=Act.READ_TENANT)
async def tenants_file(request: Request) -> Response[str]:
    search = _search(request)

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        page = await _found(request, cursor, MAX_PAGE)
        return Page([row.as_json() for row in page.rows], page.next_cursor)

    def link(cursor: str) -> str:
        return with_query(FILE, {"search": search, "cursor": cursor})

    return await csv_list("tenants", COLUMNS, read, request.query_params.get("cursor"), link)


def _search(request: Request) -> str:
    return str(request.query_params.get("search", "")).strip()


async def _found(request: Request, cursor: str | None, limit: int) -> Page[Tenant]:
    return await admin_of(request).tenants.page(
        search=_search(request) or None,
        only=own_tenants(visit_of(request).person),
        cursor=cursor,
        limit=limit,
    )


async def _shown(
    request: Request, typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, search = visit_of(request), _search(request)
    page = await _found(request, request.query_params.get("cursor"), MOST_SHOWN)
    following = {"search": search, "cursor": page.next_cursor or ""}
    return page_response(
        "tenants/tenants.html",
        visit,
        problem=problem,
        tenants=page.rows,
        search=search,
        next_page=with_query(PATH, following) if page.next_cursor else "",
        first_page=with_query(PATH, {"search": search}) if "cursor" in request.query_params else "",
        file=with_query(FILE, {"search": search}),
        file_rows=FILE_ROWS,
        may_change=visit.person.may(Act.CHANGE_TENANT),
        tiers=list(Tier),
        budgets=list(OnLowBudget),
        reserved_tiers=RESERVED_TIERS,
        typed=typed,
    )


HANDLERS = [tenants_page, new_tenant, tenants_file]
