"""Counts: service by minute, refusals, calibration, uses of keys, moves of control loops, sums of usage."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Index, Integer, String, Table, Text

from tenants.storage.tables.base import ID, WORD, metadata

POOL = String(256)

# What tenants had and would have had under an ideal fair share, by minute, pool and tier. Every gateway adds
# to rows of its own; a reader sums them up. Purged by age: the minute comes first in the key.
flow_minutes = Table(
    "flow_minutes",
    metadata,
    Column("minute_us", BigInteger, primary_key=True, autoincrement=False),
    Column("pool", POOL, primary_key=True),
    Column("tier", WORD, primary_key=True),
    Column("tenant_id", ID, primary_key=True),
    Column("gateway_id", String(80), primary_key=True),
    # Cost tokens; of one gateway, pool and minute both columns have the same sum.
    Column("served_tokens", BigInteger, nullable=False),
    Column("fair_tokens", BigInteger, nullable=False),
    # Cost tokens that waited, each as often as it waited seconds.
    Column("waiting_token_s", BigInteger, nullable=False),
    # Requests that lined up, and the time from their first byte until then, without their tenant's limits.
    Column("arrivals", BigInteger, nullable=False),
    Column("before_line_us", BigInteger, nullable=False),
)

# What engines did, by minute and replica, as each gateway that reaches them saw it: not to be summed up.
engine_minutes = Table(
    "engine_minutes",
    metadata,
    Column("minute_us", BigInteger, primary_key=True, autoincrement=False),
    Column("pool", POOL, primary_key=True),
    Column("replica", POOL, primary_key=True),
    Column("gateway_id", String(80), primary_key=True),
    # Its state when the minute was last looked at, and for how long the gateway saw it up, idle and at all.
    Column("state", WORD, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
    Column("up_us", BigInteger, nullable=False),
    Column("idle_us", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("step_us", BigInteger, nullable=False),
    # Sequences of each step, added up.
    Column("batch_sum", BigInteger, nullable=False),
    Column("computed_tokens", BigInteger, nullable=False),
    Column("emitted_tokens", BigInteger, nullable=False),
    Column("recomputed_tokens", BigInteger, nullable=False),
    Column("preemptions", BigInteger, nullable=False),
    # Share of the KV cache in use (thousandths), each as often as it was so for a second.
    Column("kv_permille_s", BigInteger, nullable=False),
)


CODE = String(64)

# Refused requests: of a flood only the first of each tenant, code, limit and minute. '': not known, or none.
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
    # NULL: the client got no time.
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

# How often a figure that was stated on arrival was kept.
calibration_counts = Table(
    "calibration_counts",
    metadata,
    # Seconds since 1970.
    Column("hour_s", BigInteger, primary_key=True, autoincrement=False),
    Column("model", String(256), primary_key=True),
    Column("tier", WORD, primary_key=True),
    Column("figure", WORD, primary_key=True),
    # By the stated wait, see `engine/forecast/calibration.py`.
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


# Made or advised, each with its reason. Purged by age and number.
control_moves = Table(
    "control_moves",
    metadata,
    Column("move_id", ID, primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("gateway_id", ID, nullable=False),
    Column("model", String(256), nullable=False),
    Column("knob", String(32), nullable=False),
    Column("before", Float, nullable=False),
    Column("after", Float, nullable=False),
    Column("reason", String(200), nullable=False),
    Column("is_made", Boolean, nullable=False),
    # Of the control loop then.
    Column("mode", WORD, nullable=False),
    # JSON: where all knobs stood afterwards.
    Column("knobs", Text, nullable=False),
    Index("ix_control_moves_at_us_move_id", "at_us", "move_id"),
    *(
        Index(f"ix_control_moves_{name}_at_us_move_id", name, "at_us", "move_id")
        for name in ("model", "knob")
    ),
)


# `hour`, `day` by tenant, model, tier, outcome (other columns empty), `key_day` by all. Hours are purged.
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
