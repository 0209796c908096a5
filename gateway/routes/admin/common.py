"""Shared by all admin routes: actor, conditions, pages, entity tags, the answer to a change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from litestar import Response

from gateway import errors
from gateway.http.accesses import actor_of
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import admin_of, gateway_of, json_response
from gateway.routes.openapi_fields import between, form
from tenants.admin.audit import Actor
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.admin.transaction import ANY, IfMatch, etag_of

T = TypeVar("T")

MAX_IF_MATCH = 1_000
_TAG = re.compile(r'(W/)?"([!#-~]*)"')
_IF_MATCH = re.compile(rf"\*|{_TAG.pattern}( *, *{_TAG.pattern})*")

READ = {"scope": "admin:read"}
WRITE = {"scope": "admin:write"}
CHANGE: dict[str, Any] = WRITE | {
    "headers": {
        "If-Match": (
            "Entity tags (`ETag`) of which the object must have one, or `*`: it must exist. Compared in the"
            " transaction of the change.",
            {"type": "string"} | form(_IF_MATCH, MAX_IF_MATCH),
        )
    },
    "answers": {
        412: "`If-Match` does not hold, and nothing was changed: `error.current` is the object as it is now"
        " (null: there is none), `ETag` its tag."
    },
}
"""For changes of an object that may exist."""
PAGED: dict[str, Any] = READ | {"parameters": {"limit": between(1, MAX_PAGE)}}


async def changed(
    request: Request, shown: Mapping[str, Any], status: int = 200, *, stored: Mapping[str, Any] | None = None
) -> Response[bytes]:
    """Answers once it is in force everywhere, or names late gateways. `stored`: for the tag; None: gone."""
    late = await gateway_of(request).directory.changed()
    answer = json_response({**shown, "not_in_force_on": late} if late else shown, status)
    return answer if stored is None else tagged(answer, stored)


def tagged(answer: Response[bytes], stored: Mapping[str, Any]) -> Response[bytes]:
    answer.headers["etag"] = f'"{etag_of(stored)}"'
    return answer


def if_match(request: Request) -> IfMatch:
    """The request's condition. Weak tags match nothing. Raises `ApiError`."""
    text = headers_of(request.scope).get("if-match")
    if text is None:
        return None
    if len(text) > MAX_IF_MATCH or _IF_MATCH.fullmatch(text.strip()) is None:
        raise errors.bad_header(
            "If-Match",
            text,
            'Give the ETag of an answer as it is, in its quotes, such as "0123456789abcdef", or *.',
        )
    return ANY if text.strip() == "*" else frozenset(tag for weak, tag in _TAG.findall(text) if not weak)


async def named(request: Request, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Adds names to ids."""
    return (await admin_of(request).with_names([shown]))[0]


async def paged(
    request: Request, page: Page[T], as_json: Callable[[T], Mapping[str, Any]]
) -> Response[bytes]:
    data = await admin_of(request).with_names(as_json(row) for row in page.rows)
    return json_response({"object": "list", "data": data, "next_cursor": page.next_cursor})


async def listed(request: Request, items: Iterable[Mapping[str, Any]]) -> Response[bytes]:
    data = await admin_of(request).with_names(items)
    return json_response({"object": "list", "data": data})


def actor(request: Request) -> Actor:
    return actor_of(request.scope, gateway_of(request))
