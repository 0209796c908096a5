"""The schema: directory, limits, prices, ledger, audit, gateways, answers, quotes, timelines, SLOs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.String(40)
NAME = sa.String(64)
WORD = sa.String(16)
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
RESERVES = sa.text("kind = 'reserve'")
CHARGES = sa.text("kind IN ('settle', 'credit', 'adjust')")
TABLES = (
    "tenants",
    "projects",
    "api_keys",
    "key_secrets",
    "limits",
    "limit_overrides",
    "limit_events",
    "prices",
    "ledger",
    "counter_sets",
    "audit",
    "directory_revision",
    "settings",
    "gateways",
    "idempotent_answers",
    "redeemed_quotes",
    "timelines",
    "slos",
    "slo_counts",
    "slo_misses",
)
"""In the order of their foreign keys."""
APPEND_ONLY = ("ledger", "counter_sets", "audit", "prices")


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", ID, primary_key=True),
        sa.Column("name", NAME, nullable=False, unique=True),
        sa.Column("status", WORD, nullable=False),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("default_tier", WORD, nullable=False),
        sa.Column("tiers", sa.JSON, nullable=False),
        sa.Column("models", sa.JSON(none_as_null=True)),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("on_low_budget", WORD, nullable=False, server_default="refuse"),
        sa.Column("reserved_tokens_per_s", sa.Float, nullable=False, server_default="0"),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "projects",
        sa.Column("id", ID, primary_key=True),
        sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", ID, primary_key=True),
        sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("project_id", ID, sa.ForeignKey("projects.id"), nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("models", sa.JSON(none_as_null=True)),
        sa.Column("tiers", sa.JSON(none_as_null=True)),
        sa.Column("default_tier", WORD),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
        sa.Column("revoked_us", sa.BigInteger),
    )
    op.create_table(
        "key_secrets",
        sa.Column("public_id", sa.String(24), primary_key=True),
        sa.Column("key_id", ID, sa.ForeignKey("api_keys.id"), nullable=False, index=True),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger),
    )
    op.create_table(
        "limits",
        sa.Column("id", ID, primary_key=True),
        sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), nullable=False, index=True),
        sa.Column("kind", WORD, nullable=False),
        sa.Column("subject_id", ID, nullable=False),
        sa.Column("meter", WORD, nullable=False),
        sa.Column("shape", WORD, nullable=False),
        sa.Column("tier", WORD, nullable=False),
        sa.Column("time_zone", sa.String(64), nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("rate_milli", sa.BigInteger),
        sa.Column("mode", WORD, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("thresholds", sa.JSON(none_as_null=True)),
        sa.UniqueConstraint("kind", "subject_id", "meter", "shape", "tier"),
    )
    op.create_table(
        "limit_overrides",
        sa.Column("limit_id", ID, sa.ForeignKey("limits.id"), primary_key=True),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("rate_milli", sa.BigInteger),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "limit_events",
        sa.Column("limit_id", ID, primary_key=True),
        sa.Column("window_start_s", sa.BigInteger, primary_key=True),
        sa.Column("kind", WORD, primary_key=True),
        sa.Column("level", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("first_us", sa.BigInteger, nullable=False),
        sa.Column("last_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "prices",
        sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("tier", WORD, primary_key=True),
        sa.Column("input_nanousd", sa.BigInteger, nullable=False),
        sa.Column("cached_input_nanousd", sa.BigInteger, nullable=False),
        sa.Column("output_nanousd", sa.BigInteger, nullable=False),
        sa.Column("multiplier", sa.Integer, nullable=False),
        sa.Column("input_weight", sa.Integer, nullable=False),
        sa.Column("cached_input_weight", sa.Integer, nullable=False),
        sa.Column("output_weight", sa.Integer, nullable=False),
        sa.Column("reasoning_weight", sa.Integer, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_prices_model_tier_version", "prices", ["model", "tier", "version"])
    op.create_table(
        "ledger",
        sa.Column("id", SERIAL, primary_key=True, autoincrement=True),
        sa.Column("request_id", sa.String(80), nullable=False),
        sa.Column("kind", WORD, nullable=False),
        sa.Column("number", sa.Integer, nullable=False, server_default="0"),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("project_id", ID, nullable=False),
        sa.Column("key_id", ID, nullable=False),
        sa.Column("gateway_id", sa.String(80), nullable=False),
        sa.Column("tier", WORD, nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("gpu_ms", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("counted_input", sa.BigInteger),
        sa.Column("counted_output", sa.BigInteger),
        sa.Column("price_version", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("outcome", sa.String(64), nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("counter_set", sa.String(16)),
        sa.UniqueConstraint("request_id", "kind", "number"),
    )
    op.create_index(
        "ix_ledger_tenant_id_at_us",
        "ledger",
        ["tenant_id", "at_us"],
        sqlite_where=CHARGES,
        postgresql_where=CHARGES,
    )
    op.create_index(
        "ix_ledger_gateway_id_counter_set",
        "ledger",
        ["gateway_id", "counter_set"],
        sqlite_where=RESERVES,
        postgresql_where=RESERVES,
    )
    op.create_table(
        "counter_sets",
        sa.Column("gateway_id", sa.String(80), primary_key=True),
        sa.Column("set_id", sa.String(16), primary_key=True),
        sa.Column("counter", sa.String(256), primary_key=True),
    )
    op.create_index("ix_counter_sets_counter", "counter_sets", ["counter"])
    op.create_table(
        "audit",
        sa.Column("id", SERIAL, primary_key=True, autoincrement=True),
        sa.Column("at_us", sa.BigInteger, nullable=False, index=True),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("origin", sa.String(128), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(128), nullable=False),
        sa.Column("tenant_id", ID),
        sa.Column("before", sa.JSON(none_as_null=True)),
        sa.Column("after", sa.JSON(none_as_null=True)),
    )
    op.create_table(
        "directory_revision",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "settings",
        sa.Column("name", NAME, primary_key=True),
        sa.Column("value", sa.String(256), nullable=False),
    )
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(80), primary_key=True),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("heartbeat_us", sa.BigInteger, nullable=False),
        sa.Column("address", sa.String(256), nullable=False),
        sa.Column("engines", sa.JSON, nullable=False),
        sa.Column("adopter", sa.String(80), nullable=False),
    )
    op.create_table(
        "idempotent_answers",
        sa.Column("key_id", ID, primary_key=True),
        sa.Column("idempotency_key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(80), nullable=False),
        sa.Column("gateway_id", sa.String(80), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("headers", sa.JSON, nullable=False),
        sa.Column("pieces", sa.LargeBinary),
        sa.Column("expires_us", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "redeemed_quotes",
        sa.Column("offer_id", sa.String(40), primary_key=True),
        sa.Column("request_id", sa.String(80), nullable=False),
        sa.Column("expires_us", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "timelines",
        sa.Column("request_id", sa.String(80), primary_key=True),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("ended_us", sa.BigInteger, nullable=False, index=True),
        sa.Column("packed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "slos",
        sa.Column("id", ID, primary_key=True),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("tier", WORD, nullable=False),
        sa.Column("metric", WORD, nullable=False),
        sa.Column("target_us", sa.BigInteger, nullable=False),
        sa.Column("per_mille", sa.Integer, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("tenant_id", "tier", "metric"),
    )
    op.create_table(
        "slo_counts",
        sa.Column("tenant_id", ID, primary_key=True),
        sa.Column("tier", WORD, primary_key=True),
        sa.Column("metric", WORD, primary_key=True),
        sa.Column("span_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("start_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("missed", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_slo_counts_span_s_start_s", "slo_counts", ["span_s", "start_s"])
    op.create_table(
        "slo_misses",
        sa.Column("request_id", sa.String(80), primary_key=True),
        sa.Column("metric", WORD, primary_key=True),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("tier", WORD, nullable=False),
        sa.Column("cause", WORD, nullable=False),
        sa.Column("target_us", sa.BigInteger, nullable=False),
        sa.Column("actual_us", sa.BigInteger),
        sa.Column("at_us", sa.BigInteger, nullable=False, index=True),
        sa.Column("evidence", sa.JSON, nullable=False),
    )
    op.create_index("ix_slo_misses_tenant_id_at_us", "slo_misses", ["tenant_id", "at_us"])
    op.execute("INSERT INTO directory_revision (id, revision) VALUES (1, 0)")
    _refuse_changes()


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
    # SQLite drops triggers with their table.
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION fairgate_append_only()")


def _refuse_changes() -> None:
    """Triggers that refuse changes of append-only tables."""
    if op.get_bind().dialect.name == "sqlite":
        for table in APPEND_ONLY:
            for change in ("update", "delete"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{change} BEFORE {change.upper()} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                )
        return
    op.execute(
        "CREATE FUNCTION fairgate_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION fairgate_append_only()"
        )
