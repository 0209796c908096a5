"""An index of credits; the size of idempotent answers, by tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

CREDITS = sa.text("kind = 'credit'")
SIZES = "ix_idempotent_answers_tenant_id_kept_bytes"


def upgrade() -> None:
    op.create_index(
        "ix_ledger_credits", "ledger", ["tenant_id", "at_us"], sqlite_where=CREDITS, postgresql_where=CREDITS
    )
    op.add_column(
        "idempotent_answers", sa.Column("tenant_id", sa.String(40), nullable=False, server_default=sa.text("''"))
    )
    op.add_column(
        "idempotent_answers", sa.Column("kept_bytes", sa.BigInteger, nullable=False, server_default="0")
    )
    op.execute(
        "UPDATE idempotent_answers SET kept_bytes = coalesce(length(pieces), 0), tenant_id ="
        " coalesce((SELECT api_keys.tenant_id FROM api_keys WHERE api_keys.id = idempotent_answers.key_id), '')"
    )
    op.create_index(SIZES, "idempotent_answers", ["tenant_id", "kept_bytes"])


def downgrade() -> None:
    op.drop_index(SIZES, "idempotent_answers")
    op.drop_column("idempotent_answers", "kept_bytes")
    op.drop_column("idempotent_answers", "tenant_id")
    op.drop_index("ix_ledger_credits", "ledger")
