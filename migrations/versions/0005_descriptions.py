"""Descriptions of servers and terms, which timelines refer to: what a replay of recorded traffic needs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0003"
branch_labels = None
depends_on = None

DIGEST = sa.String(16)


def upgrade() -> None:
    op.create_table(
        "descriptions",
        sa.Column("id", DIGEST, primary_key=True),
        sa.Column("used_us", sa.BigInteger, nullable=False, index=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.add_column("timelines", sa.Column("server", DIGEST))
    op.add_column("timelines", sa.Column("terms", DIGEST))


def downgrade() -> None:
    for name in ("terms", "server"):
        op.drop_column("timelines", name)
    op.drop_table("descriptions")
