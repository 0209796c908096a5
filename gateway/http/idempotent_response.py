"""One run and one charge for each `Idempotency-Key`.

The key is claimed in SQL before anything is held: one gateway runs the request, and the others report it as
running. The run goes on when its client disconnects, and its answer is stored: a repeat gets the same bytes,
streamed or not. If nothing was charged nothing is stored, and a repeat is a new attempt. A gateway that dies
loses the answer, not the charge: the refusal of a repeat names what was charged and asks for another key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from litestar.types import Receive, Send
from litestar.types import Scope as AsgiScope

from gateway.cluster.idempotency_keys import REPLAY_HEADER, check_key, fingerprint
from gateway.dispatch.dispatcher import NoEngineAvailable
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.fallback import NoneTook
from gateway.error_mapping import as_api_error
from gateway.errors import ApiError
from gateway.http.asgi import encode_headers, send_json, send_start
from gateway.http.completion_response import CompletionResponse, note_refused
from gateway.requests.dialects.chat import COMPLETIONS
from gateway.requests.dialects.dialect import Dialect
from tenants.directory.idempotency import Scope
from tenants.directory.idempotency import StoredAnswer as Kept

if TYPE_CHECKING:
    from gateway.gateway import Gateway

OF_ONE_SENDING = frozenset({"content-length", "x-request-id", "openai-processing-ms", "date", "server"})


class ResponseRecorder:
    """A client that disconnects, or does not read, stops nothing."""

    def __init__(
        self,
        send: Send,
        read_s: float,
        most_bytes: int,
        before_last: Callable[[Kept], Awaitable[None]],
    ) -> None:
        self._send = send
        self._read_s = read_s
        self._room = most_bytes
        self._before_last = before_last
        self._is_gone = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] | None = []

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = (
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]
            )
            self._headers = {name: value for name, value in headers if name not in OF_ONE_SENDING}
        else:
            self._add(message.get("body", b""))
            if not message.get("more_body", False):
                await self._before_last(Kept(self._status, self._headers, self._pieces))
        if self._is_gone:
            return
        try:
            async with asyncio.timeout(self._read_s):
                await self._send(message)
        except (TimeoutError, OSError):
            self._is_gone = True

    def _add(self, body: bytes) -> None:
        self._room -= len(body)
        if self._room < 0:
            self._pieces = None
        elif body and self._pieces is not None:
            self._pieces.append(body)


class IdempotentResponse:
    """Runs one call once, or repeats its stored answer."""

    def __init__(
        self,
        gateway: Gateway,
        call: Call,
        key: str,
        route: str,
        body: bytes,
        quote: str | None = None,
        dialect: Dialect = COMPLETIONS,
    ) -> None:
        """`quote`: token to redeem; a repeat needs none. Raises `ApiError` (400) for an invalid key."""
        check_key(key, gateway.deps.config.idempotency_ttl_s)
        self._gateway = gateway
        self._call = call
        self._dialect = dialect
        self._quote = quote
        self._scope = Scope(call.principal.key_id, key, call.principal.tenant_id)
        self._fingerprint = fingerprint(route, body)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            kept = await self._gateway.idempotency.claim(self._call, self._scope, self._fingerprint)
        except Exception as exception:
            await self._refuse(send, exception)
            return
        if kept is None:
            await self._run(scope, send)
        else:
            await _replay(send, kept)

    async def _run(self, scope: AsgiScope, send: Send) -> None:
        config = self._gateway.deps.config
        answer: CompletionResponse | None = None

        async def keep(kept: Kept) -> None:
            if answer is None or (answer.closed is not None and not _was_charged(answer.closed.account)):
                await self._gateway.idempotency.ended(self._call, self._scope, None)
            elif answer.closed is not None:
                await self._gateway.idempotency.ended(self._call, self._scope, kept)

        # Shorter than the limit of a slow reader, which would end the run.
        read_s = min(config.write_timeout_s, config.slow_reader_s) / 2
        recorder = ResponseRecorder(send, read_s, config.max_idempotent_answer_bytes, keep)
        try:
            self._call = await self._gateway.models.ready(self._call, self._quote)
            answer = CompletionResponse(self._gateway, self._call, self._dialect)
            await answer(scope, _never, recorder)
        except (ApiError, NoEngineAvailable, NoneTook) as refusal:
            await self._refuse(recorder, refusal)
        finally:
            self._gateway.idempotency.lost(self._scope)

    async def _refuse(self, send: Callable[[Any], Awaitable[None]], refusal: Exception) -> None:
        error = as_api_error(refusal, self._call.request_id)
        note_refused(self._gateway, self._call, error)
        body = self._dialect.refused(error, self._call.request_id)
        await send_json(send, error.status, body, encode_headers(error.all_headers()))


def _was_charged(account: Account) -> bool:
    charged = account.charged
    return charged.input_tokens + charged.output_tokens + charged.cost_nanousd > 0


async def _never() -> Any:
    """A client that never disconnects: the run goes on without it."""
    await asyncio.get_running_loop().create_future()


async def _replay(send: Send, kept: Kept) -> None:
    headers = {**kept.headers, REPLAY_HEADER: "true"}
    if kept.status >= 400:
        # It was charged, so a repeat with this key gives the same.
        headers = {name: value for name, value in headers.items() if not name.startswith("retry-after")}
        headers["x-should-retry"] = "false"
    await send_start(send, kept.status, encode_headers(headers))
    for piece in kept.pieces or ():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
