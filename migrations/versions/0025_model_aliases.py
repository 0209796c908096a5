"""Model aliases are stored, beside those of the settings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_aliases",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("means", sa.String(2000), nullable=False),
        sa.Column("max_price", sa.Float, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("model_aliases")
