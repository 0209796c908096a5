"""The page of firing and past alerts, and of the webhooks that receive them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from litestar import Response

from gateway.console.access import NotForThisRole, form, own_tenants, page, tenant_shown, visit_of
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.filters import cursor_of
from gateway.console.pages.tenant_parts.acts import said
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.directory import queries
from tenants.outbox.kinds import BY_SUBJECT, CHECKPOINT, SUBJECTS
from tenants.outbox.transitions import Incident
from tenants.outbox.webhook import Webhook, WebhookAdd
from tenants.people.person import Person
from tenants.people.roles import Act
from tenants.resources.alerts import ALERTS
from tenants.resources.reading import read_page
from tenants.resources.webhooks import WEBHOOKS, WebhookQuery

PATH = "/console/alerts"
OF_WEBHOOKS = f"{PATH}/webhooks"
MOST_WEBHOOKS = 100
MOST_SHOWN = 50
"""Per list."""
DONE = {act.verb: act.done for act in ALERTS.acts} | {
    "removed": "The webhook is removed, with all that was to be sent to it."
}
FIELDS = ("url", "tenant", "subjects")
SAYS = {subject: kind.says for subject, kind in BY_SUBJECT.items()} | {
    CHECKPOINT: "A signed checkpoint of the audit, to be kept elsewhere."
}


def problems_of(alerts: Iterable[Incident]) -> list[tuple[Incident, list[Incident]]]:
    """One row for each problem: the alert that matters most (`page` before `ticket`, then the oldest), and
    the others."""
    groups: dict[tuple[str, int | None], list[Incident]] = {}
    for alert in alerts:
        groups.setdefault((alert.problem, alert.resolved_us), []).append(alert)
    ranked = [
        sorted(group, key=lambda one: (one.severity != "page", one.fired_us)) for group in groups.values()
    ]
    return [(group[0], group[1:]) for group in ranked]


def may_change(person: Person, tenant_id: str) -> bool:
    """Whether the person may change webhooks of a tenant; empty: of the platform."""
    return person.may(Act.CHANGE_WEBHOOK, tenant_id) if tenant_id else person.may(Act.CHANGE_PLATFORM)


@page(PATH, act=Act.READ_TENANT)
async def alerts_page(request: Request) -> Response[str]:
    return await _shown(request, dict.fromkeys(FIELDS, ""))


@form(OF_WEBHOOKS, act=Act.CHANGE_WEBHOOK)
async def add_webhook(request: Request) -> Response[str]:
    visit = visit_of(request)
    typed = typed_fields(visit.form, *FIELDS)
    tenant = typed.get("tenant", "").strip()
    try:
        if tenant:
            tenant = (await tenant_shown(request, tenant, Act.CHANGE_WEBHOOK)).tenant_id
        elif not visit.person.may(Act.CHANGE_PLATFORM):
            raise NotForThisRole
        wanted = WebhookAdd(
            url=typed.get("url", "").strip(),
            tenant=tenant or None,
            subjects=typed.get("subjects", "").replace(",", " ").split(),
        )
        made, secret = await admin_of(request).webhooks.add(visit.actor, wanted)
    except FORM_ERRORS as error:
        return await _shown(request, typed, problem_of(error, fields=FIELDS))
    return page_response("alerts/secret.html", visit, webhook=made, secret=secret)


async def _shown(
    request: Request, typed: Mapping[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, admin = visit_of(request), admin_of(request)
    person, whose = visit.person, own_tenants(visit.person)
    firing = await admin.webhooks.alerts(whose, fires=True, most=MOST_SHOWN)
    over = await admin.webhooks.alerts(whose, fires=False, most=MOST_SHOWN)
    listed = await read_page(
        admin, WEBHOOKS, WebhookQuery(), cursor=cursor_of(request), limit=MOST_WEBHOOKS, only=whose
    )
    webhooks = listed.rows
    ids = {alert.tenant_id for alert in (*firing, *over)} | {webhook.tenant_id for webhook in webhooks}
    names = await gateway_of(request).deps.database.read(lambda one: queries.names_of(one, "tenant", ids))
    return page_response(
        "alerts/alerts.html",
        visit,
        problem=problem,
        done=said(request, DONE),
        lists=(
            ("Firing", problems_of(firing), "No alert is firing"),
            ("Resolved", problems_of(over), "No recently resolved alerts"),
        ),
        says=SAYS,
        names=names,
        webhooks=webhooks,
        counts=await admin.webhooks.count_deliveries(webhook.webhook_id for webhook in webhooks),
        next_page=with_query(PATH, {"cursor": listed.next_cursor}) if listed.next_cursor else "",
        subjects=SUBJECTS,
        may_add=person.may_somewhere(Act.CHANGE_WEBHOOK),
        of_platform=person.may(Act.CHANGE_PLATFORM),
        typed=typed,
    )


async def webhook_shown(request: Request, webhook: str, *, changes: bool) -> Webhook:
    """The webhook, if the person may see it. Raises `NotFound`, and with `changes` `NotForThisRole`."""
    person = visit_of(request).person
    shown = await admin_of(request).webhooks.show(webhook, own_tenants(person))
    if changes and not may_change(person, shown.tenant_id):
        raise NotForThisRole
    return shown


HANDLERS = [alerts_page, add_webhook]
