"""What did an earlier process leave unsettled, and what does it owe?

A reserve row without a settle row is a request whose gateway died. The engine knows what it emitted: it
outlives its gateway, and what it leaves when it ends is read by the next one. So at start:

1. ask every engine for its inventory, adopting what gateways that are gone left;
2. cancel what still runs for a request that nobody reads any more, and wait for its outcome;
3. settle every open reserve by the outcomes: charged is what was computed and emitted, never more than held;
4. a request that no engine knows is `lost`: it was never dispatched, or its engine died with it. Nothing is
   charged for it: nobody can say what it got, and the doubt is ours;
5. fill the counters from the ledger where they live in this process;
6. tell the engines that they may forget.

Settle rows are unique by request, so whatever is repeated or interrupted here charges once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from engine.messages import Outcome
from gateway.account.charge import charge, use_of_outcomes
from gateway.account.outcomes import RequestOutcome
from gateway.books import settle_open
from gateway.upstream.base import Upstream, UpstreamLost
from tenants.ledger import LedgerRow
from tenants.quota.store import Granted
from tenants.types import Amounts, Meter

if TYPE_CHECKING:
    from gateway.deps import GatewayDeps

ENGINE_WAIT_S = 120.0
"""How long a start waits for the engine that knows about open reserves; later ones are swept up."""
CANCEL_WAIT_S = 15.0
POLL_S = 0.05
PAGE = 10_000

log = logging.getLogger("fairgate.gateway.recovery")


@dataclass(slots=True)
class RecoveryReport:
    """What a start found and did."""

    open_reserves: int = 0
    recovered: int = 0
    """Settled by an engine's word."""
    lost: int = 0
    """Settled at nothing: no engine knew of them."""
    left_open: int = 0
    """No engine could be asked yet."""
    acknowledged: int = 0
    rebuilt_limits: int = 0


@dataclass(slots=True)
class _Known:
    """What one engine said."""

    upstream: Upstream
    outcomes: list[Outcome] = field(default_factory=list)


async def recover(deps: GatewayDeps) -> RecoveryReport:
    """Everything above, before the first request. Raises `DatabaseUnavailable`, `QuotaStoreUnavailable`."""
    report = RecoveryReport()
    while True:
        page = await deps.ledger.open_reserves(deps.gateway_id, most=PAGE)
        report.open_reserves += len(page)
        if page:
            await _wait_for_engines(deps.upstreams, ENGINE_WAIT_S)
        settled = await _settle(deps, page, frozenset(), report)
        if settled == 0 or len(page) < PAGE:
            break
    if deps.rebuild_counters:
        limits = deps.directory.limits()
        now = datetime.fromtimestamp(deps.wall_clock(), UTC)
        used = await deps.ledger.usage_by_limit(limits, now)
        await deps.quota_store.rebuild(used)
        report.rebuilt_limits = len(used)
    deps.recovery = report
    if report.open_reserves or report.acknowledged:
        log.info("recovery: %s", report)
    return report


async def sweep(deps: GatewayDeps, live: Container[str]) -> RecoveryReport:
    """The same while serving, for an engine that has come (back): whatever is in `live` (looked up when it
    matters: requests come and go meanwhile) is not touched."""
    report = RecoveryReport()
    page = await deps.ledger.open_reserves(deps.gateway_id, most=PAGE)
    orphans = [row for row in page if row.request_id not in live]
    report.open_reserves = len(orphans)
    await _settle(deps, orphans, live, report)
    return report


async def _settle(
    deps: GatewayDeps, reserves: list[LedgerRow], live: Container[str], report: RecoveryReport
) -> int:
    """Settles `reserves` and everything else that the engines hold outcomes of. Returns how many."""
    known, complete = await _ask(deps.upstreams, live)
    by_request: dict[str, list[Outcome]] = {}
    for each in known:
        for outcome in each.outcomes:
            by_request.setdefault(outcome.request_id, []).append(outcome)
    settled = 0
    for reserve in reserves:
        outcomes = by_request.get(reserve.request_id)
        if outcomes is None and not complete:
            report.left_open += 1
            continue
        await _settle_one(deps, reserve, outcomes or [], report)
        settled += 1
    # Outcomes of gateways that are gone for good: their reserve rows stand under another name.
    done = {reserve.request_id for reserve in reserves}
    for request_id, outcomes in by_request.items():
        if request_id in live or request_id in done:
            continue
        rows = {row.kind: row for row in await deps.ledger.find(request_id)}
        if "reserve" in rows and "settle" not in rows:
            await _settle_one(deps, rows["reserve"], outcomes, report)
            settled += 1
    for each in known:
        ids = [outcome.sequence_id for outcome in each.outcomes if outcome.request_id not in live]
        if ids:
            each.upstream.acknowledge(ids)
            report.acknowledged += len(ids)
    return settled


async def _settle_one(
    deps: GatewayDeps, reserve: LedgerRow, outcomes: list[Outcome], report: RecoveryReport
) -> None:
    detail = dict(reserve.detail)
    prompt_tokens = [int(tokens) for tokens in detail.get("prompt_tokens", [reserve.amounts.input_tokens])]
    use = use_of_outcomes(outcomes, prompt_tokens, max(1, int(detail.get("choices", 1))))
    cost = 0
    if outcomes:
        cost = deps.prices.cost_nanousd(
            reserve.model, reserve.tier, use.input_tokens, use.cached_tokens, use.output_tokens
        )
    charged = charge(use, cost, reserve.amounts) if outcomes else Amounts(requests=0)
    outcome = RequestOutcome.RECOVERED if outcomes else RequestOutcome.LOST
    held = reserve.amounts
    row_detail: dict[str, Any] = {
        "held": [held.input_tokens, held.output_tokens, held.cost_nanousd],
        "cached_tokens": use.cached_tokens,
        "finish": sorted({each.finish for each in outcomes}),
        "engine_counted": len(outcomes),
        "reserved_by": reserve.gateway_id,
    }
    was_held = await settle_open(
        deps.ledger,
        deps.quota_store,
        reserve,
        charged,
        outcome,
        datetime.fromtimestamp(deps.wall_clock(), UTC),
        row_detail,
        gateway_id=deps.gateway_id,
    )
    if not was_held and deps.recovery is not None:
        await _count_late(deps, reserve, charged)
    if outcomes:
        report.recovered += 1
    else:
        report.lost += 1


async def _count_late(deps: GatewayDeps, reserve: LedgerRow, charged: Amounts) -> None:
    """The counters were filled before this request was settled, and its hold is gone: count it now."""
    path = {reserve.tenant_id, reserve.project_id, reserve.key_id}
    limits = [
        limit
        for limit in deps.directory.limits(reserve.tenant_id)
        if limit.subject_id in path
        and limit.tier in (None, reserve.tier)
        and limit.meter is not Meter.CONCURRENCY
    ]
    held = await deps.quota_store.reserve(reserve.request_id, limits, charged, deps.config.lease_ttl_s)
    if isinstance(held, Granted):
        await deps.quota_store.settle(reserve.request_id, charged)
    else:
        log.error("request %s does not fit into limit %s any more", reserve.request_id, held.limit.limit_id)


async def _ask(upstreams: Iterable[Upstream], live: Container[str]) -> tuple[list[_Known], bool]:
    """Every engine's outcomes, once nothing of a request outside `live` runs any more; and whether every
    engine could be asked."""
    known: list[_Known] = []
    complete = True
    for upstream in upstreams:
        try:
            known.append(_Known(upstream, await _outcomes_of(upstream, live)))
        except UpstreamLost:
            complete = False
    return known, complete


async def _outcomes_of(upstream: Upstream, live: Container[str]) -> list[Outcome]:
    if not upstream.is_up:
        raise UpstreamLost("not connected")
    loop = asyncio.get_running_loop()
    until_s = loop.time() + CANCEL_WAIT_S
    while True:
        inventory = await upstream.collect()
        orphans = [each for each in inventory.running if each.request_id not in live]
        if not orphans:
            return inventory.outcomes
        if loop.time() > until_s:
            raise UpstreamLost("sequences that nobody reads do not end")
        for running in orphans:
            upstream.cancel(running.sequence_id, "cancelled")
        await asyncio.sleep(POLL_S)


async def _wait_for_engines(upstreams: Iterable[Upstream], timeout_s: float) -> None:
    await asyncio.gather(*(upstream.wait_until_up(timeout_s) for upstream in upstreams))
