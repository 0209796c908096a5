"""Changes the policy: from a form on its page, through a page that says what changes."""

from __future__ import annotations

from litestar import Response

from engine.scheduling.options import parsed_options
from gateway.console.access import form, visit_of
from gateway.console.form_errors import CHANGED_MEANWHILE, FormProblem
from gateway.console.forms import typed_fields
from gateway.console.pages.policy.policy import CHANGE, CHANGED, PATH, policy_shown
from gateway.console.pages.policy.policy_words import SAYS, what_if_said, words_of
from gateway.console.pages.policy.what_if_form import pairs_of
from gateway.console.rendering import confirm_page, redirect
from gateway.console.return_path import with_query
from gateway.gateway import Gateway
from gateway.http.asgi import Request
from gateway.requests.schemas import PolicyChange
from gateway.routes.context import gateway_of
from gateway.routes.views.policy_view import change_policy
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import etag_of
from tenants.errors import Invalid, PreconditionFailed
from tenants.people.roles import Act


@form(CHANGE, act=Act.CHANGE_PLATFORM, of_one=True)
async def change(request: Request) -> Response[str]:
    """Shows what would change; with that state's tag it changes it."""
    visit, gateway = visit_of(request), gateway_of(request)
    typed = typed_fields(visit.form, *CHANGED)
    name, tag = typed["new_policy"], visit.form.get("etag", "")
    problem = None
    try:
        options = dict(pairs_of("new_options", typed["new_options"].strip())) if name else {}
        wanted = _wanted(gateway, name, options)
        if tag:
            asked = PolicyChange(policy=name, options={**options}, from_settings=not name)
            await change_policy(gateway, visit.actor, asked, frozenset({tag}))
            return redirect(with_query(PATH, {"done": "changed"}))
    except PreconditionFailed:
        problem = FormProblem(412, {"": CHANGED_MEANWHILE})
    except (Invalid, ValueError) as error:
        where = "new_policy" if name not in SAYS and name else "new_options"
        text = error.message if isinstance(error, Invalid) else str(error)
        return await policy_shown(request, change=(typed, FormProblem(422, {where: text})))
    now = (await gateway.deps.admin.policy.stored()) or gateway.policy.settings
    load = await gateway.fleet.now()
    runs = () if gateway.deps.what_if is None else gateway.deps.what_if.runs()
    effects = [
        f"Policy: {words_of(gateway.policy.now.as_json())} → {words_of(wanted.as_json())}"
        f"{'' if name else ', as the settings say'}.",
        SAYS.get(wanted.name, ""),
        what_if_said(runs, wanted.name, wanted.options),
        f"{sum(load.queued.values()):,} requests wait and {load.running:,} run now:"
        " none is lost. The new order counts from the next step, in all gateways.",
    ]
    return confirm_page(
        visit,
        title="Change the policy",
        effects=list(filter(None, effects)),
        action=CHANGE,
        button="Change it",
        back=PATH,
        hidden=typed | {"etag": etag_of(now.as_json())},
        problem=problem,
    )


def _wanted(gateway: Gateway, name: str, options: dict[str, str]) -> StoredPolicy:
    """Empty: what the settings say. Raises ValueError."""
    if not name:
        return gateway.policy.settings
    return gateway.policy.checked(StoredPolicy(name, parsed_options(options).changed()))


HANDLERS = [change]
