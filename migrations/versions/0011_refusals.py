"""Refusals, what was told against what happened, last uses of keys."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

ID, WORD, CODE, MODEL = sa.String(40), sa.String(16), sa.String(64), sa.String(256)
INDEXED = ("tenant_id", "project_id", "key_id", "tier", "model", "code", "limit_id")


def upgrade() -> None:
    op.create_table(
        "refusals",
        sa.Column("request_id", sa.String(80), nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("project_id", ID, nullable=False),
        sa.Column("key_id", ID, nullable=False),
        sa.Column("tier", WORD, nullable=False),
        sa.Column("model", MODEL, nullable=False),
        sa.Column("code", CODE, nullable=False),
        sa.Column("limit_id", ID, nullable=False),
        sa.Column("of_platform", sa.Boolean, nullable=False),
        sa.Column("wanted", sa.BigInteger),
        sa.Column("available", sa.BigInteger),
        sa.Column("retry_after_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("request_id", name="pk_refusals"),
    )
    op.create_index("ix_refusals_at_us_request_id", "refusals", ["at_us", "request_id"])
    for name in INDEXED:
        op.create_index(f"ix_refusals_{name}_at_us_request_id", "refusals", [name, "at_us", "request_id"])
    op.create_table(
        "refusal_counts",
        sa.Column("minute_s", sa.BigInteger, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("code", CODE, nullable=False),
        sa.Column("limit_id", ID, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("minute_s", "tenant_id", "code", "limit_id", name="pk_refusal_counts"),
    )
    op.create_index("ix_refusal_counts_tenant_id_minute_s", "refusal_counts", ["tenant_id", "minute_s"])
    op.create_table(
        "calibration_counts",
        sa.Column("hour_s", sa.BigInteger, nullable=False),
        sa.Column("model", MODEL, nullable=False),
        sa.Column("tier", WORD, nullable=False),
        sa.Column("figure", WORD, nullable=False),
        sa.Column("wait_bucket", sa.Integer, nullable=False),
        sa.Column("kind", WORD, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("within_p50", sa.BigInteger, nullable=False),
        sa.Column("within_p90", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "hour_s", "model", "tier", "figure", "wait_bucket", "kind", name="pk_calibration_counts"
        ),
    )
    op.create_table(
        "key_uses",
        sa.Column("key_id", ID, nullable=False),
        sa.Column("last_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_key_uses"),
    )
    op.create_table(
        "flushes",
        sa.Column("writer", sa.String(80), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("writer", name="pk_flushes"),
    )


def downgrade() -> None:
    for table in ("flushes", "key_uses", "calibration_counts", "refusal_counts", "refusals"):
        op.drop_table(table)
