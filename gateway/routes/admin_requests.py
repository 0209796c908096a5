"""Admin routes of any tenant's requests: list, show, cancel, move to another tier. Changes are audited."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, delete, get, post
from litestar.params import FromPath, FromQuery

from gateway import errors
from gateway.domain.tiers import tier_named
from gateway.explain.explanation import sat_out_for
from gateway.pools.request_actions import CANCEL, LIST, MOVE, OFFER, SHOW, STATUSES, RequestAction
from gateway.requests.schemas import TierChangeBody
from gateway.routes.admin_common import READ, WRITE, actor, asked, named
from gateway.routes.context import gateway_of, json_response
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
from tenants.types import Tier


@get(
    "/admin/v1/requests",
    opt=READ,
    summary="List requests that wait or run, of one tenant or of all",
    description=f"{LISTED} `tenant`: name or id; `tier`: {', '.join(Tier)}; `status`: {', '.join(STATUSES)}"
    " (limited: its tenant's own limits hold it back).",
)
async def list_any(
    request: Request[Any, Any, Any],
    tenant: FromQuery[str | None] = None,
    tier: FromQuery[str] = "",
    status: FromQuery[str] = "",
) -> Response[bytes]:
    for name, value, known in (("tier", tier, tuple(Tier)), ("status", status, STATUSES)):
        if value not in ("", *known):
            raise errors.bad_request(
                f"Invalid '{name}': '{value[:64]}' is not one of {', '.join(known)}.", name
            )
    of_tenant = ""
    if tenant is not None:
        of_tenant = (await gateway_of(request).deps.admin.show_tenant(tenant)).tenant.tenant_id
    shown = await listed_requests(request, RequestAction(LIST, of_tenant=of_tenant, tier=tier, status=status))
    return json_response(await named(request, shown))


@get(
    "/admin/v1/requests/{request_id:str}",
    opt=READ | ELSEWHERE,
    summary="Show any tenant's request, as its tenant sees it",
    description="And, of one that has ended, `sat_out_for`: the tenants (`tenant_id`, `tenant`) that had the"
    " turns which its sequences sat out, with the number of `steps`.",
)
async def show_any(request: Request[Any, Any, Any], request_id: FromPath[str]) -> Response[bytes]:
    ask = about(SHOW, request_id)
    shown = await shown_request(request, ask)
    if shown["status"] == "ended":
        settled = settled_of(await ended(request, ask))
        shown["sat_out_for"] = await sat_out_for(gateway_of(request).deps.admin, settled)
    return json_response(await named(request, shown))


@delete(
    "/admin/v1/requests/{request_id:str}",
    status_code=200,
    opt=WRITE,
    summary="Cancel any tenant's request",
)
async def cancel_any(request: Request[Any, Any, Any], request_id: FromPath[str]) -> Response[bytes]:
    ask = about(CANCEL, request_id)
    found = await found_running(request, about(SHOW, request_id))
    if found is not None:
        before = {"status": found.result()["status"]}
        await _note(
            request, "request.cancel", ask.request_id, found.tenant_id, before, {"status": "cancelled"}
        )
    return json_response(await named(request, await acted(request, ask)))


@post(
    "/admin/v1/requests/{request_id:str}/tier",
    status_code=200,
    opt=WRITE | MOVES,
    summary="Move any tenant's waiting request to another tier",
    description="It is charged what that tier costs; the tenant need not be allowed to ask for it.",
)
async def move_any(request: Request[Any, Any, Any], request_id: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, TierChangeBody)
    found = await live(request, about(SHOW, request_id))
    tier = tier_named(wanted.service_tier, Tier(found.default_tier))
    offered = (await live(request, about(OFFER, request_id, None, tier.value))).result()
    if wanted.preview:
        return json_response(offered)
    before, after = {"tier": offered["from"]["tier"]}, {"tier": tier.value}
    await _note(request, "request.move", offered["id"], found.tenant_id, before, after)
    moved = await live(request, about(MOVE, request_id, None, tier.value, "operator"))
    return json_response(moved.result())


async def _note(
    request: Request[Any, Any, Any],
    action: str,
    target: str,
    tenant_id: str,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    admin = gateway_of(request).deps.admin
    await admin.note(actor(request), action, target, tenant_id=tenant_id, before=before, after=after)


HANDLERS = [list_any, show_any, cancel_any, move_any]
