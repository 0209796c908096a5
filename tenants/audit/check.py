"""Checks the audit of a database: all of it, on one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sqlalchemy import Connection, select

from tenants.audit.entry import FIELDS
from tenants.audit.key_history import ACTION, TARGET, SignerChange, change_from
from tenants.audit.note import PublicKey
from tenants.audit.store import stored_head
from tenants.audit.verify import AuditFinding, Damage, Head, LogRow, LogVerifier, Verdict
from tenants.storage.tables import audit, audit_checkpoints, audit_tiles

PAGE = 1_000


def verify_stored(connection: Connection, keys: Sequence[PublicKey], kept: Sequence[str] = ()) -> Verdict:
    """`keys`: those that sign the log; `kept`: checkpoints from elsewhere. Raises `Invalid` for a kept one
    that none of the keys signed."""
    head = stored_head(connection)
    notes = connection.execute(select(audit_checkpoints.c.size, audit_checkpoints.c.note))
    tiles = select(audit_tiles.c.number, audit_tiles.c.root).order_by(audit_tiles.c.number)
    verifier = LogVerifier(
        keys,
        [(size, note) for size, note in notes],
        kept=kept,
        tiles=[(number, root) for number, root in connection.execute(tiles)],
        changes=key_changes(connection),
    )
    try:
        for row in rows(connection, -(2**62)):
            verifier.add(row)
    except ValueError as error:  # SQLite keeps any text in a column of JSON
        verdict = verifier.verdict()
        first, last = verdict.rows, max(verdict.rows, min(verdict.rows + PAGE, head.size) - 1)
        unread = AuditFinding(Damage.EDITED, first, last, f"a column cannot be read: {error}")
        return replace(verdict, finding=unread)
    return verifier.verdict(Head(head.size, head.root, head.frontier))


def key_changes(connection: Connection) -> list[SignerChange]:
    """Changes of the key as rows claim; their checkpoints prove them."""
    query = select(audit.c.entry).where(audit.c.target == TARGET, audit.c.action == ACTION)
    entries = connection.execute(query.order_by(audit.c.seq)).scalars()
    return [found for entry in entries if (found := change_from(entry)) is not None]


def rows(connection: Connection, first: int, most: int | None = None) -> Iterator[LogRow]:
    """From `first` on, in order, at most `most`, read a page at a time."""
    left = most
    while left is None or left > 0:
        page = PAGE if left is None else min(PAGE, left)
        query = select(audit).where(audit.c.seq >= first).order_by(audit.c.seq).limit(page)
        found = connection.execute(query).mappings().all()
        for row in found:
            yield LogRow(row["seq"], row["entry"], {name: row[name] for name in FIELDS})
        if len(found) < page:
            return
        first = found[-1]["seq"] + 1
        left = None if left is None else left - len(found)
