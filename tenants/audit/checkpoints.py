"""Checkpoints of the audit: signed once it is shown that the log extends the one before, and stored.

The first checkpoint notes the log's public key in the database. From then on only its holder signs, until the
key is changed: gateways that share a database share the key's file, or leave signing to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from tenants.audit import key_history, store
from tenants.audit.note import Checkpoint, PublicKey, SigningKey, open_checkpoint
from tenants.audit.tree import Frontier, consistency_proof, is_consistent
from tenants.errors import AuditDamaged, Invalid
from tenants.storage.tables import audit, audit_checkpoints, settings

PUBLIC_KEY_SETTING = "audit_public_key"


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A signed head; reading it verifies nothing."""

    size: int
    """Rows that it covers."""
    note: str
    at_us: int


def is_due(size: int, signed: int, age_s: float, *, rows: int, seconds: float) -> bool:
    """Whether there are new rows, and either many, or the newest checkpoint is old. Pure."""
    return size > signed and (size - signed >= rows or age_s >= seconds)


def oldest_unsigned_us(connection: Connection) -> int | None:
    """When the first row that no checkpoint covers was written; None: there is none."""
    last = newest(connection)
    query = select(audit.c.at_us).where(audit.c.seq >= (0 if last is None else last.size))
    return connection.execute(query.order_by(audit.c.seq).limit(1)).scalar()


def public_key(connection: Connection) -> PublicKey | None:
    """The log's key as the database has it; None: nothing was signed yet."""
    query = select(settings.c.value).where(settings.c.name == PUBLIC_KEY_SETTING)
    text = connection.execute(query).scalar()
    return None if text is None else PublicKey.parse(text)


def newest(connection: Connection) -> StoredCheckpoint | None:
    query = select(audit_checkpoints).order_by(audit_checkpoints.c.size.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return None if row is None else StoredCheckpoint(**row)


def register(connection: Connection, key: PublicKey) -> PublicKey:
    """The log's key: this one, where it has none yet."""
    if (known := public_key(connection)) is not None:
        return known
    try:
        with connection.begin_nested():
            connection.execute(insert(settings).values(name=PUBLIC_KEY_SETTING, value=str(key)))
    except IntegrityError:  # another process was first
        return public_key(connection) or key
    return key


def make(connection: Connection, key: SigningKey, now_us: int) -> StoredCheckpoint:
    """Signs the head, or returns its checkpoint. Raises `Invalid` for a key that is not this log's,
    `AuditDamaged` where the rows do not extend the newest checkpoint: a log must never sign two histories."""
    edge, last = store.head(connection), newest(connection)
    # After the head: where the key was changed below it, that is seen here.
    own = register(connection, key.public)
    if own != key.public:
        raise Invalid("audit key", f"this log is signed with another one: {own}")
    if last is not None:
        require_extension(connection, open_checkpoint(last.note, [own]), edge)
        if last.size == edge.size:
            return last
    made = StoredCheckpoint(edge.size, key.signed(Checkpoint(key.name, edge.size, edge.root).text), now_us)
    try:
        with connection.begin_nested():
            values = {"size": made.size, "note": made.note, "at_us": made.at_us}
            connection.execute(insert(audit_checkpoints).values(values))
    except IntegrityError:  # another gateway signed the same head
        return newest(connection) or made
    return made


def change_key(
    connection: Connection, old: SigningKey, new: SigningKey, actor: str, origin: str, now_us: int
) -> StoredCheckpoint:
    """Adds a row that names both keys, and a checkpoint up to it, signed by both. Raises as `make`."""
    row = row_of_change(old.public, new.public, key_history.ACTION, actor, origin, now_us)
    return hand_over(connection, old, new, row)


def row_of_change(
    old: PublicKey, new: PublicKey, action: str, actor: str, origin: str, now_us: int, **said: Any
) -> store.LogEntry:
    """The row that names both keys. `said`: what it says besides of the new state."""
    return store.LogEntry(
        at_us=now_us,
        actor=actor,
        origin=origin,
        action=action,
        target=key_history.TARGET,
        before={"public_key": str(old)},
        after={"public_key": str(new)} | said,
    )


def hand_over(
    connection: Connection, old: SigningKey | None, new: SigningKey, row: store.LogEntry
) -> StoredCheckpoint:
    """Adds the row, and a checkpoint up to it under the new key's name, signed by both. `old` None: it is
    lost. Raises as `make`."""
    store.head(connection, is_locked=True)
    if old is not None:
        make(connection, old, row.at_us)  # whatever the old key vouches for, it has looked at
    store.append(connection, row)
    edge = store.head(connection)
    text = Checkpoint(new.name, edge.size, edge.root).text
    signed = new.signed(text) if old is None else old.signed(text) + new.signature(text)
    made = StoredCheckpoint(edge.size, signed, row.at_us)
    values = {"size": made.size, "note": made.note, "at_us": made.at_us}
    connection.execute(insert(audit_checkpoints).values(values))
    is_key = settings.c.name == PUBLIC_KEY_SETTING
    connection.execute(update(settings).where(is_key).values(value=str(new.public)))
    return made


def require_extension(connection: Connection, old: Checkpoint, edge: Frontier) -> None:
    """Raises `AuditDamaged` unless the stored rows lead from an older head to this one."""
    try:
        proof = consistency_proof(old.size, edge.size, store.subtree(connection))
    except ValueError as error:
        raise AuditDamaged(f"the log does not extend its checkpoint of {old.size} rows: {error}") from None
    if not is_consistent(old.size, old.root, edge.size, edge.root, proof):
        raise AuditDamaged(f"rows before its checkpoint of {old.size} rows are not those that were signed")
