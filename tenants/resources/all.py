"""All resources, as the product serves them."""

from __future__ import annotations

from typing import Any

from tenants.resources.alerts import ALERTS
from tenants.resources.keys import KEYS
from tenants.resources.limits import LIMITS
from tenants.resources.people import PEOPLE
from tenants.resources.platform.aliases import ALIASES
from tenants.resources.prices import PRICES
from tenants.resources.projects import PROJECTS
from tenants.resources.records.audit import AUDIT
from tenants.resources.records.counts import CALIBRATION, REFUSAL_COUNTS
from tenants.resources.records.ended import ENDED
from tenants.resources.records.minutes import ENGINES, FLOW
from tenants.resources.records.misses import MISSES
from tenants.resources.records.moves import MOVES
from tenants.resources.records.refusals import REFUSALS
from tenants.resources.resource import Resource
from tenants.resources.slos import SLOS
from tenants.resources.tenants import TENANTS
from tenants.resources.webhooks import WEBHOOKS

RESOURCES: tuple[Resource[Any], ...] = (
    TENANTS,
    PROJECTS,
    KEYS,
    LIMITS,
    SLOS,
    PRICES,
    ALIASES,
    ENDED,
    MISSES,
    REFUSALS,
    REFUSAL_COUNTS,
    CALIBRATION,
    MOVES,
    FLOW,
    ENGINES,
    AUDIT,
    WEBHOOKS,
    ALERTS,
    PEOPLE,
)
