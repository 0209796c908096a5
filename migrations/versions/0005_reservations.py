"""Reserved service of a tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "tenants", sa.Column("reserved_tokens_per_s", sa.Float(), server_default="0", nullable=False)
    )


def downgrade() -> None:
    op.drop_column("tenants", "reserved_tokens_per_s")
