"""A running request as an ASGI response.

It starts the lifecycle, writes its events, and interrupts the request when its client disconnects; the
request runs in a task of its own, so no settlement is lost. Headers go out with the first token, so that
every refusal has a clean status. A stream that waits long in the queue, or asked for progress, gets them when
it is queued; a later refusal ends it with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from litestar.types import Receive, Scope, Send

from gateway.domain.call import Call
from gateway.error_mapping import refusal_of
from gateway.errors import ApiError
from gateway.http.asgi import BoundedSend, EncodedHeaders, encode_headers, send_start
from gateway.http.event_listener import EventListener
from gateway.metrics.gen_ai import operation_of
from gateway.quotes.offered import tiers_instead
from gateway.requests import queue_progress
from gateway.requests.dialects.chat import COMPLETIONS
from gateway.requests.dialects.dialect import Choice, Dialect, StreamWriter, encode
from gateway.requests.run import Closed, Event, InLine, Run, SequenceEnded, SequenceOutput
from gateway.response_headers import contract_headers, estimate_headers, limit_headers
from tenants.outcomes import RequestOutcome

if TYPE_CHECKING:
    from gateway.gateway import Gateway

WATCH_AFTER_S = 0.1
STREAM_HEADERS = encode_headers(
    {
        "content-type": "text/event-stream; charset=utf-8",
        # `no-transform`: a compressing proxy holds back small pieces.
        "cache-control": "no-cache, no-transform",
        "x-accel-buffering": "no",
    }
)


class CompletionResponse:
    def __init__(self, gateway: Gateway, call: Call, dialect: Dialect = COMPLETIONS) -> None:
        self._gateway = gateway
        self._call = call
        self._dialect = dialect
        self._write_timeout_s = gateway.deps.config.write_timeout_s
        self._keep_alive_s = gateway.deps.config.keep_alive_s
        self._headers: EncodedHeaders | None = None
        self._writer: StreamWriter | None = None
        self.closed: Closed | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._gateway.pools.begin(self._call)
        run.get_ready = self._get_ready
        watcher = _Watcher(receive, run)
        events = EventListener(run)
        bounded = BoundedSend(send, self._write_timeout_s)
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
            events.end()
            await watcher.close()

    async def _whole(self, run: Run, events: EventListener, send: BoundedSend) -> None:
        choices = [Choice(index) for index in range(self._call.sequences)]
        closed: Closed | None = None
        for event in [await events.next(), *events.available()]:
            match event:
                case SequenceOutput(index=index, text=text, logprobs=logprobs, parts=parts):
                    choices[index].add(text, logprobs, parts)
                case SequenceEnded(index=index, finish=finish, outcome=outcome):
                    choices[index].finish, choices[index].outcome = finish, outcome
                case Closed():
                    closed = event
        assert closed is not None, "a whole answer ends with `Closed`"
        self.closed = closed
        error = refusal_of(run, closed)
        if error is not None:
            await self._refuse(run, send, error, closed)
            return
        body = encode(self._dialect.whole(run.call, choices, closed.account))
        await send.json(200, body, self._opening(run))

    async def _stream(self, run: Run, events: EventListener, send: BoundedSend) -> None:
        first, has_headers = await self._first(run, events, send)
        if not has_headers:
            if isinstance(first, Closed):
                # It never came to a token: still a clean status.
                self.closed = first
                refusal = refusal_of(run, first)
                assert refusal is not None, "a request without tokens has a reason"
                await self._refuse(run, send, refusal, first)
                return
            await send_start(send, 200, self._opening(run) + STREAM_HEADERS)
        writer = self._writer or self._dialect.writer(run.call)
        batch = [first, *events.available()]
        while True:
            last, refusal = batch[-1], None
            if isinstance(last, Closed):
                self.closed, refusal = last, refusal_of(run, last)
                if refusal is not None:
                    self._note(run, refusal)
            body = b"".join([writer.write(event, refusal) for event in batch])
            if body:
                more = not isinstance(last, Closed)
                await send({"type": "http.response.body", "body": body, "more_body": more})
            if isinstance(last, Closed):
                return
            events.note_silence(self._keep_alive_s)
            batch = [await events.next(), *events.available()]

    async def _first(self, run: Run, events: EventListener, send: BoundedSend) -> tuple[Event, bool]:
        """The first event to write, and whether headers went out before it (long wait, progress asked)."""
        is_asked = self._call.progress is True
        event = await events.within(queue_progress.HEADERS_AT_ONCE_S) if is_asked else await events.next()
        if event is not None and not isinstance(event, InLine):
            return event, False
        await send_start(send, 200, self._opening(run) + STREAM_HEADERS)
        while event is None or isinstance(event, InLine):
            comment = self._gateway.pools.lifecycle_of(run.call).outlook(run).comment()
            await send({"type": "http.response.body", "body": comment, "more_body": True})
            event = await events.within(queue_progress.EVERY_S)
        return event, True

    async def _refuse(self, run: Run, send: BoundedSend, error: ApiError, closed: Closed) -> None:
        self._note(run, error)
        is_long = self._gateway.pools.lifecycle_of(run.call).is_long(run)
        tiers = tiers_instead(run.call, closed.cause, is_long=is_long)
        error.details |= await self._gateway.models.quotes_instead(run.call, tiers)
        body = self._dialect.refused(error, run.call.request_id)
        await send.json(error.status, body, encode_headers(_headers(run) | error.all_headers()))

    def _note(self, run: Run, error: ApiError) -> None:
        if error.code != "client_left":
            note_refused(self._gateway, run.call, error)
            if run.leases is None and (duration_s := run.times.e2e_s) is not None:
                gen_ai = self._gateway.metrics.gen_ai
                gen_ai.refused(operation_of(run.call), run.call.model, error.code, duration_s)

    def _get_ready(self, run: Run) -> None:
        """Prepares the answer while the upstream works, so that it adds nothing to the TTFT."""
        self._opening(run)
        if self._call.stream:
            self._writer = self._dialect.writer(run.call)

    def _opening(self, run: Run) -> EncodedHeaders:
        if self._headers is None:
            self._headers = encode_headers(_headers(run))
        return self._headers


def note_refused(gateway: Gateway, call: Call, error: ApiError) -> None:
    gateway.refusals.note(error, call.request_id, call.principal.ids, model=call.model, tier=call.tier.value)


def _headers(run: Run) -> dict[str, str]:
    return (
        contract_headers(run.call.principal, run.call.tier)
        | limit_headers(run.limit_states)
        | estimate_headers(run.estimate)
    )


class _Watcher:
    """Interrupts the request when the client disconnects. Starts late: short requests are not worth it."""

    def __init__(self, receive: Receive, run: Run) -> None:
        self._receive = receive
        self._run = run
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    async def close(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._run.interrupt(RequestOutcome.DISCONNECTED)
                return
