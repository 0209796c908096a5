"""One stream for all live regions that a browser shows, since it opens only six connections to a server.

Its query names them, `READER=ADDRESS` each. Each address is asked of this application as if it came alone,
with its own guard; `id:` of an event says whose it is."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any, cast

from litestar.types import ASGIApp, Message, Scope

from gateway.console.access import page
from gateway.console.live.hub import MOST_OF_PERSON
from gateway.console.live.stream import EVENTS, LIVE, READER, last_event, page_of, streamed
from gateway.console.return_path import START, safe
from gateway.http.asgi import Request
from tenants.storage.task_stop import stop

PATH = f"{START}/streams"
log = logging.getLogger("fairgate.gateway.console")
_NAME = re.compile(r"[a-z0-9]{1,32}")


def wanted_of(request: Request) -> dict[str, str]:
    """Addresses by reader."""
    asked = islice(request.query_params.multi_items(), MOST_OF_PERSON)
    return {name: address for name, address in asked if _NAME.fullmatch(name) and _is_region(address)}


def _is_region(address: str) -> bool:
    path = address.partition("?")[0]
    return safe(address) != START and path.endswith(LIVE) and path != PATH


# Without a session each region says so itself, with the way back to its own page.
@page(PATH, act=None)
async def shared_stream(request: Request) -> ASGIApp:
    return streamed(merged(request, wanted_of(request) if request.method == "GET" else {}))


async def merged(request: Request, wanted: dict[str, str]) -> AsyncGenerator[bytes, None]:
    # One place: a region renders its next event when the browser has taken the last one.
    ready: asyncio.Queue[bytes] = asyncio.Queue(1)
    tasks = [
        asyncio.create_task(_region(request, *each, ready), name="live region") for each in wanted.items()
    ]
    going = len(tasks)
    try:
        while going and (part := await ready.get()):
            yield part
            going -= part.partition(b"\n")[2].startswith(b"event: ")
    finally:
        await stop(tasks)


async def _region(request: Request, reader: str, address: str, ready: asyncio.Queue[bytes]) -> None:
    """Puts the region's events; nothing if it ends without a last one: the browser then opens all again."""
    mark = f"id: {reader}\n".encode()
    path, _, query = address.partition("?")
    status, is_stream, is_over = 500, False, False
    answered = asyncio.Event()

    async def send(message: Message) -> None:
        nonlocal status, is_stream, is_over
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            status, is_stream = message["status"], kind.startswith(EVENTS.encode())
        elif message["type"] == "http.response.body":
            if is_stream and (body := message["body"]):
                is_over = body.startswith(b"event: ")
                await ready.put(mark + body)
            if not message["more_body"]:
                answered.set()

    async def receive() -> Any:
        await answered.wait()
        return {"type": "http.disconnect"}

    own = {"path": path, "raw_path": path.encode(), "query_string": query.encode(), "state": {READER: reader}}
    try:
        await request.app.asgi_handler(cast(Scope, {**request.scope, **own}), receive, send)
    except Exception as error:
        log.warning("a live region of the console: %s: %s", type(error).__name__, error)
    if not is_stream and 400 <= status < 500:
        is_over = True
        await ready.put(
            mark + last_event("This part of the page cannot be shown.", page_of(address), "Refresh")
        )
    if not is_over:
        await ready.put(b"")


HANDLERS = [shared_stream]
