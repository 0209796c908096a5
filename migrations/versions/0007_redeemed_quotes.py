"""Which request redeemed a quote."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "redeemed_quotes",
        sa.Column("offer_id", sa.String(40), primary_key=True),
        sa.Column("request_id", sa.String(80), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_redeemed_quotes_expires_us", "redeemed_quotes", ["expires_us"])


def downgrade() -> None:
    op.drop_table("redeemed_quotes")
