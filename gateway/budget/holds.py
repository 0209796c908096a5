"""Holds budget for requests: reserve, top up, move, settle.

Order matters: the hold, its durable reserve row, the queue; a top-up in the store, its durable row, the
engine's lease; at the end the durable settle row, the counters (`settlement.py`), and then the engine may
drop the outcome. So the ledger always covers what the engine may emit, and has a request's last report after
a crash. After a failure of the store nothing is admitted until `counter_rebuild.py` has checked its counters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gateway.background import Site
from gateway.budget.counter_rebuild import CounterRebuilder
from gateway.budget.hold_renewal import HoldRenewal
from gateway.budget.metering import RequestMetering
from gateway.budget.settlement import Settlement, Settlements
from gateway.domain.call import Call
from gateway.domain.usage import use_of
from tenants.errors import EpochEnded
from tenants.ledger.ledger import Ledger
from tenants.ledger.progress import RunningUse
from tenants.ledger.rows import Kind, LedgerRow, amounts_from, as_list, sum_of
from tenants.outcomes import RequestOutcome
from tenants.quota import rules
from tenants.quota.store import (
    Denied,
    Granted,
    Hold,
    LimitState,
    QuotaStore,
    QuotaStoreUnavailable,
    TooManyEndUsers,
)
from tenants.storage.task_stop import stop
from tenants.types import NOTHING, Amounts, Limit

__all__ = ["BudgetDenied", "Holds", "Settlement"]

log = logging.getLogger("fairgate.gateway.holds")


class BudgetDenied(Exception):
    fitting_max_tokens: int | None = None

    def __init__(self, denied: Denied) -> None:
        super().__init__(f"limit {denied.limit.limit_id}")
        self.denied = denied


class EndUserRefused(Exception):
    """The tenant's maximum of end users have counters, and this one has none."""

    def __init__(self, end_user: str, refused: TooManyEndUsers) -> None:
        super().__init__(f"end user {end_user!r}: {refused}")
        self.end_user = end_user
        self.most = refused.most
        self.retry_after_s = refused.retry_after_s


@dataclass(slots=True)
class _LiveHold:
    call: Call
    held: Amounts
    """Reserve row and top-ups together, as in the ledger."""
    price_version: int
    asked: Hold
    charged_to: frozenset[str]
    """Every counter in its rows."""
    metering: RequestMetering | None = None
    top_ups: int = 0
    report: dict[str, Any] = field(default_factory=lambda: {"used": as_list(NOTHING)})
    """The detail of its last top-up row: what it had used by then."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from a change in the store until its row is durable, as later rows add to it."""
    sent_to: str = ""
    """Identifies the engine's run; empty: not sent yet."""


class Holds:
    """Use from one event loop."""

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        quota_store: QuotaStore,
        *,
        all_limits: Callable[[], list[Limit]],
        require_presence: Callable[[], None] = lambda: None,
        on_granted: Callable[[Granted], None] = lambda _: None,
    ) -> None:
        """`require_presence` raises if others may take this one for dead; `on_granted` gets every grant."""
        self._ledger = ledger
        self._quota_store = quota_store
        self._site = site
        self._lease_ttl_s = site.config.lease_ttl_s
        self._on_granted = on_granted
        self._require_presence = require_presence
        self._live: dict[str, _LiveHold] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rebuilder = CounterRebuilder(site, ledger, quota_store, all_limits)
        self._renewal = HoldRenewal(site, ledger, quota_store, self._rebuilder, self._live.keys())
        self._settlements = Settlements(ledger, quota_store, self._rebuilder)

    def refill_per_s(self, limit: Limit) -> float:
        """A token bucket's current refill rate: more than set while capacity is spare."""
        return self._quota_store.spare.rate_per_s(limit)

    @property
    def pending(self) -> int:
        """Settlements that are not durable yet."""
        return len(self._settlements)

    @property
    def overdue(self) -> int:
        return self._renewal.overdue

    @property
    def live(self) -> Set[str]:
        """Requests that hold budget here until their settlement is durable (a live view)."""
        return self._live.keys()

    @property
    def is_recovering(self) -> bool:
        """The quota store failed and has not recovered: nothing is admitted."""
        return self._rebuilder.is_needed and not self.is_local

    @property
    def is_local(self) -> bool:
        """The quota store is unavailable and local slices of the limits are granted."""
        return self._quota_store.is_local

    async def ping(self) -> None:
        """A failure starts the store's recovery. Raises `QuotaStoreUnavailable`."""
        with self._rebuilder.watching:
            await self._quota_store.ping()

    async def fill(self, *, is_new: bool) -> None:
        """`is_new`: the counters start empty. Raises `DatabaseUnavailable`, `QuotaStoreUnavailable`."""
        if is_new:
            await self._rebuilder.rebuild()
        else:
            with self._rebuilder.watching:
                await self._rebuilder.recover()

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._renewal.run(), name="gateway books, holds"),
            asyncio.create_task(self._rebuilder.run(), name="gateway books, rebuild"),
        ]

    async def close(self, timeout_s: float) -> None:
        """Waits for running settlements; the rest is settled at the next start."""
        await self._settlements.close(timeout_s)
        await stop(self._tasks)

    def sending(self, request_id: str, engine: str) -> None:
        """Call right before sending. Raises `DatabaseUnavailable` if another gateway may have settled it."""
        self._require_presence()
        if (live := self._live.get(request_id)) is not None:
            live.sent_to = engine

    def running(self) -> dict[str, RunningUse]:
        """What has reached this gateway of each request that was sent and is not settled."""
        return {
            request_id: _use_so_far(live.sent_to, live.call, live.metering)
            for request_id, live in self._live.items()
            if live.sent_to and live.metering is not None
        }

    def held(self, request_id: str) -> Amounts:
        """As limits count it; zero if the request is not live."""
        live = self._live.get(request_id)
        return NOTHING if live is None else live.held

    async def look(self, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """Present states, holding nothing; empty while the store is away, as the reservation decides."""
        if not limits or self.is_recovering or self.is_local:
            return ()
        try:
            with self._rebuilder.watching:
                return await self._quota_store.states(limits)
        except QuotaStoreUnavailable:
            return ()

    async def reserve(
        self,
        call: Call,
        hold: Hold,
        *,
        price_version: int = 0,
        metering: RequestMetering | None = None,
    ) -> Granted:
        """Holds on every limit of its path, then writes the reserve row durably; it may use up to
        `Granted.covered`. `metering`: its real tokens are noted where limits weight them. Raises
        `BudgetDenied`, `EndUserRefused`, `QuotaStoreUnavailable`, `DatabaseUnavailable`;
        nothing stays held then."""
        if self.is_recovering or self._renewal.doubts(call.request_id):
            raise QuotaStoreUnavailable("its counters, or this request's, are being put right")
        limits = call.limits_at(self._site.wall_clock())
        asked_s = asyncio.get_running_loop().time()
        try:
            epoch, answer = await self._in_one_epoch(
                lambda: self._quota_store.reserve(
                    call.request_id, limits, hold, self._lease_ttl_s, tenant_id=call.principal.tenant_id
                )
            )
        except TooManyEndUsers as refused:
            raise EndUserRefused(call.end_user, refused) from None
        except QuotaStoreUnavailable:
            # The store may have executed the call all the same.
            self._renewal.doubt(call.request_id)
            raise
        if isinstance(answer, Denied):
            raise BudgetDenied(answer)
        self._live[call.request_id] = _LiveHold(
            call, answer.covered, price_version, hold, frozenset(answer.charged_to), metering
        )
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
        """Raises the hold of a live request durably (`QuotaStore.top_up`; totals since it began); only then
        may the engine's lease grow. `used`: so far, as limits count it; charged if all processes crash, and
        billed as the metering's `reported` says. Raises `KeyError` if it is not live,
        `QuotaStoreUnavailable`, `DatabaseUnavailable`; may be repeated."""
        live = self._live[request_id]
        async with live.changing:
            epoch, answer = await self._raise_hold(request_id, used, first, ahead)
            if isinstance(answer, Denied):
                return answer
            detail = {"used": as_list(used)}
            if live.metering is not None and (tokens := live.metering.reported) != used:
                detail["tokens"] = as_list(tokens)
            await self._write_top_up(live, live.call, answer.covered, detail, epoch)
            live.report = detail
        self._on_granted(answer)
        return answer

    async def rebind(self, request_id: str, limits: Sequence[Limit], *, must_fit: bool) -> Granted | Denied:
        """Puts a live request under the limits in force, durably (`QuotaStore.rebind`); on new ones it holds
        what it holds so far. `limits`: at least all that it was held on. `must_fit`: it has not begun, and
        without room nothing changes; else it runs on, and is promised nothing more there. Raises `KeyError`
        if it is not live, `EndUserRefused`, `QuotaStoreUnavailable` (also with local slices only),
        `DatabaseUnavailable`; may be repeated."""
        live = self._live[request_id]
        async with live.changing:
            may_be_cut = live.asked.may_be_cut or not must_fit
            most = rules.largest(live.held, live.asked.most)
            hold = Hold(live.held, live.held, live.held if may_be_cut else most, may_be_cut)
            used = amounts_from(live.report["used"])
            try:
                epoch, answer = await self._in_one_epoch(
                    lambda: self._quota_store.rebind(request_id, limits, hold, used, must_fit=must_fit)
                )
            except KeyError:
                raise QuotaStoreUnavailable(
                    "the hold is gone: another gateway has settled the request"
                ) from None
            except TooManyEndUsers as refused:
                raise EndUserRefused(live.call.end_user, refused) from None
            if isinstance(answer, Granted):
                await self._write_top_up(
                    live, live.call, answer.covered, live.report, epoch, charged_to=answer.charged_to
                )
        return answer

    async def move(self, call: Call, first: Amounts, ahead: Amounts) -> Granted:
        """Raises the hold of a live request that has emitted nothing, and records durably that it is charged
        in `call.tier` from now on. Raises `BudgetDenied` (nothing has changed then), `KeyError`,
        `QuotaStoreUnavailable`, `DatabaseUnavailable`."""
        live = self._live[call.request_id]
        async with live.changing:
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
        most_credit_nanousd: int = 0,
    ) -> Settlement:
        """Settles until durable, even if the caller stops waiting. `counted`: weighted amounts for limits;
        None: `charged`. `credit_nanousd` is credited in a row of its own, up to `most_credit_nanousd` for its
        tenant and day; limits are not refunded."""
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
        return self._settlements.start(row, acknowledge, done, credit, most_credit_nanousd)

    async def keep_once(self) -> None:
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
            gateway_id=self._site.gateway_id,
            tier=call.tier,
            model=call.model,
            amounts=amounts,
            outcome=outcome,
            at=self._site.now(),
            detail=detail,
            charged_to=charged_to,
            price_version=price_version,
            labels=call.labels,
        )

    async def _raise_hold(
        self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts
    ) -> tuple[str, Granted | Denied]:
        try:
            return await self._in_one_epoch(lambda: self._quota_store.top_up(request_id, used, first, ahead))
        except KeyError:
            raise QuotaStoreUnavailable("the hold is gone: somebody else has settled the request") from None

    async def _write_top_up(
        self,
        live: _LiveHold,
        call: Call,
        covered: Amounts,
        detail: dict[str, Any],
        epoch: str,
        *,
        charged_to: Iterable[str] = (),
    ) -> None:
        """Records durably, as one more row, that `covered` is held for `call`, which is also charged to
        `charged_to`; nothing if nothing has changed. Call with `live.changing` held."""
        try:
            while (
                _any(newly := _beyond(covered, live.held))
                or live.call is not call
                or not live.charged_to.issuperset(charged_to)
            ):
                names = tuple(name for name in charged_to if name not in live.charged_to)
                row = replace(
                    self._row(call, "top_up", newly, detail, names, live.price_version),
                    number=live.top_ups + 1,
                )
                if await self._ledger.append(row, epoch=epoch):
                    live.held, live.top_ups = sum_of([live.held, newly]), live.top_ups + 1
                    live.call, live.charged_to = call, live.charged_to | set(names)
                else:
                    # An attempt that seemed to fail had been written.
                    await self._read_again(call.request_id, live)
        except EpochEnded as error:
            raise QuotaStoreUnavailable("its counters were rebuilt") from error

    async def _read_again(self, request_id: str, live: _LiveHold) -> None:
        for found in await self._ledger.open_requests(request_ids=[request_id]):
            live.held, live.top_ups = found.held, len(found.top_ups)
            live.charged_to = frozenset(found.charged_to)
            return
        raise QuotaStoreUnavailable("somebody else has settled the request")

    async def _release(self, request_id: str) -> None:
        try:
            with self._rebuilder.watching:
                await asyncio.shield(self._quota_store.settle(request_id, NOTHING))
        except QuotaStoreUnavailable:
            log.warning("the hold of %s could not be released; the keeper will", request_id)


def _use_so_far(engine: str, call: Call, metering: RequestMetering) -> RunningUse:
    use = use_of(metering.uses, call.choices, dispatched=True)
    return RunningUse(engine, use.input_tokens, use.cached_tokens, use.output_tokens, use.gpu_us)


def _beyond(amounts: Amounts, held: Amounts) -> Amounts:
    pairs = zip(as_list(amounts), as_list(held), strict=True)
    return Amounts(*(max(0, one - other) for one, other in pairs))


def _any(amounts: Amounts) -> bool:
    return any(as_list(amounts))
