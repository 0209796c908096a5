"""Webhooks, incidents of alerts, and the outbox."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

ID = sa.String(40)


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("subjects", sa.JSON, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("by", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_tenant_id", "webhooks", ["tenant_id"])
    op.create_table(
        "incidents",
        sa.Column("id", ID, nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("summary", sa.String(500), nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("page", sa.String(300), nullable=False),
        sa.Column("fired_us", sa.BigInteger, nullable=False),
        sa.Column("quiet_us", sa.BigInteger),
        sa.Column("resolved_us", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_incidents"),
    )
    op.create_index("ix_incidents_resolved_us", "incidents", ["resolved_us"])
    op.create_index("ix_incidents_fired_us_id", "incidents", ["fired_us", "id"])
    firing = sa.text("resolved_us IS NULL")
    op.create_index(
        "uq_incidents_key_firing", "incidents", ["key"], unique=True, sqlite_where=firing, postgresql_where=firing
    )
    op.create_table(
        "outbox_head",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("evaluator", sa.String(80), nullable=False),
        sa.Column("leased_until_us", sa.BigInteger, nullable=False),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox_head"),
    )
    # Checkpoints from before are no news.
    op.execute(
        "INSERT INTO outbox_head (id, seq, evaluator, leased_until_us, checkpoint)"
        " SELECT 1, 0, '', 0, coalesce(max(size), -1) FROM audit_checkpoints"
    )
    op.create_table(
        "outbox",
        sa.Column("seq", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("event_id", ID, nullable=False),
        sa.Column("webhook_id", ID, nullable=False),
        sa.Column("tenant_id", ID, nullable=False),
        sa.Column("subject", sa.String(32), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("made_us", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_us", sa.BigInteger, nullable=False),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("sender", sa.String(80), nullable=False),
        sa.Column("claimed_until_us", sa.BigInteger, nullable=False),
        sa.Column("error", sa.String(300), nullable=False),
        sa.Column("ended_us", sa.BigInteger),
        sa.PrimaryKeyConstraint("seq", name="pk_outbox"),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_outbox_webhook_id_webhooks"),
    )
    op.create_index("ix_outbox_state_next_us", "outbox", ["state", "next_us"])
    op.create_index(
        "ix_outbox_webhook_id_tenant_id_state_seq", "outbox", ["webhook_id", "tenant_id", "state", "seq"]
    )
    op.create_index("ix_outbox_webhook_id_seq", "outbox", ["webhook_id", "seq"])


def downgrade() -> None:
    for table in ("outbox", "outbox_head", "incidents", "webhooks"):
        op.drop_table(table)
