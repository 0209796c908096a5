"""Settles finished requests durably and exactly once, with retries.

First the settle row, then the counters, then the waiter is notified and the engine may drop the outcome. Only
failed steps are repeated, until they succeed; if this process dies, the open reserve row is found later.
Where a settle row exists already (another gateway adopted the request) the counters are charged by it. The
store charges a request only while it holds something, so it is counted once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.budget.counter_rebuild import CounterRebuilder
from tenants.errors import DatabaseUnavailable
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow
from tenants.quota.store import QuotaStore, QuotaStoreUnavailable
from tenants.storage.task_stop import stop

RETRY_FIRST_S = 0.1
RETRY_MOST_S = 5.0

log = logging.getLogger("fairgate.gateway.settling")


@dataclass(slots=True)
class Settlement:
    row: LedgerRow
    acknowledge: Callable[[], None]
    done: Callable[[], None]
    credit: LedgerRow | None = None
    """For a missed quote, written with the settle row or not at all."""
    most_credit_nanousd: int = 0
    """Of its tenant and day."""
    is_durable: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """True: durable and counted. False: the waiter timed out, and the settlement goes on."""
    counts: LedgerRow | None = None
    credited_nanousd: int = 0
    """What was credited; until the settle row is durable, what is due."""

    async def within(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether it is durable. For one waiter."""
        # Cheaper than `asyncio.timeout`: every request passes here.
        timer = asyncio.get_running_loop().call_later(seconds, self.resolve, False)
        try:
            return await self.is_durable
        finally:
            timer.cancel()

    def resolve(self, is_durable: bool) -> None:
        if not self.is_durable.done():
            self.is_durable.set_result(is_durable)


class Settlements:
    """Use from one event loop."""

    def __init__(self, ledger: Ledger, quota_store: QuotaStore, rebuilder: CounterRebuilder) -> None:
        self._ledger = ledger
        self._quota_store = quota_store
        self._rebuilder = rebuilder
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self,
        row: LedgerRow,
        acknowledge: Callable[[], None],
        done: Callable[[], None],
        credit: LedgerRow | None = None,
        most_credit_nanousd: int = 0,
    ) -> Settlement:
        """`acknowledge` is called once it is durable, `done` when its task ends."""
        settlement = Settlement(row, acknowledge, done, credit, most_credit_nanousd)
        if credit is not None:
            settlement.credited_nanousd = -credit.amounts.cost_nanousd
        task = asyncio.create_task(self._settle(settlement), name=f"settle {row.request_id}")
        self._tasks[row.request_id] = task
        return settlement

    async def close(self, timeout_s: float) -> None:
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        await stop(tasks)

    async def _settle(self, settlement: Settlement) -> None:
        delay_s = RETRY_FIRST_S
        try:
            while not await self._try_to_settle(settlement):
                await asyncio.sleep(delay_s)
                delay_s = min(RETRY_MOST_S, delay_s * 2)
            settlement.resolve(True)
            settlement.acknowledge()
        finally:
            self._tasks.pop(settlement.row.request_id, None)
            settlement.done()

    async def _try_to_settle(self, settlement: Settlement) -> bool:
        row = settlement.row
        try:
            if settlement.counts is None:
                if settlement.credit is None:
                    settlement.counts = await self._ledger.settle(row)
                else:
                    settlement.counts, settlement.credited_nanousd = await self._ledger.settle_with_credit(
                        row, settlement.credit, settlement.most_credit_nanousd
                    )
            with self._rebuilder.watching:
                await self._quota_store.settle(row.request_id, settlement.counts.counted)
            return True
        except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
            log.warning("settlement of %s waits: %s", row.request_id, error)
        except Exception:
            log.exception("settlement of %s failed; it is tried again", row.request_id)
        return False
