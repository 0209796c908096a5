"""Holds budget for requests: reserve, top up, move, settle.

The edge to the quota store and the ledger. Order matters: the hold, then the durable reserve row, then the
queue; a top-up in the store, then its durable row, then the engine's lease; at the end the durable settle
row, then the counters (`settlement.py`), then the engine may drop the outcome. So the ledger always covers at
least what the engine may emit, and after a crash the last report of a request is found there.

A quota store may come back from an outage without its counters. So after every failure nothing is admitted
until `counter_rebuild.py` has verified or rebuilt them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from gateway.budget.counter_rebuild import CounterRebuilder
from gateway.budget.hold_renewal import HoldRenewal
from gateway.budget.settlement import Settlement, Settlements
from gateway.domain.call import Call
from gateway.domain.outcomes import RequestOutcome
from tenants.errors import EpochEnded
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import Kind, LedgerRow, as_list, sum_of
from tenants.quota.store import (
    Denied,
    Granted,
    Hold,
    QuotaStore,
    QuotaStoreUnavailable,
    TooManyEndUsers,
)
from tenants.storage.task_stop import stop
from tenants.types import NOTHING, Amounts, Limit

__all__ = ["BudgetDenied", "Holds", "Settlement"]

log = logging.getLogger("fairgate.gateway.holds")


class BudgetDenied(Exception):
    """A hard limit has no room for this request."""

    def __init__(self, denied: Denied) -> None:
        super().__init__(f"limit {denied.limit.limit_id}")
        self.denied = denied


class EndUserRefused(Exception):
    """The tenant has as many end users with counters as it may, and this one is not among them."""

    def __init__(self, end_user: str, refused: TooManyEndUsers) -> None:
        super().__init__(f"end user {end_user!r}: {refused}")
        self.end_user = end_user
        self.most = refused.most
        self.retry_after_s = refused.retry_after_s


@dataclass(slots=True)
class _LiveHold:
    """The hold of a live request."""

    call: Call
    held: Amounts
    """Reserve row and top-ups together, as in the ledger."""
    price_version: int
    reported: Callable[[], Amounts] | None = None
    top_ups: int = 0


class Holds:
    """Holds, tops up, settles and renews. Use from one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        quota_store: QuotaStore,
        gateway_id: str,
        *,
        lease_ttl_s: float,
        wall_clock: Callable[[], float],
        all_limits: Callable[[], list[Limit]],
        require_presence: Callable[[], None] = lambda: None,
        on_granted: Callable[[Granted], None] = lambda _: None,
    ) -> None:
        """`all_limits`: every limit in force, for rebuilding counters. `require_presence` raises when other
        gateways may consider this one dead. `on_granted` is called with every grant of a reservation or
        top-up."""
        self._ledger = ledger
        self._quota_store = quota_store
        self._gateway_id = gateway_id
        self._lease_ttl_s = lease_ttl_s
        self._wall_clock = wall_clock
        self._on_granted = on_granted
        self.require_presence = require_presence
        """Call right before a request is sent to an engine: if this gateway stalled, another one may have
        settled its waiting requests. Raises `DatabaseUnavailable`."""
        self._live: dict[str, _LiveHold] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rebuilder = CounterRebuilder(
            ledger, quota_store, gateway_id, lease_ttl_s=lease_ttl_s, now=self._now, all_limits=all_limits
        )
        self._renewal = HoldRenewal(
            ledger, quota_store, self._rebuilder, self._live.keys(), lease_ttl_s=lease_ttl_s, now=self._now
        )
        self._settlements = Settlements(ledger, quota_store, self._rebuilder)

    @property
    def pending(self) -> int:
        """Settlements that are not durable yet."""
        return len(self._settlements)

    @property
    def live(self) -> Set[str]:
        """Requests that hold budget here until their settlement is durable (a live view)."""
        return self._live.keys()

    @property
    def is_recovering(self) -> bool:
        """Whether the quota store failed and has not recovered yet: nothing is admitted."""
        return self._rebuilder.is_needed and not self.is_local

    @property
    def is_local(self) -> bool:
        """Whether the quota store is away and local slices of the limits are granted."""
        return self._quota_store.is_local

    async def ping(self) -> None:
        """Pings the quota store; a failure starts its recovery. Raises `QuotaStoreUnavailable`."""
        with self._rebuilder.watching:
            await self._quota_store.ping()

    async def fill(self, *, is_new: bool) -> None:
        """Before the first request: counters that are right. `is_new`: they begin empty with this process.
        Raises `DatabaseUnavailable`, `QuotaStoreUnavailable`."""
        if is_new:
            await self._rebuilder.rebuild()
        else:
            with self._rebuilder.watching:
                await self._rebuilder.recover()

    def start(self) -> None:
        """Starts renewing holds and watching the store."""
        self._tasks = [
            asyncio.create_task(self._renewal.run(), name="gateway books, holds"),
            asyncio.create_task(self._rebuilder.run(), name="gateway books, rebuild"),
        ]

    async def close(self, timeout_s: float) -> None:
        """Waits for running settlements; the rest is settled at the next start."""
        await self._settlements.close(timeout_s)
        await stop(self._tasks)

    def held(self, request_id: str) -> Amounts:
        """What a live request holds so far, as limits count it; zero when it is not live."""
        live = self._live.get(request_id)
        return NOTHING if live is None else live.held

    async def reserve(
        self,
        call: Call,
        hold: Hold,
        *,
        price_version: int = 0,
        reported: Callable[[], Amounts] | None = None,
    ) -> Granted:
        """Holds on every limit of the request's path, then writes the reserve row durably. The request may
        use up to `Granted.covered`. `reported`: the real tokens of what top-ups report as used, where limits
        weight them; None: not weighted.

        Raises `BudgetDenied`, `EndUserRefused`, `LimitNotKept`, `QuotaStoreUnavailable`,
        `DatabaseUnavailable`; nothing stays held then.
        """
        if self.is_recovering or self._renewal.doubts(call.request_id):
            raise QuotaStoreUnavailable("its counters, or this request's, are being put right")
        limits = call.limits_at(self._wall_clock())
        asked_s = asyncio.get_running_loop().time()
        try:
            epoch, answer = await self._in_one_epoch(
                lambda: self._quota_store.reserve(call.request_id, limits, hold, self._lease_ttl_s)
            )
        except TooManyEndUsers as refused:
            raise EndUserRefused(call.end_user, refused) from None
        except QuotaStoreUnavailable:
            # The store may have executed the call all the same.
            self._renewal.doubt(call.request_id)
            raise
        if isinstance(answer, Denied):
            raise BudgetDenied(answer)
        self._live[call.request_id] = _LiveHold(call, answer.covered, price_version, reported)
        detail = {
            "prompt_tokens": [len(prompt) for prompt in call.prompts],
            "choices": call.choices,
            "max_tokens": call.max_tokens,
            "most": as_list(hold.most),
            "may_be_cut": hold.may_be_cut,
            "metering": "local" if self.is_local else "shared",
        }
        if call.chained is not None:
            detail["fallback"] = call.chained.fallback.as_json()
        row = self._row(call, "reserve", answer.covered, detail, answer.charged_to, price_version)
        try:
            await self._ledger.append(row, epoch=epoch)
            if asyncio.get_running_loop().time() - asked_s > self._lease_ttl_s / 2:
                # This process stalled: the hold may have been ended as overdue meanwhile.
                raise QuotaStoreUnavailable("the hold is too old to rely on")
        except BaseException as error:
            # Whether the row was written is unknown: hold renewal finds out when the database is back.
            self._renewal.doubt(call.request_id)
            self._live.pop(call.request_id, None)
            await self._release(call.request_id)
            if isinstance(error, EpochEnded):
                raise QuotaStoreUnavailable("its counters were rebuilt") from error
            raise
        self._on_granted(answer)
        return answer

    async def top_up(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> Granted | Denied:
        """Raises the hold of a live request (`QuotaStore.top_up`; totals since it began) durably; only after
        this may the engine's lease grow. `used`: emitted and computed so far, as limits count it; charged if
        all processes crash, and billed as `reported` says.

        Raises `KeyError` for a request that is not live, `QuotaStoreUnavailable`, `DatabaseUnavailable`; the
        engine's lease must then not grow, and the call may be repeated.
        """
        live = self._live[request_id]
        epoch, answer = await self._raise_hold(request_id, used, first, ahead)
        if isinstance(answer, Denied):
            return answer
        detail = {"used": as_list(used)}
        if live.reported is not None and (tokens := live.reported()) != used:
            detail["tokens"] = as_list(tokens)
        await self._write_top_up(live, live.call, answer.covered, detail, epoch)
        self._on_granted(answer)
        return answer

    async def move(self, call: Call, first: Amounts, ahead: Amounts) -> Granted:
        """Raises the hold of a live request that has emitted nothing, and records durably that it is charged
        in `call.tier` from now on.

        Raises `BudgetDenied` (nothing has changed then), `KeyError`, `QuotaStoreUnavailable`,
        `DatabaseUnavailable`.
        """
        live = self._live[call.request_id]
        epoch, answer = await self._raise_hold(call.request_id, NOTHING, first, ahead)
        if isinstance(answer, Denied):
            raise BudgetDenied(answer)
        detail = {"used": as_list(NOTHING), "moved_from": live.call.tier.value}
        await self._write_top_up(live, call, answer.covered, detail, epoch)
        return answer

    def settle(
        self,
        call: Call,
        charged: Amounts,
        outcome: RequestOutcome,
        detail: dict[str, Any],
        acknowledge: Callable[[], None],
        *,
        counted: Amounts | None = None,
        credit_nanousd: int = 0,
    ) -> Settlement:
        """Starts the settlement; it continues until durable, even if the caller stops waiting. `counted`:
        weighted amounts for limits; None: `charged`. `credit_nanousd` is credited on the bill in a row of its
        own; limits are not refunded."""
        live = self._live.get(call.request_id)
        price_version = live.price_version if live else 0
        row = self._row(call, "settle", charged, detail, (), price_version, outcome.value)
        if counted is not None and counted != charged:
            row = replace(row, counted_input=counted.input_tokens, counted_output=counted.output_tokens)

        def done() -> None:
            self._live.pop(call.request_id, None)

        credit: LedgerRow | None = None
        if credit_nanousd:
            given_back = replace(NOTHING, cost_nanousd=-credit_nanousd)
            credit = self._row(call, "credit", given_back, {}, (), price_version, "quote")
        return self._settlements.start(row, acknowledge, done, credit)

    async def keep_once(self) -> None:
        """Renews and releases holds now, instead of at the next round."""
        await self._renewal.keep_once()

    async def _in_one_epoch(
        self, ask: Callable[[], Awaitable[Granted | Denied]]
    ) -> tuple[str, Granted | Denied]:
        """The store's answer and its epoch. A repeated call changes nothing."""
        while True:
            epoch = self._quota_store.epoch
            with self._rebuilder.watching:
                answer = await ask()
            if epoch == self._quota_store.epoch:
                return epoch, answer

    def _row(
        self,
        call: Call,
        kind: Kind,
        amounts: Amounts,
        detail: dict[str, Any],
        charged_to: tuple[str, ...],
        price_version: int,
        outcome: str = "",
    ) -> LedgerRow:
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
            at=self._now(),
            detail=detail,
            charged_to=charged_to,
            price_version=price_version,
            labels=call.labels,
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall_clock(), UTC)

    async def _raise_hold(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> tuple[str, Granted | Denied]:
        """`QuotaStore.top_up` and its epoch."""
        try:
            return await self._in_one_epoch(lambda: self._quota_store.top_up(request_id, used, first, ahead))
        except KeyError:
            raise QuotaStoreUnavailable("the hold is gone: somebody else has settled the request") from None

    async def _write_top_up(
        self, live: _LiveHold, call: Call, covered: Amounts, detail: dict[str, Any], epoch: str
    ) -> None:
        """Records durably, as one more numbered row, that all of `covered` is held and that the request is
        now `call`. Writes nothing where neither has changed."""
        try:
            while _any(newly := _beyond(covered, live.held)) or live.call is not call:
                row = replace(
                    self._row(call, "top_up", newly, detail, (), live.price_version), number=live.top_ups + 1
                )
                if await self._ledger.append(row, epoch=epoch):
                    live.held, live.top_ups = sum_of([live.held, newly]), live.top_ups + 1
                    live.call = call
                else:
                    # An attempt that seemed to fail had been written.
                    await self._read_again(call.request_id, live)
        except EpochEnded as error:
            raise QuotaStoreUnavailable("its counters were rebuilt") from error

    async def _read_again(self, request_id: str, live: _LiveHold) -> None:
        for found in await self._ledger.open_requests(request_ids=[request_id]):
            live.held, live.top_ups = found.held, len(found.top_ups)
            return
        raise QuotaStoreUnavailable("somebody else has settled the request")

    async def _release(self, request_id: str) -> None:
        try:
            with self._rebuilder.watching:
                await asyncio.shield(self._quota_store.settle(request_id, NOTHING))
        except QuotaStoreUnavailable:
            log.warning("the hold of %s could not be released; the keeper will", request_id)


def _beyond(amounts: Amounts, held: Amounts) -> Amounts:
    pairs = zip(as_list(amounts), as_list(held), strict=True)
    return Amounts(*(max(0, one - other) for one, other in pairs))


def _any(amounts: Amounts) -> bool:
    return any(as_list(amounts))
