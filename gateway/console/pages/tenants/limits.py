"""The page of a tenant's limits, each as a gauge, and a new one."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import NotForThisRole, form, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done, said
from gateway.console.pages.tenant_parts.limit_form import (
    FIELDS,
    FURTHER_TERMS,
    HINTS,
    NAMED_FIELD,
    NEW_LIMIT,
    OPTIONS,
    SUBJECT_KINDS,
    act_on,
    kind_of,
    preview_of,
    set_of,
)
from gateway.console.pages.tenant_parts.limit_rows import rows_of_tenant
from gateway.console.pages.tenants import tenant as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.admin.cursor import Page
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.reading import read_page
from tenants.types import SubjectKind

PATH = f"{one.PATH}/limits"
OF_PLATFORM = "/console/limits"
MOST_SHOWN = 50
DONE = {"set": "The limit is set.", "removed": "The limit is removed."}


@page(PATH, act=Act.READ_TENANT)
async def limits_page(request: Request, tenant: FromPath[str]) -> Response[str]:
    return await _shown(request, await tenant_shown(request, tenant), typed_fields(NEW_LIMIT, *FIELDS))


@page(OF_PLATFORM, act=Act.READ_PLATFORM)
async def platform_limits_page(request: Request) -> Response[str]:
    return await _shown(request, None, typed_fields(NEW_LIMIT, *FIELDS))


@form(PATH, act=Act.LIMIT_BELOW_TENANT)
async def new_limit(request: Request, tenant: FromPath[str]) -> Response[str]:
    """Limits of the tenant itself need the right to change tenants."""
    return await _set(request, await tenant_shown(request, tenant, Act.LIMIT_BELOW_TENANT))


@form(OF_PLATFORM, act=Act.CHANGE_PLATFORM)
async def new_platform_limit(request: Request) -> Response[str]:
    return await _set(request, None)


def home_of(owner: Tenant | None) -> str:
    """The page of a tenant's limits; None: of those on all tenants together."""
    return OF_PLATFORM if owner is None else f"{LIST}/{owner.name}/limits"


async def _set(request: Request, owner: Tenant | None) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    typed = typed_fields(visit.form, *FIELDS)
    try:
        if owner is not None and not visit.person.may(act_on(kind_of(visit.form)), owner.tenant_id):
            raise NotForThisRole
        wanted = set_of(visit.form, None if owner is None else owner.tenant_id)
        if "preview" in visit.form:
            preview = preview_of(wanted, visit.form, "" if owner is None else owner.name)
            return await _shown(request, owner, typed, preview=preview)
        await deps.admin.limits.set(visit.actor, wanted)
    except FORM_ERRORS as error:
        problem = problem_of(error, fields=(*FIELDS, *NAMED_FIELD))
        errors = {NAMED_FIELD.get(field, field): text for field, text in problem.errors.items()}
        again = FormProblem(problem.status, errors, problem.headers)
        return await _shown(request, owner, typed, again)
    return await done(request, home_of(owner), "set")


async def _shown(
    request: Request,
    found: Tenant | None,
    typed: dict[str, str],
    problem: FormProblem | None = None,
    preview: str = "",
) -> Response[str]:
    visit, admin, here = visit_of(request), admin_of(request), home_of(found)
    if found is None:
        listed, kinds = Page(await admin.limits.of_platform(), None), []
        may_limit = visit.person.may(Act.CHANGE_PLATFORM)
    else:
        query, cursor = LimitQuery(tenant=found.tenant_id), request.query_params.get("cursor")
        listed = await read_page(admin, LIMITS, query, cursor=cursor, limit=MOST_SHOWN)
        may_limit = visit.person.may(Act.LIMIT_BELOW_TENANT, found.tenant_id)
        may_limit_tenant = visit.person.may(act_on(SubjectKind.TENANT), found.tenant_id)
        kinds = [
            (kind, words) for kind, words in SUBJECT_KINDS.items() if kind != "tenant" or may_limit_tenant
        ]
    return page_response(
        "tenants/limits.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        found=found,
        home=here,
        limits=await rows_of_tenant(
            request, found, listed.rows, shows_reasons=visit.person.may(Act.READ_PLATFORM)
        ),
        next_page=with_query(here, {"cursor": listed.next_cursor or ""}) if listed.next_cursor else "",
        first_page=here if "cursor" in request.query_params else "",
        may_limit=may_limit,
        kinds=kinds,
        known=FURTHER_TERMS,
        options=OPTIONS,
        hints=HINTS,
        typed=typed,
        preview=preview,
    )


HANDLERS = [limits_page, new_limit, platform_limits_page, new_platform_limit]
