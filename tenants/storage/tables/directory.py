"""Who may use what: tenants, projects, keys, limits, prices."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
    false,
    text,
)

from tenants.storage.tables.base import ID, NAME, WORD, metadata

tenants = Table(
    "tenants",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", NAME, nullable=False, unique=True),
    Column("status", WORD, nullable=False),
    Column("weight", Float, nullable=False),
    Column("default_tier", WORD, nullable=False),
    Column("tiers", JSON, nullable=False),
    Column("models", JSON(none_as_null=True)),
    Column("created_us", BigInteger, nullable=False),
    Column("on_low_budget", WORD, nullable=False, server_default="refuse"),
    Column("reserved_tokens_per_s", Float, nullable=False, server_default="0"),
    # The tier that this is for; NULL: all.
    Column("reserved_tier", WORD),
    # Labels that its requests may carry, each with its values; NULL: none.
    Column("labels", JSON(none_as_null=True)),
    # Whether a suspension also ends what runs; the same of projects and keys.
    Column("ends_running", Boolean, nullable=False, server_default=false()),
    # For people; NULL: none. The same of keys.
    Column("display_name", String(100)),
    # The directory revision of the last change to this tenant or anything below it.
    Column("revision", BigInteger, nullable=False, index=True),
)

projects = Table(
    "projects",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False),
    Column("name", NAME, nullable=False),
    Column("status", WORD, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("ends_running", Boolean, nullable=False, server_default=false()),
    UniqueConstraint("tenant_id", "name"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", ID, primary_key=True),
    Column("tenant_id", ID, ForeignKey("tenants.id"), nullable=False, index=True),
    Column("project_id", ID, ForeignKey("projects.id"), nullable=False),
    Column("name", NAME, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("models", JSON(none_as_null=True)),
    Column("tiers", JSON(none_as_null=True)),
    Column("default_tier", WORD),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    Column("revoked_us", BigInteger),
    # Networks that it may be used from, in CIDR notation; NULL: anywhere.
    Column("allow_from", JSON(none_as_null=True)),
    Column("ends_running", Boolean, nullable=False, server_default=false()),
    Column("display_name", String(100)),
    Index("ix_api_keys_created_us_id", "created_us", "id"),
)

# Rotating a key changes its secrets; its id, limits and scopes stay.
key_secrets = Table(
    "key_secrets",
    metadata,
    Column("public_id", String(24), primary_key=True),
    Column("key_id", ID, ForeignKey("api_keys.id"), nullable=False, index=True),
    Column("digest", LargeBinary(32), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
)

limits = Table(
    "limits",
    metadata,
    Column("id", ID, primary_key=True),
    # NULL: all tenants together.
    Column("tenant_id", ID, ForeignKey("tenants.id"), index=True),
    Column("kind", WORD, nullable=False),
    Column("subject_id", ID, nullable=False),
    Column("meter", WORD, nullable=False),
    # A window's name, `bucket` or `concurrency`.
    Column("shape", WORD, nullable=False),
    Column("tier", WORD, nullable=False),
    Column("time_zone", String(64), nullable=False),
    Column("amount", BigInteger, nullable=False),
    # Thousandths of a unit per second: exact, where a float would not be.
    Column("rate_milli", BigInteger),
    Column("mode", WORD, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # Per cent at which a soft limit alerts; NULL: the default ones.
    Column("thresholds", JSON(none_as_null=True)),
    Column("model", String(256), nullable=False, server_default=text("''")),
    # It binds only requests of more tokens; 0: all.
    Column("above_tokens", BigInteger, nullable=False, server_default="0"),
    # The name of the end user that it is set on.
    Column("end_user", String(64), nullable=False, server_default=text("''")),
    # What it refills at while capacity is spare; NULL: never faster than its rate.
    Column("ceiling_milli", BigInteger),
    UniqueConstraint("kind", "subject_id", "meter", "shape", "tier", "model", "above_tokens"),
    Index("ix_limits_created_us_id", "created_us", "id"),
)

# At most one per limit; an expired one stays until replaced or cleared.
limit_overrides = Table(
    "limit_overrides",
    metadata,
    Column("limit_id", ID, ForeignKey("limits.id"), primary_key=True),
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
    Column("limit_id", ID, primary_key=True),
    # Seconds since 1970; 0 where the limit has no windows.
    Column("window_start_s", BigInteger, primary_key=True),
    Column("kind", WORD, primary_key=True),
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
    Column("tier", WORD, primary_key=True),
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

# Model aliases beside those of the settings; `means` as it is typed.
model_aliases = Table(
    "model_aliases",
    metadata,
    Column("id", ID, primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("means", String(2000), nullable=False),
    Column("max_price", Float, nullable=False),
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
    Column("name", NAME, primary_key=True),
    Column("value", String(256), nullable=False),
)
