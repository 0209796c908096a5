"""The page of one limit: its events, change, override, removal."""

from __future__ import annotations

from dataclasses import replace

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import NotForThisRole, form, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.tenant_parts.acts import done, if_match, said, tag_of
from gateway.console.pages.tenant_parts.limit_form import (
    HINTS,
    OPTIONS,
    act_on,
    changed_terms,
    override_of,
    same_with,
    stored_in_form,
)
from gateway.console.pages.tenant_parts.limit_rows import rows_of_tenant
from gateway.console.pages.tenants import limits
from gateway.console.pages.tenants.limits import home_of
from gateway.console.rendering import confirm_page, page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.admin.limits import LimitView
from tenants.errors import Invalid, NotFound, PreconditionFailed
from tenants.nouns.limit import limit_as_json
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.types import SubjectKind

PATH = f"{limits.PATH}/{{limit:str}}"
OF_PLATFORM = f"{limits.OF_PLATFORM}/{{limit:str}}"
OVERRIDDEN = ("override_amount", "override_rate", "for_h", "reason")
OVERRIDE_FIELD = {"amount": "override_amount", "rate_per_s": "override_rate", "for_s": "for_h"}
"""Form fields of command fields with other names."""
DONE = {
    "changed": "The change is stored. What was used stays used.",
    "overridden": "The other amount is in force.",
    "cleared": "The override has ended.",
}


Owner = Tenant | None
"""None: the limit is on all tenants together."""


async def _found(request: Request, tenant: str, limit: str, *, to_change: bool) -> tuple[Owner, LimitView]:
    """Raises `NotFound` for another tenant's limit. The tenant's own limits need `Act.CHANGE_TENANT`. Without
    a tenant it is one of the platform, which its route guards."""
    if not tenant:
        view = await admin_of(request).limits.show(limit)
        if view.limit.kind is not SubjectKind.PLATFORM:
            raise NotFound("limit", limit)
        return None, view
    owner = await tenant_shown(request, tenant, Act.LIMIT_BELOW_TENANT if to_change else Act.READ_TENANT)
    view = await admin_of(request).limits.show(limit)
    if view.limit.tenant_id != owner.tenant_id:
        raise NotFound("limit", limit)
    if to_change and not visit_of(request).person.may(act_on(view.limit.kind), owner.tenant_id):
        raise NotForThisRole
    return owner, view


async def limit_page(request: Request, limit: FromPath[str], tenant: FromPath[str] = "") -> Response[str]:
    return await _shown(request, *await _found(request, tenant, limit, to_change=False))


async def change_limit(request: Request, limit: FromPath[str], tenant: FromPath[str] = "") -> Response[str]:
    """Does what the pressed button says, unless the limit was changed in the meantime."""
    visit, admin = visit_of(request), admin_of(request)
    owner, view = await _found(request, tenant, limit, to_change=True)
    stored, tag, act = view.limit, if_match(visit.form), visit.form.get("act", "")
    try:
        match act:
            case "changed":
                await admin.limits.set(visit.actor, same_with(stored, visit.form), if_match=tag)
            case "overridden":
                wanted = override_of(stored, visit.form)
                await admin.limits.override(visit.actor, limit, wanted, _id_of(owner), if_match=tag)
            case "cleared":
                await admin.limits.clear_override(visit.actor, limit, _id_of(owner), if_match=tag)
            case _:
                raise Invalid("act", "there is no such button")
    except FORM_ERRORS as error:
        changed = [one.name for one in changed_terms(stored)]
        problem = problem_of(error, fields=(*changed, *OVERRIDDEN, *OVERRIDE_FIELD, "burst"))
        moved = OVERRIDE_FIELD if act == "overridden" else {"burst": "amount"}
        errors = {moved.get(field, field): text for field, text in problem.errors.items()}
        # After a conflict the form refers to the new state: submitted again it overwrites that.
        kept = "" if isinstance(error, PreconditionFailed) else visit.form.get("etag", "")
        current = await admin.limits.show(limit)
        return await _shown(request, owner, current, replace(problem, errors=errors), kept)
    return await done(request, f"{home_of(owner)}/{stored.limit_id}", act)


async def ask_remove(request: Request, limit: FromPath[str], tenant: FromPath[str] = "") -> Response[str]:
    owner, view = await _found(request, tenant, limit, to_change=True)
    [row] = await rows_of_tenant(request, owner, [view], projected=False)
    here = f"{home_of(owner)}/{view.limit.limit_id}"
    return confirm_page(
        visit_of(request),
        title=f"Remove the limit of {row.amount_words} {row.what} on {row.subject}?",
        effects=[
            f"Now: {row.used_words}. From then on nothing is refused for it, in every gateway.",
            "Its override, and what it noticed, are forgotten. What was charged stays charged.",
            "Set again, a limit begins at what is under way: what ended before does not count on it.",
        ],
        action=f"{here}/remove",
        button="Remove it",
        back=here,
        hidden={"etag": tag_of(limit_as_json(view.limit))},
    )


async def remove_limit(request: Request, limit: FromPath[str], tenant: FromPath[str] = "") -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    owner, view = await _found(request, tenant, limit, to_change=True)
    try:
        await admin.limits.remove(visit.actor, limit, _id_of(owner), if_match=if_match(visit.form))
    except PreconditionFailed as error:
        return await _shown(request, owner, view, problem_of(error))
    return await done(request, home_of(owner), "removed")


async def _shown(
    request: Request, owner: Owner, found: LimitView, problem: FormProblem | None = None, tag: str = ""
) -> Response[str]:
    visit, stored = visit_of(request), stored_in_form(found.limit)
    shows_reasons = visit.person.may(Act.READ_PLATFORM)
    [row] = await rows_of_tenant(request, owner, [found], shows_reasons=shows_reasons)
    act = visit.form.get("act", "")
    typed = stored | dict.fromkeys(OVERRIDDEN, "") | {"for_h": "24"}
    if problem is not None:
        again = {"changed": tuple(stored), "overridden": OVERRIDDEN}.get(act, ())
        typed |= typed_fields(visit.form, *again)
    return page_response(
        "tenants/limit.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        owner=owner,
        limit=found.limit,
        row=row,
        events=[event.as_json() for event in found.events],
        stored=stored,
        is_conflict=problem is not None and problem.status == 412,
        tag=tag or tag_of(limit_as_json(found.limit)),
        home=f"{home_of(owner)}/{found.limit.limit_id}",
        may_change=visit.person.may(act_on(found.limit.kind), _id_of(owner)),
        known=changed_terms(found.limit),
        options=OPTIONS,
        hints=HINTS,
        typed=typed,
    )


def _id_of(owner: Owner) -> str | None:
    return None if owner is None else owner.tenant_id


HANDLERS = [
    page(PATH, act=Act.READ_TENANT)(limit_page),
    form(PATH, act=Act.LIMIT_BELOW_TENANT)(change_limit),
    page(f"{PATH}/remove", act=Act.LIMIT_BELOW_TENANT)(ask_remove),
    form(f"{PATH}/remove", act=Act.LIMIT_BELOW_TENANT)(remove_limit),
    page(OF_PLATFORM, act=Act.READ_PLATFORM)(limit_page),
    form(OF_PLATFORM, act=Act.CHANGE_PLATFORM)(change_limit),
    page(f"{OF_PLATFORM}/remove", act=Act.CHANGE_PLATFORM)(ask_remove),
    form(f"{OF_PLATFORM}/remove", act=Act.CHANGE_PLATFORM)(remove_limit),
]
