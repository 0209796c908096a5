"""What token buckets of tier batch refill at while capacity is spare."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("limits", sa.Column("ceiling_milli", sa.BigInteger))


def downgrade() -> None:
    op.drop_column("limits", "ceiling_milli")
