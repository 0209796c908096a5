"""Tenants and keys have names for people, beside those that programs use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

TABLES = ("tenants", "api_keys")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("display_name", sa.String(100)))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "display_name")
