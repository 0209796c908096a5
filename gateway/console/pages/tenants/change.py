"""The form that changes a tenant. Of two concurrent edits one wins; the other is shown both states."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done, if_match, tag_of
from gateway.console.pages.tenant_parts.tenant_form import (
    FIELDS,
    LABELS,
    RESERVED_TIERS,
    change_of,
    differences,
    errors_by_field,
    stored_in_form,
)
from gateway.console.pages.tenants import tenant as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.errors import PreconditionFailed
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.types import OnLowBudget, Tier

PATH = f"{one.PATH}/change"


@page(PATH, act=Act.CHANGE_TENANT)
async def change_page(request: Request, tenant: FromPath[str]) -> Response[str]:
    shown = await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    return _shown(request, shown, stored_in_form(shown))


@form(PATH, act=Act.CHANGE_TENANT, lines=("labels",))
async def change_tenant(request: Request, tenant: FromPath[str]) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    shown = await tenant_shown(request, tenant, Act.CHANGE_TENANT)
    typed = typed_fields(visit.form, *FIELDS)
    try:
        await deps.admin.tenants.update(
            visit.actor, shown.tenant_id, change_of(visit.form, shown), if_match=if_match(visit.form)
        )
    except FORM_ERRORS as error:
        problem = errors_by_field(problem_of(error, fields=(*FIELDS, "tier", "tiers")))
        # After a conflict the form refers to the new state: submitted again it overwrites that.
        tag = "" if isinstance(error, PreconditionFailed) else visit.form.get("etag", "")
        current = await tenant_shown(request, shown.tenant_id, Act.CHANGE_TENANT)
        return _shown(request, current, typed, problem, tag)
    return await done(request, f"{LIST}/{shown.name}", "changed")


def _shown(
    request: Request, found: Tenant, typed: dict[str, str], problem: FormProblem | None = None, tag: str = ""
) -> Response[str]:
    is_conflict = problem is not None and problem.status == 412
    return page_response(
        "tenants/change.html",
        visit_of(request),
        problem=problem,
        found=found,
        tag=tag or tag_of(found.as_json()),
        differences=differences(LABELS, typed, stored_in_form(found)) if is_conflict else [],
        tiers=list(Tier),
        budgets=list(OnLowBudget),
        reserved_tiers=RESERVED_TIERS,
        typed=typed,
    )


HANDLERS = [change_page, change_tenant]
