"""Numbered ledger rows for top-ups, and which gateways live."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _unprotect()
    with op.batch_alter_table("ledger") as ledger:
        ledger.add_column(sa.Column("number", sa.Integer(), server_default="0", nullable=False))
        ledger.drop_constraint("uq_ledger_request_id_kind", type_="unique")
        ledger.create_unique_constraint("uq_ledger_request_id_kind_number", ["request_id", "kind", "number"])
    _protect()
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(length=80), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat_us", sa.BigInteger(), nullable=False),
        sa.Column("address", sa.String(length=256), nullable=False),
        sa.Column("engines", sa.JSON(), nullable=False),
        sa.Column("adopter", sa.String(length=80), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
    )


def downgrade() -> None:
    """What was topped up is forgotten: the older release reserved everything at once."""
    op.drop_table("gateways")
    _unprotect()
    op.execute("DELETE FROM ledger WHERE kind = 'top_up'")
    with op.batch_alter_table("ledger") as ledger:
        ledger.drop_constraint("uq_ledger_request_id_kind_number", type_="unique")
        ledger.drop_column("number")
        ledger.create_unique_constraint("uq_ledger_request_id_kind", ["request_id", "kind"])
    _protect()


def _unprotect() -> None:
    """Takes away the triggers that refuse changes of `ledger` (SQLite copies the table, and drops them with
    the old one)."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(f"DROP TRIGGER ledger_no_{change}")
    else:
        op.execute("DROP TRIGGER ledger_append_only ON ledger")


def _protect() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER ledger_no_{change} BEFORE {change.upper()} ON ledger "
                "BEGIN SELECT RAISE(ABORT, 'ledger is append-only'); END"
            )
    else:
        op.execute(
            "CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger "
            "FOR EACH STATEMENT EXECUTE FUNCTION fairgate_append_only()"
        )
