"""Timelines of requests; targets, how they were met, and misses with their causes."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "timelines",
        sa.Column("request_id", sa.String(80), primary_key=True),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
    )
    op.create_index("ix_timelines_ended_us", "timelines", ["ended_us"])
    op.create_table(
        "slos",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("metric", sa.String(16), nullable=False),
        sa.Column("target_us", sa.BigInteger(), nullable=False),
        sa.Column("per_mille", sa.Integer(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("tenant_id", "tier", "metric", name="uq_slos_tenant_id_tier_metric"),
    )
    op.create_table(
        "slo_counts",
        sa.Column("tenant_id", sa.String(40), primary_key=True),
        sa.Column("tier", sa.String(16), primary_key=True),
        sa.Column("metric", sa.String(16), primary_key=True),
        sa.Column("span_s", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("start_s", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("missed", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_slo_counts_span_s_start_s", "slo_counts", ["span_s", "start_s"])
    op.create_table(
        "slo_misses",
        sa.Column("request_id", sa.String(80), primary_key=True),
        sa.Column("metric", sa.String(16), primary_key=True),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(16), nullable=False),
        sa.Column("target_us", sa.BigInteger(), nullable=False),
        sa.Column("actual_us", sa.BigInteger()),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
    )
    op.create_index("ix_slo_misses_at_us", "slo_misses", ["at_us"])
    op.create_index("ix_slo_misses_tenant_id_at_us", "slo_misses", ["tenant_id", "at_us"])


def downgrade() -> None:
    for table in ("slo_misses", "slo_counts", "slos", "timelines"):
        op.drop_table(table)
