"""The ids of the request that a row of the audit was made by, and the erasable record of persons in it."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("audit", sa.Column("request_id", sa.String(40)))
    op.add_column("audit", sa.Column("trace_id", sa.String(32)))
    op.create_table(
        "audit_persons",
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("person_id", sa.String(40), nullable=False),
        sa.Column("salt", sa.LargeBinary(16), nullable=False),
        sa.Column("text", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_audit_persons"),
        sa.UniqueConstraint("person_id", "text", name="uq_audit_persons_person_id_text"),
    )
    op.create_index("ix_audit_persons_text", "audit_persons", ["text"])


def downgrade() -> None:
    op.drop_table("audit_persons")
    op.drop_column("audit", "trace_id")
    op.drop_column("audit", "request_id")
