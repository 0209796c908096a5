"""The page of one webhook: deliveries, failures, a test, removal."""

from __future__ import annotations

from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.pages.alerts.alerts import OF_WEBHOOKS, may_change, webhook_shown
from gateway.console.pages.alerts.alerts import PATH as LIST
from gateway.console.pages.tenant_parts.acts import said
from gateway.console.rendering import confirm_page, page_response, redirect
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.errors import Invalid
from tenants.outbox.webhook import DeliveryAgain, Webhook
from tenants.people.roles import Act

PATH = f"{OF_WEBHOOKS}/{{webhook:str}}"
MOST_SHOWN = 50
DONE = {
    "test": "A test event is on its way: reload the page to see how it went.",
    "resend": "It is sent again.",
}


@page(PATH, act=Act.READ_TENANT)
async def webhook_page(request: Request, webhook: FromPath[str]) -> Response[str]:
    return await _shown(request, await webhook_shown(request, webhook, changes=False))


@form(PATH, act=Act.CHANGE_WEBHOOK)
async def use_webhook(request: Request, webhook: FromPath[str]) -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    shown = await webhook_shown(request, webhook, changes=True)
    act, seq = visit.form.get("act", ""), visit.form.get("seq", "")
    try:
        if act == "test":
            await admin.webhooks.test(visit.actor, shown.webhook_id)
        elif act == "resend" and (not seq or (seq.isascii() and seq.isdigit() and len(seq) < 19)):
            wanted = DeliveryAgain(seq=int(seq) if seq else None)
            await admin.webhooks.resend(visit.actor, shown.webhook_id, wanted)
        else:
            raise Invalid("act", "there is no such button")
    except FORM_ERRORS as error:
        return await _shown(request, shown, problem_of(error))
    return redirect(with_query(f"{OF_WEBHOOKS}/{shown.webhook_id}", {"done": act}))


@page(f"{PATH}/remove", act=Act.CHANGE_WEBHOOK)
async def ask_remove(request: Request, webhook: FromPath[str]) -> Response[str]:
    shown = await webhook_shown(request, webhook, changes=True)
    counts = await admin_of(request).webhooks.count_deliveries([shown.webhook_id])
    sent = counts[shown.webhook_id]
    return confirm_page(
        visit_of(request),
        title=f"Remove the webhook to {shown.host}",
        effects=[
            "Nothing is sent to it any more.",
            f"{sent.get('pending', 0):,} events that wait, and {sent.get('dead', 0):,} that could not be"
            " delivered, are forgotten.",
            "One that is added again has another secret.",
        ],
        action=f"{OF_WEBHOOKS}/{shown.webhook_id}/remove",
        button="Remove it",
        back=f"{OF_WEBHOOKS}/{shown.webhook_id}",
    )


@form(f"{PATH}/remove", act=Act.CHANGE_WEBHOOK)
async def remove_webhook(request: Request, webhook: FromPath[str]) -> Response[str]:
    shown = await webhook_shown(request, webhook, changes=True)
    await admin_of(request).webhooks.remove(visit_of(request).actor, shown.webhook_id)
    return redirect(with_query(LIST, {"done": "removed"}))


async def _shown(request: Request, found: Webhook, problem: FormProblem | None = None) -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    newest = await admin.webhooks.deliveries(found.webhook_id, most=MOST_SHOWN)
    dead = await admin.webhooks.deliveries(found.webhook_id, state="dead", most=MOST_SHOWN)
    return page_response(
        "alerts/webhook.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        webhook=found,
        tenant=found.tenant_id,
        lists=(("Failed", dead), ("Newest", newest)),
        may_change=may_change(visit.person, found.tenant_id),
    )


HANDLERS = [webhook_page, use_webhook, ask_remove, remove_webhook]
