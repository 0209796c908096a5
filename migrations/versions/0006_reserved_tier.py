"""Reservations for one tier."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("reserved_tier", sa.String(16)))


def downgrade() -> None:
    # A reservation for one tier is none for all: without the column it would be.
    op.execute("UPDATE tenants SET reserved_tokens_per_s = 0 WHERE reserved_tier IS NOT NULL")
    op.drop_column("tenants", "reserved_tier")
