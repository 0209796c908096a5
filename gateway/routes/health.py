"""Is the process up, is it ready, and what do its metrics say? No key is asked for here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from litestar import Request, Response, get

from gateway.metrics import CONTENT_TYPE
from gateway.routes.context import gateway_of, json_response
from tenants.errors import DatabaseUnavailable
from tenants.quota.store import QuotaStoreUnavailable

CHECK_TIMEOUT_S = 2.0


@get("/healthz", summary="The process is up", tags=["operation"])
async def healthz() -> Response[bytes]:
    return json_response({"status": "ok"})


@get(
    "/readyz",
    summary="Everything that serving needs is there",
    description="503 with the checks that fail: database, quota store, engine.",
    tags=["operation"],
)
async def readyz(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    database, quota_store = await asyncio.gather(
        _check(gateway.deps.database.ping()), _check(gateway.deps.quota_store.ping())
    )
    if quota_store == "ok" and gateway.books.is_recovering:
        quota_store = "its counters are being rebuilt"
    engine = "ok" if gateway.dispatcher.has_engine else "no engine is ready"
    checks = {"database": database, "quota_store": quota_store, "engine": engine}
    ready = all(answer == "ok" for answer in checks.values())
    return json_response(
        {"status": "ready" if ready else "not ready", "checks": checks}, 200 if ready else 503
    )


@get("/metrics", summary="Prometheus metrics", tags=["operation"])
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    gateway = gateway_of(request)
    text = gateway.metrics.render(
        gateway.flow.queued_by_tier(),
        gateway.flow.num_in_flight,
        gateway.books.pending,
        [(each.replica_id, each.is_up, each.snapshot) for each in gateway.deps.upstreams],
    )
    return Response(text, media_type=CONTENT_TYPE)


async def _check(ping: Awaitable[None]) -> str:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await ping
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"
    except (DatabaseUnavailable, QuotaStoreUnavailable):
        return "cannot be reached"
    return "ok"


HANDLERS = [healthz, readyz, metrics]
