"""The transaction of every admin act: the change, the directory's revision (running servers notice within a
second) and the audit row. Several acts can share one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import Connection, update
from sqlalchemy.exc import IntegrityError

from tenants.admin import audit
from tenants.admin.audit import Actor
from tenants.audit.accesses import Access, MergedAccess
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey
from tenants.directory import names
from tenants.directory.keys import check_pepper
from tenants.errors import AlreadyExists, PersonChanged, PreconditionFailed
from tenants.people import rows
from tenants.pricing.pricing import DEFAULT_MULTIPLIERS
from tenants.slo.slo import DEFAULT_LEAST_MISSES
from tenants.storage import flushes, tables
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tenants.types import Tier

IfMatch = frozenset[str] | None
"""Tags of which the object must have one; None: no condition."""
ANY = frozenset({"*"})
"""The object must exist."""
TAG_CHARACTERS = 16
T = TypeVar("T")


def etag_of(stored: Mapping[str, Any]) -> str:
    """A digest of an object as stored, without what is shown beside it (names, use, status by the clock)."""
    return hashlib.sha256(msgspec.json.encode(stored, order="sorted")).hexdigest()[:TAG_CHARACTERS]


def require_match(if_match: IfMatch, stored: Mapping[str, Any] | None) -> None:
    """Raises `PreconditionFailed` unless the object exists (None: it does not) and has one of the tags."""
    if if_match is None:
        return
    if stored is None or (if_match != ANY and etag_of(stored) not in if_match):
        raise PreconditionFailed(stored)


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """An act's result, and its audit entry."""

    result: T
    target: str
    tenant_id: str | None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    connection: Connection
    now_us: int
    revision: int


@dataclass(frozen=True)
class Transactions:
    """The database of admin acts, with what they share."""

    database: Database
    pepper: bytes
    clock: Callable[[], float] = time.time
    """Seconds since 1970."""
    tier_multipliers: Mapping[Tier, int] = field(default_factory=lambda: DEFAULT_MULTIPLIERS)
    """Thousandths: of a model priced for the first time, unless the act gives one."""
    alert_misses: int = DEFAULT_LEAST_MISSES
    """An alert's fewest in its long window."""
    webhook_private: bool = False
    """Whether webhooks may have private addresses."""
    console_url: str = ""
    """Before the path of a link to the console; empty: the link is the path."""
    models: Collection[str] = ()
    """Served here as far as known: no alias may have the name of one."""
    opened: OpenTransaction | None = None
    """The transaction that all acts share; None: each has its own."""
    snapshot: Connection | None = None
    """What all reads share; None: each has its own."""

    def __post_init__(self) -> None:
        check_pepper(self.pepper)

    def now_us(self) -> int:
        """Microseconds since 1970."""
        return round(self.clock() * 1e6)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Raises `DatabaseUnavailable`, and what `work` raises."""
        return await self.database.read(work) if self.snapshot is None else work(self.snapshot)

    async def note(
        self,
        actor: Actor | str,
        action: str,
        target: str,
        *,
        tenant_id: str | None = None,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> None:
        """Audits an act on the running system before it is done; the directory stays as it is."""
        await self.act(actor, action, lambda *_: Change(None, target, tenant_id, before, after))

    async def note_access(self, access: Access) -> None:
        """Audits one access before it is granted. Raises `DatabaseUnavailable`."""
        now_us = self.now_us()
        await self.record_accesses([MergedAccess(access, now_us, now_us, now_us, 1)])

    async def record_accesses(self, rows: Sequence[MergedAccess], flush: Flush | None = None) -> None:
        """Audits accesses; the directory's revision stays. With `flush` exactly once, however often repeated.
        Raises `DatabaseUnavailable`."""
        now_us = self.now_us()

        def write(connection: Connection) -> None:
            if flush is None or flushes.is_new(connection, flush, now_us):
                audit.record_accesses(connection, rows, at_us=now_us, name_key=self.pepper)

        await self.database.write(write)

    def audit_log(self, key: SigningKey | None = None) -> AuditLog:
        """The audit as a signed log; `key`: what it is signed with here."""
        return AuditLog(self.database, key, self.clock)

    async def with_names(self, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Items with the names of tenants, projects and keys beside their ids."""
        shown = list(items)
        return await self.read(lambda connection: names.with_names(connection, shown))

    async def in_one_snapshot(self, reads: Callable[[Transactions], Coroutine[Any, Any, T]]) -> T:
        """Several reads of the same instant, so that their sums agree. `reads` gets this object on the open
        snapshot, and awaits only its reads. Raises `DatabaseUnavailable`."""
        return await self.database.read(lambda connection: _run(reads(replace(self, snapshot=connection))))

    async def in_one_transaction(
        self,
        acts: Callable[[Transactions], Coroutine[Any, Any, T]],
        *,
        at_revision: int | None = None,
        is_rehearsal: bool = False,
    ) -> T:
        """Runs several acts as one transaction with one revision, each with its audit row; all or none.
        `acts` gets this object on the open transaction, awaits only its acts, and may run again after a
        rollback. Raises `PreconditionFailed` unless at `at_revision`. A rehearsal is rolled back."""
        now_us = self.now_us()

        def transaction(connection: Connection) -> T:
            revision = _next_revision(connection)
            if at_revision not in (None, revision - 1):
                raise PreconditionFailed({"revision": revision - 1})
            return _run(acts(replace(self, opened=OpenTransaction(connection, now_us, revision))))

        def rehearsal(connection: Connection) -> T:
            savepoint = connection.begin_nested()
            try:
                return transaction(connection)
            finally:
                savepoint.rollback()

        return await self.database.write(rehearsal if is_rehearsal else transaction)

    async def act(
        self,
        actor: Actor | str,
        action: str,
        change: Callable[[Connection, int], Change[T]],
        if_match: IfMatch = None,
    ) -> T:
        """Runs `change` as one audited transaction; every change of the directory goes through here. Rolled
        back with `PreconditionFailed` unless `Change.before` has one of the tags of `if_match`."""
        who = Actor(actor) if isinstance(actor, str) else actor
        if self.opened is not None:
            return _perform(self.opened, who, action, change, if_match)
        now_us = self.now_us()

        def transaction(connection: Connection) -> T:
            opened = OpenTransaction(connection, now_us, _next_revision(connection))
            return _perform(opened, who, action, change, if_match)

        return await self.database.write(transaction)


class AdminActs:
    """Base of the admin acts and reads of one kind of object."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions


def _next_revision(connection: Connection) -> int:
    """Raises the directory's revision. First in a transaction: on PostgreSQL this row's lock serialises admin
    acts, so that revisions become visible in order and a check followed by an insert is safe."""
    revision: int = connection.execute(
        update(tables.directory_revision)
        .values(revision=tables.directory_revision.c.revision + 1)
        .returning(tables.directory_revision.c.revision)
    ).scalar_one()
    return revision


def _perform(
    opened: OpenTransaction,
    actor: Actor,
    action: str,
    change: Callable[[Connection, int], Change[T]],
    if_match: IfMatch,
) -> T:
    """Makes a change, with revision and audit row. Raises `PersonChanged` if the actor has been changed."""
    connection = opened.connection
    if actor.person is not None and not rows.is_as_it_was(connection, *actor.person):
        raise PersonChanged
    done = change(connection, opened.now_us)
    require_match(if_match, done.before)
    connection.execute(
        update(tables.tenants).where(tables.tenants.c.id == done.tenant_id).values(revision=opened.revision)
    )
    audit.record(
        connection,
        actor,
        action,
        done.target,
        at_us=opened.now_us,
        tenant_id=done.tenant_id,
        before=done.before,
        after=done.after,
    )
    return done.result


def _run(acts: Coroutine[Any, Any, T]) -> T:
    """Acts on an open transaction never wait: the database's thread has no event loop."""
    try:
        acts.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    acts.close()
    raise RuntimeError("acts in one transaction must await nothing but acts")


def insert_unique(connection: Connection, statement: Any, what: str, name: str) -> None:
    """Raises `AlreadyExists`."""
    try:
        with connection.begin_nested():
            connection.execute(statement)
    except IntegrityError:
        raise AlreadyExists(what, name) from None
