"""Moves of control loops, each with its reason."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "control_moves",
        sa.Column("move_id", sa.String(40), nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("gateway_id", sa.String(40), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("knob", sa.String(32), nullable=False),
        sa.Column("before", sa.Float, nullable=False),
        sa.Column("after", sa.Float, nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
        sa.Column("is_made", sa.Boolean, nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("knobs", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("move_id", name="pk_control_moves"),
    )
    op.create_index("ix_control_moves_at_us_move_id", "control_moves", ["at_us", "move_id"])
    for name in ("model", "knob"):
        columns = [name, "at_us", "move_id"]
        op.create_index(f"ix_control_moves_{name}_at_us_move_id", "control_moves", columns)


def downgrade() -> None:
    op.drop_table("control_moves")
