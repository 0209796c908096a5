"""Admin routes: the ledger's rows, whether it and the counters agree, and corrections of what is in doubt."""

from __future__ import annotations

from litestar import Response, get, post
from litestar.params import FromPath

from gateway import errors
from gateway.http.asgi import Request
from gateway.pools.request_actions import SHOW, owner
from gateway.routes.admin.common import READ, WRITE, actor, named
from gateway.routes.context import asked, gateway_of, json_response
from gateway.routes.requests import about, rows_of
from tenants.admin.commands import LedgerAdjust
from tenants.ledger.verify import verify_ledger


@get(
    "/admin/v1/ledger/{request_id:str}",
    opt=READ,
    summary="Show every ledger row of a request",
    description="What was reserved, topped up and charged, and on whose word. The id is the request's, or"
    " that of its completion.",
)
async def ledger_show(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    ask = about(SHOW, request_id)
    rows = await rows_of(request, ask)
    if not rows:
        raise errors.request_not_found(ask.request_id, of_any_tenant=True)
    shown = {"request_id": ask.request_id, "rows": [row.as_json() for row in rows]}
    return json_response(await named(request, shown | owner(rows[0])))


@post("/admin/v1/ledger/verify", status_code=200, opt=READ, summary="Do ledger and counters agree?")
async def ledger_verify(request: Request) -> Response[bytes]:
    gateway = gateway_of(request)
    report = await verify_ledger(
        gateway.deps.database,
        gateway.deps.quota_store,
        running=lambda: gateway.holds.live,
        gateway_id=gateway.deps.gateway_id,
        stale_s=gateway.deps.config.gateway_stale_s,
    )
    return json_response(report.as_json())


@post(
    "/admin/v1/ledger/adjust",
    status_code=200,
    opt=WRITE | {"body": LedgerAdjust},
    summary="Give back what limits count of a request in doubt",
    description="Where gateway and engine died together, limits count all that a request held, and the bill"
    " what was last reported (`in_doubt` in `POST /admin/v1/ledger/verify`). This gives the difference back"
    " to the limits, in every gateway; the bill stays. Repeating it changes nothing (`is_new` is false).",
)
async def ledger_adjust(request: Request) -> Response[bytes]:
    deps = gateway_of(request).deps
    wanted = await asked(request, LedgerAdjust)
    adjustment = await deps.admin.ledger.adjust(actor(request), wanted, deps.quota_store)
    return json_response(adjustment.as_json())


HANDLERS = [ledger_show, ledger_verify, ledger_adjust]
