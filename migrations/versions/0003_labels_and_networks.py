"""Labels of tenants and of ledger rows; networks that keys may be used from."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = (("tenants", "labels"), ("api_keys", "allow_from"), ("ledger", "labels"))


def upgrade() -> None:
    for table, name in COLUMNS:
        op.add_column(table, sa.Column(name, sa.JSON(none_as_null=True)))


def downgrade() -> None:
    for table, name in reversed(COLUMNS):
        op.drop_column(table, name)
