"""Sums of what the ledger says was charged, by hour and by day."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Index, Integer, String, Table

from tenants.storage.tables.base import ID, WORD, metadata

# Three grains in one table: `hour` and `day` (by tenant, model, tier and outcome; other columns empty), and
# `key_day` (by all columns). Hours are deleted after a while.
usage_sums = Table(
    "usage_sums",
    metadata,
    Column("grain", WORD, primary_key=True),
    # Of the hour or the day, UTC.
    Column("start_us", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant_id", ID, primary_key=True),
    Column("project_id", ID, primary_key=True),
    Column("key_id", ID, primary_key=True),
    Column("model", String(256), primary_key=True),
    Column("tier", WORD, primary_key=True),
    Column("outcome", String(64), primary_key=True),
    # Of `usage_labels`; empty: no labels.
    Column("label_set", String(32), primary_key=True),
    Column("ended_requests", BigInteger, nullable=False),
    # Those that count against limits on requests, as the ledger charges them.
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cost_nanousd", BigInteger, nullable=False),
    Column("credit_nanousd", BigInteger, nullable=False),
    Column("gpu_ms", BigInteger, nullable=False),
    # Requests with a wait, and the sum of their waits; the same of times to the first token.
    Column("waits", BigInteger, nullable=False),
    Column("wait_us", BigInteger, nullable=False),
    Column("first_tokens", BigInteger, nullable=False),
    Column("ttft_us", BigInteger, nullable=False),
    Index("ix_usage_sums_tenant_id_grain_start_us", "tenant_id", "grain", "start_us"),
)

# The labels of each set, which is named by a digest of its content.
usage_labels = Table(
    "usage_labels",
    metadata,
    Column("label_set", String(32), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("value", String(64), nullable=False),
)

# One row: how far the ledger is in the sums. It changes in the transactions that change the sums.
usage_fold = Table(
    "usage_fold",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    # Ledger rows with ids up to this one are in the sums.
    Column("folded_id", BigInteger, nullable=False),
    # The newest instant among them.
    Column("folded_us", BigInteger, nullable=False),
    # Hours that began before were deleted.
    Column("hours_from_us", BigInteger, nullable=False),
    # PostgreSQL: rows up to this id come next, once these transactions have ended.
    Column("waiting_id", BigInteger, nullable=False),
    Column("waiting_for", JSON, nullable=False),
    # Random, of the last rebuild.
    Column("rebuild_id", String(32), nullable=False),
)
