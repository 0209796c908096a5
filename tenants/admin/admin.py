"""All admin acts and reads, one object a noun, over the same transactions.

Every act of command line and API is one method and one transaction with its audit row (`transaction.py`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from tenants.admin.alerts import AlertActs
from tenants.admin.keys import KeyActs
from tenants.admin.ledger import LedgerActs
from tenants.admin.limits import LimitActs
from tenants.admin.lists.engine_time import EngineTimeReads
from tenants.admin.lists.person_sessions import PersonSessionActs
from tenants.admin.lists.sessions import SessionReads
from tenants.admin.lists.usage import UsageActs
from tenants.admin.people import PeopleActs
from tenants.admin.platform.brakes import BrakeActs
from tenants.admin.platform.drains import DrainActs
from tenants.admin.platform.policy import PolicyActs
from tenants.admin.prices import PriceActs
from tenants.admin.slos import SloActs
from tenants.admin.tenants import ProjectActs, TenantActs
from tenants.admin.transaction import Transactions
from tenants.admin.webhooks import WebhookActs

T = TypeVar("T")


class Admin:
    """Every admin act, by noun."""

    def __init__(self, transactions: Transactions) -> None:
        self.transactions = transactions
        self.tenants = TenantActs(transactions)
        self.projects = ProjectActs(transactions)
        self.keys = KeyActs(transactions)
        self.limits = LimitActs(transactions)
        self.prices = PriceActs(transactions)
        self.slos = SloActs(transactions)
        self.people = PeopleActs(transactions)
        self.person_sessions = PersonSessionActs(transactions)
        self.alerts = AlertActs(transactions)
        self.webhooks = WebhookActs(transactions)
        self.brakes = BrakeActs(transactions)
        self.drains = DrainActs(transactions)
        self.policy = PolicyActs(transactions)
        self.ledger = LedgerActs(transactions)
        self.usage = UsageActs(transactions)
        self.sessions = SessionReads(transactions)
        self.engine_time = EngineTimeReads(transactions)

    async def with_names(self, items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return await self.transactions.with_names(items)

    async def in_one_snapshot(self, reads: Callable[[Admin], Coroutine[Any, Any, T]]) -> T:
        """As `Transactions.in_one_snapshot`: `reads` gets an `Admin` on the open snapshot."""
        return await self.transactions.in_one_snapshot(lambda opened: reads(Admin(opened)))

    async def in_one_transaction(
        self,
        acts: Callable[[Admin], Coroutine[Any, Any, T]],
        *,
        at_revision: int | None = None,
        is_rehearsal: bool = False,
    ) -> T:
        """As `Transactions.in_one_transaction`: `acts` gets an `Admin` on the open transaction."""
        return await self.transactions.in_one_transaction(
            lambda opened: acts(Admin(opened)), at_revision=at_revision, is_rehearsal=is_rehearsal
        )
