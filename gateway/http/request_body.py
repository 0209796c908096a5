"""Reads a request's body within a size and a time."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.types import Scope

from gateway import errors
from gateway.asyncio_helpers import within
from gateway.http.asgi import headers_of


def declared_length(scope: Scope) -> int | None:
    """Content-Length, where it is valid."""
    value = headers_of(scope).get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


def content_type(scope: Scope) -> str:
    """The media type without its parameters."""
    return headers_of(scope).get("content-type", "").partition(";")[0].strip().lower()


async def read_json_body(request: Request[Any, Any, Any], max_body_bytes: int, timeout_s: float) -> bytes:
    """The whole body, if its type is JSON and it is not larger than allowed.

    A declared length is trusted: a body that is too large is refused before any of it is read. Raises
    `ApiError` (413, 415, 408, 400).
    """
    declared = declared_length(request.scope)
    if declared is not None and declared > max_body_bytes:
        raise errors.body_too_large(max_body_bytes)
    media_type = content_type(request.scope)
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise errors.wrong_content_type(media_type)
    try:
        body = await within(timeout_s, _read(request, max_body_bytes))
    except TimeoutError:
        raise errors.body_too_slow(timeout_s) from None
    if not body:
        raise errors.broken_json("it is empty.")
    return body


async def _read(request: Request[Any, Any, Any], max_body_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise errors.bad_request("The client left before its request was complete.")
        if message["type"] != "http.request":
            continue
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_body_bytes:
            raise errors.body_too_large(max_body_bytes)
        chunks.append(chunk)
        more = bool(message.get("more_body", False))
    return b"".join(chunks)
