"""The transaction of every admin act.

It makes the change, raises the directory's revision (running servers notice within a second) and writes the
audit row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, update

from tenants.admin import audit
from tenants.admin.audit import Actor
from tenants.directory import names
from tenants.directory.keys import check_pepper
from tenants.pricing.pricing import DEFAULT_MULTIPLIERS
from tenants.storage import tables
from tenants.storage.database import Database
from tenants.types import Tier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """An act's result, and its audit entry."""

    result: T
    target: str
    tenant_id: str | None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


class AdminCommands:
    """Base of all admin acts."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        clock: Callable[[], float] = time.time,
        tier_multipliers: Mapping[Tier, int] = DEFAULT_MULTIPLIERS,
    ) -> None:
        """`clock` gives seconds since 1970. `tier_multipliers` (thousandths): those of a model priced for the
        first time, unless the act gives one."""
        self._database = database
        self._pepper = check_pepper(pepper)
        self._clock = clock
        self._tier_multipliers = tier_multipliers

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
        await self._act(actor, action, lambda *_: Change(None, target, tenant_id, before, after))

    async def with_names(self, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Items as shown to people: beside each id of a tenant, project or key its name."""
        shown = list(items)
        return await self._database.read(lambda connection: names.with_names(connection, shown))

    async def _act(
        self, actor: Actor | str, action: str, change: Callable[[Connection, int], Change[T]]
    ) -> T:
        """Runs `change` as one audited transaction; every change of the directory goes through here."""
        who = Actor(actor) if isinstance(actor, str) else actor
        now_us = round(self._clock() * 1e6)

        def transaction(connection: Connection) -> T:
            # First, because on PostgreSQL this row's lock serialises admin acts, so that
            # revisions become visible in order and a check followed by an insert is safe.
            revision = connection.execute(
                update(tables.directory_revision)
                .values(revision=tables.directory_revision.c.revision + 1)
                .returning(tables.directory_revision.c.revision)
            ).scalar_one()
            done = change(connection, now_us)
            connection.execute(
                update(tables.tenants).where(tables.tenants.c.id == done.tenant_id).values(revision=revision)
            )
            audit.record(
                connection,
                who,
                action,
                done.target,
                at_us=now_us,
                tenant_id=done.tenant_id,
                before=done.before,
                after=done.after,
            )
            return done.result

        return await self._database.write(transaction)
