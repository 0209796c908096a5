"""Service by minute: of tenants in the queue, and of engines."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, String, Table

from tenants.storage.tables.base import ID, WORD, metadata

POOL = String(256)

# What tenants had and would have had under an ideal fair share, by minute, pool and tier. Every gateway adds
# to rows of its own; a reader sums them up. Purged by age: the minute comes first in the key.
flow_minutes = Table(
    "flow_minutes",
    metadata,
    # The minute's begin, microseconds since 1970.
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
