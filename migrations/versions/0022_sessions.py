"""Timelines name their request's session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

TABLE = "timelines"
INDEXES = {
    "ix_timelines_session": ["tenant_id", "session", "ended_us", "request_id"],
    "ix_timelines_sessions": ["tenant_id", "ended_us", "session"],
}
IN_SESSION = sa.text("session IS NOT NULL")


def upgrade() -> None:
    op.add_column(TABLE, sa.Column("session", sa.String(64)))
    for name, columns in INDEXES.items():
        op.create_index(name, TABLE, columns, sqlite_where=IN_SESSION, postgresql_where=IN_SESSION)


def downgrade() -> None:
    for name in INDEXES:
        op.drop_index(name, TABLE)
    op.drop_column(TABLE, "session")
