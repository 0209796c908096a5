"""The page of one key: the limits that bind it, rotation, revocation."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done, if_match, in_flight, said, tag_of
from gateway.console.pages.tenant_parts.key_form import OWNERS_SCOPES, check_scopes
from gateway.console.pages.tenant_parts.key_path import paths_of
from gateway.console.pages.tenant_parts.key_rows import rows_of_keys
from gateway.console.pages.tenants import keys
from gateway.console.pages.tenants.tenants import PATH as LIST
from gateway.console.rendering import confirm_page, page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.errors import NotFound
from tenants.instants import to_us
from tenants.nouns.key import ApiKey
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.keys import with_uses
from tenants.resources.records.usage import DEFAULT_DAYS, UsageAsked, usage_page
from tenants.typed import decimal_typed
from tenants.types import Tier
from tenants.usage.sums import AMOUNTS

PATH = f"{keys.PATH}/{{key:str}}"
DONE = {"changed": "The change is stored.", "revoked": "The key is revoked, for good."}


async def found_key(request: Request, tenant: str, key: str, act: Act) -> tuple[Tenant, ApiKey]:
    """Raises `NotFound` for another tenant's key."""
    owner = await tenant_shown(request, tenant, act)
    api_key = await admin_of(request).keys.show(key)
    if api_key.tenant_id != owner.tenant_id:
        raise NotFound("key", api_key.key_id)
    return owner, api_key


@page(PATH, act=Act.READ_TENANT)
async def key_page(request: Request, tenant: FromPath[str], key: FromPath[str]) -> Response[str]:
    return await _shown(request, *await found_key(request, tenant, key, Act.READ_TENANT))


@form(f"{PATH}/rotate", act=Act.MAKE_KEY)
async def rotate(request: Request, tenant: FromPath[str], key: FromPath[str]) -> Response[str]:
    visit = visit_of(request)
    owner, api_key = await found_key(request, tenant, key, Act.MAKE_KEY)
    try:
        check_scopes(api_key.scopes, is_owner=visit.person.may(Act.CHANGE_PEOPLE))
        grace_h = decimal_typed("grace_h", visit.form.get("grace_h", ""))
        rotated, secret = await admin_of(request).keys.rotate(
            visit.actor, api_key.key_id, float(grace_h * 3_600), if_match=if_match(visit.form)
        )
    except FORM_ERRORS as error:
        problem = problem_of(error, fields=("grace_h", "grace_s"))
        errors = {"grace_h" if field == "grace_s" else field: text for field, text in problem.errors.items()}
        return await _shown(request, owner, api_key, FormProblem(problem.status, errors, problem.headers))
    return await keys.secret_page(request, owner, rotated, secret)


@page(f"{PATH}/revoke", act=Act.REVOKE_KEY)
async def ask_revoke(request: Request, tenant: FromPath[str], key: FromPath[str]) -> Response[str]:
    """`now` in the address: running requests end, too."""
    owner, api_key = await found_key(request, tenant, key, Act.REVOKE_KEY)
    now = request.query_params.get("now") == "yes"
    live = await in_flight(request, owner.tenant_id, key=api_key.key_id)
    here = f"{LIST}/{owner.name}/keys/{api_key.key_id}"
    return confirm_page(
        visit_of(request),
        title=f"Revoke the key {api_key.name or api_key.prefix} of {owner.name}"
        + (" and end what runs?" if now else "?"),
        effects=[
            "All its secrets are refused from then on, in every gateway, with 401. This cannot be undone.",
            f"Now it has {live.words} requests. What waits ends with 401, and its budget is given back.",
            "What runs ends now as well, charged for what it emitted."
            if now
            else "What runs goes on to its end.",
        ],
        action=f"{here}/revoke",
        button="Revoke it",
        back=here,
        hidden={"now": "yes"} if now else {},
    )


@form(f"{PATH}/revoke", act=Act.REVOKE_KEY)
async def revoke(request: Request, tenant: FromPath[str], key: FromPath[str]) -> Response[str]:
    visit = visit_of(request)
    owner, api_key = await found_key(request, tenant, key, Act.REVOKE_KEY)
    now = visit.form.get("now") == "yes"
    await admin_of(request).keys.revoke(visit.actor, api_key.key_id, owner.tenant_id, now=now)
    return await done(request, f"{LIST}/{owner.name}/keys/{api_key.key_id}", "revoked")


async def _shown(
    request: Request, owner: Tenant, found: ApiKey, problem: FormProblem | None = None
) -> Response[str]:
    visit, deps = visit_of(request), gateway_of(request).deps
    transactions = deps.admin.transactions
    listed = await transactions.read(lambda one: with_uses(one, [found], transactions.now_us()))
    [row] = await rows_of_keys(request, listed)
    shows_platform = visit.person.may(Act.READ_PLATFORM)
    paths = await paths_of(request, [found], shows_platform=shows_platform)
    usage = await usage_page(deps.admin, UsageAsked(tenant=owner.tenant_id, key=found.key_id))
    sums = dict(zip(AMOUNTS, usage.rows[0].amounts, strict=True)) if usage.rows else dict.fromkeys(AMOUNTS, 0)
    return page_response(
        "tenants/key.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        owner=owner,
        found=found,
        row=row,
        tiers=list(Tier),
        made_us=to_us(found.created_at),
        path=paths[found.key_id],
        sums=sums,
        days=DEFAULT_DAYS["total"],
        tag=tag_of(found.as_json()),
        may_change=visit.person.may(Act.CHANGE_KEY, owner.tenant_id)
        and found.revoked_at is None
        and (visit.person.may(Act.CHANGE_PEOPLE) or OWNERS_SCOPES.isdisjoint(found.scopes)),
        may_make=visit.person.may(Act.MAKE_KEY, owner.tenant_id) and found.revoked_at is None,
        may_revoke=visit.person.may(Act.REVOKE_KEY, owner.tenant_id) and found.revoked_at is None,
        typed=typed_fields(visit.form, "grace_h") if problem else {"grace_h": "24"},
    )


HANDLERS = [key_page, rotate, ask_revoke, revoke]
