"""The start page: who is signed in, and what the role allows."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import page, visit_of
from gateway.console.names import tenant_names
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.people.person import Person
from tenants.people.roles import Act

SENTENCES = {
    Act.OWN_ACCOUNT: "Change your password and end your sessions",
    Act.READ_TENANT: "See requests, usage, keys and limits",
    Act.READ_PLATFORM: "See all tenants, prices, the policy, the state of the gateways and the audit",
    Act.MAKE_KEY: "Make and rotate API keys",
    Act.CHANGE_KEY: "Change what API keys are for, and until when",
    Act.REVOKE_KEY: "Revoke API keys",
    Act.STEER_REQUEST: "Cancel requests, and move those that wait to another tier",
    Act.LIMIT_BELOW_TENANT: "Set limits of projects, keys and end users",
    Act.CHANGE_WEBHOOK: "Add and remove webhooks that are told of alerts",
    Act.CHANGE_TENANT: "Change tenants, their projects and their limits",
    Act.CHANGE_PLATFORM: "Change prices, the policy, targets, brakes and upstreams",
    Act.READ_PEOPLE: "See people and their sessions",
    Act.CHANGE_PEOPLE: "Invite people, change their roles, suspend them and end their sessions",
}
"""In display order."""


def allowed(person: Person) -> list[str]:
    return [text for act, text in SENTENCES.items() if person.may_somewhere(act)]


@page("/console")
async def start(request: Request) -> Response[str]:
    visit = visit_of(request)
    names = tenant_names(gateway_of(request).deps.directory, visit.person)
    return page_response(
        "account/start.html",
        visit,
        tenants=names,
        allowed=allowed(visit.person),
        may_read_platform=visit.person.may(Act.READ_PLATFORM),
    )


HANDLERS = [start]
