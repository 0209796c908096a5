"""The form that changes a key. Of two concurrent edits one wins; the other is shown both states."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import NotForThisRole, form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done, if_match, tag_of
from gateway.console.pages.tenant_parts.key_form import (
    CHANGED,
    LABELS,
    MOVED,
    OWNERS_SCOPES,
    SCOPE_FIELDS,
    change_of,
    errors_by_field,
    stored_in_form,
    tiers_shown,
)
from gateway.console.pages.tenant_parts.tenant_form import TIER_FIELDS, differences
from gateway.console.pages.tenants import key as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.errors import PreconditionFailed
from tenants.nouns.key import ApiKey
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act

PATH = f"{one.PATH}/change"


async def _found(request: Request, tenant: str, key: str) -> tuple[Tenant, ApiKey]:
    """Keys of the admin API are for owners."""
    owner, api_key = await one.found_key(request, tenant, key, Act.CHANGE_KEY)
    if not visit_of(request).person.may(Act.CHANGE_PEOPLE) and not OWNERS_SCOPES.isdisjoint(api_key.scopes):
        raise NotForThisRole
    return owner, api_key


@page(PATH, act=Act.CHANGE_KEY)
async def change_key_page(request: Request, tenant: FromPath[str], key: FromPath[str]) -> Response[str]:
    owner, api_key = await _found(request, tenant, key)
    return _shown(request, owner, api_key, stored_in_form(api_key))


@form(PATH, act=Act.CHANGE_KEY)
async def change_key(request: Request, tenant: FromPath[str], key: FromPath[str]) -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    owner, api_key = await _found(request, tenant, key)
    is_owner = visit.person.may(Act.CHANGE_PEOPLE)
    try:
        wanted = change_of(visit.form, api_key, is_owner=is_owner)
        await admin.keys.update(
            visit.actor, api_key.key_id, wanted, owner.tenant_id, if_match=if_match(visit.form)
        )
    except FORM_ERRORS as error:
        problem = errors_by_field(problem_of(error, fields=(*CHANGED, *MOVED)))
        # After a conflict the form refers to the new state: submitted again it overwrites that.
        tag = "" if isinstance(error, PreconditionFailed) else visit.form.get("etag", "")
        owner, current = await _found(request, tenant, key)
        return _shown(request, owner, current, typed_fields(visit.form, *CHANGED), problem, tag)
    return await done(request, f"{LIST}/{owner.name}/keys/{api_key.key_id}", "changed")


def _shown(
    request: Request,
    owner: Tenant,
    found: ApiKey,
    typed: dict[str, str],
    problem: FormProblem | None = None,
    tag: str = "",
) -> Response[str]:
    visit = visit_of(request)
    is_conflict = problem is not None and problem.status == 412
    return page_response(
        "tenants/key_change.html",
        visit,
        problem=problem,
        owner=owner,
        found=found,
        tag=tag or tag_of(found.as_json()),
        differences=differences(LABELS, typed, stored_in_form(found)) if is_conflict else [],
        tier_options=tiers_shown(owner.tiers),
        tiers=[
            (tier.value, field) for tier, field in TIER_FIELDS.items() if tier in owner.tiers or typed[field]
        ],
        scopes=[
            (scope, field)
            for scope, field in SCOPE_FIELDS.items()
            if scope not in OWNERS_SCOPES or visit.person.may(Act.CHANGE_PEOPLE)
        ],
        typed=typed,
    )


HANDLERS = [change_key_page, change_key]
