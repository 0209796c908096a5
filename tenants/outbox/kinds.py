"""Every kind of event of a webhook: alerts, which fire and are resolved, and single events. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class AlertKind:
    subject: str
    """The type of its events."""
    says: str
    severity: Severity = "ticket"
    """`page`: react now; `ticket`: within days. A kind may say another one of what it found."""
    after_s: int = 0
    """How long it must hold before it fires."""
    quiet_s: int = 0
    """How long it must be over before it is resolved."""
    has_levels: bool = False
    """One problem may have several alerts, which differ in the last part of what they are about."""


MINUTE_S = 60
SLO_BURN = AlertKind(
    "slo.burn", "An error budget burns too fast.", "page", quiet_s=5 * MINUTE_S, has_levels=True
)
SOFT_LIMIT = AlertKind("limit.soft", "A soft limit has reached one of its thresholds.", has_levels=True)
EXHAUSTION = AlertKind(
    "limit.exhaustion", "A limit is used up, or will be before its window ends.", quiet_s=10 * MINUTE_S
)
KEY_EXPIRES = AlertKind("key.expires", "An API key expires within a week.")
LEDGER_DRIFT = AlertKind(
    "ledger.drift", "The last comparison of usage sums with the ledger found differences.", "page"
)
HOLDS_LEAKED = AlertKind("holds.leaked", "Requests of dead gateways hold budget.", after_s=5 * MINUTE_S)
CALIBRATION = AlertKind(
    "calibration.off", "Too few, or too many, requests stay within their estimated p90.", quiet_s=3_600
)
SATURATION = AlertKind(
    "saturation", "Requests are refused because the queue is full.", "page", quiet_s=5 * MINUTE_S
)
AUDIT_DAMAGED = AlertKind(
    "audit.damaged", "A check of the audit found damage, or it does not extend its newest checkpoint.", "page"
)
AUDIT_LATE = AlertKind("audit.late", "New audit rows are not signed in time.")
BACKUP_LATE = AlertKind("backup.late", "The newest backup is too old, or there is none.")
REPLICA_DOWN = AlertKind(
    "replica.down",
    "A replica of a model is down.",
    "page",
    after_s=MINUTE_S,
    quiet_s=MINUTE_S,
)
ALERT_KINDS = (
    SLO_BURN,
    SOFT_LIMIT,
    EXHAUSTION,
    KEY_EXPIRES,
    LEDGER_DRIFT,
    HOLDS_LEAKED,
    CALIBRATION,
    SATURATION,
    AUDIT_DAMAGED,
    AUDIT_LATE,
    BACKUP_LATE,
    REPLICA_DOWN,
)
BY_SUBJECT = {kind.subject: kind for kind in ALERT_KINDS}


def runbook_path(subject: str) -> str:
    """Where each gateway serves the alert's page (`runbooks.py`)."""
    return f"/runbooks/{subject}"


CHECKPOINT = "audit.checkpoint"
"""A signed checkpoint of the audit, to be kept elsewhere."""
TEST = "webhook.test"
"""Sent on request, to one webhook, whatever its subjects are."""
OF_TENANTS = (SLO_BURN.subject, SOFT_LIMIT.subject, EXHAUSTION.subject, KEY_EXPIRES.subject)
"""Subjects with events of tenants."""
SUBJECTS = (*BY_SUBJECT, CHECKPOINT)
"""What a webhook may name."""
