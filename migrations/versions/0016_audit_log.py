"""The audit as a log: rows as leaves of a Merkle tree, its head, stored subtrees, checkpoints.

The rows that are there become the first leaves, in the order of their ids.
"""

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

ID = sa.String(40)
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
APPEND_ONLY = ("audit", "audit_tiles", "audit_checkpoints")
FIELDS = ("at_us", "actor", "origin", "action", "target", "tenant_id", "before", "after")
TILE = 256
CHUNK = 1_000


def upgrade() -> None:
    _create("audit_as_log", "seq", sa.Column("entry", sa.LargeBinary, nullable=False))
    op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("frontier", sa.LargeBinary, nullable=False),
        sa.Column("root", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "audit_tiles",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("root", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "audit_checkpoints",
        sa.Column("size", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("note", sa.String(1_000), nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
    )
    _copy_as_leaves()
    op.drop_table("audit")
    op.rename_table("audit_as_log", "audit")
    _index("seq")
    for table in APPEND_ONLY:
        _refuse_changes(table)


def downgrade() -> None:
    _create("audit_without_log", "id")
    names = ", ".join(f'"{name}"' for name in FIELDS)
    op.execute(f"INSERT INTO audit_without_log (id, {names}) SELECT seq + 1, {names} FROM audit")
    for table in ("audit_checkpoints", "audit_tiles", "audit_head", "audit"):
        op.drop_table(table)
    op.rename_table("audit_without_log", "audit")
    _index("id")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("CREATE SEQUENCE audit_id_seq OWNED BY audit.id")
        op.execute("SELECT setval('audit_id_seq', (SELECT coalesce(max(id), 0) + 1 FROM audit), false)")
        op.execute("ALTER TABLE audit ALTER COLUMN id SET DEFAULT nextval('audit_id_seq')")
    _refuse_changes("audit")


def _create(table: str, key: str, *more: sa.Column[Any]) -> None:
    op.create_table(
        table,
        sa.Column(key, SERIAL, nullable=False, autoincrement=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("origin", sa.String(128), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(128), nullable=False),
        sa.Column("tenant_id", ID),
        sa.Column("before", sa.JSON(none_as_null=True)),
        sa.Column("after", sa.JSON(none_as_null=True)),
        *more,
        sa.PrimaryKeyConstraint(key, name=f"pk_{table}"),
    )


def _index(key: str) -> None:
    op.create_index("ix_audit_at_us", "audit", ["at_us"])
    op.create_index(f"ix_audit_tenant_id_{key}", "audit", ["tenant_id", key])
    op.create_index(f"ix_audit_target_{key}", "audit", ["target", key])


def _columns() -> list[sa.ColumnClause[Any]]:
    plain: list[sa.ColumnClause[Any]] = [sa.column(name) for name in FIELDS[:-2]]
    return plain + [sa.column(name, sa.JSON(none_as_null=True)) for name in FIELDS[-2:]]


def _copy_as_leaves() -> None:
    connection = op.get_bind()
    old = sa.table("audit", sa.column("id"), *_columns())
    new = sa.table("audit_as_log", sa.column("seq"), *_columns(), sa.column("entry", sa.LargeBinary))
    tiles = sa.table("audit_tiles", sa.column("number"), sa.column("root", sa.LargeBinary))
    last, size = 0, 0
    peaks: list[bytes] = []
    tile: list[bytes] = []
    while True:
        query = sa.select(old).where(old.c.id > last).order_by(old.c.id).limit(CHUNK)
        rows = [dict(row) for row in connection.execute(query).mappings()]
        if not rows:
            break
        for row in rows:
            last = row.pop("id")
            row["seq"] = size
            row["entry"] = _entry(row)
            leaf = _hash(b"\0" + row["entry"])
            peaks = _appended(peaks, size, leaf)
            tile = _appended(tile, size % TILE, leaf)
            size += 1
            if size % TILE == 0:
                connection.execute(sa.insert(tiles).values(number=size // TILE - 1, root=tile.pop()))
        connection.execute(sa.insert(new), rows)
    root = peaks[-1] if peaks else _hash(b"")
    for peak in peaks[-2::-1]:
        root = _hash(b"\1" + peak + root)
    head = sa.table(
        "audit_head",
        *(sa.column(name) for name in ("id", "size")),
        *(sa.column(name, sa.LargeBinary) for name in ("frontier", "root")),
    )
    connection.execute(sa.insert(head).values(id=1, size=size, frontier=b"".join(peaks), root=root))


def _entry(row: dict[str, Any]) -> bytes:
    said = {name: row[name] for name in ("seq", *FIELDS) if row[name] is not None}
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode("ascii")


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _appended(peaks: list[bytes], size: int, leaf: bytes) -> list[bytes]:
    grown = [*peaks, leaf]
    while size & 1:
        right = grown.pop()
        grown.append(_hash(b"\1" + grown.pop() + right))
        size >>= 1
    return grown


def _refuse_changes(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{change} BEFORE {change.upper()} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION fairgate_append_only()"
    )
