"""Gateways, drained replicas, and answers that are kept for a repeated request."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    text,
)

from tenants.storage.tables.base import ID, metadata

# Heartbeats of the gateways. What a dead gateway left open is settled by another.
gateways = Table(
    "gateways",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("started_us", BigInteger, nullable=False),
    Column("heartbeat_us", BigInteger, nullable=False),
    Column("address", String(256), nullable=False),
    # Names of the engines that it can reach: only a gateway that reaches all of them may adopt its requests.
    Column("engines", JSON, nullable=False),
    # The gateway that settles what this one left; empty: none.
    Column("adopter", String(80), nullable=False),
    # Random, of the process that writes the heartbeats: two processes never share a gateway's id.
    Column("instance_id", String(32), nullable=False, server_default=text("''")),
    # Boot, device and inode of its data directory; empty: not known.
    Column("runs_in", String(128), nullable=False, server_default=text("''")),
    # The directory's revision that it serves by; NULL: not confirmed.
    Column("served_revision", BigInteger),
    # Fairgate's version; empty: older than 0026 of the schema.
    Column("release", String(32), nullable=False, server_default=text("''")),
)

# Replicas without new requests in any gateway, by model and by the replica's name in the installation.
drains = Table(
    "drains",
    metadata,
    Column("pool", String(128), primary_key=True),
    Column("replica", String(160), primary_key=True),
    Column("since_us", BigInteger, nullable=False),
    Column("by", String(128), nullable=False),
    Column("reason", String(200), nullable=False),
)

# Engines that a placer says to run. A gateway that hears one goes on with it whatever is here.
placed_engines = Table(
    "placed_engines",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("address", String(256), nullable=False),
    # By the database's clock: the placer writes it anew while the engine runs.
    Column("until_us", BigInteger, nullable=False),
    # The placer, and where it runs: for people.
    Column("placed_by", String(128), nullable=False),
    Column("place", String(128), nullable=False),
)

# One row per `Idempotency-Key` in use: its request and, once that has ended, its answer.
idempotent_answers = Table(
    "idempotent_answers",
    metadata,
    Column("key_id", ID, primary_key=True),
    Column("idempotency_key", String(255), primary_key=True),
    # SHA-256 of the route and the body, in hex.
    Column("fingerprint", String(64), nullable=False),
    Column("request_id", String(80), nullable=False),
    Column("gateway_id", String(80), nullable=False),
    # 0: not ended.
    Column("status", Integer, nullable=False),
    Column("headers", JSON, nullable=False),
    # The body's pieces as sent, packed; NULL: too large to keep.
    Column("pieces", LargeBinary),
    Column("expires_us", BigInteger, nullable=False, index=True),
    Column("tenant_id", ID, nullable=False, server_default=text("''")),
    # Size of headers and pieces.
    Column("kept_bytes", BigInteger, nullable=False, server_default="0"),
    Index("ix_idempotent_answers_tenant_id_kept_bytes", "tenant_id", "kept_bytes"),
)
