"""Reads of a tenant's hours of usage, and acts on the sums behind all usage."""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import Connection

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs
from tenants.directory import queries
from tenants.errors import DatabaseUnavailable
from tenants.outbox.figures import LedgerCheck, note_ledger_check
from tenants.usage import verify
from tenants.usage.query import UsageQuery
from tenants.usage.read import UsageRow, usage

MOST_HOUR_ROWS = 50_000
"""Of four weeks by hour: some 70 models and tiers in use in every one of them."""


class UsageActs(AdminActs):
    async def hours(
        self, tenant: str, since_us: int, until_us: int, *, most: int = MOST_HOUR_ROWS
    ) -> list[UsageRow]:
        """By full hour, model and tier; the oldest `most` rows. Raises `Invalid`, `NotFound`."""

        def look(connection: Connection) -> list[UsageRow]:
            owner = queries.find_tenant(connection, tenant)
            query = UsageQuery(since_us, until_us, "hour", ("model", "tier"), tenant_id=owner.tenant_id)
            return usage(connection, query, None, most).rows

        return await self._transactions.read(look)

    async def verify(self) -> list[str]:
        """Some sums that differ from the ledger; alerts use the last result. Raises `DatabaseUnavailable`."""
        problems = await verify.usage_problems(self._transactions.database)
        await self._note_check(len(problems))
        return problems

    async def rebuild(self, actor: Actor | str) -> int:
        """Returns how many were wrong. Raises `DatabaseUnavailable`, `Invalid` if another rebuild begins."""
        await self._transactions.note(actor, "usage.rebuild", "usage")
        corrected = await verify.rebuild_usage(self._transactions.database)
        await self._note_check(0)
        return corrected

    async def _note_check(self, problems: int) -> None:
        check = LedgerCheck(self._transactions.now_us(), problems)
        with suppress(DatabaseUnavailable):
            await self._transactions.database.write(lambda one: note_ledger_check(one, check))
