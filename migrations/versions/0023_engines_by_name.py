"""Replicas are known by name: drained ones, and engines that a placer runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

COMMON = ("since_us", "by", "reason")


def _more() -> list[sa.Column[object]]:
    return [
        sa.Column("since_us", sa.BigInteger, nullable=False),
        sa.Column("by", sa.String(128), nullable=False),
        sa.Column("reason", sa.String(200), nullable=False),
    ]


def upgrade() -> None:
    """An engine at a Unix socket that one gateway has is that gateway's own."""
    before = sa.table("drains", *map(sa.column, ("pool", "address", "replica", *COMMON)))
    gateways = sa.table("gateways", sa.column("id"), sa.column("engines", sa.JSON))
    connection = op.get_bind()
    drains = connection.execute(sa.select(before).order_by(before.c.since_us)).mappings().all()
    reached = connection.execute(sa.select(gateways)).mappings().all()
    named: dict[tuple[str, str], dict[str, object]] = {}
    for drain in drains:
        owners = [row["id"] for row in reached if drain["address"] in (row["engines"] or [])]
        is_own = drain["address"].startswith("ipc://") and len(owners) == 1
        replica = f"{drain['replica']}@{owners[0]}" if is_own else drain["replica"]
        kept = {name: drain[name] for name in COMMON}
        named.setdefault((drain["pool"], replica), {"pool": drain["pool"], "replica": replica, **kept})
    op.drop_table("drains")
    after = op.create_table(
        "drains",
        sa.Column("pool", sa.String(128), primary_key=True),
        sa.Column("replica", sa.String(160), primary_key=True),
        *_more(),
    )
    op.bulk_insert(after, list(named.values()))
    op.create_table(
        "placed_engines",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("address", sa.String(256), nullable=False),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("placed_by", sa.String(128), nullable=False),
        sa.Column("place", sa.String(128), nullable=False),
    )


def downgrade() -> None:
    """Without the addresses: what is drained has to be drained anew."""
    op.drop_table("placed_engines")
    op.drop_table("drains")
    op.create_table(
        "drains",
        sa.Column("pool", sa.String(128), primary_key=True),
        sa.Column("address", sa.String(512), primary_key=True),
        sa.Column("replica", sa.String(64), nullable=False),
        *_more(),
    )
