"""Service and fair shares by minute, and engines by minute."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

FLOW = ("served_tokens", "fair_tokens", "waiting_token_s", "arrivals", "before_line_us")
ENGINE = (
    "seen_us",
    "up_us",
    "idle_us",
    "steps",
    "step_us",
    "batch_sum",
    "computed_tokens",
    "emitted_tokens",
    "recomputed_tokens",
    "preemptions",
    "kv_permille_s",
)


def _counts(names: tuple[str, ...]) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def upgrade() -> None:
    op.create_table(
        "flow_minutes",
        sa.Column("minute_us", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("pool", sa.String(256), primary_key=True),
        sa.Column("tier", sa.String(16), primary_key=True),
        sa.Column("tenant_id", sa.String(40), primary_key=True),
        sa.Column("gateway_id", sa.String(80), primary_key=True),
        *_counts(FLOW),
    )
    op.create_table(
        "engine_minutes",
        sa.Column("minute_us", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("pool", sa.String(256), primary_key=True),
        sa.Column("replica", sa.String(256), primary_key=True),
        sa.Column("gateway_id", sa.String(80), primary_key=True),
        sa.Column("state", sa.String(16), nullable=False),
        *_counts(ENGINE),
    )


def downgrade() -> None:
    op.drop_table("engine_minutes")
    op.drop_table("flow_minutes")
