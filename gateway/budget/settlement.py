"""How does the end of a request become durable, exactly once, whatever fails?

The settle row first, then the counters, then whoever waits is told and the engine may forget. Each half that
succeeded is not repeated; what fails is tried again until it succeeds. If this process dies first, the open
reserve row is found by the next one, or by another gateway.

Where a settle row is there already (another gateway took this one for dead and adopted the request), that
row counts: counters are charged by it, never by ours. The store charges a request as long as it holds
something, so however many settle it, it is counted once.
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
    """One request's end on its way into the books."""

    row: LedgerRow
    acknowledge: Callable[[], None]
    done: Callable[[], None]
    credit: LedgerRow | None = None
    """Given back for a broken promise, written with the settle row or not at all."""
    is_durable: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The settle row is in the ledger and the counters know: the client may be told. False where whoever
    waits gave it up before; it goes on all the same."""
    counts: LedgerRow | None = None
    """The settle row that is in the ledger."""

    async def within(self, seconds: float) -> bool:
        """Whether it is durable after so long at most. For one who waits."""
        # What `asyncio.timeout` does, without its states: this is on every request's way.
        timer = asyncio.get_running_loop().call_later(seconds, self.tell, False)
        try:
            return await self.is_durable
        finally:
            timer.cancel()

    def tell(self, is_durable: bool) -> None:
        """Whoever waits hears of it; the first word counts."""
        if not self.is_durable.done():
            self.is_durable.set_result(is_durable)


class Settlements:
    """Settlements under way. Use from one event loop."""

    def __init__(self, ledger: Ledger, quota_store: QuotaStore, mender: CounterRebuilder) -> None:
        self._ledger = ledger
        self._quota_store = quota_store
        self._mender = mender
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self,
        row: LedgerRow,
        acknowledge: Callable[[], None],
        done: Callable[[], None],
        credit: LedgerRow | None = None,
    ) -> Settlement:
        """Begins to settle. `acknowledge` is called once it is durable, `done` when nobody works on it any
        more."""
        settlement = Settlement(row, acknowledge, done, credit)
        task = asyncio.create_task(self._settle(settlement), name=f"settle {row.request_id}")
        self._tasks[row.request_id] = task
        return settlement

    async def close(self, timeout_s: float) -> None:
        """Waits for what is under way, then gives it up."""
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
            settlement.tell(True)
            settlement.acknowledge()
        finally:
            self._tasks.pop(settlement.row.request_id, None)
            settlement.done()

    async def _try_to_settle(self, settlement: Settlement) -> bool:
        row = settlement.row
        try:
            if settlement.counts is None:
                settlement.counts = await self._ledger.settle(row, settlement.credit)
            with self._mender.noticing:
                await self._quota_store.settle(row.request_id, settlement.counts.counted)
            return True
        except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
            log.warning("settlement of %s waits: %s", row.request_id, type(error).__name__)
        except Exception:
            log.exception("settlement of %s failed; it is tried again", row.request_id)
        return False
