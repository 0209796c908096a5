"""How is budget held before a request runs, and given back, exactly once, when it has ended?

The edge to the quota store and the ledger. Order matters: the hold, then the reserve row durable, and only
then the queue; at the end the settle row durable, then the counters, then the engine may forget the
outcome. A settlement that cannot be written is kept and tried again until it can be; its hold is renewed
as long, and if this process dies first, the open reserve row is found at the next start.

A quota store that was away may come back without its memory. So after every failure of it nothing is
admitted until its counters have been filled from the ledger again and every live request holds what it
held (`_rebuild`); settlements pause meanwhile, so that none is counted twice or missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gateway.account.outcomes import RequestOutcome
from gateway.understand import Call
from tenants.errors import DatabaseUnavailable
from tenants.ledger import Kind, Ledger, LedgerRow
from tenants.quota.store import Denied, Granted, QuotaStore, QuotaStoreUnavailable
from tenants.types import Amounts, Limit

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0
MEND_EVERY_S = 0.5
MAX_DOUBTFUL = 100_000
NOTHING = Amounts(requests=0)

log = logging.getLogger("fairgate.gateway.books")


class BudgetDenied(Exception):
    """A hard limit has no room for this request."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(f"limit {denied.limit.limit_id}")
        self.denied = denied


@dataclass(slots=True)
class Settlement:
    """One request's end on its way into the books."""

    row: LedgerRow
    acknowledge: Callable[[], None]
    durable: asyncio.Event = field(default_factory=asyncio.Event)
    """The settle row is in the ledger and the counters know: the client may be told."""
    is_in_ledger: bool = False
    is_counted: bool = False


@dataclass(frozen=True, slots=True)
class _Hold:
    """What a live request holds, and on which limits."""

    limits: tuple[Limit, ...]
    amounts: Amounts


class Books:
    """Holds, settles, renews. Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        quota_store: QuotaStore,
        gateway_id: str,
        *,
        lease_ttl_s: float,
        wall_clock: Callable[[], float],
        all_limits: Callable[[], list[Limit]],
    ) -> None:
        """`all_limits`: every limit in force, for filling counters again."""
        self._ledger = ledger
        self._quota_store = quota_store
        self._gateway_id = gateway_id
        self._lease_ttl_s = lease_ttl_s
        self._wall_clock = wall_clock
        self._all_limits = all_limits
        self._live: dict[str, _Hold] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._settlements: dict[str, Settlement] = {}
        self._doubtful: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._store_failed = asyncio.Event()
        self._may_settle = asyncio.Event()
        self._may_settle.set()
        self._attempts = 0
        self._no_attempt = asyncio.Event()
        self._no_attempt.set()

    @property
    def pending(self) -> int:
        """Settlements that are not durable yet."""
        return len(self._settling)

    @property
    def live(self) -> Set[str]:
        """Requests that hold budget here, until their settlement is durable (a view: it changes)."""
        return self._live.keys()

    @property
    def is_recovering(self) -> bool:
        """The quota store failed, and its counters are not known to be right yet: nothing is admitted."""
        return self._store_failed.is_set()

    def start(self) -> None:
        """Begins to renew holds and to look after the store."""
        self._tasks = [
            asyncio.create_task(self._keep(), name="gateway books"),
            asyncio.create_task(self._mend(), name="gateway books, rebuild"),
        ]

    async def close(self, timeout_s: float) -> None:
        """Waits for the settlements under way; what is not durable then is settled at the next start."""
        if self._settling:
            await asyncio.wait(list(self._settling.values()), timeout=timeout_s)
        tasks = [*self._settling.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def row(
        self,
        call: Call,
        kind: Kind,
        amounts: Amounts,
        outcome: str,
        detail: dict[str, Any],
        charged_to: tuple[str, ...] = (),
    ) -> LedgerRow:
        """A ledger row of this request."""
        principal = call.principal
        return LedgerRow(
            request_id=call.request_id,
            kind=kind,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            gateway_id=self._gateway_id,
            tier=call.tier,
            model=call.model,
            amounts=amounts,
            outcome=outcome,
            at=datetime.fromtimestamp(self._wall_clock(), UTC),
            detail=detail,
            charged_to=charged_to,
        )

    async def reserve(self, call: Call, held: Amounts) -> Granted:
        """Holds `held` on every limit of the request's path, then makes the reserve row durable.

        Raises `BudgetDenied`, `QuotaStoreUnavailable`, `DatabaseUnavailable`; nothing stays held then.
        """
        if self.is_recovering:
            raise QuotaStoreUnavailable("its counters are being rebuilt")
        limits = call.principal.limits_for(call.tier)
        try:
            answer = await self._quota_store.reserve(call.request_id, limits, held, self._lease_ttl_s)
        except QuotaStoreUnavailable:
            self._store_failed.set()
            raise
        if isinstance(answer, Denied):
            raise BudgetDenied(answer)
        self._live[call.request_id] = _Hold(limits, held)
        detail = {
            "prompt_tokens": [len(prompt) for prompt in call.prompts],
            "choices": call.choices,
            "max_tokens": call.max_tokens,
        }
        try:
            await self._ledger.append(self.row(call, "reserve", held, "", detail, answer.charged_to))
        except BaseException:
            # Whether the row is there is unknown. The sweep finds out when the database is back.
            if len(self._doubtful) < MAX_DOUBTFUL:
                self._doubtful.add(call.request_id)
            self._live.pop(call.request_id, None)
            await self._release(call.request_id)
            raise
        return answer

    def settle(
        self,
        call: Call,
        charged: Amounts,
        outcome: RequestOutcome,
        detail: dict[str, Any],
        acknowledge: Callable[[], None],
    ) -> Settlement:
        """Starts the settlement; it goes on until it is durable, whoever stops waiting for it."""
        settlement = Settlement(self.row(call, "settle", charged, outcome, detail), acknowledge)
        task = asyncio.create_task(self._settle(settlement), name=f"settle {call.request_id}")
        self._settling[call.request_id] = task
        self._settlements[call.request_id] = settlement
        return settlement

    async def _settle(self, settlement: Settlement) -> None:
        request_id = settlement.row.request_id
        delay_s = RETRY_FIRST_S
        try:
            while not await self._try_to_settle(settlement):
                await asyncio.sleep(delay_s)
                delay_s = min(RETRY_MOST_S, delay_s * 2)
            settlement.durable.set()
            settlement.acknowledge()
        finally:
            self._live.pop(request_id, None)
            self._settling.pop(request_id, None)
            self._settlements.pop(request_id, None)

    async def _try_to_settle(self, settlement: Settlement) -> bool:
        """One attempt; each half that succeeds is not repeated."""
        await self._may_settle.wait()
        self._attempts += 1
        self._no_attempt.clear()
        row = settlement.row
        try:
            if not settlement.is_in_ledger:
                await self._ledger.append(row)
                settlement.is_in_ledger = True
            if not settlement.is_counted:
                await self._quota_store.settle(row.request_id, row.amounts)
                settlement.is_counted = True
            return True
        except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
            if isinstance(error, QuotaStoreUnavailable):
                self._store_failed.set()
            log.warning("settlement of %s waits: %s", row.request_id, type(error).__name__)
        except Exception:
            log.exception("settlement of %s failed; it is tried again", row.request_id)
        finally:
            self._attempts -= 1
            if self._attempts == 0:
                self._no_attempt.set()
        return False

    async def _release(self, request_id: str) -> None:
        try:
            await asyncio.shield(self._quota_store.settle(request_id, NOTHING))
        except QuotaStoreUnavailable:
            self._store_failed.set()
            log.warning("the hold of %s could not be released; its lease will run out", request_id)

    async def _keep(self) -> None:
        """Renews the holds of what lives here and drops those that nobody renews."""
        while True:
            await asyncio.sleep(self._lease_ttl_s / 4)
            try:
                await self.keep_once()
            except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
                if isinstance(error, QuotaStoreUnavailable):
                    self._store_failed.set()
                log.warning("holds could not be renewed: %s", type(error).__name__)
            except Exception:
                log.exception("the keeper of the books failed; it goes on")

    async def keep_once(self) -> None:
        """One round of `_keep`."""
        if self._live:
            await self._quota_store.renew(sorted(self._live), self._lease_ttl_s)
        await self._quota_store.expire()
        if self._doubtful:
            await self._settle_doubtful()

    async def _mend(self) -> None:
        while True:
            await self._store_failed.wait()
            try:
                await self._quota_store.ping()
                await self._rebuild()
                self._store_failed.clear()
                log.info("the quota store is back, its counters are rebuilt")
            except (DatabaseUnavailable, QuotaStoreUnavailable):
                await asyncio.sleep(MEND_EVERY_S)
            except Exception:
                log.exception("the counters could not be rebuilt; it is tried again")
                await asyncio.sleep(MEND_EVERY_S)

    async def _rebuild(self) -> None:
        """Fills the counters from the ledger, and holds again what live requests hold. Nothing is admitted
        and nothing settles meanwhile."""
        self._may_settle.clear()
        try:
            await self._no_attempt.wait()
            for request_id, settlement in list(self._settlements.items()):
                # A write that failed may have been committed all the same.
                rows = await self._ledger.find(request_id)
                settlement.is_in_ledger = any(row.kind == "settle" for row in rows)
                if settlement.is_in_ledger:
                    # Its row is part of what is filled in; only its hold, if it is still there, must go.
                    await self._quota_store.settle(request_id, NOTHING)
                    settlement.is_counted = True
            now = datetime.fromtimestamp(self._wall_clock(), UTC)
            await self._quota_store.rebuild(await self._ledger.usage_by_limit(self._all_limits(), now))
            for request_id, hold in list(self._live.items()):
                settlement_here = self._settlements.get(request_id)
                if settlement_here is not None and settlement_here.is_in_ledger:
                    continue
                answer = await self._quota_store.reserve(
                    request_id, hold.limits, hold.amounts, self._lease_ttl_s
                )
                if isinstance(answer, Denied):
                    log.error("request %s no longer fits into limit %s", request_id, answer.limit.limit_id)
        finally:
            self._may_settle.set()

    async def _settle_doubtful(self) -> None:
        """Reserve rows that may or may not be there, as the database failed: the requests never ran."""
        doubtful = set(self._doubtful)
        for reserve in await self._ledger.open_reserves(self._gateway_id):
            if reserve.request_id in doubtful:
                now = datetime.fromtimestamp(self._wall_clock(), UTC)
                await settle_open(
                    self._ledger, self._quota_store, reserve, NOTHING, RequestOutcome.REFUSED, now, {}
                )
        self._doubtful -= doubtful


async def settle_open(
    ledger: Ledger,
    quota_store: QuotaStore,
    reserve: LedgerRow,
    charged: Amounts,
    outcome: RequestOutcome,
    now: datetime,
    detail: dict[str, Any],
    gateway_id: str = "",
) -> bool:
    """Settles a reserve row that nobody serves any more. False when the store had no hold for it."""
    row = LedgerRow(
        request_id=reserve.request_id,
        kind="settle",
        tenant_id=reserve.tenant_id,
        project_id=reserve.project_id,
        key_id=reserve.key_id,
        gateway_id=gateway_id or reserve.gateway_id,
        tier=reserve.tier,
        model=reserve.model,
        amounts=charged,
        outcome=outcome.value,
        at=now,
        detail=detail,
    )
    await ledger.append(row)
    return await quota_store.settle(row.request_id, charged)
