"""Liveness, readiness, Prometheus metrics and the runbooks of alerts, without a key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from litestar import Response, get
from litestar.params import FromPath

from gateway.budget.holds import Holds
from gateway.gateway import Gateway
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of, is_of_sibling, json_response
from gateway.routes.views.workers_view import READY, merged_readiness, readiness
from gateway.workers.metrics_sum import MergedRegistry
from tenants.errors import DatabaseUnavailable, NotWritten
from tenants.outbox.runbooks import runbook
from tenants.quota.store import QuotaStoreRecovering, QuotaStoreUnavailable

CHECK_TIMEOUT_S = 2.5
"""A little longer than Redis's own timeout, whose error says more."""
REBUILDING = "its counters are being rebuilt"
SUPERSEDED = "superseded: another process runs under this gateway's id; give each its own data directory"
LOCAL = "local: it cannot be reached, a slice of each limit is given out without it"
BROKEN = "broken: Redis refuses what this gateway says, and is asked again; the log has the reason"
BROKEN_LOCAL = "local: Redis refuses what this gateway says, which decides about its own requests"


@get(["/healthz", "/health"], summary="The process is up")
async def healthz() -> Response[bytes]:
    return json_response({"status": "ok"})


@get(
    "/readyz",
    summary="Everything that serving needs is there",
    description="503 with the checks that fail: database (it answers, and stored what was last written),"
    " quota store, engine (also while another process runs under this gateway's id), and where gateways share"
    " queues `shared_queue`. A quota store that is away does not fail while slices of the limits are given"
    " out without it, nor a broken queue while this gateway decides alone; the check then begins with"
    " `local`. `missing`: engines that run elsewhere and do not serve here, by name; while others serve, that"
    " fails nothing. `workers`, where several serve one port: how many answer (`up`) of how many (`of`); a"
    " check then fails where it fails at any of them.",
    opt={"answers": {503: "Something is missing."}, "plain": 503},
)
async def readyz(request: Request) -> Response[bytes]:
    shown = await readiness_of(gateway_of(request), own=is_of_sibling(request))
    return json_response(shown, 200 if shown["status"] == READY else 503)


async def readiness_of(gateway: Gateway, *, own: bool = False) -> dict[str, Any]:
    """Of all workers of the port; `own`: of this process alone."""
    workers = gateway.deps.workers
    if own or workers is None:
        return await _readiness_here(gateway)
    here, others = await asyncio.gather(_readiness_here(gateway), workers.siblings.ask("/readyz"))
    said = {number: answer.json() for number, answer in others.items()}
    answers = {number: each for number, each in said.items() if "checks" in each}
    return merged_readiness(answers | {workers.seat.number: here}, workers.seat.count)


async def _readiness_here(gateway: Gateway) -> dict[str, Any]:
    database, quota_store = await asyncio.gather(
        _check(gateway.deps.database.ping()), _check_quota_store(gateway.holds)
    )
    engine = _check_engine(gateway)
    checks = {"database": database, "quota_store": quota_store, "engine": engine}
    if (sharing := gateway.deps.sharing) is not None and sharing.queues:
        broken = BROKEN_LOCAL if sharing.may_go_alone else BROKEN
        checks["shared_queue"] = broken if sharing.is_broken else "ok"
    return readiness(checks, [] if gateway.deps.members is None else gateway.deps.members.missing())


@get(
    "/metrics",
    opt={"media_types": ("text/plain",)},
    summary="Prometheus metrics",
    description="In Prometheus's text format, or in OpenMetrics where the Accept header asks for it. Where"
    " several workers serve one port, of all of them; counters go on with what ended workers counted.",
)
async def metrics(request: Request) -> Response[bytes]:
    gateway = gateway_of(request)
    registry, workers = gateway.metrics.registry, gateway.deps.workers
    if workers is not None and is_of_sibling(request):
        return Response(workers.metrics.own(registry), media_type="application/x-msgpack")
    whole = None if workers is None else MergedRegistry(await workers.metrics.all(registry))
    text, content_type = gateway.metrics.render(headers_of(request.scope).get("accept", ""), whole)
    return Response(text, headers={"content-type": content_type})


@get("/runbooks/{subject:str}", include_in_schema=False)
async def runbook_page(request: Request, subject: FromPath[str]) -> Response[str]:
    """As plain text to browsers, of which some would save Markdown as a file. Links have `.md` or not."""
    is_browser = "text/html" in headers_of(request.scope).get("accept", "")
    kind = "text/plain" if is_browser else "text/markdown"
    return Response(runbook(subject.removesuffix(".md")), headers={"vary": "accept"}, media_type=kind)


def _check_engine(gateway: Gateway) -> str:
    # Also where other servers do the work: two processes with one id would settle each other's requests.
    if any(upstream.describe().get("refusal_code") == "superseded" for upstream in gateway.deps.upstreams):
        return SUPERSEDED
    if gateway.pools.has_engine:
        return "ok"
    missing = "" if gateway.deps.members is None else ", ".join(gateway.deps.members.missing())
    return f"nothing that runs a model is ready{f': missing are {missing}' if missing else ''}"


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
    except NotWritten as error:
        return f"cannot be written: {error.reason}"
    except (DatabaseUnavailable, QuotaStoreUnavailable):
        return "cannot be reached"
    return "ok"


HANDLERS = [healthz, readyz, metrics, runbook_page]
