"""Limits on the platform and on end users, by model and by size of request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = ["kind", "subject_id", "meter", "shape", "tier"]
MORE_COLUMNS = [*COLUMNS, "model", "above_tokens"]
OVERRIDES = sa.table(
    "limit_overrides",
    *(sa.column(name) for name in ("limit_id", "amount", "rate_milli", "until_us", "reason", "created_us")),
)
EVENTS = sa.table("limit_events", sa.column("limit_id"))
LIMITS = sa.table(
    "limits", *(sa.column(name) for name in ("id", "tenant_id", "kind", "model", "above_tokens"))
)


def upgrade() -> None:
    with overrides_apart(), op.batch_alter_table("limits") as limits:
        limits.alter_column("tenant_id", existing_type=sa.String(40), nullable=True)
        limits.add_column(sa.Column("model", sa.String(256), nullable=False, server_default=sa.text("''")))
        limits.add_column(sa.Column("above_tokens", sa.BigInteger, nullable=False, server_default="0"))
        limits.add_column(sa.Column("end_user", sa.String(64), nullable=False, server_default=sa.text("''")))
        limits.drop_constraint(name_of(COLUMNS), type_="unique")
        limits.create_unique_constraint(name_of(MORE_COLUMNS), MORE_COLUMNS)


def downgrade() -> None:
    # What the earlier schema cannot hold would bind more there than it was set for.
    gone = sa.select(LIMITS.c.id).where(
        sa.or_(
            LIMITS.c.tenant_id.is_(None),
            LIMITS.c.kind == "end_user",
            LIMITS.c.model != "",
            LIMITS.c.above_tokens != 0,
        )
    )
    for table in (OVERRIDES, EVENTS):
        op.execute(sa.delete(table).where(table.c.limit_id.in_(gone)))
    op.execute(sa.delete(LIMITS).where(LIMITS.c.id.in_(gone)))
    with overrides_apart(), op.batch_alter_table("limits") as limits:
        limits.drop_constraint(name_of(MORE_COLUMNS), type_="unique")
        limits.create_unique_constraint(name_of(COLUMNS), COLUMNS)
        for column in ("end_user", "above_tokens", "model"):
            limits.drop_column(column)
        limits.alter_column("tenant_id", existing_type=sa.String(40), nullable=False)


def name_of(columns: list[str]) -> str:
    """The unique constraint's name, by the naming convention of the tables."""
    return f"uq_limits_{'_'.join(columns)}"


@contextmanager
def overrides_apart() -> Iterator[None]:
    """SQLite makes the table anew, which its foreign keys forbid while overrides refer to it."""
    kept = [dict(row) for row in op.get_bind().execute(sa.select(OVERRIDES)).mappings()]
    op.execute(sa.delete(OVERRIDES))
    yield
    if kept:
        op.bulk_insert(OVERRIDES, kept)
