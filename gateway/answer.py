"""How does a running request become an HTTP answer?

An ASGI application for one request. It starts the lifecycle, listens to it, writes what it hears, and
watches the connection all the while: a client that leaves interrupts the request, whether it waits, decodes
or is not read. Nothing here can lose a settlement: the request runs in a task of its own.

Headers go out with the first token, so that everything that can be refused is refused with a clean status.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from litestar.types import Receive, Scope, Send

from gateway import responses
from gateway.account.estimate import Account
from gateway.account.outcomes import RequestOutcome
from gateway.errors import ApiError
from gateway.headers import contract_headers, estimate_headers, rate_limit_headers
from gateway.responses import Choice
from gateway.run import Begun, Closed, Ended, Event, Piece, Run
from gateway.understand import Call
from gateway.wire import send_json, send_start

if TYPE_CHECKING:
    from gateway.runtime import Gateway

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Answer:
    """Runs one call and writes its answer."""

    def __init__(self, gateway: Gateway, call: Call) -> None:
        self._gateway = gateway
        self._call = call
        self._write_timeout_s = gateway.deps.config.write_timeout_s
        self._keep_alive_s = gateway.deps.config.keep_alive_s
        self.closed: Closed | None = None
        """How the request ended, once it has."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._gateway.lifecycle.begin(self._call)
        watcher = asyncio.create_task(_watch(receive, run))
        events = _Listener(run)
        bounded = _Bounded(send, self._write_timeout_s)
        try:
            if self._call.stream:
                await self._stream(run, events, bounded)
            else:
                await self._whole(run, events, bounded)
        except (TimeoutError, OSError):
            run.interrupt(RequestOutcome.DISCONNECTED)
        except asyncio.CancelledError:
            # Cut while writing: the server stops, and this client does not read.
            run.interrupt(RequestOutcome.SHUTDOWN)
        except BaseException:
            run.interrupt(RequestOutcome.FAILED)
            raise
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    # ------------------------------------------------------------ not streamed

    async def _whole(self, run: Run, events: _Listener, send: _Bounded) -> None:
        call = self._call
        choices = [Choice(index) for index in range(call.sequences)]
        while True:
            match await events.next():
                case Piece(index=index, text=text, logprobs=logprobs):
                    choices[index].add(text, logprobs)
                case Ended(index=index, finish=finish):
                    choices[index].finish = finish
                case Closed() as closed:
                    break
        self.closed = closed
        if closed.error is not None:
            await self._refuse(run, send, closed.error)
            return
        account = closed.account
        body = responses.encode(responses.whole_body(call, choices, self._usage(account), account))
        await send_json(send, 200, body, self._headers(run))

    # ------------------------------------------------------------ streamed

    async def _stream(self, run: Run, events: _Listener, send: _Bounded) -> None:
        first = await events.next()
        if isinstance(first, Closed):
            # It never came to a token: still a clean status.
            self.closed = first
            assert first.error is not None, "a request without tokens has a reason"
            await self._refuse(run, send, first.error)
            return
        await send_start(send, 200, self._headers(run) | STREAM_HEADERS)
        writer = _ChunkWriter(self._call)
        batch: list[Event] = [first]
        while True:
            batch += events.at_once()
            body = b"".join([writer.write(event) for event in batch]) if batch else responses.KEEP_ALIVE
            last = batch[-1] if batch else None
            if isinstance(last, Closed):
                self.closed = last
                if last.error is not None:
                    self._count(last.error)
            if body:
                more = not isinstance(last, Closed)
                await send({"type": "http.response.body", "body": body, "more_body": more})
            if isinstance(last, Closed):
                return
            try:
                batch = [await events.next(self._keep_alive_s)]
            except TimeoutError:
                batch = []

    # ------------------------------------------------------------ both

    async def _refuse(self, run: Run, send: _Bounded, error: ApiError) -> None:
        self._count(error)
        await send_json(send, error.status, error.body(), self._headers(run) | error.all_headers())

    def _count(self, error: ApiError) -> None:
        if error.code != "client_left":
            self._gateway.metrics.refused(error.code)

    def _headers(self, run: Run) -> dict[str, str]:
        call = self._call
        return (
            contract_headers(call.principal, call.tier)
            | rate_limit_headers(run.limit_states)
            | estimate_headers(run.estimate)
        )

    def _usage(self, account: Account) -> dict[str, object]:
        return responses.usage(
            account.charged.input_tokens, account.charged.output_tokens, account.cached_tokens
        )


class _Listener:
    """The events of a run. A server that stops cancels its handlers: that interrupts the run, once, and the
    client still gets the last word."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._was_cut = False

    async def next(self, timeout_s: float | None = None) -> Event:
        """The next event. Raises `TimeoutError` after a silence of `timeout_s`."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._run.events.get()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._was_cut or task is None:
                    raise
                self._was_cut = True
                task.uncancel()
                self._run.interrupt(RequestOutcome.SHUTDOWN)

    def at_once(self) -> list[Event]:
        """What is there already: a step's events go out together."""
        found: list[Event] = []
        while not self._run.events.empty():
            found.append(self._run.events.get_nowait())
        return found


class _ChunkWriter:
    """Events to server-sent events. Keeps back the last choice's end where it is to carry the account."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._live = call.sequences
        self._logprob_characters = [0] * call.sequences
        self._last: tuple[int, str] | None = None

    def write(self, event: Event) -> bytes:
        """The bytes of one event; none where there is nothing to say yet."""
        call = self._call
        match event:
            case Begun():
                if not call.chat:
                    return b""
                return b"".join(
                    [responses.event(responses.role_chunk(call, index)) for index in range(call.sequences)]
                )
            case Piece(index=index, text=text, logprobs=logprobs):
                before = self._logprob_characters[index]
                self._logprob_characters[index] += sum(len(item.text) for item in logprobs)
                return responses.event(responses.text_chunk(call, index, text, logprobs, before))
            case Ended(index=index, finish=finish):
                self._live -= 1
                if self._live == 0 and not call.include_usage:
                    self._last = (index, finish)
                    return b""
                return responses.event(responses.finish_chunk(call, index, finish))
            case Closed(account=account, error=error):
                return self._close(account, error)

    def _close(self, account: Account, error: ApiError | None) -> bytes:
        if error is not None:
            return responses.event(error.payload())
        used = responses.usage(
            account.charged.input_tokens, account.charged.output_tokens, account.cached_tokens
        )
        if self._call.include_usage:
            return responses.event(responses.usage_chunk(self._call, used, account)) + responses.DONE
        assert self._last is not None, "a complete request has a last choice"
        chunk = responses.finish_chunk(self._call, *self._last) | {"fairgate": account.as_json()}
        return responses.event(chunk) + responses.DONE


class _Bounded:
    """`send` that a client who reads nothing cannot hold for ever. Raises `TimeoutError`."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s

    async def __call__(self, message: object) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._send(message)  # type: ignore[arg-type]


async def _watch(receive: Receive, run: Run) -> None:
    """Interrupts the request when the client goes away."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            run.interrupt(RequestOutcome.DISCONNECTED)
            return
