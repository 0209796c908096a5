"""What requests are charged to, once for all that are charged to the same; indexes of what is looked for only."""

import sqlalchemy as sa
from alembic import op

from tenants.ledger.counter_sets import set_id

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

AT_ONCE = 500
"""Requests that are moved in one go."""
RESERVES = sa.text("kind = 'reserve'")
CHARGES = sa.text("kind IN ('settle', 'credit', 'adjust')")


def upgrade() -> None:
    op.create_table(
        "counter_sets",
        sa.Column("gateway_id", sa.String(80), nullable=False),
        sa.Column("set_id", sa.String(16), nullable=False),
        sa.Column("counter", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id", "set_id", "counter", name=op.f("pk_counter_sets")),
    )
    op.create_index("ix_counter_sets_counter", "counter_sets", ["counter"])
    # Adding a column fires no trigger; filling it does.
    op.add_column("ledger", sa.Column("counter_set", sa.String(16), nullable=True))
    _unprotect("ledger")
    _name_sets()
    _protect("ledger")
    _protect("counter_sets")
    op.drop_table("ledger_charges")
    op.drop_index("ix_ledger_tenant_id_at_us", "ledger")
    op.drop_index("ix_ledger_gateway_id_kind_at_us", "ledger")
    for name, columns, where in (
        ("ix_ledger_tenant_id_at_us", ["tenant_id", "at_us"], CHARGES),
        ("ix_ledger_gateway_id_counter_set", ["gateway_id", "counter_set"], RESERVES),
    ):
        op.create_index(name, "ledger", columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.create_table(
        "ledger_charges",
        sa.Column("counter", sa.String(256), nullable=False),
        sa.Column("request_id", sa.String(80), nullable=False),
        sa.PrimaryKeyConstraint("counter", "request_id", name=op.f("pk_ledger_charges")),
    )
    op.execute(
        "INSERT INTO ledger_charges (counter, request_id) SELECT counter_sets.counter, ledger.request_id"
        " FROM ledger JOIN counter_sets ON counter_sets.gateway_id = ledger.gateway_id"
        " AND counter_sets.set_id = ledger.counter_set"
    )
    op.create_index("ix_ledger_charges_request_id", "ledger_charges", ["request_id"])
    _protect("ledger_charges")
    for name in ("ix_ledger_tenant_id_at_us", "ix_ledger_gateway_id_counter_set"):
        op.drop_index(name, "ledger")
    op.create_index("ix_ledger_tenant_id_at_us", "ledger", ["tenant_id", "at_us"])
    op.create_index("ix_ledger_gateway_id_kind_at_us", "ledger", ["gateway_id", "kind", "at_us"])
    op.drop_column("ledger", "counter_set")
    op.drop_table("counter_sets")


def _name_sets() -> None:
    """Gives every reserve row the name of its set, and writes each set down once."""
    connection = op.get_bind()
    ledger = sa.table("ledger", *map(sa.column, ("id", "request_id", "gateway_id", "kind", "counter_set")))
    charges = sa.table("ledger_charges", *map(sa.column, ("counter", "request_id")))
    sets = sa.table("counter_sets", *map(sa.column, ("gateway_id", "set_id", "counter")))
    fill = ledger.update().where(ledger.c.id == sa.bindparam("row_id"))
    fill = fill.values(counter_set=sa.bindparam("name"))
    written: set[tuple[str, str]] = set()
    last = 0
    while True:
        some = sa.select(ledger.c.id, ledger.c.request_id, ledger.c.gateway_id).where(ledger.c.id > last, RESERVES)
        rows = connection.execute(some.order_by(ledger.c.id).limit(AT_ONCE)).all()
        if not rows:
            return
        last = rows[-1][0]
        counters: dict[str, list[str]] = {}
        of_these = sa.select(charges).where(charges.c.request_id.in_([row[1] for row in rows]))
        for counter, request_id in connection.execute(of_these):
            counters.setdefault(request_id, []).append(counter)
        named: list[dict[str, object]] = []
        for row_id, request_id, gateway_id in rows:
            name = set_id(tuple(sorted(counters.get(request_id, ()))))
            if name is None:
                continue
            if (gateway_id, name) not in written:
                written.add((gateway_id, name))
                of_set = {"gateway_id": gateway_id, "set_id": name}
                members = [of_set | {"counter": each} for each in counters[request_id]]
                connection.execute(sets.insert(), members)
            named.append({"row_id": row_id, "name": name})
        if named:
            connection.execute(fill, named)


def _unprotect(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(f"DROP TRIGGER {table}_no_{change}")
    else:
        op.execute(f"DROP TRIGGER {table}_append_only ON {table}")


def _protect(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{change} BEFORE {change.upper()} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
    else:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION fairgate_append_only()"
        )
