"""An entry of the audit is bytes on SQLite, too, which would keep text.

Text that lies there becomes the bytes that it is stored as: the check of the log says whether they are those
that were signed.
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

CHECK = "typeof(entry) = 'blob'"


def upgrade() -> None:
    _make_anew(is_checked=True)


def downgrade() -> None:
    _make_anew(is_checked=False)


def _make_anew(*, is_checked: bool) -> None:
    """SQLite adds and removes no constraint of a table that is there. A copy has no triggers."""
    if op.get_bind().dialect.name != "sqlite":
        return
    op.execute("DROP TRIGGER IF EXISTS audit_no_update")
    op.execute(f"UPDATE audit SET entry = CAST(entry AS BLOB) WHERE NOT {CHECK}")
    with op.batch_alter_table("audit", recreate="always") as batch:
        if is_checked:
            batch.create_check_constraint("entry_is_blob", CHECK)
        else:
            batch.drop_constraint(op.f("ck_audit_entry_is_blob"), type_="check")
    for change in ("update", "delete"):
        op.execute(
            f"CREATE TRIGGER audit_no_{change} BEFORE {change.upper()} ON audit "
            "BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END"
        )
