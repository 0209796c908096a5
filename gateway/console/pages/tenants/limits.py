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
    HINTS,
    NAMED_FIELD,
    NEW_LIMIT,
    OPTIONS,
    SUBJECT_KINDS,
    TYPED_TERMS,
    act_on,
    kind_of,
    set_of,
)
from gateway.console.pages.tenant_parts.limit_rows import rows_of_tenant
from gateway.console.pages.tenants import tenant as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.reading import read_page
from tenants.types import SubjectKind

PATH = f"{one.PATH}/limits"
MOST_SHOWN = 50
DONE = {"set": "The limit is set.", "removed": "The limit is removed."}


@page(PATH, act=Act.READ_TENANT)
async def limits_page(request: Request, tenant: FromPath[str]) -> Response[str]:
    return await _shown(request, await tenant_shown(request, tenant), typed_fields(NEW_LIMIT, *FIELDS))


@form(PATH, act=Act.LIMIT_BELOW_TENANT)
async def new_limit(request: Request, tenant: FromPath[str]) -> Response[str]:
    """Limits of the tenant itself need the right to change tenants."""
    visit, deps = visit_of(request), gateway_of(request).deps
    owner = await tenant_shown(request, tenant, Act.LIMIT_BELOW_TENANT)
    try:
        if not visit.person.may(act_on(kind_of(visit.form)), owner.tenant_id):
            raise NotForThisRole
        await deps.admin.limits.set(visit.actor, set_of(visit.form, owner.tenant_id))
    except FORM_ERRORS as error:
        problem = problem_of(error, fields=(*FIELDS, *NAMED_FIELD))
        errors = {NAMED_FIELD.get(field, field): text for field, text in problem.errors.items()}
        again = FormProblem(problem.status, errors, problem.headers)
        return await _shown(request, owner, typed_fields(visit.form, *FIELDS), again)
    return await done(request, f"{LIST}/{owner.name}/limits", "set")


async def _shown(
    request: Request, found: Tenant, typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, here = visit_of(request), f"{LIST}/{found.name}/limits"
    query, cursor = LimitQuery(tenant=found.tenant_id), request.query_params.get("cursor")
    listed = await read_page(admin_of(request), LIMITS, query, cursor=cursor, limit=MOST_SHOWN)
    may_limit_tenant = visit.person.may(act_on(SubjectKind.TENANT), found.tenant_id)
    kinds = [(kind, words) for kind, words in SUBJECT_KINDS.items() if kind != "tenant" or may_limit_tenant]
    return page_response(
        "tenants/limits.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        found=found,
        limits=await rows_of_tenant(
            request, found, listed.rows, shows_reasons=visit.person.may(Act.READ_PLATFORM)
        ),
        next_page=with_query(here, {"cursor": listed.next_cursor or ""}) if listed.next_cursor else "",
        first_page=here if "cursor" in request.query_params else "",
        may_limit=visit.person.may(Act.LIMIT_BELOW_TENANT, found.tenant_id),
        kinds=kinds,
        known=TYPED_TERMS,
        options=OPTIONS,
        hints=HINTS,
        typed=typed,
    )


HANDLERS = [limits_page, new_limit]
