"""The server-sent event stream of a page's live region.

It ends with its session (which it does not keep alive), when the gateway stops, and after `LONGEST_S`. The
last event says why; after it the browser does not ask again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from typing import TypeVar

from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.console import cookies
from gateway.console.access import visit_of
from gateway.console.live.hub import HubFull, LiveHub, RegionReader
from gateway.console.rendering import HTML, SECURITY_HEADERS, render
from gateway.console.return_path import log_in_for
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of
from tenants.errors import DatabaseUnavailable
from tenants.people.sessions import Session

T = TypeVar("T")
Texts = dict[Hashable, str]
"""Texts rendered from one snapshot, shared between identical readers."""

LONGEST_S = 3600.0
UNREAD_S = 10.0
log = logging.getLogger("fairgate.gateway.console")
SESSION_EVERY_S = 3.0
EVENTS = "text/event-stream"
STREAM_HEADERS = SECURITY_HEADERS | {"x-accel-buffering": "no"}
LIVE = "/live"
"""Suffix of a stream's path."""
READER = "reader"
"""In the state of a request of the shared stream: the id of the region in the browser."""


def hub_of(request: Request) -> LiveHub:
    hub: LiveHub = request.app.state.live
    return hub


def event(text: str) -> bytes:
    return ("data: " + text.strip("\n").replace("\n", "\ndata: ") + "\n\n").encode()


def last_event(why: str, href: str, words: str, name: str = "stopped") -> bytes:
    """`stopped`: the region keeps what it shows, marked as old."""
    return f"event: {name}\n".encode() + event(
        render("live/ended.html", None, why=why, href=href, words=words)
    )


def session_ended(page: str) -> bytes:
    """After this one, nothing of the page stays."""
    return last_event("Your session has ended.", log_in_for(page), "Log in", "ended")


def wants_stream(request: Request) -> bool:
    """Whether the client asks for events; others get the region once."""
    return request.method == "GET" and EVENTS in headers_of(request.scope).get("accept", "")


def page_of(address: str) -> str:
    """The page of a region."""
    path, mark, query = address.partition("?")
    return path.removesuffix(LIVE) + mark + query


def session_over(address: str) -> Response[bytes]:
    return Response(session_ended(page_of(address)), headers=STREAM_HEADERS, media_type=EVENTS)


def streamed(events: AsyncGenerator[bytes, None], unread_s: float = UNREAD_S) -> ASGIApp:
    """Sends the events; ends when a client leaves one unread for `unread_s`."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unless_unread(message: Message) -> None:
            async with asyncio.timeout(unread_s):
                await send(message)

        answer = ASGIStreamingResponse(iterator=events, headers=STREAM_HEADERS, media_type=EVENTS)
        async with contextlib.aclosing(events):
            try:
                await answer(scope, receive, send_unless_unread)
            except* TimeoutError:
                log.info("a live page is not read: its stream ends")

    return answered


async def live_region(
    request: Request,
    key: tuple[object, ...],
    make: Callable[[], Awaitable[T]],
    text_of: Callable[[T, Texts], str],
    page: str,
) -> ASGIApp:
    """The region of `page`, streamed or once. `key` identifies the snapshot, `text_of` renders it."""
    hub = hub_of(request)
    if wants_stream(request):
        return streamed(_events(request, hub, key, make, text_of, page))
    text = text_of(await hub.look(key, make), {})
    is_head = request.method == "HEAD"
    return ASGIResponse(
        body=b"" if is_head else text.encode(),
        headers=SECURITY_HEADERS,
        media_type=HTML,
        is_head_response=is_head,
    )


async def _events(
    request: Request,
    hub: LiveHub,
    key: tuple[object, ...],
    make: Callable[[], Awaitable[T]],
    text_of: Callable[[T, Texts], str],
    page: str,
) -> AsyncGenerator[bytes, None]:
    deps, session = gateway_of(request).deps, visit_of(request).session
    assert session is not None
    looked_s = deps.clock()
    number = 0
    new = RegionReader(text_of, looked_s)
    name = (session.session_id, session.person, page, request.scope["state"].get(READER) or object())
    try:
        async with hub.watch(key, make, session.person) as topic, hub.reading(name, new) as reader:
            while await topic.after(number):
                number = topic.number
                now_s = deps.clock()
                if now_s - looked_s >= SESSION_EVERY_S:
                    looked_s = now_s
                    if not await _is_open(request, session):
                        yield session_ended(page)
                        return
                if now_s - reader.began_s >= LONGEST_S:
                    yield last_event("Live for an hour: updates have stopped.", page, "Go on")
                    return
                yield event(reader.text_of(topic.latest, topic.texts))
    except DatabaseUnavailable:
        # No session can be looked up. The browser connects again, and is let in when that is over.
        return
    except HubFull as full:
        yield last_event(f"{full} This page does not update.", page, "Refresh")


async def _is_open(request: Request, session: Session) -> bool:
    """Whether the session is still open in all gateways. Raises `DatabaseUnavailable`."""
    deps, visit = gateway_of(request).deps, visit_of(request)
    cookie = cookies.read(request.scope, cookies.SESSION, secure=visit.is_https)
    stored = await deps.people.session(cookie, is_use=False)
    return stored is not None and stored.person == session.person
