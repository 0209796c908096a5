"""Every admin route but those of requests.

Changes go through `tenants.admin.admin`, which audits them, and are in force here before the answer.
"""

from gateway.routes.admin import (
    brakes,
    config,
    ledger,
    limits,
    people,
    policy,
    prices,
    slo,
    status,
    upstreams,
)
from gateway.routes.admin.records import audit_log, webhooks

HANDLERS = [
    *status.HANDLERS,
    *ledger.HANDLERS,
    *policy.HANDLERS,
    *audit_log.HANDLERS,
    *brakes.HANDLERS,
    *limits.HANDLERS,
    *config.HANDLERS,
    *prices.HANDLERS,
    *slo.HANDLERS,
    *upstreams.HANDLERS,
    *people.HANDLERS,
    *webhooks.HANDLERS,
]
