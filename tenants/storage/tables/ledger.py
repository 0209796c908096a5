"""What was reserved, charged and credited, and what running requests have used."""

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
    and_,
    text,
)

from tenants.storage.tables.base import ID, SERIAL, WORD, metadata

#: Partial indexes' conditions: fewer index pages to write a row. SQLite needs them verbatim in a query.
RESERVES = text("kind = 'reserve'")
CHARGES = text("kind IN ('settle', 'credit', 'adjust')")
#: The same rows in words that match no index's condition, for reading by id: before a table has statistics,
#: PostgreSQL takes so few rows to charge that it would read one of those indexes whole and sort it.
CHARGES_BY_ID = text("kind || '' IN ('settle', 'credit', 'adjust')")
SETTLES = text("kind = 'settle'")
#: Few requests end otherwise than they should: their index is hardly ever written.
RARE_OUTCOMES = text("outcome <> 'completed'")
CREDITS = text("kind = 'credit'")
#: Rows that may name counters: reserve rows, and top-ups that put their request under further limits.
NAME_COUNTERS = text("(kind = 'reserve' OR counter_set IS NOT NULL)")

ledger = Table(
    "ledger",
    metadata,
    Column("id", SERIAL, primary_key=True, autoincrement=True),
    Column("request_id", String(80), nullable=False),
    Column("kind", WORD, nullable=False),
    # Top-ups of a request are numbered from 1; other rows have 0.
    Column("number", Integer, nullable=False, server_default="0"),
    Column("tenant_id", ID, nullable=False),
    Column("project_id", ID, nullable=False),
    Column("key_id", ID, nullable=False),
    Column("gateway_id", String(80), nullable=False),
    Column("tier", WORD, nullable=False),
    Column("model", String(256), nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cost_nanousd", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("gpu_ms", BigInteger, nullable=False, server_default="0"),
    # Weighted tokens, as limits count them; NULL: not weighted.
    Column("counted_input", BigInteger),
    Column("counted_output", BigInteger),
    # What limits on cost count, where that is not what is billed; NULL: it is.
    Column("counted_cost", BigInteger),
    # Version of the price book; 0: none.
    Column("price_version", BigInteger, nullable=False, server_default="0"),
    Column("outcome", String(64), nullable=False),
    Column("at_us", BigInteger, nullable=False),
    Column("detail", JSON, nullable=False),
    # The counters charged for the request; of a top-up row those that came later. NULL: none.
    Column("counter_set", String(16)),
    # The request's labels; NULL: none.
    Column("labels", JSON(none_as_null=True)),
    UniqueConstraint("request_id", "kind", "number"),
    Index("ix_ledger_tenant_id_at_us", "tenant_id", "at_us", sqlite_where=CHARGES, postgresql_where=CHARGES),
    Index("ix_ledger_settled", "at_us", "id", sqlite_where=SETTLES, postgresql_where=SETTLES),
    Index(
        "ix_ledger_settled_key_id",
        "key_id",
        "at_us",
        "id",
        sqlite_where=SETTLES,
        postgresql_where=SETTLES,
    ),
    Index(
        "ix_ledger_settled_outcome",
        "outcome",
        "at_us",
        "id",
        sqlite_where=and_(SETTLES, RARE_OUTCOMES),
        postgresql_where=and_(SETTLES, RARE_OUTCOMES),
    ),
    Index(
        "ix_ledger_credits",
        "tenant_id",
        "at_us",
        sqlite_where=CREDITS,
        postgresql_where=CREDITS,
    ),
    Index(
        "ix_ledger_gateway_id_counter_set",
        "gateway_id",
        "counter_set",
        sqlite_where=NAME_COUNTERS,
        postgresql_where=NAME_COUNTERS,
    ),
)

# Sets of counters (limit and window), named by a digest of their members: a key's requests share one until a
# window turns. Each gateway has its own sets, so that gateways' writes never block each other.
counter_sets = Table(
    "counter_sets",
    metadata,
    Column("gateway_id", String(80), primary_key=True),
    Column("set_id", String(16), primary_key=True),
    Column("counter", String(256), primary_key=True),
    Index("ix_counter_sets_counter", "counter"),
)

# Per gateway, overwritten every second: what each of its running requests has used so far, packed.
progress = Table(
    "progress",
    metadata,
    Column("gateway_id", String(80), primary_key=True),
    Column("written_us", BigInteger, nullable=False),
    Column("counts", LargeBinary, nullable=False),
)

# One row per redeemed, unexpired quote: the request that redeemed it.
redeemed_quotes = Table(
    "redeemed_quotes",
    metadata,
    Column("offer_id", String(40), primary_key=True),
    Column("request_id", String(80), nullable=False),
    Column("expires_us", BigInteger, nullable=False, index=True),
)
