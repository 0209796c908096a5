"""Every admin route but those of requests.

Changes go through `tenants.admin.admin`, which audits them, and are in force here before the answer.
"""

from gateway.routes.admin import (
    brakes,
    config,
    ledger,
    limits,
    policy,
    prices,
    sessions,
    slo,
    status,
    upstreams,
)
from gateway.routes.admin.records import alerts, audit_log

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
    *sessions.HANDLERS,
    *alerts.HANDLERS,
]
