"""Webhooks, the incidents of alerts, and the outbox: what is to be sent where."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    text,
)

from tenants.storage.tables.base import ID, WORD, metadata

SUBJECT = String(32)

# Receivers of events. tenant_id '': of all tenants, and of the platform.
webhooks = Table(
    "webhooks",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, nullable=False, index=True),
    # Scheme, name and port of its URL.
    Column("host", String(300), nullable=False),
    # Subjects that it receives; empty: all.
    Column("subjects", JSON, nullable=False),
    # The signing secret, and the URL with its secret path, encrypted with a key derived from the pepper.
    Column("sealed", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("by", String(128), nullable=False),
)

# Times during which an alert fired.
incidents = Table(
    "incidents",
    metadata,
    Column("id", ID, primary_key=True),
    # Subject and what it is about.
    Column("key", String(200), nullable=False),
    Column("subject", SUBJECT, nullable=False),
    Column("tenant_id", ID, nullable=False),
    Column("severity", WORD, nullable=False),
    Column("summary", String(500), nullable=False),
    Column("evidence", JSON, nullable=False),
    # Of the console.
    Column("page", String(300), nullable=False),
    Column("fired_us", BigInteger, nullable=False),
    # Since when it has been quiet, though not long enough; NULL: it is not.
    Column("quiet_us", BigInteger),
    # NULL: it fires.
    Column("resolved_us", BigInteger, index=True),
    # NULL: nobody did.
    Column("acknowledged_us", BigInteger),
    Column("acknowledged_by", String(128)),
    Index("ix_incidents_fired_us_id", "fired_us", "id"),
    # One at a time.
    Index(
        "uq_incidents_key_firing",
        "key",
        unique=True,
        sqlite_where=text("resolved_us IS NULL"),
        postgresql_where=text("resolved_us IS NULL"),
    ),
)

# Problems of which no webhook hears until an instant.
alert_silences = Table(
    "alert_silences",
    metadata,
    # `Incident.problem`.
    Column("problem", String(200), primary_key=True),
    Column("until_us", BigInteger, nullable=False),
    Column("by", String(128), nullable=False),
    Column("reason", String(200), nullable=False),
)

# One row, id 1. Its lock orders what is put into the outbox.
outbox_head = Table(
    "outbox_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    # Of the newest row of the outbox.
    Column("seq", BigInteger, nullable=False),
    # The gateway that evaluates alerts; '': none.
    Column("evaluator", String(80), nullable=False),
    Column("leased_until_us", BigInteger, nullable=False),
    # Rows that the newest announced checkpoint of the audit speaks of.
    Column("checkpoint", BigInteger, nullable=False),
)

# One event for one webhook.
outbox = Table(
    "outbox",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    # The same for each webhook, and in each attempt.
    Column("event_id", ID, nullable=False),
    Column("webhook_id", ID, ForeignKey("webhooks.id"), nullable=False),
    # Whose event it is; '': the platform's.
    Column("tenant_id", ID, nullable=False),
    Column("subject", SUBJECT, nullable=False),
    # The bytes that are signed and sent.
    Column("body", Text, nullable=False),
    Column("made_us", BigInteger, nullable=False),
    # pending, delivered, dead.
    Column("state", WORD, nullable=False),
    Column("attempts", Integer, nullable=False),
    # When it is tried next, and until when.
    Column("next_us", BigInteger, nullable=False),
    Column("until_us", BigInteger, nullable=False),
    # The gateway that sends it now; '': none.
    Column("sender", String(80), nullable=False),
    Column("claimed_until_us", BigInteger, nullable=False),
    # Of the last attempt; '': it went well, or there was none.
    Column("error", String(300), nullable=False),
    # NULL: pending.
    Column("ended_us", BigInteger),
    Index("ix_outbox_state_next_us", "state", "next_us"),
    Index("ix_outbox_webhook_id_tenant_id_state_seq", "webhook_id", "tenant_id", "state", "seq"),
    Index("ix_outbox_webhook_id_seq", "webhook_id", "seq"),
)
