"""A gateway's row names its release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("gateways", sa.Column("release", sa.String(32), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    op.drop_column("gateways", "release")
