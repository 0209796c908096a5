"""Admin routes: API keys."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath, FromQuery

from gateway.http.asgi import Request
from gateway.requests.schemas import KeyRotate
from gateway.routes.admin.common import (
    CHANGE,
    PAGED,
    PAGES,
    READ,
    WITHDRAW,
    WRITE,
    actor,
    changed,
    if_match,
    named,
    paged,
    tagged,
)
from gateway.routes.context import asked, asked_or_not, gateway_of, json_response
from tenants.admin.commands import KeyChange, KeyCreate, Withdrawal
from tenants.admin.cursor import DEFAULT_PAGE
from tenants.directory.records import ApiKey


@get(
    "/admin/v1/keys",
    opt=PAGED,
    summary="List keys, of one tenant or of all, in order of creation",
    description=f"`last_used_at`: within a minute or so; null: never. {PAGES}",
)
async def list_keys(
    request: Request,
    tenant: FromQuery[str | None] = None,
    cursor: FromQuery[str | None] = None,
    limit: FromQuery[int] = DEFAULT_PAGE,
) -> Response[bytes]:
    page = await gateway_of(request).deps.admin.page_keys(tenant, cursor=cursor, limit=limit)
    uses = await gateway_of(request).deps.admin.last_uses(page.rows)
    return await paged(request, page, lambda key: _shown(key, uses))


@get(
    "/admin/v1/keys/{key:str}",
    opt=READ,
    summary="Show a key, without its secret",
    description="`key` is its id or the visible prefix of its secret.",
)
async def show_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    shown = await gateway_of(request).deps.admin.show_key(key)
    uses = await gateway_of(request).deps.admin.last_uses([shown])
    return tagged(json_response(await named(request, _shown(shown, uses))), shown.as_json())


def _shown(key: ApiKey, uses: Mapping[str, datetime]) -> dict[str, Any]:
    return key.as_json() | {
        "status": key.status(datetime.now(UTC)),
        "last_used_at": None if key.key_id not in uses else uses[key.key_id].isoformat(),
    }


@post(
    "/admin/v1/keys",
    status_code=201,
    opt=WRITE | {"body": KeyCreate},
    summary="Create a key",
    description="The answer's `key` is the secret, shown this once.",
)
async def create_key(request: Request) -> Response[bytes]:
    wanted = await asked(request, KeyCreate)
    key, secret = await gateway_of(request).deps.admin.create_key(actor(request), wanted)
    shown = await named(request, key.as_json() | {"key": secret})
    return await changed(request, shown, 201, stored=key.as_json())


@patch(
    "/admin/v1/keys/{key:str}",
    opt=CHANGE | {"body": KeyChange},
    summary="Change a key",
    description="What is not named stays as it is. In force from the next request on; a new end also counts"
    " for what waits.",
)
async def change_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    wanted = await asked(request, KeyChange)
    edited = await gateway_of(request).deps.admin.update_key(
        actor(request), key, wanted, if_match=if_match(request)
    )
    return await changed(request, await named(request, edited.as_json()), stored=edited.as_json())


@post(
    "/admin/v1/keys/{key:str}/rotate",
    status_code=200,
    opt=CHANGE | {"body": KeyRotate, "body_is_optional": True},
    summary="Give a key a new secret",
    description="Older secrets work `grace_s` longer.",
)
async def rotate_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, KeyRotate)
    rotated, secret = await gateway_of(request).deps.admin.rotate_key(
        actor(request), key, wanted.grace_s, if_match=if_match(request)
    )
    shown = await named(request, rotated.as_json() | {"key": secret})
    return await changed(request, shown, stored=rotated.as_json())


@delete(
    "/admin/v1/keys/{key:str}",
    status_code=200,
    opt=WITHDRAW,
    summary="Revoke a key",
    description="For good. Waiting and running requests as of a suspended tenant.",
)
async def revoke_key(request: Request, key: FromPath[str]) -> Response[bytes]:
    wanted = await asked_or_not(request, Withdrawal)
    revoked = await gateway_of(request).deps.admin.revoke_key(
        actor(request), key, now=wanted.now, if_match=if_match(request)
    )
    return await changed(request, await named(request, revoked.as_json()), stored=revoked.as_json())


HANDLERS = [list_keys, show_key, create_key, change_key, rotate_key, revoke_key]
