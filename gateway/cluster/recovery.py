"""Settles the requests that a dead gateway left open.

A reserve row without a settle row and without a live owner: its gateway died. The engine outlives its
gateways, cancels what is not read, and keeps every outcome until its settlement is acknowledged. So

- a gateway that starts settles what its earlier life left (`recover`), and again whenever an engine comes
  (back) that could not be asked before (`sweep`);
- a live gateway settles what a dead one left (`adopt`), if it reaches every engine that the dead one could
  have used, and none of them is still connected to it. One that has left the pool is not waited for for ever.

Each time: ask every engine, cancel what runs without an owner and wait for its outcome, compute the charge
(`crash_charge.py`), write the settle row, charge the counters by the row that is in the ledger, and let the
engines forget. Settle rows are unique by request and counters charge a request only while it holds something,
so repeated, interrupted or concurrent recoveries charge once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.messages import Inventory, SequenceOutcome
from gateway.cluster.crash_charge import reckon, tier_of
from gateway.deps import RecoveryReport
from gateway.upstream.base import Upstream, UpstreamLost, engine_life
from tenants.directory.gateways import GatewaySeen
from tenants.errors import UnknownPrice
from tenants.ledger.progress import Progress
from tenants.ledger.rows import OpenRequest

if TYPE_CHECKING:
    from gateway.deps import GatewayDeps
    from gateway.pools.pool import PoolSpec

ENGINE_WAIT_S = 120.0
"""Longest wait at start for the engine that knows about open requests; later ones are swept."""
MEMBER_WAIT_S = 3.0
"""The same where engines run elsewhere, and may not come at all."""
LEFT_S = 120.0
"""A gateway that is silent for so long and used engines that are no members any more is settled without."""
CANCEL_WAIT_S = 15.0
POLL_S = 0.05
PAGE = 10_000

log = logging.getLogger("fairgate.gateway.recovery")


@dataclass(slots=True)
class _Inventories:
    inventories: list[tuple[Upstream, Inventory]] = field(default_factory=list)
    unasked: list[Upstream] = field(default_factory=list)
    """Unreachable, or with more outcomes to fetch."""
    is_complete: bool = True
    """False: who is a member is not known yet."""

    def may_know(self, model: str, pools: Iterable[PoolSpec]) -> bool:
        """Whether an unasked engine may know of `model`; a name of no pool (an alias) may mean any."""
        if not self.is_complete:
            return True
        if not self.unasked:
            return False
        named = [pool for pool in pools if pool.name == model]
        return not named or any(upstream in self.unasked for pool in named for upstream in pool.upstreams)

    def outcomes(self) -> dict[str, list[SequenceOutcome]]:
        by_request: dict[str, list[SequenceOutcome]] = {}
        for _, inventory in self.inventories:
            for outcome in inventory.outcomes:
                by_request.setdefault(outcome.request_id, []).append(outcome)
        return by_request

    def lives(self) -> Set[str]:
        return {engine_life(upstream.ready) for upstream, _ in self.inventories} - {""}

    def is_connected(self, gateway_id: str) -> bool:
        return any(gateway_id in inventory.gateways for _, inventory in self.inventories)


async def recover(deps: GatewayDeps, earlier: Progress) -> RecoveryReport:
    """Settles what this gateway's earlier life left, before the first request; `earlier` is that life's last
    record. Raises `DatabaseUnavailable`, `QuotaStoreUnavailable`."""
    report = RecoveryReport()
    while True:
        page = await _own_open_requests(deps)
        report.open_reserves += len(page)
        if page:
            models = {open_request.reserve.model for open_request in page}
            wait_s = ENGINE_WAIT_S if deps.members is None else MEMBER_WAIT_S
            await _wait_for_engines(_that_may_know(deps, models), wait_s)
        settled = await _settle(deps, page, frozenset(), report, earlier)
        if settled == 0 or len(page) < PAGE:
            break
    if report.open_reserves or report.acknowledged:
        log.info("recovery: %s", report)
    return report


async def sweep(deps: GatewayDeps, live: Container[str], earlier: Progress | None) -> RecoveryReport:
    """`recover` while serving: leaves requests in `live` alone. `earlier` None: nothing old is open."""
    report = RecoveryReport()
    page = await _own_open_requests(deps)
    orphans = [open_request for open_request in page if open_request.request_id not in live]
    report.open_reserves = len(orphans)
    await _settle(deps, orphans, live, report, earlier)
    return report


async def adopt(deps: GatewayDeps, dead: GatewaySeen, stale_s: float, live: Container[str]) -> RecoveryReport:
    """Settles what a dead gateway left, and forgets it once nothing is open. Raises as `recover`."""
    report = RecoveryReport()
    if not _may_adopt(deps, dead):
        log.warning(
            "gateway %s is gone; it used engines that are not known here: it is left", dead.gateway_id
        )
        return report
    page = await deps.ledger.open_requests(dead.gateway_id, most=PAGE)
    # After the page was read: had it come back and reserved one of these, its heartbeat would be seen here.
    if not await deps.registry.claim(dead.gateway_id, deps.gateway_id, stale_s):
        return report
    report.open_reserves = len(page)
    progress = await deps.progress.read(dead.gateway_id)
    engines = await _ask(deps, live, adopt=True)
    if engines.is_connected(dead.gateway_id):
        report.left_open = len(page)
        return report
    await _settle_by(deps, page, live, engines, report, progress)
    if len(page) < PAGE and not report.left_open:
        await deps.registry.forget(dead.gateway_id, stale_s)
    log.info("gateway %s is gone, its requests are settled: %s", dead.gateway_id, report)
    return report


async def _own_open_requests(deps: GatewayDeps) -> list[OpenRequest]:
    page = await deps.ledger.open_requests(deps.gateway_id, most=PAGE)
    # After the page was read: none of these was reserved by another process under this gateway's id.
    return page if await deps.registry.is_held_by(deps.gateway_id, deps.instance) else []


async def _settle(
    deps: GatewayDeps,
    page: list[OpenRequest],
    live: Container[str],
    report: RecoveryReport,
    progress: Progress | None,
) -> int:
    """Settles `page` and everything else of which the engines hold outcomes. Returns the number settled."""
    return await _settle_by(deps, page, live, await _ask(deps, live), report, progress)


async def _settle_by(
    deps: GatewayDeps,
    page: list[OpenRequest],
    live: Container[str],
    engines: _Inventories,
    report: RecoveryReport,
    progress: Progress | None,
) -> int:
    by_request, lives = engines.outcomes(), engines.lives()
    settled = 0
    for open_request in page:
        outcomes = by_request.get(open_request.request_id, [])
        if not outcomes and engines.may_know(open_request.reserve.model, deps.pools):
            report.left_open += 1
            continue
        settled += await _settle_one(deps, open_request, outcomes, report, progress, lives)
    # Adopted before, and not settled then: their reserve rows have another gateway's id.
    done = {open_request.request_id for open_request in page}
    for request_id, outcomes in by_request.items():
        if request_id in live or request_id in done:
            continue
        for open_request in await deps.ledger.open_requests(request_ids=[request_id]):
            settled += await _settle_one(deps, open_request, outcomes, report)
    for upstream, inventory in engines.inventories:
        ids = [outcome.sequence_id for outcome in inventory.outcomes if outcome.request_id not in live]
        if ids:
            upstream.acknowledge(ids)
            report.acknowledged += len(ids)
    return settled


async def _settle_one(
    deps: GatewayDeps,
    open_request: OpenRequest,
    outcomes: list[SequenceOutcome],
    report: RecoveryReport,
    progress: Progress | None = None,
    lives: Set[str] = frozenset(),
) -> bool:
    reserve = open_request.reserve
    try:
        prices = await deps.directory.prices_at(reserve.price_version)
        charge = reckon(open_request, outcomes, prices, progress, lives)
    except UnknownPrice as error:
        # The price was deleted. Better an open request, named in the log, than a wrong charge.
        log.error("request %s stays open: %s", open_request.request_id, error)
        report.left_open += 1
        return False
    counted = charge.counted
    row = replace(
        reserve,
        kind="settle",
        gateway_id=deps.gateway_id,
        tier=tier_of(open_request),
        amounts=charge.charged,
        outcome=charge.outcome.value,
        at=datetime.fromtimestamp(deps.wall_clock(), UTC),
        detail=charge.detail,
        charged_to=(),
        counted_input=counted.input_tokens,
        counted_output=counted.output_tokens,
        counted_cost=None if counted.cost_nanousd == charge.charged.cost_nanousd else counted.cost_nanousd,
    )
    counts = await deps.ledger.settle(row)
    await deps.quota_store.settle(row.request_id, counts.counted)
    if outcomes:
        report.recovered += 1
    else:
        report.lost += 1
    return True


def _may_adopt(deps: GatewayDeps, dead: GatewaySeen) -> bool:
    """Whether its engines can be asked. Rows from before engines had names have addresses."""
    known = deps.engine_names() | {upstream.address for upstream in deps.upstreams}
    others = dead.engines - known
    if not others:
        return True
    # An engine that only the dead one reaches knows more, and waits for it.
    is_own = any(name.endswith(f"@{dead.gateway_id}") or "://" in name for name in others)
    shares_pool = deps.members is not None and bool(dead.engines & known)
    return shares_pool and not is_own and dead.silent_s >= LEFT_S


async def _ask(deps: GatewayDeps, live: Container[str], *, adopt: bool = False) -> _Inventories:
    """All outcomes, once nothing outside `live` runs. Only the gateway entitled to settle adopts."""
    engines = _Inventories(is_complete=deps.members is None or deps.members.is_complete)
    for upstream in deps.upstreams:
        try:
            inventory = await _inventory_of(upstream, live, adopt)
        except UpstreamLost:
            engines.unasked.append(upstream)
            continue
        engines.inventories.append((upstream, inventory))
        if inventory.is_partial:
            engines.unasked.append(upstream)
    return engines


async def _inventory_of(upstream: Upstream, live: Container[str], adopt: bool) -> Inventory:
    if not upstream.is_up:
        raise UpstreamLost("not connected")
    loop = asyncio.get_running_loop()
    until_s = loop.time() + CANCEL_WAIT_S
    while True:
        inventory = await upstream.collect(adopt=adopt)
        orphans = [sequence for sequence in inventory.running if sequence.request_id not in live]
        if not orphans:
            return inventory
        if loop.time() > until_s:
            raise UpstreamLost("orphaned sequences do not end")
        for running in orphans:
            upstream.cancel(running.sequence_id, "cancelled")
        await asyncio.sleep(POLL_S)


def _that_may_know(deps: GatewayDeps, models: Set[str]) -> list[Upstream]:
    pools = {pool.name: pool for pool in deps.pools}
    if not models <= pools.keys():
        return list(deps.upstreams)  # an alias may mean any
    return [
        upstream for upstream in deps.upstreams if any(upstream in pools[name].upstreams for name in models)
    ]


async def _wait_for_engines(upstreams: Iterable[Upstream], timeout_s: float) -> None:
    await asyncio.gather(*(upstream.wait_until_up(timeout_s) for upstream in upstreams))
