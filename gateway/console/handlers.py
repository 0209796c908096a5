"""Every page of the console.

Pages are rendered on the server and work without scripts, which add live figures, charts and local times."""

from collections.abc import Iterable
from typing import Any

from litestar.handlers import HTTPRouteHandler

from gateway.console import assets, resource_pages
from gateway.console.live import shared_stream
from gateway.console.pages import search
from gateway.console.pages.account import log_in, password, sessions, set_up
from gateway.console.pages.alerts import alerts, webhook
from gateway.console.pages.live import overview, steer, waiting
from gateway.console.pages.money import recovery, usage, usage_check
from gateway.console.pages.people import people, person
from gateway.console.pages.platform import audit, audit_check, settings, upstreams
from gateway.console.pages.policy import change as policy_change
from gateway.console.pages.policy import policy, what_if
from gateway.console.pages.requests import ended, misses, quotes, refused, request, slo
from gateway.console.pages.tenants import (
    change,
    hygiene,
    key,
    key_change,
    keys,
    limit,
    limits,
    projects,
    suspension,
    tenant,
    tenants,
)
from tenants.resources.alerts import ALERTS
from tenants.resources.platform.brakes import BRAKES
from tenants.resources.prices import PRICE_HISTORY
from tenants.resources.resource import Resource

HANDLERS = [
    *search.HANDLERS,
    *set_up.HANDLERS,
    *log_in.HANDLERS,
    *password.HANDLERS,
    *sessions.HANDLERS,
    *overview.HANDLERS,
    *waiting.HANDLERS,
    *steer.HANDLERS,
    *shared_stream.HANDLERS,
    *people.HANDLERS,
    *person.HANDLERS,
    *tenants.HANDLERS,
    *tenant.HANDLERS,
    *change.HANDLERS,
    *suspension.HANDLERS,
    *projects.HANDLERS,
    *keys.HANDLERS,
    *key.HANDLERS,
    *key_change.HANDLERS,
    *limits.HANDLERS,
    *limit.HANDLERS,
    *hygiene.HANDLERS,
    *request.HANDLERS,
    *slo.HANDLERS,
    *quotes.HANDLERS,
    *usage.HANDLERS,
    *usage_check.HANDLERS,
    *recovery.HANDLERS,
    *upstreams.HANDLERS,
    *audit_check.HANDLERS,
    *settings.HANDLERS,
    *alerts.HANDLERS,
    *webhook.HANDLERS,
    *policy.HANDLERS,
    *policy_change.HANDLERS,
    *what_if.HANDLERS,
    *assets.HANDLERS,
]
PAGES = (BRAKES, PRICE_HISTORY)
"""Resources that only the console lists."""
PARTS = {
    "refusals": refused.PARTS,
    "requests/ended": ended.PARTS,
    "slo/misses": misses.PARTS,
    "audit": audit.PARTS,
}
"""By a resource's plural: what its page shows beside rows."""


def handlers(resources: Iterable[Resource[Any]]) -> list[HTTPRouteHandler]:
    forms = resource_pages.forms(ALERTS)
    return [*HANDLERS, *forms, *resource_pages.handlers((*resources, *PAGES), PARTS)]
