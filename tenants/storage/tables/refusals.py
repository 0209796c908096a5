"""What was refused, what was told against what happened, when keys were last used."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, String, Table

from tenants.storage.tables.base import ID, WORD, metadata

CODE = String(64)

# Refused requests: of a flood only the first few of each tenant, code, limit and minute. '': not known, or
# none. Purged by age and count.
refusals = Table(
    "refusals",
    metadata,
    Column("request_id", String(80), primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("tenant_id", ID, nullable=False),
    Column("project_id", ID, nullable=False),
    Column("key_id", ID, nullable=False),
    Column("tier", WORD, nullable=False),
    Column("model", String(256), nullable=False),
    Column("code", CODE, nullable=False),
    Column("limit_id", ID, nullable=False),
    # The limit is on all tenants together: its numbers are not for one of them to read.
    Column("of_platform", Boolean, nullable=False),
    # In the limit's unit; NULL: no limit refused it.
    Column("wanted", BigInteger),
    Column("available", BigInteger),
    # NULL: its client was told no time.
    Column("retry_after_ms", BigInteger),
    Index("ix_refusals_at_us_request_id", "at_us", "request_id"),
    *(
        Index(f"ix_refusals_{name}_at_us_request_id", name, "at_us", "request_id")
        for name in ("tenant_id", "project_id", "key_id", "tier", "model", "code", "limit_id")
    ),
)

# All refused requests, added up by all gateways.
refusal_counts = Table(
    "refusal_counts",
    metadata,
    # Seconds since 1970.
    Column("minute_s", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant_id", ID, primary_key=True),
    Column("code", CODE, primary_key=True),
    Column("limit_id", ID, primary_key=True),
    Column("count", BigInteger, nullable=False),
    Index("ix_refusal_counts_tenant_id_minute_s", "tenant_id", "minute_s"),
)

# How often a figure that was told on arrival was kept.
calibration_counts = Table(
    "calibration_counts",
    metadata,
    # Seconds since 1970.
    Column("hour_s", BigInteger, primary_key=True, autoincrement=False),
    Column("model", String(256), primary_key=True),
    Column("tier", WORD, primary_key=True),
    Column("figure", WORD, primary_key=True),
    # By the wait that was told, see `engine/forecast/calibration.py`.
    Column("wait_bucket", Integer, primary_key=True, autoincrement=False),
    # `plain` or `binding`.
    Column("kind", WORD, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("within_p50", BigInteger, nullable=False),
    Column("within_p90", BigInteger, nullable=False),
)

# When keys were last used. Not part of the directory: no gateway reads it.
key_uses = Table(
    "key_uses",
    metadata,
    Column("key_id", ID, primary_key=True),
    Column("last_us", BigInteger, nullable=False),
)

# The last flush of each writer of counts: one that is repeated, because its answer was lost, adds nothing.
flushes = Table(
    "flushes",
    metadata,
    Column("writer", String(80), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("at_us", BigInteger, nullable=False),
)
