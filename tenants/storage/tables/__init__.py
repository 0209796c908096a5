"""SQLAlchemy tables.

Instants are integer microseconds since 1970 (UTC), money is integer nano-dollars, `''` means "any" or "none"
in columns of a UNIQUE constraint (NULLs never collide). `ledger`, `counter_sets`, `prices` and all of the
audit but its head are append-only: triggers created by the migration refuse UPDATE and DELETE."""

from tenants.storage.tables.audit import audit, audit_checkpoints, audit_head, audit_persons, audit_tiles
from tenants.storage.tables.base import metadata
from tenants.storage.tables.cluster import drains, gateways, idempotent_answers
from tenants.storage.tables.counts import (
    calibration_counts,
    control_moves,
    engine_minutes,
    flow_minutes,
    flushes,
    key_uses,
    refusal_counts,
    refusals,
    usage_fold,
    usage_labels,
    usage_sums,
)
from tenants.storage.tables.directory import (
    api_keys,
    directory_revision,
    key_secrets,
    limit_events,
    limit_overrides,
    limits,
    prices,
    projects,
    settings,
    tenants,
)
from tenants.storage.tables.history import (
    descriptions,
    slo_causes,
    slo_counts,
    slo_misses,
    slos,
    timelines,
)
from tenants.storage.tables.ledger import (
    CHARGES,
    CHARGES_BY_ID,
    CREDITS,
    NAME_COUNTERS,
    RARE_OUTCOMES,
    RESERVES,
    SETTLES,
    counter_sets,
    ledger,
    progress,
    redeemed_quotes,
)
from tenants.storage.tables.outbox import incidents, outbox, outbox_head, webhooks
from tenants.storage.tables.people import people, person_links, person_sessions

__all__ = [
    "CHARGES",
    "CHARGES_BY_ID",
    "CREDITS",
    "NAME_COUNTERS",
    "RARE_OUTCOMES",
    "RESERVES",
    "SETTLES",
    "api_keys",
    "audit",
    "audit_checkpoints",
    "audit_head",
    "audit_persons",
    "audit_tiles",
    "calibration_counts",
    "control_moves",
    "counter_sets",
    "descriptions",
    "directory_revision",
    "drains",
    "engine_minutes",
    "flow_minutes",
    "flushes",
    "gateways",
    "idempotent_answers",
    "incidents",
    "key_secrets",
    "key_uses",
    "ledger",
    "limit_events",
    "limit_overrides",
    "limits",
    "metadata",
    "outbox",
    "outbox_head",
    "people",
    "person_links",
    "person_sessions",
    "prices",
    "progress",
    "projects",
    "redeemed_quotes",
    "refusal_counts",
    "refusals",
    "settings",
    "slo_causes",
    "slo_counts",
    "slo_misses",
    "slos",
    "tenants",
    "timelines",
    "usage_fold",
    "usage_labels",
    "usage_sums",
    "webhooks",
]
