"""Suspensions that end what runs; top-up rows that name further counters."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

INDEX = "ix_ledger_gateway_id_counter_set"
NAME_COUNTERS = sa.text("(kind = 'reserve' OR counter_set IS NOT NULL)")
RESERVES = sa.text("kind = 'reserve'")


def upgrade() -> None:
    for table in ("tenants", "projects", "api_keys"):
        op.add_column(
            table, sa.Column("ends_running", sa.Boolean, nullable=False, server_default=sa.false())
        )
    _index(NAME_COUNTERS)


def downgrade() -> None:
    _index(RESERVES)
    for table in ("api_keys", "projects", "tenants"):
        op.drop_column(table, "ends_running")


def _index(condition: sa.TextClause) -> None:
    op.drop_index(INDEX, "ledger")
    columns = ["gateway_id", "counter_set"]
    op.create_index(INDEX, "ledger", columns, sqlite_where=condition, postgresql_where=condition)
