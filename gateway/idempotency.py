"""How does an `Idempotency-Key` give one run and one charge?

The key is claimed in SQL before anything is held, so that of any number of gateways one runs the request; the
others say so. The run goes on when its client leaves, and what it answers is kept: a repeat gets the same
bytes, streamed or not. Where nothing was charged nothing is kept, and a repeat is a new attempt.

A gateway that dies takes the answer with it, not the charge: a repeat is told what was charged, and that
another key runs the request again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from litestar.types import Receive, Send
from litestar.types import Scope as AsgiScope

from gateway import errors
from gateway.account.estimate import Account
from gateway.answer import Answer
from gateway.deps import GatewayDeps
from gateway.errors import ApiError
from gateway.refusals import as_api_error
from gateway.understand import Call
from gateway.wire import encode_headers, send_json, send_start
from tenants.directory.idempotency import MAX_KEY_CHARACTERS, Claimed, IdempotentAnswers, Scope, TooManyKeys
from tenants.directory.idempotency import Answer as Kept
from tenants.errors import DatabaseUnavailable
from tenants.ledger.rows import LedgerRow

if TYPE_CHECKING:
    from gateway.runtime import Gateway

HEADER = "idempotency-key"
REPLAY_HEADER = "x-fairgate-idempotent-replay"
RETRY_S = 1.0
TOO_MANY_RETRY_S = 60.0
OF_ONE_SENDING = frozenset({"content-length", "x-request-id", "openai-processing-ms", "date", "server"})

log = logging.getLogger("fairgate.gateway.idempotency")


def check_key(key: str, ttl_s: float) -> None:
    """Raises `ApiError` (400) for a key that cannot be used."""
    if ttl_s == 0:
        raise errors.bad_request(
            "This server keeps no answers (setting gateway.idempotency_ttl is 0), so 'Idempotency-Key' cannot"
            " be honoured. Leave the header out.",
            "Idempotency-Key",
            "idempotency_off",
        )
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
        raise errors.bad_request(
            f"Invalid 'Idempotency-Key': it has {len(key)} characters; 1 to {MAX_KEY_CHARACTERS} printable"
            " ASCII characters are allowed.",
            "Idempotency-Key",
        )


def fingerprint(route: str, body: bytes) -> str:
    """What makes two requests the same."""
    return hashlib.sha256(route.encode() + b"\n" + body).hexdigest()


def charged_tokens(rows: Sequence[LedgerRow]) -> int | None:
    """What was charged for a request by its ledger rows; None: it is not settled."""
    for row in rows:
        if row.kind == "settle":
            return row.amounts.input_tokens + row.amounts.output_tokens
    return None


class Recorder:
    """Sends, and keeps what was sent. A client that left, or does not read, stops nothing."""

    def __init__(
        self, send: Send, patience_s: float, most_bytes: int, before_last: Callable[[Kept], Awaitable[None]]
    ) -> None:
        """`before_last` gets what a repeat will get, when it is known and the last piece is not sent yet."""
        self._send = send
        self._patience_s = patience_s
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
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except (TimeoutError, OSError):
            self._is_gone = True

    def _add(self, body: bytes) -> None:
        self._room -= len(body)
        if self._room < 0:
            self._pieces = None
        elif body and self._pieces is not None:
            self._pieces.append(body)


class Idempotency:
    """The keys that this gateway is asked about. Use from one event loop."""

    def __init__(self, deps: GatewayDeps) -> None:
        self._deps = deps
        self._store = IdempotentAnswers(deps.database, max_per_key=deps.config.max_idempotency_keys)
        self._running: dict[Scope, asyncio.Future[None]] = {}

    async def purge(self) -> int:
        """Forgets what has expired. Raises `DatabaseUnavailable`."""
        return await self._store.purge(self._now_us())

    async def claim(self, call: Call, scope: Scope, print_: str) -> Kept | None:
        """None: run it, and say `ended` or `lost` afterwards. Otherwise the answer that is there already;
        one that is on its way here is waited for. Raises `ApiError`, `DatabaseUnavailable`."""
        until_s = self._deps.clock() + self._deps.config.idempotency_wait_s
        instead_of: str | None = None
        while True:
            found = await self._claim(call, scope, print_, instead_of)
            if found is None:
                self._running[scope] = asyncio.get_running_loop().create_future()
                return None
            if found.fingerprint != print_:
                raise errors.idempotency_key_reused()
            if found.answer is not None:
                if found.answer.pieces is None:
                    raise errors.idempotent_answer_too_large(found.request_id)
                return found.answer
            here = self._running.get(scope)
            if here is None:
                instead_of = await self._never_began(found)
                continue
            try:
                async with asyncio.timeout(until_s - self._deps.clock()):
                    await asyncio.shield(here)
            except TimeoutError:
                raise errors.idempotent_run_in_progress(RETRY_S) from None

    async def ended(self, call: Call, scope: Scope, answer: Kept | None) -> None:
        """The run is over; None: nothing was charged, and the key is free again."""
        try:
            if answer is None:
                await self._store.release(scope, call.request_id)
            else:
                await self._store.keep(scope, call.request_id, answer)
        except DatabaseUnavailable:
            # The claim stays: a repeat is told what the ledger says.
            log.warning("the answer of %s could not be kept", call.request_id)
        self.lost(scope)

    def lost(self, scope: Scope) -> None:
        """The run is over, and how it ended is not known here. Harmless to repeat."""
        ended = self._running.pop(scope, None)
        if ended is not None:
            ended.set_result(None)

    async def _claim(self, call: Call, scope: Scope, print_: str, instead_of: str | None) -> Claimed | None:
        now_us = self._now_us()
        try:
            return await self._store.claim(
                scope,
                print_,
                call.request_id,
                self._deps.gateway_id,
                now_us=now_us,
                expires_us=now_us + round(self._deps.config.idempotency_ttl_s * 1e6),
                instead_of=instead_of,
            )
        except TooManyKeys as error:
            raise errors.rate_limited(
                f"{error.most} idempotency keys of this API key are in use, the most that are kept."
                f" They expire after {self._deps.config.idempotency_ttl_s:g} s.",
                "requests",
                TOO_MANY_RETRY_S,
            ) from None

    async def _never_began(self, found: Claimed) -> str:
        """Of a run that is not here: its request, if nothing was charged for it and nothing can be any more.
        Raises `ApiError` otherwise."""
        if found.gateway_id != self._deps.gateway_id:
            stale_s = self._deps.config.gateway_stale_s
            seen = await self._deps.registry.seen()
            if any(each.gateway_id == found.gateway_id and each.silent_s <= stale_s for each in seen):
                raise errors.idempotent_run_in_progress(RETRY_S)
        rows = await self._deps.ledger.find(found.request_id)
        charged = charged_tokens(rows)
        if rows and charged is None:
            raise errors.idempotent_run_in_progress(RETRY_S)
        if charged:
            raise errors.idempotent_run_lost(found.request_id, charged)
        return found.request_id

    def _now_us(self) -> int:
        return round(self._deps.wall_clock() * 1e6)


class IdempotentAnswer:
    """Runs one call once, or repeats what it answered."""

    def __init__(
        self, gateway: Gateway, call: Call, key: str, route: str, body: bytes, quote: str | None = None
    ) -> None:
        """`quote`: the token that the run redeems; a repeat needs none. Raises `ApiError` (400) for a key
        that cannot be used."""
        check_key(key, gateway.deps.config.idempotency_ttl_s)
        self._gateway = gateway
        self._call = call
        self._quote = quote
        self._scope = Scope(call.principal.key_id, key)
        self._fingerprint = fingerprint(route, body)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            kept = await self._gateway.idempotency.claim(self._call, self._scope, self._fingerprint)
        except Exception as exception:
            await _send_error(send, as_api_error(exception, self._call.request_id))
            return
        if kept is None:
            await self._run(scope, send)
        else:
            await _replay(send, kept)

    async def _run(self, scope: AsgiScope, send: Send) -> None:
        config = self._gateway.deps.config
        answer: Answer | None = None

        async def keep(kept: Kept) -> None:
            if answer is None or (answer.closed is not None and not _was_charged(answer.closed.account)):
                await self._gateway.idempotency.ended(self._call, self._scope, None)
            elif answer.closed is not None:
                await self._gateway.idempotency.ended(self._call, self._scope, kept)

        # Shorter than what a slow reader is given: the run must not end for its sake.
        patience_s = min(config.write_timeout_s, config.slow_reader_s) / 2
        recorder = Recorder(send, patience_s, config.max_idempotent_answer_bytes, keep)
        try:
            self._gateway.require_engine(self._call.pool)
            if self._quote is not None:
                self._call = await self._gateway.bound(self._call, self._quote)
            answer = Answer(self._gateway, self._call)
            await answer(scope, _never, recorder)
        except ApiError as error:
            await _send_error(recorder, error)
        finally:
            self._gateway.idempotency.lost(self._scope)


def _was_charged(account: Account) -> bool:
    charged = account.charged
    return charged.input_tokens + charged.output_tokens + charged.cost_nanousd > 0


async def _never() -> Any:
    """A client that never leaves: the run goes on without it."""
    await asyncio.get_running_loop().create_future()


async def _send_error(send: Callable[[Any], Awaitable[None]], error: ApiError) -> None:
    await send_json(send, error.status, error.body(), encode_headers(error.all_headers()))


async def _replay(send: Send, kept: Kept) -> None:
    headers = {**kept.headers, REPLAY_HEADER: "true"}
    if kept.status >= 400:
        # It was charged, so asking again with this key gives the same.
        headers = {name: value for name, value in headers.items() if not name.startswith("retry-after")}
        headers["x-should-retry"] = "false"
    await send_start(send, kept.status, encode_headers(headers))
    for piece in kept.pieces or ():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
