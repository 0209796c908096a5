"""Indexes of the request list, of the audit's filters, and of the lists of keys, limits and misses; misses by
cause and day."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

SETTLES = "kind = 'settle'"
LEDGER = {
    "ix_ledger_settled": (["at_us", "id"], SETTLES),
    "ix_ledger_settled_key_id": (["key_id", "at_us", "id"], SETTLES),
    "ix_ledger_settled_outcome": (["outcome", "at_us", "id"], f"{SETTLES} AND outcome <> 'completed'"),
}
OTHERS = {
    "ix_slo_misses_cause_at_us": ("slo_misses", ["cause", "at_us"]),
    "ix_audit_tenant_id_id": ("audit", ["tenant_id", "id"]),
    "ix_audit_target_id": ("audit", ["target", "id"]),
    "ix_api_keys_created_us_id": ("api_keys", ["created_us", "id"]),
    "ix_limits_created_us_id": ("limits", ["created_us", "id"]),
}


def upgrade() -> None:
    for name, (columns, condition) in LEDGER.items():
        where = sa.text(condition)
        op.create_index(name, "ledger", columns, sqlite_where=where, postgresql_where=where)
    for name, (table, columns) in OTHERS.items():
        op.create_index(name, table, columns)
    op.create_table(
        "slo_causes",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("metric", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(16), nullable=False),
        sa.Column("start_s", sa.BigInteger, nullable=False),
        sa.Column("missed", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id", "tier", "metric", "cause", "start_s", name=op.f("pk_slo_causes")
        ),
    )
    op.create_index("ix_slo_causes_start_s", "slo_causes", ["start_s"])
    op.execute(
        "INSERT INTO slo_causes (tenant_id, tier, metric, cause, start_s, missed)"
        " SELECT tenant_id, tier, metric, cause, at_us / 86400000000 * 86400, count(*) FROM slo_misses"
        " GROUP BY tenant_id, tier, metric, cause, at_us / 86400000000 * 86400"
    )


def downgrade() -> None:
    op.drop_table("slo_causes")
    for name, (table, _) in OTHERS.items():
        op.drop_index(name, table)
    for name in LEDGER:
        op.drop_index(name, "ledger")
