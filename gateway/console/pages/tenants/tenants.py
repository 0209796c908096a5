"""The page of tenants: search, what each did today, and a new one."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import form, own_tenants, page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.filters import Filters, filters_of
from gateway.console.pages.tenant_parts.acts import done
from gateway.console.pages.tenant_parts.tenant_form import (
    FIELDS,
    NEW_TENANT,
    RESERVED_TIERS,
    create_of,
    errors_by_field,
)
from gateway.console.pages.tenant_parts.today import last_uses, today_of
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.reading import read_page
from tenants.resources.tenants import TENANTS, TenantQuery
from tenants.types import OnLowBudget, Tier

PATH = "/console/tenants"
FILE = f"{PATH}.csv"
FILTERS = ("search", "sort")
SORTS = {"": "name", "cost_nanousd": "charged", "requests": "requests", "refused": "refused"}
"""Of the list, by what tenants did today; empty: of all, in pages."""
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
    filters = filters_of(request, FILE, FILTERS)

    async def read(cursor: str | None) -> Page[dict[str, object]]:
        page = await _found(request, filters, cursor, MAX_PAGE)
        return Page([row.as_json() for row in page.rows], page.next_cursor)

    return await csv_list(
        "tenants", TENANTS.file, read, filters.cursor, lambda cursor: filters.link(cursor=cursor)
    )


def _seen(request: Request, filters: Filters) -> list[Tenant]:
    """Those that the person may see, and that are searched for."""
    own, part = own_tenants(visit_of(request).person), filters.values["search"].lower()
    tenants = gateway_of(request).deps.directory.tenants()
    return [one for one in tenants if (own is None or one.tenant_id in own) and part in one.name.lower()]


async def _found(request: Request, filters: Filters, cursor: str | None, limit: int) -> Page[Tenant]:
    query, only = TenantQuery(search=filters.get("search")), own_tenants(visit_of(request).person)
    return await read_page(admin_of(request), TENANTS, query, cursor=cursor, limit=limit, only=only)


async def _shown(
    request: Request, typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, filters = visit_of(request), filters_of(request, PATH, FILTERS)
    gateway, sort = gateway_of(request), filters.values["sort"]
    since, today = await today_of(gateway)
    if sort and sort in SORTS:
        rows = sorted(
            _seen(request, filters), key=lambda one: (-getattr(today[one.tenant_id], sort), one.name)
        )
        page = Page(rows[:MOST_SHOWN], None)
    else:
        page = await _found(request, filters, filters.cursor, MOST_SHOWN)
    return page_response(
        "tenants/tenants.html",
        visit,
        problem=problem,
        tenants=page.rows,
        today=today,
        since=since,
        last_used=await last_uses(gateway, [one.tenant_id for one in page.rows]),
        search=filters.values["search"],
        sort=sort,
        sorts=[(words, filters.link(sort=name), name == sort) for name, words in SORTS.items()],
        most=MOST_SHOWN,
        next_page=filters.link(cursor=page.next_cursor) if page.next_cursor else "",
        first_page=filters.link() if filters.cursor is not None else "",
        file=filters.link(FILE),
        file_rows=FILE_ROWS,
        may_change=visit.person.may(Act.CHANGE_TENANT),
        tiers=list(Tier),
        budgets=list(OnLowBudget),
        reserved_tiers=RESERVED_TIERS,
        typed=typed,
    )


HANDLERS = [tenants_page, new_tenant, tenants_file]
