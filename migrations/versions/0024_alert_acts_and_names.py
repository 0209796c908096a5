"""Alerts are acknowledged and silenced; tenants and keys have names for people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

NAMED = ("tenants", "api_keys")


def upgrade() -> None:
    for table in NAMED:
        op.add_column(table, sa.Column("display_name", sa.String(100)))
    op.add_column("incidents", sa.Column("acknowledged_us", sa.BigInteger))
    op.add_column("incidents", sa.Column("acknowledged_by", sa.String(128)))
    op.create_table(
        "alert_silences",
        sa.Column("problem", sa.String(200), primary_key=True),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("by", sa.String(128), nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("alert_silences")
    op.drop_column("incidents", "acknowledged_by")
    op.drop_column("incidents", "acknowledged_us")
    for table in NAMED:
        op.drop_column(table, "display_name")
