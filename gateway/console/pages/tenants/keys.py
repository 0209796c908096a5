"""The page of a tenant's keys, and of a new one, whose secret is shown once."""

from __future__ import annotations

from collections.abc import Mapping

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.names import names_in
from gateway.console.pages.tenant_parts.acts import said
from gateway.console.pages.tenant_parts.curl_line import curl_line
from gateway.console.pages.tenant_parts.key_form import (
    MOVED,
    OWNERS_SCOPES,
    SCOPE_FIELDS,
    check_scopes,
    end_typed,
    errors_by_field,
    tiers_shown,
)
from gateway.console.pages.tenant_parts.key_rows import rows_of_keys
from gateway.console.pages.tenants import tenant as one
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.nouns.key import DEFAULT_SCOPES, ApiKey, KeyCreate
from tenants.nouns.project import DEFAULT_PROJECT, MAX_PROJECTS_PER_TENANT
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.keys import KEYS, KeyQuery
from tenants.resources.projects import PROJECTS, ProjectQuery
from tenants.resources.reading import read_page

PATH = f"{one.PATH}/keys"
MOST_SHOWN = 50
FIELDS = ("name", "display_name", "project", "default_tier", *SCOPE_FIELDS.values(), "ends", "allow_from")
NEW_KEY = {"project": DEFAULT_PROJECT} | {SCOPE_FIELDS[scope]: "yes" for scope in DEFAULT_SCOPES}
DONE = {"revoked": "The key is revoked, for good."}


def create_of(form: Mapping[str, str], tenant_id: str, *, is_owner: bool) -> KeyCreate:
    scopes = [scope for scope, field in SCOPE_FIELDS.items() if form.get(field)]
    check_scopes(scopes, is_owner=is_owner)
    return KeyCreate(
        tenant=tenant_id,
        project=form.get("project") or None,
        name=form.get("name", ""),
        display_name=form.get("display_name", ""),
        default_tier=form.get("default_tier") or None,
        scopes=scopes,
        expires=end_typed("ends", form.get("ends", "")),
        allow_from=names_in(form.get("allow_from", "")) or None,
    )


@page(PATH, act=Act.READ_TENANT)
async def keys_page(request: Request, tenant: FromPath[str]) -> Response[str]:
    return await _shown(request, await tenant_shown(request, tenant), typed_fields(NEW_KEY, *FIELDS))


@form(PATH, act=Act.MAKE_KEY)
async def new_key(request: Request, tenant: FromPath[str]) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    owner = await tenant_shown(request, tenant, Act.MAKE_KEY)
    try:
        wanted = create_of(visit.form, owner.tenant_id, is_owner=visit.person.may(Act.CHANGE_PEOPLE))
        made, secret = await deps.admin.keys.create(visit.actor, wanted)
    except FORM_ERRORS as error:
        problem = errors_by_field(problem_of(error, fields=(*FIELDS, *MOVED)))
        return await _shown(request, owner, typed_fields(visit.form, *FIELDS), problem)
    return await secret_page(request, owner, made, secret)


async def secret_page(request: Request, owner: Tenant, key: ApiKey, secret: str) -> Response[str]:
    """Shows a secret, once, when the key is active everywhere."""
    late = await gateway_of(request).directory.changed()
    return page_response(
        "tenants/secret.html",
        visit_of(request),
        found=owner,
        key=key,
        secret=secret,
        is_late=bool(late),
        curl=curl_line(request, secret),
    )


async def _shown(
    request: Request, found: Tenant, typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, deps, here = visit_of(request), gateway_of(request).deps, f"{LIST}/{found.name}/keys"
    query, cursor = KeyQuery(tenant=found.tenant_id), request.query_params.get("cursor")
    listed = await read_page(deps.admin, KEYS, query, cursor=cursor, limit=MOST_SHOWN)
    all_of_it = ProjectQuery(tenant=found.tenant_id)
    projects = await read_page(deps.admin, PROJECTS, all_of_it, limit=MAX_PROJECTS_PER_TENANT)
    return page_response(
        "tenants/keys.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        found=found,
        keys=await rows_of_keys(request, listed.rows),
        next_page=with_query(here, {"cursor": listed.next_cursor or ""}) if listed.next_cursor else "",
        first_page=here if "cursor" in request.query_params else "",
        project_options=[(row.name, row.name) for row in projects.rows],
        tier_options=tiers_shown(found.tiers),
        scopes=[
            (scope, field)
            for scope, field in SCOPE_FIELDS.items()
            if scope not in OWNERS_SCOPES or visit.person.may(Act.CHANGE_PEOPLE)
        ],
        may_make=visit.person.may(Act.MAKE_KEY, found.tenant_id),
        typed=typed,
    )


HANDLERS = [keys_page, new_key]
