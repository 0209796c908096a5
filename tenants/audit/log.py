"""What auditors and gateways ask the audit for: entries, checkpoints, proofs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, select

from tenants.audit import checkpoints, store
from tenants.audit.checkpoints import StoredCheckpoint
from tenants.audit.entry import FIELDS
from tenants.audit.key_history import ACTION, RESTORE, TARGET, SignerChange, change_from
from tenants.audit.note import InclusionProof, PublicKey, SigningKey, open_checkpoint
from tenants.audit.store import stored_head
from tenants.audit.tree import consistency_proof, inclusion_proof
from tenants.audit.verify import AuditFinding, Damage, Head, LogRow, LogVerifier, Verdict
from tenants.errors import AuditDamaged, Invalid, NotFound
from tenants.storage.database import Database
from tenants.storage.tables import audit, audit_checkpoints, audit_tiles

MAX_ENTRIES = 1_000
"""Rows in one answer."""
MAX_CHECKPOINTS = 1_000
PAGE = 1_000


@dataclass(frozen=True, slots=True)
class LogState:
    size: int
    root: bytes
    newest: StoredCheckpoint | None
    public_key: PublicKey | None

    @property
    def signed(self) -> int:
        """Rows that the newest checkpoint covers."""
        return 0 if self.newest is None else self.newest.size


class AuditLog:
    """The log of one database. Methods raise `DatabaseUnavailable`."""

    def __init__(
        self,
        database: Database,
        key: SigningKey | None = None,
        clock: Callable[[], float] = time.time,
        read_key: Callable[[], SigningKey | None] = lambda: None,
    ) -> None:
        """`key`: what checkpoints are signed with; None: others sign. `clock` gives seconds since 1970.
        `read_key`: reads the key again once the log is signed with another one."""
        self._database = database
        self._key = key
        self._clock = clock
        self._read_key = read_key

    @property
    def can_sign(self) -> bool:
        return self._key is not None

    async def state(self) -> LogState:
        def look(connection: Connection) -> LogState:
            edge = store.head(connection)
            newest, key = checkpoints.newest(connection), checkpoints.public_key(connection)
            return LogState(edge.size, edge.root, newest, key)

        return await self._database.read(look)

    async def public_key(self) -> PublicKey | None:
        return await self._database.read(checkpoints.public_key)

    async def oldest_unsigned_us(self) -> int | None:
        return await self._database.read(checkpoints.oldest_unsigned_us)

    async def register(self, key: PublicKey) -> PublicKey:
        return await self._database.write(lambda connection: checkpoints.register(connection, key))

    async def make_checkpoint(self) -> StoredCheckpoint:
        """Signs the head. Raises `Invalid`, `AuditDamaged`."""
        key, now_us = self._own_key(await self.public_key()), round(self._clock() * 1e6)
        return await self._database.write(lambda connection: checkpoints.make(connection, key, now_us))

    async def change_key(self, new: SigningKey, actor: str, origin: str) -> StoredCheckpoint:
        """Lets `new` sign; returns the checkpoint that both keys sign. Raises `Invalid`, `AuditDamaged`."""
        old, now_us = self._own_key(await self.public_key()), round(self._clock() * 1e6)
        if new.name != old.name or new.public == old.public:
            raise Invalid("audit key", "the new one needs the log's name, and must be another one")
        made = await self._database.write(
            lambda connection: checkpoints.change_key(connection, old, new, actor, origin, now_us)
        )
        self._key = new
        return made

    def _own_key(self, known: PublicKey | None) -> SigningKey:
        """The key here, read again where the log's was changed. Raises `Invalid` where there is none."""
        if self._key is None:
            raise Invalid("audit key", "there is none here: the gateways that have it sign the log")
        if known not in (None, self._key.public):
            again = self._read_key()
            if again is not None and again.public == known:
                self._key = again
        return self._key

    async def rows(self, first: int, most: int = MAX_ENTRIES) -> list[LogRow]:
        return await self._database.read(lambda one: list(_rows(one, first, most)))

    async def checkpoints(self, after: int = -1, most: int = MAX_CHECKPOINTS) -> list[StoredCheckpoint]:
        """Checkpoints of more than `after` rows, the smallest first."""

        def look(connection: Connection) -> list[StoredCheckpoint]:
            column = audit_checkpoints.c.size
            query = select(audit_checkpoints).where(column > after).order_by(column).limit(most)
            return [StoredCheckpoint(**row) for row in connection.execute(query).mappings()]

        return await self._database.read(look)

    async def damage(self) -> AuditFinding | None:
        """The first damage of the whole log."""
        return (await self.own_verdict()).finding

    async def own_verdict(self) -> Verdict:
        """Of the whole log, by the key here, else the one that the database names."""
        known = await self.public_key() if self._key is None else self._key.public
        return await self.verify([] if known is None else [known])

    async def verify(self, keys: Sequence[PublicKey], kept: Sequence[str] = ()) -> Verdict:
        """Checks the whole log. Raises `Invalid` for a kept checkpoint of another key."""
        return await self._database.read(lambda one: verify_stored(one, keys, kept))

    async def consistency(self, old: int, new: int) -> list[bytes]:
        """The proof that the log of `new` rows extends that of `old`. Raises `Invalid`."""

        def prove(connection: Connection) -> list[bytes]:
            size = store.head(connection).size
            if not 0 <= old <= new <= size:
                raise Invalid(
                    "old" if old > new else "new", f"must be 0 <= old <= new <= {size}, the log's size"
                )
            return _made(lambda: consistency_proof(old, new, store.subtree(connection)))

        return await self._database.read(prove)

    async def prove(self, seq: int) -> InclusionProof:
        """The proof, by the newest checkpoint. Raises `NotFound`, `Invalid` for a row not signed yet."""

        def look(connection: Connection) -> InclusionProof:
            query = select(audit.c.entry).where(audit.c.seq == seq)
            entry = connection.execute(query).scalar() if seq >= 0 else None
            if entry is None:
                raise NotFound("audit row", str(seq))
            newest, key = checkpoints.newest(connection), checkpoints.public_key(connection)
            if newest is None or key is None or newest.size <= seq:
                raise Invalid("seq", f"row {seq} is not signed yet: `fairgate audit checkpoint` signs it")
            size = open_checkpoint(newest.note, [key]).size
            path = _made(lambda: inclusion_proof(seq, size, store.subtree(connection)))
            return InclusionProof(seq, tuple(path), newest.note, entry)

        return await self._database.read(look)


def _made(proof: Callable[[], list[bytes]]) -> list[bytes]:
    try:
        return proof()
    except ValueError as error:
        raise AuditDamaged(f"the proof cannot be made: {error}; `fairgate audit verify` says more") from None


def verify_stored(connection: Connection, keys: Sequence[PublicKey], kept: Sequence[str] = ()) -> Verdict:
    """`kept`: checkpoints from elsewhere. Raises `Invalid` for one that none of the log's `keys` signed."""
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
        for row in _rows(connection, -(2**62)):
            verifier.add(row)
    except ValueError as error:  # SQLite keeps any text in a column of JSON
        verdict = verifier.verdict()
        first, last = verdict.rows, max(verdict.rows, min(verdict.rows + PAGE, head.size) - 1)
        unread = AuditFinding(Damage.EDITED, first, last, f"a column cannot be read: {error}")
        return replace(verdict, finding=unread)
    return verifier.verdict(Head(head.size, head.root, head.frontier))


def key_changes(connection: Connection) -> list[SignerChange]:
    """Changes of the key as rows claim; their checkpoints prove them."""
    query = select(audit.c.entry).where(audit.c.target == TARGET, audit.c.action.in_((ACTION, RESTORE)))
    entries = connection.execute(query.order_by(audit.c.seq)).scalars()
    return [change for entry in entries if (change := change_from(entry)) is not None]


def _rows(connection: Connection, first: int, most: int | None = None) -> Iterator[LogRow]:
    """From `first` on, in order, at most `most`, read a page at a time."""
    left = most
    while left is None or left > 0:
        page = PAGE if left is None else min(PAGE, left)
        query = select(audit).where(audit.c.seq >= first).order_by(audit.c.seq).limit(page)
        stored = connection.execute(query).mappings().all()
        for row in stored:
            yield LogRow(row["seq"], row["entry"], {name: row[name] for name in FIELDS})
        if len(stored) < page:
            return
        first = stored[-1]["seq"] + 1
        left = None if left is None else left - len(stored)
