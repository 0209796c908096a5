"""Usage rollups."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

AMOUNTS = (
    "ended_requests",
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanousd",
    "credit_nanousd",
    "gpu_ms",
    "waits",
    "wait_us",
    "first_tokens",
    "ttft_us",
)


def upgrade() -> None:
    op.create_table(
        "usage_sums",
        sa.Column("grain", sa.String(16), primary_key=True),
        sa.Column("start_us", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(40), primary_key=True),
        sa.Column("project_id", sa.String(40), primary_key=True),
        sa.Column("key_id", sa.String(40), primary_key=True),
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("tier", sa.String(16), primary_key=True),
        sa.Column("outcome", sa.String(64), primary_key=True),
        sa.Column("label_set", sa.String(32), primary_key=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in AMOUNTS),
    )
    op.create_index(
        "ix_usage_sums_tenant_id_grain_start_us", "usage_sums", ["tenant_id", "grain", "start_us"]
    )
    op.create_table(
        "usage_labels",
        sa.Column("label_set", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(64), nullable=False),
    )
    op.create_table(
        "usage_fold",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("folded_id", sa.BigInteger, nullable=False),
        sa.Column("folded_us", sa.BigInteger, nullable=False),
        sa.Column("hours_from_us", sa.BigInteger, nullable=False),
        sa.Column("waiting_id", sa.BigInteger, nullable=False),
        sa.Column("waiting_for", sa.JSON, nullable=False),
        sa.Column("rebuild_id", sa.String(32), nullable=False),
    )
    op.execute("INSERT INTO usage_fold VALUES (1, 0, 0, 0, 0, '[]', '')")


def downgrade() -> None:
    op.drop_table("usage_fold")
    op.drop_table("usage_labels")
    op.drop_table("usage_sums")
