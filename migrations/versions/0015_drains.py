"""Replicas that are drained."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "drains",
        sa.Column("pool", sa.String(128), nullable=False),
        sa.Column("address", sa.String(512), nullable=False),
        sa.Column("replica", sa.String(64), nullable=False),
        sa.Column("since_us", sa.BigInteger, nullable=False),
        sa.Column("by", sa.String(128), nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("pool", "address", name="pk_drains"),
    )


def downgrade() -> None:
    op.drop_table("drains")
