"""SQLAlchemy tables.

Instants are integer microseconds since 1970 (UTC), money is integer nano-dollars, `''` means "any" or "none"
in columns of a UNIQUE constraint (NULLs never collide). `ledger`, `counter_sets`, `audit` and `prices` are
append-only: triggers created by the migration refuse UPDATE and DELETE.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_ID = String(40)
_NAME = String(64)
_WORD = String(16)
#: SQLite autoincrements only columns of exactly the type INTEGER.
_SERIAL = BigInteger().with_variant(Integer, "sqlite")

tenants = Table(
    "tenants",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("name", _NAME, nullable=False, unique=True),
    Column("status", _WORD, nullable=False),
    Column("weight", Float, nullable=False),
    Column("default_tier", _WORD, nullable=False),
    Column("tiers", JSON, nullable=False),
    Column("models", JSON(none_as_null=True)),
    Column("created_us", BigInteger, nullable=False),
    Column("on_low_budget", _WORD, nullable=False, server_default="refuse"),
    Column("reserved_tokens_per_s", Float, nullable=False, server_default="0"),
    # The tier that this is for; NULL: all.
    Column("reserved_tier", _WORD),
    # Labels that its requests may carry, each with its values; NULL: none.
    Column("labels", JSON(none_as_null=True)),
    # The directory revision of the last change to this tenant or anything below it.
    Column("revision", BigInteger, nullable=False, index=True),
)

projects = Table(
    "projects",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id"), nullable=False),
    Column("name", _NAME, nullable=False),
    Column("status", _WORD, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("tenant_id", "name"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, ForeignKey("tenants.id"), nullable=False, index=True),
    Column("project_id", _ID, ForeignKey("projects.id"), nullable=False),
    Column("name", _NAME, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("models", JSON(none_as_null=True)),
    Column("tiers", JSON(none_as_null=True)),
    Column("default_tier", _WORD),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("revoked_us", BigInteger),
    # Networks that it may be used from, in CIDR notation; NULL: anywhere.
    Column("allow_from", JSON(none_as_null=True)),
)

# Rotating a key changes its secrets; its id, limits and scopes stay.
key_secrets = Table(
    "key_secrets",
    metadata,
    Column("public_id", String(24), primary_key=True),
    Column("key_id", _ID, ForeignKey("api_keys.id"), nullable=False, index=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
)

limits = Table(
    "limits",
    metadata,
    Column("id", _ID, primary_key=True),
    # NULL: all tenants together.
    Column("tenant_id", _ID, ForeignKey("tenants.id"), index=True),
    Column("kind", _WORD, nullable=False),
    Column("subject_id", _ID, nullable=False),
    Column("meter", _WORD, nullable=False),
    # A window's name, `bucket` or `concurrency`.
    Column("shape", _WORD, nullable=False),
    Column("tier", _WORD, nullable=False),
    Column("time_zone", String(64), nullable=False),
    Column("amount", BigInteger, nullable=False),
    # Thousandths of a unit per second: exact, where a float would not be.
    Column("rate_milli", BigInteger),
    Column("mode", _WORD, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # Per cent at which a soft limit alerts; NULL: the default ones.
    Column("thresholds", JSON(none_as_null=True)),
    Column("model", String(256), nullable=False, server_default=text("''")),
    # It binds only requests of more tokens; 0: all.
    Column("above_tokens", BigInteger, nullable=False, server_default="0"),
    # The name of the end user that it is set on.
    Column("end_user", String(64), nullable=False, server_default=text("''")),
    UniqueConstraint("kind", "subject_id", "meter", "shape", "tier", "model", "above_tokens"),
)

# At most one per limit; an expired one stays until replaced or cleared.
limit_overrides = Table(
    "limit_overrides",
    metadata,
    Column("limit_id", _ID, ForeignKey("limits.id"), primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("rate_milli", BigInteger),
    Column("until_us", BigInteger, nullable=False),
    Column("reason", String(200), nullable=False),
    Column("created_us", BigInteger, nullable=False),
)

# Events of soft and shadow limits, counted per window; written off the hot path.
limit_events = Table(
    "limit_events",
    metadata,
    Column("limit_id", _ID, primary_key=True),
    # Seconds since 1970; 0 where the limit has no windows.
    Column("window_start_s", BigInteger, primary_key=True),
    Column("kind", _WORD, primary_key=True),
    # Per cent of the amount; 0 for `would_deny`.
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
    Column("first_us", BigInteger, nullable=False),
    Column("last_us", BigInteger, nullable=False),
)

# The price book: a version's rows are its changes; in force is the newest row of a model and tier.
prices = Table(
    "prices",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("model", String(256), primary_key=True),
    Column("tier", _WORD, primary_key=True),
    Column("input_nanousd", BigInteger, nullable=False),
    Column("cached_input_nanousd", BigInteger, nullable=False),
    Column("output_nanousd", BigInteger, nullable=False),
    # Thousandths, all five.
    Column("multiplier", Integer, nullable=False),
    Column("input_weight", Integer, nullable=False),
    Column("cached_input_weight", Integer, nullable=False),
    Column("output_weight", Integer, nullable=False),
    Column("reasoning_weight", Integer, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index("ix_prices_model_tier_version", "model", "tier", "version"),
)

#: Conditions of partial indexes, which save index pages to write with every row. SQLite uses a partial index
#: only if a query contains its condition verbatim.
RESERVES = text("kind = 'reserve'")
CHARGES = text("kind IN ('settle', 'credit', 'adjust')")

ledger = Table(
    "ledger",
    metadata,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("request_id", String(80), nullable=False),
    Column("kind", _WORD, nullable=False),
    # Top-ups of a request are numbered from 1; other rows have 0.
    Column("number", Integer, nullable=False, server_default="0"),
    Column("tenant_id", _ID, nullable=False),
    Column("project_id", _ID, nullable=False),
    Column("key_id", _ID, nullable=False),
    Column("gateway_id", String(80), nullable=False),
    Column("tier", _WORD, nullable=False),
    Column("model", String(256), nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cost_nanousd", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("gpu_ms", BigInteger, nullable=False, server_default="0"),
    # Weighted tokens, as limits count them; NULL: not weighted.
    Column("counted_input", BigInteger),
    Column("counted_output", BigInteger),
    # Version of the price book; 0: none.
    Column("price_version", BigInteger, nullable=False, server_default="0"),
    Column("outcome", String(64), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("detail", JSON, nullable=False),
    # Reserve rows: the counters that hold the request and will be charged for it; NULL: none.
    Column("counter_set", String(16)),
    # The request's labels; NULL: none.
    Column("labels", JSON(none_as_null=True)),
    UniqueConstraint("request_id", "kind", "number"),
    Index("ix_ledger_tenant_id_at_us", "tenant_id", "at_us", sqlite_where=CHARGES, postgresql_where=CHARGES),
    Index(
        "ix_ledger_gateway_id_counter_set",
        "gateway_id",
        "counter_set",
        sqlite_where=RESERVES,
        postgresql_where=RESERVES,
    ),
)

# Sets of counters (limit and window), named by a digest of their members: requests of one key are charged to
# the same set until a window turns. Each gateway has its own sets, so that gateways' writes never block
# each other.
counter_sets = Table(
    "counter_sets",
    metadata,
    Column("gateway_id", String(80), primary_key=True),
    Column("set_id", String(16), primary_key=True),
    Column("counter", String(256), primary_key=True),
    Index("ix_counter_sets_counter", "counter"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", _SERIAL, primary_key=True, autoincrement=True),
    Column("at_us", BigInteger, nullable=False, index=True),
    Column("actor", String(128), nullable=False),
    Column("origin", String(128), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(128), nullable=False),
    Column("tenant_id", _ID),
    Column("before", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
)

# One row, id 1: incremented by every admin act in the same transaction.
directory_revision = Table(
    "directory_revision",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
)

# Facts about the installation, such as the pepper's fingerprint.
settings = Table(
    "settings",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("value", String(256), nullable=False),
)

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
)

# One row per `Idempotency-Key` in use: its request and, once that has ended, its answer.
idempotent_answers = Table(
    "idempotent_answers",
    metadata,
    Column("key_id", _ID, primary_key=True),
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
)

# One row per redeemed, unexpired quote: the request that redeemed it.
redeemed_quotes = Table(
    "redeemed_quotes",
    metadata,
    Column("offer_id", String(40), primary_key=True),
    Column("request_id", String(80), nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
)

# Packed timelines of requests (`gateway/domain/timeline.py`); numbers only. Purged by age and count.
timelines = Table(
    "timelines",
    metadata,
    Column("request_id", String(80), primary_key=True),
    Column("tenant_id", _ID, nullable=False),
    Column("ended_us", BigInteger, nullable=False, index=True),
    Column("packed", LargeBinary, nullable=False),
    # Ids of `descriptions`: the server that ran it, and what its key was entitled to; NULL: not described.
    Column("server", _WORD),
    Column("terms", _WORD),
)

# What timelines refer to (`gateway/domain/server_description.py`), named by a digest of its content: however
# many requests, gateways and restarts, one row for as long as nothing changes.
descriptions = Table(
    "descriptions",
    metadata,
    Column("id", _WORD, primary_key=True),
    # The end of the last request that refers to it.
    Column("used_us", BigInteger, nullable=False, index=True),
    Column("content", LargeBinary, nullable=False),
)

# SLO targets. tenant_id '': the default of all tenants without one of their own in that tier.
slos = Table(
    "slos",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("tenant_id", _ID, nullable=False),
    Column("tier", _WORD, nullable=False),
    Column("metric", _WORD, nullable=False),
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
    Column("tenant_id", _ID, primary_key=True),
    Column("tier", _WORD, primary_key=True),
    Column("metric", _WORD, primary_key=True),
    Column("span_s", Integer, primary_key=True, autoincrement=False),
    # Seconds since 1970.
    Column("start_s", BigInteger, primary_key=True, autoincrement=False),
    Column("total", BigInteger, nullable=False),
    Column("missed", BigInteger, nullable=False),
    Index("ix_slo_counts_span_s_start_s", "span_s", "start_s"),
)

# Missed targets of requests, with cause and evidence.
slo_misses = Table(
    "slo_misses",
    metadata,
    Column("request_id", String(80), primary_key=True),
    Column("metric", _WORD, primary_key=True),
    Column("tenant_id", _ID, nullable=False),
    Column("tier", _WORD, nullable=False),
    Column("cause", _WORD, nullable=False),
    Column("target_us", BigInteger, nullable=False),
    # NULL: never reached.
    Column("actual_us", BigInteger),
    Column("at_us", BigInteger, nullable=False, index=True),
    Column("evidence", JSON, nullable=False),
    Index("ix_slo_misses_tenant_id_at_us", "tenant_id", "at_us"),
)
