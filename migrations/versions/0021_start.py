"""The schema at its start, frozen: later revisions change it from here.

`tenants/storage/tables` says what the columns mean.
"""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa
from alembic import op

# Not 0001: there are databases of earlier programs with that number and another schema.
revision = "0021"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
APPEND_ONLY = ("ledger", "counter_sets", "audit", "audit_tiles", "audit_checkpoints", "prices")

ID = sa.String(40)
LONG_ID = sa.String(80)
WORD = sa.String(16)
NAME = sa.String(64)
LINE = sa.String(256)
BIG = sa.BigInteger()
BYTES = sa.LargeBinary()
JSON = sa.JSON()
JSON_OR_NULL = sa.JSON(none_as_null=True)
EMPTY = sa.text("''")
#: SQLite autoincrements only columns of exactly the type INTEGER.
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _key(name: str, kind: Any, *more: Any, autoincrement: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind, *more, primary_key=True, autoincrement=autoincrement)


def _column(name: str, kind: Any, *more: Any, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, *more, nullable=False, **options)


def _keys(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [_key(name, kind) for name in names]


def _columns(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [_column(name, kind) for name in names]


def _where(condition: str) -> dict[str, Any]:
    """Options of a partial index."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


sa.Table(
    "audit", SCHEMA,
    _column("seq", SERIAL, autoincrement=False), _column("at_us", BIG, index=True),
    _column("actor", sa.String(128)), _column("origin", sa.String(128)), _column("action", NAME),
    _column("target", sa.String(128)), sa.Column("tenant_id", ID), sa.Column("before", JSON_OR_NULL),
    sa.Column("after", JSON_OR_NULL), _column("entry", BYTES), sa.Column("request_id", ID),
    sa.Column("trace_id", sa.String(32)),
    sa.PrimaryKeyConstraint("seq", name="pk_audit_as_log"),
    sa.CheckConstraint("typeof(entry) = 'blob'", name="entry_is_blob").ddl_if(dialect="sqlite"),
    sa.Index("ix_audit_target_seq", "target", "seq"),
    sa.Index("ix_audit_tenant_id_seq", "tenant_id", "seq"),
)
sa.Table(
    "audit_head", SCHEMA,
    _key("id", sa.Integer), _column("size", BIG), _column("frontier", BYTES), _column("root", BYTES),
)
sa.Table(
    "audit_tiles", SCHEMA,
    _key("number", BIG), _column("root", BYTES),
)
sa.Table(
    "audit_checkpoints", SCHEMA,
    _key("size", BIG), _column("note", sa.String(1000)), _column("at_us", BIG),
)
sa.Table(
    "audit_persons", SCHEMA,
    _key("digest", sa.String(32)), _column("person_id", ID), _column("salt", sa.LargeBinary(16)),
    _column("text", sa.String(200), index=True),
    sa.UniqueConstraint("person_id", "text"),
)
sa.Table(
    "gateways", SCHEMA,
    _key("id", LONG_ID), _column("started_us", BIG), _column("heartbeat_us", BIG), _column("address", LINE),
    _column("engines", JSON), _column("adopter", LONG_ID),
    _column("instance_id", sa.String(32), server_default=EMPTY),
    _column("runs_in", sa.String(128), server_default=EMPTY), sa.Column("served_revision", BIG),
)
sa.Table(
    "drains", SCHEMA,
    _key("pool", sa.String(128)), _key("address", sa.String(512)), _column("replica", NAME),
    _column("since_us", BIG), _column("by", sa.String(128)), _column("reason", sa.String(200)),
)
sa.Table(
    "idempotent_answers", SCHEMA,
    _key("key_id", ID), _key("idempotency_key", sa.String(255)), _column("fingerprint", NAME),
    _column("request_id", LONG_ID), _column("gateway_id", LONG_ID), _column("status", sa.Integer),
    _column("headers", JSON), sa.Column("pieces", BYTES), _column("expires_us", BIG, index=True),
    _column("tenant_id", ID, server_default=EMPTY), _column("kept_bytes", BIG, server_default="0"),
    sa.Index("ix_idempotent_answers_tenant_id_kept_bytes", "tenant_id", "kept_bytes"),
)
sa.Table(
    "tenants", SCHEMA,
    _key("id", ID), _column("name", NAME, unique=True), _column("status", WORD), _column("weight", sa.Float),
    _column("default_tier", WORD), _column("tiers", JSON), sa.Column("models", JSON_OR_NULL),
    _column("created_us", BIG), _column("on_low_budget", WORD, server_default="refuse"),
    _column("reserved_tokens_per_s", sa.Float, server_default="0"), _column("revision", BIG, index=True),
    sa.Column("labels", JSON_OR_NULL), sa.Column("reserved_tier", WORD),
    _column("ends_running", sa.Boolean, server_default=sa.false()),
)
sa.Table(
    "projects", SCHEMA,
    _key("id", ID), _column("tenant_id", ID, sa.ForeignKey("tenants.id")), _column("name", NAME),
    _column("status", WORD), _column("created_us", BIG),
    _column("ends_running", sa.Boolean, server_default=sa.false()),
    sa.UniqueConstraint("tenant_id", "name"),
)
sa.Table(
    "api_keys", SCHEMA,
    _key("id", ID), _column("tenant_id", ID, sa.ForeignKey("tenants.id"), index=True),
    _column("project_id", ID, sa.ForeignKey("projects.id")), _column("name", NAME), _column("scopes", JSON),
    sa.Column("models", JSON_OR_NULL), sa.Column("tiers", JSON_OR_NULL), sa.Column("default_tier", WORD),
    _column("created_us", BIG), sa.Column("expires_us", BIG), sa.Column("revoked_us", BIG),
    sa.Column("allow_from", JSON_OR_NULL), _column("ends_running", sa.Boolean, server_default=sa.false()),
    sa.Index("ix_api_keys_created_us_id", "created_us", "id"),
)
sa.Table(
    "key_secrets", SCHEMA,
    _key("public_id", sa.String(24)), _column("key_id", ID, sa.ForeignKey("api_keys.id"), index=True),
    _column("digest", sa.LargeBinary(32)), _column("created_us", BIG), sa.Column("expires_us", BIG),
)
sa.Table(
    "limits", SCHEMA,
    _key("id", ID), sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), index=True),
    _column("kind", WORD), _column("subject_id", ID), *_columns(WORD, "meter", "shape", "tier"),
    _column("time_zone", NAME), _column("amount", BIG), sa.Column("rate_milli", BIG), _column("mode", WORD),
    _column("created_us", BIG), sa.Column("thresholds", JSON_OR_NULL),
    _column("model", LINE, server_default=EMPTY), _column("above_tokens", BIG, server_default="0"),
    _column("end_user", NAME, server_default=EMPTY), sa.Column("ceiling_milli", BIG),
    sa.UniqueConstraint("kind", "subject_id", "meter", "shape", "tier", "model", "above_tokens"),
    sa.Index("ix_limits_created_us_id", "created_us", "id"),
)
sa.Table(
    "limit_overrides", SCHEMA,
    _key("limit_id", ID, sa.ForeignKey("limits.id")), _column("amount", BIG), sa.Column("rate_milli", BIG),
    _column("until_us", BIG), _column("reason", sa.String(200)), _column("created_us", BIG),
)
sa.Table(
    "limit_events", SCHEMA,
    _key("limit_id", ID), _key("window_start_s", BIG), _key("kind", WORD), _key("level", sa.Integer),
    *_columns(BIG, "count", "first_us", "last_us"),
)
sa.Table(
    "prices", SCHEMA,
    _key("version", BIG), _key("model", LINE), _key("tier", WORD),
    *_columns(BIG, "input_nanousd", "cached_input_nanousd", "output_nanousd"),
    *_columns(
        sa.Integer,
        "multiplier", "input_weight",
        "cached_input_weight", "output_weight", "reasoning_weight",
    ),
    _column("created_us", BIG),
    sa.Index("ix_prices_model_tier_version", "model", "tier", "version"),
)
sa.Table(
    "directory_revision", SCHEMA,
    _key("id", sa.Integer), _column("revision", BIG),
)
sa.Table(
    "settings", SCHEMA,
    _key("name", NAME), _column("value", LINE),
)
sa.Table(
    "flow_minutes", SCHEMA,
    _key("minute_us", BIG), _key("pool", LINE), _key("tier", WORD), _key("tenant_id", ID),
    _key("gateway_id", LONG_ID),
    *_columns(BIG, "served_tokens", "fair_tokens", "waiting_token_s", "arrivals", "before_line_us"),
)
sa.Table(
    "engine_minutes", SCHEMA,
    _key("minute_us", BIG), _key("pool", LINE), _key("replica", LINE), _key("gateway_id", LONG_ID),
    _column("state", WORD),
    *_columns(
        BIG,
        "seen_us", "up_us", "idle_us", "steps", "step_us",
        "batch_sum", "computed_tokens", "emitted_tokens", "recomputed_tokens", "preemptions", "kv_permille_s",
    ),
)
sa.Table(
    "timelines", SCHEMA,
    _key("request_id", LONG_ID), _column("tenant_id", ID), _column("ended_us", BIG, index=True),
    _column("packed", BYTES), sa.Column("server", WORD), sa.Column("terms", WORD),
)
sa.Table(
    "descriptions", SCHEMA,
    _key("id", WORD), _column("used_us", BIG, index=True), _column("content", BYTES),
)
sa.Table(
    "slos", SCHEMA,
    _key("id", ID), _column("tenant_id", ID), _column("tier", WORD), _column("metric", WORD),
    _column("target_us", BIG), _column("per_mille", sa.Integer), _column("created_us", BIG),
    sa.UniqueConstraint("tenant_id", "tier", "metric"),
)
sa.Table(
    "slo_counts", SCHEMA,
    _key("tenant_id", ID), _key("tier", WORD), _key("metric", WORD), _key("span_s", sa.Integer),
    _key("start_s", BIG), _column("total", BIG), _column("missed", BIG),
    sa.Index("ix_slo_counts_span_s_start_s", "span_s", "start_s"),
)
sa.Table(
    "slo_causes", SCHEMA,
    _key("tenant_id", ID), *_keys(WORD, "tier", "metric", "cause"), _key("start_s", BIG),
    _column("missed", BIG),
    sa.Index("ix_slo_causes_start_s", "start_s"),
)
sa.Table(
    "slo_misses", SCHEMA,
    _key("request_id", LONG_ID), _key("metric", WORD), _column("tenant_id", ID), _column("tier", WORD),
    _column("cause", WORD), _column("target_us", BIG), sa.Column("actual_us", BIG),
    _column("at_us", BIG, index=True), _column("evidence", JSON),
    sa.Index("ix_slo_misses_cause_at_us", "cause", "at_us"),
    sa.Index("ix_slo_misses_tenant_id_at_us", "tenant_id", "at_us"),
)
sa.Table(
    "ledger", SCHEMA,
    _key("id", SERIAL, autoincrement=True), _column("request_id", LONG_ID), _column("kind", WORD),
    _column("number", sa.Integer, server_default="0"), *_columns(ID, "tenant_id", "project_id", "key_id"),
    _column("gateway_id", LONG_ID), _column("tier", WORD), _column("model", LINE),
    *_columns(BIG, "input_tokens", "output_tokens", "cost_nanousd", "requests"),
    _column("gpu_ms", BIG, server_default="0"), sa.Column("counted_input", BIG),
    sa.Column("counted_output", BIG), _column("price_version", BIG, server_default="0"),
    _column("outcome", NAME), _column("at_us", BIG), _column("detail", JSON), sa.Column("counter_set", WORD),
    sa.Column("labels", JSON_OR_NULL), sa.Column("counted_cost", BIG),
    sa.UniqueConstraint("request_id", "kind", "number"),
    sa.Index("ix_ledger_credits", "tenant_id", "at_us", **_where("kind = 'credit'")),
    sa.Index(
        "ix_ledger_gateway_id_counter_set", "gateway_id", "counter_set",
        **_where("(kind = 'reserve' OR counter_set IS NOT NULL)"),
    ),
    sa.Index("ix_ledger_settled", "at_us", "id", **_where("kind = 'settle'")),
    sa.Index("ix_ledger_settled_key_id", "key_id", "at_us", "id", **_where("kind = 'settle'")),
    sa.Index(
        "ix_ledger_settled_outcome", "outcome", "at_us", "id",
        **_where("kind = 'settle' AND outcome <> 'completed'"),
    ),
    sa.Index(
        "ix_ledger_tenant_id_at_us", "tenant_id", "at_us",
        **_where("kind IN ('settle', 'credit', 'adjust')"),
    ),
)
sa.Table(
    "counter_sets", SCHEMA,
    _key("gateway_id", LONG_ID), _key("set_id", WORD), _key("counter", LINE),
    sa.Index("ix_counter_sets_counter", "counter"),
)
sa.Table(
    "progress", SCHEMA,
    _key("gateway_id", LONG_ID), _column("written_us", BIG), _column("counts", BYTES),
)
sa.Table(
    "redeemed_quotes", SCHEMA,
    _key("offer_id", ID), _column("request_id", LONG_ID), _column("expires_us", BIG, index=True),
)
sa.Table(
    "control_moves", SCHEMA,
    _key("move_id", ID), _column("at_us", BIG), _column("gateway_id", ID), _column("model", LINE),
    _column("knob", sa.String(32)), _column("before", sa.Float), _column("after", sa.Float),
    _column("reason", sa.String(200)), _column("is_made", sa.Boolean), _column("mode", WORD),
    _column("knobs", sa.Text),
    sa.Index("ix_control_moves_at_us_move_id", "at_us", "move_id"),
    sa.Index("ix_control_moves_knob_at_us_move_id", "knob", "at_us", "move_id"),
    sa.Index("ix_control_moves_model_at_us_move_id", "model", "at_us", "move_id"),
)
sa.Table(
    "webhooks", SCHEMA,
    _key("id", ID), _column("tenant_id", ID, index=True), _column("host", sa.String(300)),
    _column("subjects", JSON), _column("sealed", BYTES), _column("created_us", BIG),
    _column("by", sa.String(128)),
)
sa.Table(
    "incidents", SCHEMA,
    _key("id", ID), _column("key", sa.String(200)), _column("subject", sa.String(32)),
    _column("tenant_id", ID), _column("severity", WORD), _column("summary", sa.String(500)),
    _column("evidence", JSON), _column("page", sa.String(300)), _column("fired_us", BIG),
    sa.Column("quiet_us", BIG), sa.Column("resolved_us", BIG, index=True),
    sa.Index("ix_incidents_fired_us_id", "fired_us", "id"),
    sa.Index("uq_incidents_key_firing", "key", **_where("resolved_us IS NULL"), unique=True),
)
sa.Table(
    "outbox_head", SCHEMA,
    _key("id", sa.Integer), _column("seq", BIG), _column("evaluator", LONG_ID),
    _column("leased_until_us", BIG), _column("checkpoint", BIG),
)
sa.Table(
    "outbox", SCHEMA,
    _key("seq", BIG), _column("event_id", ID), _column("webhook_id", ID, sa.ForeignKey("webhooks.id")),
    _column("tenant_id", ID), _column("subject", sa.String(32)), _column("body", sa.Text),
    _column("made_us", BIG), _column("state", WORD), _column("attempts", sa.Integer),
    _column("next_us", BIG), _column("until_us", BIG), _column("sender", LONG_ID),
    _column("claimed_until_us", BIG), _column("error", sa.String(300)), sa.Column("ended_us", BIG),
    sa.Index("ix_outbox_state_next_us", "state", "next_us"),
    sa.Index("ix_outbox_webhook_id_seq", "webhook_id", "seq"),
    sa.Index("ix_outbox_webhook_id_tenant_id_state_seq", "webhook_id", "tenant_id", "state", "seq"),
)
sa.Table(
    "people", SCHEMA,
    _key("id", ID), _column("name", sa.String(128), unique=True), _column("role", WORD),
    _column("tenants", JSON), _column("status", WORD), _column("password_hash", sa.String(200)),
    sa.Column("password_us", BIG), _column("revision", BIG), _column("created_us", BIG),
)
sa.Table(
    "person_links", SCHEMA,
    _key("digest", sa.LargeBinary(32)), sa.Column("person_id", ID, sa.ForeignKey("people.id"), index=True),
    _column("expires_us", BIG),
)
sa.Table(
    "person_sessions", SCHEMA,
    _key("digest", sa.LargeBinary(32)), _column("id", ID, unique=True),
    _column("person_id", ID, sa.ForeignKey("people.id"), index=True),
    *_columns(BIG, "person_revision", "created_us", "seen_us"), _column("ends_us", BIG, index=True),
    _column("address", NAME), _column("user_agent", sa.String(200)),
)
sa.Table(
    "refusals", SCHEMA,
    _key("request_id", LONG_ID), _column("at_us", BIG), *_columns(ID, "tenant_id", "project_id", "key_id"),
    _column("tier", WORD), _column("model", LINE), _column("code", NAME), _column("limit_id", ID),
    _column("of_platform", sa.Boolean), sa.Column("wanted", BIG), sa.Column("available", BIG),
    sa.Column("retry_after_ms", BIG),
    sa.Index("ix_refusals_at_us_request_id", "at_us", "request_id"),
    sa.Index("ix_refusals_code_at_us_request_id", "code", "at_us", "request_id"),
    sa.Index("ix_refusals_key_id_at_us_request_id", "key_id", "at_us", "request_id"),
    sa.Index("ix_refusals_limit_id_at_us_request_id", "limit_id", "at_us", "request_id"),
    sa.Index("ix_refusals_model_at_us_request_id", "model", "at_us", "request_id"),
    sa.Index("ix_refusals_project_id_at_us_request_id", "project_id", "at_us", "request_id"),
    sa.Index("ix_refusals_tenant_id_at_us_request_id", "tenant_id", "at_us", "request_id"),
    sa.Index("ix_refusals_tier_at_us_request_id", "tier", "at_us", "request_id"),
)
sa.Table(
    "refusal_counts", SCHEMA,
    _key("minute_s", BIG), _key("tenant_id", ID), _key("code", NAME), _key("limit_id", ID),
    _column("count", BIG),
    sa.Index("ix_refusal_counts_tenant_id_minute_s", "tenant_id", "minute_s"),
)
sa.Table(
    "calibration_counts", SCHEMA,
    _key("hour_s", BIG), _key("model", LINE), _key("tier", WORD), _key("figure", WORD),
    _key("wait_bucket", sa.Integer), _key("kind", WORD),
    *_columns(BIG, "requests", "within_p50", "within_p90"),
)
sa.Table(
    "key_uses", SCHEMA,
    _key("key_id", ID), _column("last_us", BIG),
)
sa.Table(
    "flushes", SCHEMA,
    _key("writer", LONG_ID), _column("number", BIG), _column("at_us", BIG),
)
sa.Table(
    "usage_sums", SCHEMA,
    _key("grain", WORD), _key("start_us", BIG), *_keys(ID, "tenant_id", "project_id", "key_id"),
    _key("model", LINE), _key("tier", WORD), _key("outcome", NAME), _key("label_set", sa.String(32)),
    *_columns(
        BIG,
        "ended_requests", "requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanousd",
        "credit_nanousd", "gpu_ms", "waits", "wait_us", "first_tokens", "ttft_us",
    ),
    sa.Index("ix_usage_sums_tenant_id_grain_start_us", "tenant_id", "grain", "start_us"),
)
sa.Table(
    "usage_labels", SCHEMA,
    _key("label_set", sa.String(32)), _key("name", NAME), _column("value", NAME),
)
sa.Table(
    "usage_fold", SCHEMA,
    _key("id", sa.Integer), *_columns(BIG, "folded_id", "folded_us", "hours_from_us", "waiting_id"),
    _column("waiting_for", JSON), _column("rebuild_id", sa.String(32)),
)


def upgrade() -> None:
    SCHEMA.create_all(op.get_bind(), checkfirst=False)
    op.execute("INSERT INTO directory_revision (id, revision) VALUES (1, 0)")
    op.execute("INSERT INTO usage_fold VALUES (1, 0, 0, 0, 0, '[]', '')")
    op.execute("INSERT INTO outbox_head VALUES (1, 0, '', 0, -1)")
    # The tree of no rows.
    head = {"id": 1, "size": 0, "frontier": b"", "root": hashlib.sha256().digest()}
    op.bulk_insert(SCHEMA.tables["audit_head"], [head])
    _refuse_changes()


def downgrade() -> None:
    # SQLite drops triggers with their table.
    SCHEMA.drop_all(op.get_bind(), checkfirst=False)
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
