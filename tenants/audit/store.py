"""The audit's rows, and the tree over them, in the database.

A row, the tree's new head and, each 256 rows, the root over them are written in the act's transaction. The
head row is locked while it moves, which makes `seq` dense and in order; of row locks it is the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from tenants.audit.entry import encode
from tenants.audit.tree import TILE, Frontier, Subtree, leaf_hash, subtree_of_leaves
from tenants.errors import AuditDamaged
from tenants.storage.tables import audit, audit_head, audit_tiles

TILE_PEAKS = TILE.bit_length() - 1
"""Complete subtrees of a tile that lacks its last row."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    at_us: int
    actor: str
    origin: str
    action: str
    target: str
    tenant_id: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    request_id: str | None = None
    trace_id: str | None = None


def append(connection: Connection, row: LogEntry) -> int:
    """Adds one row and moves the head; returns the row's `seq`."""
    edge = head(connection, is_locked=True)
    fields = asdict(row)
    entry = encode(edge.size, fields)
    leaf = leaf_hash(entry)
    grown = edge.append(leaf)
    connection.execute(insert(audit).values(seq=edge.size, entry=entry, **fields))
    if grown.size % TILE == 0:
        tile = Frontier(TILE - 1, edge.peaks[-TILE_PEAKS:]).append(leaf)
        connection.execute(insert(audit_tiles).values(number=edge.size // TILE, root=tile.root))
    connection.execute(update(audit_head).values(size=grown.size, frontier=grown.packed, root=grown.root))
    return edge.size


@dataclass(frozen=True, slots=True)
class StoredHead:
    """The head as stored, unchecked."""

    size: int
    frontier: bytes
    root: bytes


def stored_head(connection: Connection) -> StoredHead:
    """The head's row; where it is missing, a head that no log has."""
    columns = (audit_head.c.size, audit_head.c.frontier, audit_head.c.root)
    row = connection.execute(select(*columns)).first()
    return StoredHead(0, b"", b"") if row is None else StoredHead(*row)


def head(connection: Connection, *, is_locked: bool = False) -> Frontier:
    """The tree over all rows. `is_locked`: it stays so until the transaction ends. Raises `AuditDamaged`."""
    query = select(audit_head.c.size, audit_head.c.frontier)
    size, packed = connection.execute(query.with_for_update() if is_locked else query).one()
    try:
        return Frontier.unpacked(size, packed)
    except ValueError as error:
        raise AuditDamaged(f"the head of the log is no tree: {error}") from None


def subtree(connection: Connection) -> Subtree:
    """Complete subtrees of the stored log: from tiles where they have 256 rows or more, else from rows."""

    def found(start: int, size: int) -> bytes:
        if size >= TILE:
            first, count = start // TILE, size // TILE
            column, number = audit_tiles.c.root, audit_tiles.c.number
            query = select(column).where(number >= first, number < first + count).order_by(number)
            return subtree_of_leaves(list(connection.execute(query).scalars()), first)(first, count)
        query = select(audit.c.entry).where(audit.c.seq >= start, audit.c.seq < start + size)
        entries = connection.execute(query.order_by(audit.c.seq)).scalars()
        return subtree_of_leaves([leaf_hash(entry) for entry in entries], start)(start, size)

    return found
