"""Admin acts on the ledger: gives back to limits what they count of a request in doubt; digests, checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from sqlalchemy import Connection

from tenants.admin.audit import Actor
from tenants.admin.commands import LedgerAdjust
from tenants.admin.transaction import AdminActs, Change
from tenants.directory import queries
from tenants.errors import EpochEnded, Invalid, NotFound
from tenants.instants import from_us
from tenants.ledger import ledger
from tenants.ledger.digests import LedgerDigests, LedgerVerdict, verify_digests
from tenants.ledger.price_check import PriceVerdict, verify_prices
from tenants.ledger.rows import LedgerRow, in_doubt
from tenants.nouns import checks
from tenants.quota import rules
from tenants.quota.store import QuotaStore, QuotaStoreUnavailable
from tenants.types import NOTHING, Amounts, Limit

MOST_SPANS = 100
"""Of the ledger, digested by one command: a million rows. A server goes on with older ones."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What was given back to the limits of one request."""

    request_id: str
    amounts: Amounts
    """As limits count them."""
    charged_to: tuple[str, ...]
    is_new: bool
    """False: it had been given back before, and nothing was changed."""

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "input_tokens": self.amounts.input_tokens,
            "output_tokens": self.amounts.output_tokens,
            "cost_nanousd": self.amounts.cost_nanousd,
            "requests": self.amounts.requests,
            "is_new": self.is_new,
        }


class _Before(Exception):
    def __init__(self, given: GivenBack) -> None:
        super().__init__(given.request_id)
        self.given = given


class LedgerActs(AdminActs):
    async def adjust(
        self, actor: Actor | str, wanted: LedgerAdjust, quota_store: QuotaStore | None
    ) -> GivenBack:
        """Repeatable; the bill stays. `quota_store` None: counters are filled from the ledger later. Raises
        `NotFound`, `Invalid`, `QuotaStoreUnavailable`, `DatabaseUnavailable`."""
        reason = checks.reason(wanted.reason)
        epoch = "" if quota_store is None else quota_store.epoch

        def change(connection: Connection, now_us: int) -> Change[GivenBack]:
            of_request = ledger.rows_of(connection, wanted.request_id)
            rows = {row.kind: row for row in of_request}
            if "reserve" not in rows or "settle" not in rows:
                raise NotFound("settled request", wanted.request_id)
            settled, charged_to = rows["settle"], tuple(name for row in of_request for name in row.charged_to)
            doubt = in_doubt(settled.detail)
            if doubt == Amounts(requests=0):
                raise Invalid(
                    "request_id", f"nothing of {wanted.request_id} is in doubt: it is counted as used"
                )
            if "adjust" in rows:
                raise _Before(GivenBack(wanted.request_id, doubt, charged_to, is_new=False))
            ledger.append_in(connection, _row(settled, doubt, reason, now_us), epoch)
            given = GivenBack(wanted.request_id, doubt, charged_to, is_new=True)
            after = given.as_json() | {"reason": reason}
            return Change(given, wanted.request_id, settled.tenant_id, after=after)

        try:
            given = await self._transactions.act(actor, "ledger.adjust", change)
        except _Before as before:
            return before.given
        except EpochEnded:
            raise QuotaStoreUnavailable("the counters are being rebuilt: try again") from None
        if quota_store is not None:
            limits = _charged_limits(await self._transactions.read(queries.limits_where), given.charged_to)
            await quota_store.give_back(epoch, limits, given.charged_to, given.amounts)
        return given

    async def digest(self) -> int:
        """Digests at most `MOST_SPANS` spans of the ledger; returns the number of rows. Raises `Invalid`,
        `AuditDamaged`, `DatabaseUnavailable`."""
        digests, rows = LedgerDigests(self._transactions.database, self._transactions.clock, 0.0), 0
        for _ in range(MOST_SPANS):
            span = await digests.close_due()
            if span is None:
                break
            rows += span.rows
        return rows

    async def verify_digests(self) -> LedgerVerdict:
        """Whether the ledger matches the audit's digests. Raises `DatabaseUnavailable`."""
        return await verify_digests(self._transactions.database)

    async def verify_prices(self) -> PriceVerdict:
        """Whether each charge matches its prices. Raises `DatabaseUnavailable`."""
        return await verify_prices(self._transactions.database)


def _charged_limits(limits: Sequence[Limit], charged_to: Sequence[str]) -> list[Limit]:
    """Of all limits those of these counters; a default of end users as that of its end user."""
    users = {rules.end_user_in(name) for name in charged_to} - {""}
    own = [limit for limit in limits if not limit.is_default]
    own += [limit.of_end_user(user) for limit in limits if limit.is_default for user in users]
    return [limit for limit, _ in rules.charged_limits(own, charged_to)]


def _row(settled: LedgerRow, doubt: Amounts, reason: str, now_us: int) -> LedgerRow:
    """On bills nothing, on limits less."""
    return replace(
        settled,
        kind="adjust",
        amounts=replace(NOTHING, requests=-doubt.requests, gpu_ms=-doubt.gpu_ms),
        counted_input=-doubt.input_tokens,
        counted_output=-doubt.output_tokens,
        counted_cost=-doubt.cost_nanousd,
        outcome="in_doubt",
        at=from_us(now_us),
        detail={"reason": reason},
        charged_to=(),
    )
