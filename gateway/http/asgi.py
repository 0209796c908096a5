"""ASGI messages that we read and write ourselves, and the headers of every answer."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import litestar
from litestar.types import Message, Scope

from gateway import log_context, trace_context
from gateway.asyncio_helpers import within
from gateway.domain.ids import new_request_id
from gateway.log_context import LogContext

Request = litestar.Request[Any, Any, Any]
Send = Callable[[Any], Awaitable[None]]
EncodedHeaders = list[tuple[bytes, bytes]]
FIRST_BYTE = "first_byte_s"
"""In a request's state: when its first byte was read, on the monotonic clock."""
SIBLING = "sibling"
"""In the state of a request that another worker of the port sends."""
TRACE = "trace"
"""In a request's state: its `TraceContext`, where it came with one."""
_NUMBER = re.compile(r"[0-9]{0,30}\.?[0-9]{1,30}([eE][+-]?[0-9]{1,3})?")


def begin(scope: Scope) -> str:
    """Names the request and notes its arrival, once; returns its id."""
    state = scope["state"]
    if "request_id" not in state:
        state["request_id"] = new_request_id(time.time())
        state["arrived_s"] = time.perf_counter()
        log_context.CURRENT.set(LogContext(state["request_id"]))
    request_id: str = state["request_id"]
    return request_id


def headers_of(scope: Scope) -> Mapping[str, str]:
    """Headers by lower-case name; of a repeated one the first. Built once: the framework's object is slow."""
    state = scope["state"]
    found: dict[str, str] | None = state.get("headers")
    if found is None:
        found = {}
        for name, value in scope["headers"]:
            found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        state["headers"] = found
    return found


def read_trace(scope: Scope) -> str:
    """Takes the trace context into the request's state; returns the name of a useless header, else empty."""
    if trace_context.TRACEPARENT not in headers_of(scope):
        return ""
    parents, states = (
        [value.decode("latin-1") for found, value in scope["headers"] if found == name]
        for name in (b"traceparent", b"tracestate")
    )
    found, of_no_use = trace_context.read(parents, states)
    if found is not None:
        scope["state"][TRACE] = found
        if (context := log_context.CURRENT.get()) is not None:
            context.trace_id = found.trace_id
    return of_no_use


def is_number(text: str) -> bool:
    """Whether a header's text is a number, 0 or more. Python's own parsers also take inf, nan and 1_0."""
    return _NUMBER.fullmatch(text) is not None and math.isfinite(float(text))


async def add_standard_headers(message: Message, scope: Scope) -> None:
    """`before_send` hook: `x-request-id` and `openai-processing-ms` on every answer."""
    if message["type"] != "http.response.start":
        return
    request_id = begin(scope)
    elapsed_s = time.perf_counter() - scope["state"]["arrived_s"]
    message["headers"] = [
        *message["headers"],
        (b"x-request-id", request_id.encode()),
        (b"openai-processing-ms", b"%d" % round(elapsed_s * 1000)),
    ]


def encode_headers(headers: Mapping[str, str]) -> EncodedHeaders:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def send_start(send: Send, status: int, headers: EncodedHeaders) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_json(send: Send, status: int, body: bytes, headers: EncodedHeaders) -> None:
    """A whole JSON answer; `headers` say neither its type nor its length."""
    standard = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send_start(send, status, headers + standard)
    await send({"type": "http.response.body", "body": body, "more_body": False})


class BoundedSend:
    """`send` with a bound for a client that does not read: raises `TimeoutError`."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s

    async def __call__(self, message: object) -> None:
        await within(self._timeout_s, self._send(message))

    async def json(self, status: int, body: bytes, headers: EncodedHeaders) -> None:
        await send_json(self, status, body, headers)
