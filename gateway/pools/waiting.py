"""What waits at this gateway: each request with what is ahead and for how long."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from gateway.flow.types import Ticket
from gateway.metrics.waits import KeptWaits, RecentWaits
from gateway.requests.queue_progress import outlook
from gateway.requests.run import Run

if TYPE_CHECKING:
    from gateway.background import Site
    from gateway.pools.pool import ModelPool

MAX_WAITING_SHOWN = 100
"""Of one gateway; the figures of each cost a look at its tenant's queue."""
MAX_KEPT_SHOWN = 50
"""Tenants and tiers with what their last requests were told and had."""


class WaitingNow(msgspec.Struct, frozen=True):
    request_id: str
    tenant_id: str
    model: str
    tier: str
    status: str
    """`waiting`, or `limited`: held back by its tenant's own limits."""
    elapsed_s: float
    input_tokens: int
    gateway_id: str = ""
    tokens_ahead: dict[str, int] | None = None
    """Cost tokens: own, others, higher_tier; None: not queued, or unknown."""
    left_p50_s: float | None = None
    """Until its turn."""
    left_p90_s: float | None = None
    due_in_s: float | None = None
    """Until its answer is due, as promised or as its client asks; negative: late."""
    gone_in_s: float | None = None
    """Until it leaves the queue without a turn."""


class WaitingHere(msgspec.Struct, frozen=True):
    """The oldest of one gateway, and the total."""

    data: list[WaitingNow]
    total: int
    kept: list[KeptWaits] = []


def waiting_here(
    site: Site,
    pools: Mapping[str, ModelPool],
    waits: RecentWaits,
    tenant_ids: Collection[str] | None,
    tier: str,
) -> WaitingHere:
    """`tenant_ids`: None: of all tenants. `tier`: empty: all."""
    waiting = [
        (run, pool)
        for pool in pools.values()
        for run in pool.lifecycle.runs_of(None)
        if run.status in ("waiting", "limited")
        and (tenant_ids is None or run.call.principal.tenant_id in tenant_ids)
        and tier in ("", run.call.tier.value)
    ]
    waiting.sort(key=lambda row: row[0].times.arrived_s)
    shown = list(itertools.islice(waiting, MAX_WAITING_SHOWN))
    lines = {pool.name: _by_tenant(pool) for _, pool in shown}
    return WaitingHere(
        [
            _waiting(site.gateway_id, run, pool, lines[pool.name][run.call.principal.tenant_id], site.clock())
            for run, pool in shown
        ],
        len(waiting),
        waits.latest(tenant_ids, tier, MAX_KEPT_SHOWN),
    )


def _by_tenant(pool: ModelPool) -> Mapping[str, list[Ticket]]:
    """A forecast looks at its own tenant's tickets only."""
    lines: defaultdict[str, list[Ticket]] = defaultdict(list)
    for ticket in pool.flow.queue.tickets():
        lines[ticket.entry.tenant_id].append(ticket)
    return lines


def _waiting(gateway_id: str, run: Run, pool: ModelPool, line: Iterable[Ticket], now_s: float) -> WaitingNow:
    call, targets = run.call, run.targets
    expected = pool.estimates.of_call(call, now_s) if run.in_line else None
    seen = outlook(run, expected, line, now_s)
    ticket = pool.flow.ticket(call.request_id)
    due_s = _earliest(targets.deadline_s, targets.own_deadline_s)
    gone_s = run.expires_s if ticket is None else pool.flow.queue.expires_s(ticket)
    left_s = seen.time_left_s or (None, None)
    return WaitingNow(
        call.request_id,
        call.principal.tenant_id,
        call.model,
        seen.tier,
        seen.status,
        round(seen.waited_s, 3),
        call.input_tokens,
        gateway_id,
        seen.tokens_ahead,
        left_s[0],
        left_s[1],
        None if due_s is None else due_s - now_s,
        None if gone_s is None else gone_s - now_s,
    )


def _earliest(*instants_s: float | None) -> float | None:
    return min((instant_s for instant_s in instants_s if instant_s is not None), default=None)
