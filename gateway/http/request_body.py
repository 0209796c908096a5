"""Reads a request's body within a size and a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar import Request
from litestar.types import Scope

from gateway import errors
from gateway.asyncio_helpers import within
from gateway.http.asgi import headers_of

FORM_TYPE = "application/x-www-form-urlencoded"


def declared_length(scope: Scope) -> int | None:
    """None: missing or invalid."""
    value = headers_of(scope).get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


def content_type(scope: Scope) -> str:
    """Without parameters."""
    return headers_of(scope).get("content-type", "").partition(";")[0].strip().lower()


async def read_json_body(
    request: Request[Any, Any, Any],
    max_body_bytes: int,
    timeout_s: float,
    grow: Callable[[int], None] | None = None,
) -> bytes:
    """The whole body, if it is JSON and not larger than allowed; by its declared length it is refused before
    any of it is read. `grow` gets the size before so much is kept; what it raises ends the reading. Raises
    `ApiError` (413, 415, 408, 400)."""
    declared = declared_length(request.scope)
    if declared is not None and declared > max_body_bytes:
        raise errors.body_too_large(max_body_bytes=max_body_bytes)
    media_type = content_type(request.scope)
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise errors.wrong_content_type(media_type)
    body = await _read_within(request, declared, max_body_bytes, timeout_s, grow)
    if not body:
        raise errors.broken_json(message="it is empty.")
    return body


async def read_form_body(request: Request[Any, Any, Any], max_body_bytes: int, timeout_s: float) -> bytes:
    """An HTML form without files. Raises `ApiError` (413, 415, 408, 400)."""
    declared = declared_length(request.scope)
    if declared is not None and declared > max_body_bytes:
        raise errors.body_too_large(max_body_bytes=max_body_bytes)
    media_type = content_type(request.scope)
    if media_type != FORM_TYPE:
        raise errors.wrong_content_type(media_type, FORM_TYPE)
    return await _read_within(request, declared, max_body_bytes, timeout_s, None)


async def _read_within(
    request: Request[Any, Any, Any],
    declared: int | None,
    max_body_bytes: int,
    timeout_s: float,
    grow: Callable[[int], None] | None,
) -> bytes:
    encoding = headers_of(request.scope).get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise errors.wrong_content_encoding(encoding=encoding)
    try:
        if grow is not None and declared is not None:
            grow(declared)
        return await within(timeout_s, _read(request, max_body_bytes, grow))
    except TimeoutError:
        raise errors.body_too_slow(timeout_s=timeout_s) from None


async def _read(
    request: Request[Any, Any, Any], max_body_bytes: int, grow: Callable[[int], None] | None
) -> bytes:
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
            raise errors.body_too_large(max_body_bytes=max_body_bytes)
        if grow is not None:
            grow(size)
        chunks.append(chunk)
        more = bool(message.get("more_body", False))
    return b"".join(chunks)
