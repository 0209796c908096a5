"""Liveness, readiness and Prometheus metrics, without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from litestar import Request, Response, get

from gateway.budget.holds import Holds
from gateway.metrics.registry import CONTENT_TYPE
from gateway.routes.context import gateway_of, json_response
from tenants.errors import DatabaseUnavailable
from tenants.quota.store import QuotaStoreRecovering, QuotaStoreUnavailable

CHECK_TIMEOUT_S = 2.5
"""A little longer than Redis's own timeout, whose error says more."""
REBUILDING = "its counters are being rebuilt"
LOCAL = "local: it cannot be reached, a slice of each limit is given out without it"


@get("/healthz", summary="The process is up")
async def healthz() -> Response[bytes]:
    return json_response({"status": "ok"})


@get(
    "/readyz",
    summary="Everything that serving needs is there",
    description="503 with the checks that fail: database, quota store, engine. A quota store that is away"
    " does not fail while slices of the limits are given out without it; its check then begins with `local`.",
    opt={"answers": {503: "Something is missing."}, "plain": 503},
)
async def readyz(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    database, quota_store = await asyncio.gather(
        _check(gateway.deps.database.ping()), _check_quota_store(gateway.holds)
    )
    engine = "ok" if gateway.has_engine else "no engine is ready"
    checks = {"database": database, "quota_store": quota_store, "engine": engine}
    ready = all(answer in ("ok", LOCAL) for answer in checks.values())
    return json_response(
        {"status": "ready" if ready else "not ready", "checks": checks}, 200 if ready else 503
    )


@get("/metrics", opt={"media_type": "text/plain"}, summary="Prometheus metrics")
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    pools = list(gateway.pools.values())
    text = gateway.metrics.render(
        [sum(tier) for tier in zip(*(each.flow.queued_by_tier() for each in pools), strict=True)],
        sum(each.flow.num_in_flight for each in pools),
        gateway.holds.pending,
        gateway.holds.is_local,
        [(each.replica_id, each.is_up, each.snapshot) for pool in pools for each in pool.spec.upstreams],
    )
    return Response(text, media_type=CONTENT_TYPE)


async def _check_quota_store(holds: Holds) -> str:
    # While it is away only `gateway/budget/counter_rebuild.py` probes it, not every readiness check too.
    answer = "ok" if holds.is_local else await _check(holds.ping())
    if holds.is_local:
        return LOCAL
    return REBUILDING if answer == "ok" and holds.is_recovering else answer


async def _check(ping: Awaitable[None]) -> str:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await ping
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"
    except QuotaStoreRecovering:
        return REBUILDING
    except (DatabaseUnavailable, QuotaStoreUnavailable):
        return "cannot be reached"
    return "ok"


HANDLERS = [healthz, readyz, metrics]
