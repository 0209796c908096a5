"""Last uses of keys, which change nothing that gateways serve by."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, case, select

from tenants.directory.queries import chunks
from tenants.storage.tables import key_uses
from tenants.storage.upserts import insert


def note(connection: Connection, last_us: Mapping[str, int]) -> None:
    """By key id; a later stored use stays."""
    new = insert(connection, key_uses)
    latest = case((new.excluded.last_us > key_uses.c.last_us, new.excluded.last_us), else_=key_uses.c.last_us)
    connection.execute(
        new.on_conflict_do_update(index_elements=["key_id"], set_={"last_us": latest}),
        # In one order, so that two gateways never wait for each other.
        [{"key_id": key_id, "last_us": last_us[key_id]} for key_id in sorted(last_us)],
    )


def last_uses(connection: Connection, key_ids: list[str]) -> dict[str, int]:
    """In microseconds since 1970, by key id; unused keys are left out."""
    return {
        row.key_id: row.last_us
        for chunk in chunks(key_ids)
        for row in connection.execute(select(key_uses).where(key_uses.c.key_id.in_(chunk)))
    }
