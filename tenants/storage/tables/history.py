"""What happened: timelines of requests, SLO targets and misses."""

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
    UniqueConstraint,
    text,
)

from tenants.storage.tables.base import ID, WORD, metadata

# Packed timelines of requests (`gateway/domain/timeline.py`); numbers only. Purged by age and count.
timelines = Table(
    "timelines",
    metadata,
    Column("request_id", String(80), primary_key=True),
    Column("tenant_id", ID, nullable=False),
    Column("ended_us", BigInteger, nullable=False, index=True),
    Column("packed", LargeBinary, nullable=False),
    # Ids of `descriptions`: the server that ran it, and what its key was entitled to; NULL: not described.
    Column("server", WORD),
    Column("terms", WORD),
    # The run of an agent that it is a call of; NULL: none, and then it is in no further index.
    Column("session", String(64)),
    *(
        Index(
            name,
            *columns,
            sqlite_where=text("session IS NOT NULL"),
            postgresql_where=text("session IS NOT NULL"),
        )
        for name, columns in {
            "ix_timelines_session": ("tenant_id", "session", "ended_us", "request_id"),
            "ix_timelines_sessions": ("tenant_id", "ended_us", "session"),
        }.items()
    ),
)

# What timelines refer to (`gateway/domain/server_description.py`), named by a digest of its content.
descriptions = Table(
    "descriptions",
    metadata,
    Column("id", WORD, primary_key=True),
    # The end of the last request that refers to it.
    Column("used_us", BigInteger, nullable=False, index=True),
    Column("content", LargeBinary, nullable=False),
)

# SLO targets. tenant_id '': the default of all tenants without one of their own in that tier.
slos = Table(
    "slos",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, nullable=False),
    Column("tier", WORD, nullable=False),
    Column("metric", WORD, nullable=False),
    Column("target_us", BigInteger, nullable=False),
    # Thousandths of all requests that must meet it.
    Column("per_mille", Integer, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("tenant_id", "tier", "metric"),
)

# Requests and misses of each target, by spans of five minutes and of a day.
slo_counts = Table(
    "slo_counts",
    metadata,
    Column("tenant_id", ID, primary_key=True),
    Column("tier", WORD, primary_key=True),
    Column("metric", WORD, primary_key=True),
    Column("span_s", Integer, primary_key=True, autoincrement=False),
    # Seconds since 1970.
    Column("start_s", BigInteger, primary_key=True, autoincrement=False),
    Column("total", BigInteger, nullable=False),
    Column("missed", BigInteger, nullable=False),
    Index("ix_slo_counts_span_s_start_s", "span_s", "start_s"),
)

# Misses of each target by cause, by the day: reports read these, however many misses there are.
slo_causes = Table(
    "slo_causes",
    metadata,
    Column("tenant_id", ID, primary_key=True),
    Column("tier", WORD, primary_key=True),
    Column("metric", WORD, primary_key=True),
    Column("cause", WORD, primary_key=True),
    # Seconds since 1970.
    Column("start_s", BigInteger, primary_key=True, autoincrement=False),
    Column("missed", BigInteger, nullable=False),
    Index("ix_slo_causes_start_s", "start_s"),
)

# Missed targets of requests, with cause and evidence.
slo_misses = Table(
    "slo_misses",
    metadata,
    Column("request_id", String(80), primary_key=True),
    Column("metric", WORD, primary_key=True),
    Column("tenant_id", ID, nullable=False),
    Column("tier", WORD, nullable=False),
    Column("cause", WORD, nullable=False),
    Column("target_us", BigInteger, nullable=False),
    # NULL: never reached.
    Column("actual_us", BigInteger),
    Column("at_us", BigInteger, nullable=False, index=True),
    Column("evidence", JSON, nullable=False),
    Index("ix_slo_misses_tenant_id_at_us", "tenant_id", "at_us"),
    Index("ix_slo_misses_cause_at_us", "cause", "at_us"),
)
