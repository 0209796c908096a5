"""Acts on one record of the directory: it is looked up, edited and stored as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy import Connection, Table, update

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.nouns.key import ApiKey
from tenants.nouns.project import Project
from tenants.nouns.tenant import Tenant

R = TypeVar("R", Tenant, Project, ApiKey)
S = TypeVar("S", Tenant, Project)


class RecordActs(AdminActs, Generic[R]):
    """`reference`: by what `find` knows it; with `tenant` only one of that tenant is looked up."""

    kind: ClassVar[str]
    """Of its acts in the audit."""
    table: ClassVar[Table]

    def find(self, connection: Connection, reference: str, tenant: str | None = None) -> Any:
        """Raises `NotFound`, `Invalid`."""
        raise NotImplementedError

    async def _edit(
        self,
        actor: Actor | str,
        verb: str,
        reference: str,
        tenant: str | None,
        edit: Callable[[Connection, R, int], R],
        if_match: IfMatch,
    ) -> R:
        def change(connection: Connection, now_us: int) -> Change[R]:
            before: R = self.find(connection, reference, tenant)
            after, row = edit(connection, before, now_us), before.as_row()
            is_it = self.table.c.id == row["id"]
            connection.execute(update(self.table).where(is_it).values(**after.as_row()))
            return Change(after, row["id"], after.tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, f"{self.kind}.{verb}", change, if_match)


class SuspendableActs(RecordActs[S]):
    async def suspend(
        self,
        actor: Actor | str,
        reference: str,
        tenant: str | None = None,
        *,
        now: bool = False,
        if_match: IfMatch = None,
    ) -> S:
        """Its keys are refused until `resume`, and its waiting requests end; running ones finish, or
        with `now` end as well, charged for what they emitted."""

        def edit(connection: Connection, before: S, now_us: int) -> S:
            return replace(before, status="suspended", ends_running=now)

        return await self._edit(actor, "suspend", reference, tenant, edit, if_match)

    async def resume(
        self, actor: Actor | str, reference: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> S:
        def edit(connection: Connection, before: S, now_us: int) -> S:
            return replace(before, status="active", ends_running=False)

        return await self._edit(actor, "resume", reference, tenant, edit, if_match)
