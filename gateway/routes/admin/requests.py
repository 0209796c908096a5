"""Admin routes of any tenant's requests: list, show, cancel, move to another tier. Changes are audited."""

from __future__ import annotations

from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery
from msgspec.structs import replace

from gateway import errors
from gateway.domain.tiers import tier_named
from gateway.explain.explanation import sat_out_for
from gateway.http.asgi import Request
from gateway.pools.request_actions import CANCEL, LIST, MOVE, OFFER, SHOW, STATUSES, RequestAction
from gateway.requests.schemas import TierChangeBody
from gateway.routes.admin.common import READ, WRITE, actor, named
from gateway.routes.context import admin_of, asked, json_response
from gateway.routes.openapi_fields import one_of
from gateway.routes.requests import (
    ELSEWHERE,
    LISTED,
    MOVES,
    about,
    acted,
    ended,
    found_running,
    listed_requests,
    live,
    settled_of,
    shown_request,
)
from tenants.admin.audit import Actor
from tenants.types import Tier


@get(
    "/admin/v1/requests",
    opt=READ | {"parameters": {"model": {}, "tier": one_of(["", *Tier]), "status": one_of(["", *STATUSES])}},
    summary="List requests that wait or run, of one tenant or of all",
    description=f"{LISTED} `tenant`: name or id; `project`: id, or with `tenant` a name; `key`: id or visible"
    f" prefix; `model`: as asked for; `tier`: {', '.join(Tier)}; `status`: {', '.join(STATUSES)} (limited:"
    " its tenant's own limits hold it back). Those that have ended: `GET /admin/v1/requests/ended`.",
)
async def list_any(
    request: Request,
    tenant: FromQuery[str | None] = None,
    project: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str] = "",
    tier: FromQuery[str] = "",
    status: FromQuery[str] = "",
) -> Response[bytes]:
    for name, value, known in (("tier", tier, tuple(Tier)), ("status", status, STATUSES)):
        if value not in ("", *known):
            raise errors.bad_request(
                f"Invalid '{name}': '{value[:64]}' is not one of {', '.join(known)}.", name
            )
    admin = admin_of(request)
    ask = RequestAction(
        LIST,
        of_tenant="" if tenant is None else (await admin.tenants.show(tenant)).tenant.tenant_id,
        project="" if project is None else (await admin.projects.show(project, tenant)).project_id,
        key="" if key is None else (await admin.keys.show(key)).key_id,
        model=model,
        tier=tier,
        status=status,
    )
    shown = await listed_requests(request, ask)
    return json_response(await named(request, shown))


@get(
    "/admin/v1/requests/{request_id:str}",
    opt=READ | ELSEWHERE,
    summary="Show any tenant's request, as its tenant sees it",
    description="And, of one that has ended, `sat_out_for`: the tenants (`tenant_id`, `tenant`) that had the"
    " turns which its sequences sat out, with the number of `steps`.",
)
async def show_any(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    ask = about(SHOW, request_id)
    shown = await shown_request(request, ask)
    if shown["status"] == "ended":
        settled = settled_of(await ended(request, ask))
        shown["sat_out_for"] = await sat_out_for(admin_of(request), settled)
    return json_response(await named(request, shown))


@delete(
    "/admin/v1/requests/{request_id:str}", status_code=200, opt=WRITE, summary="Cancel any tenant's request"
)
async def cancel_any(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    shown = await cancelled_by(actor(request), request, about(CANCEL, request_id))
    return json_response(await named(request, shown))


@post(
    "/admin/v1/requests/{request_id:str}/tier",
    status_code=200,
    opt=WRITE | MOVES,
    summary="Move any tenant's waiting request to another tier",
    description="It is charged what that tier costs; the tenant need not be allowed to ask for it.",
)
async def move_any(request: Request, request_id: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, TierChangeBody)
    shown = await live(request, about(SHOW, request_id))
    tier = tier_named(wanted.service_tier, Tier(shown.default_tier))
    if wanted.preview:
        return json_response((await live(request, about(OFFER, request_id, None, tier.value))).result())
    ask = about(MOVE, request_id, None, tier.value, "operator")
    return json_response(await moved_by(actor(request), request, ask, shown.tenant_id))


async def cancelled_by(by: Actor, request: Request, ask: RequestAction) -> dict[str, Any]:
    """The result of a `cancel`, audited unless the request had ended. Raises `ApiError`."""
    running = await found_running(request, replace(ask, act=SHOW))
    if running is not None:
        before, after = {"status": running.result()["status"]}, {"status": "cancelled"}
        admin = admin_of(request)
        await admin.transactions.note(
            by, "request.cancel", ask.request_id, tenant_id=running.tenant_id, before=before, after=after
        )
    return await acted(request, ask)


async def moved_by(by: Actor, request: Request, ask: RequestAction, tenant_id: str) -> dict[str, Any]:
    """The result of a `move`, audited. Raises `ApiError`."""
    offered = (await live(request, replace(ask, act=OFFER))).result()
    before, after = {"tier": offered["from"]["tier"]}, {"tier": ask.tier}
    note = admin_of(request).transactions.note
    await note(by, "request.move", offered["id"], tenant_id=tenant_id, before=before, after=after)
    moved: dict[str, Any] = (await live(request, ask)).result()
    return moved


HANDLERS = [list_any, show_any, cancel_any, move_any]
