"""Instances and served revisions of gateways; progress of requests; what limits count of a cost."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, characters in (("instance_id", 32), ("runs_in", 128)):
        column = sa.Column(name, sa.String(characters), nullable=False, server_default=sa.text("''"))
        op.add_column("gateways", column)
    op.add_column("gateways", sa.Column("served_revision", sa.BigInteger))
    op.add_column("ledger", sa.Column("counted_cost", sa.BigInteger))
    op.create_table(
        "progress",
        sa.Column("gateway_id", sa.String(80), primary_key=True),
        sa.Column("written_us", sa.BigInteger, nullable=False),
        sa.Column("counts", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("progress")
    op.drop_column("ledger", "counted_cost")
    for name in ("served_revision", "runs_in", "instance_id"):
        op.drop_column("gateways", name)
