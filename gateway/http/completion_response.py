"""A running request as an ASGI response.

It starts the lifecycle, writes its events, and interrupts the request when its client disconnects; the
request runs in a task of its own, so no settlement is lost. Headers go out with the first token, so that
every refusal has a clean status. A stream that waits long in the queue, or asked for progress, gets them when
it is queued; a later refusal ends it with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from litestar.types import Receive, Scope, Send

from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.outcomes import RequestOutcome
from gateway.error_mapping import refusal_of
from gateway.errors import ApiError
from gateway.http import openai_responses
from gateway.http.asgi import BoundedSend, EncodedHeaders, encode_headers, send_start
from gateway.http.event_listener import EventListener
from gateway.http.openai_responses import Choice, TextChunks
from gateway.metrics.gen_ai import operation_of
from gateway.quotes.offered import tiers_instead
from gateway.requests import queue_progress
from gateway.requests.run import Begun, Closed, Event, InLine, Run, SequenceEnded, SequenceOutput, Silence
from gateway.response_headers import contract_headers, estimate_headers, limit_headers
from gateway.upstream.base import RequestTask

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
    def __init__(self, gateway: Gateway, call: Call) -> None:
        self._gateway = gateway
        self._call = call
        self._write_timeout_s = gateway.deps.config.write_timeout_s
        self._keep_alive_s = gateway.deps.config.keep_alive_s
        self._headers: EncodedHeaders | None = None
        self._writer: _ChunkWriter | None = None
        self.closed: Closed | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._gateway.lifecycle.begin(self._call)
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
        if run.call.task is RequestTask.COMPLETE:
            shown = openai_responses.whole_body(run.call, choices, closed.account)
        else:
            shown = vectors_body(run.call, "".join(choices[0].text), closed.account)
        body = openai_responses.encode(shown)
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
        writer = self._writer or _ChunkWriter(run.call)
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
            comment = self._gateway.lifecycle.of(run.call).outlook(run).comment()
            await send({"type": "http.response.body", "body": comment, "more_body": True})
            event = await events.within(queue_progress.EVERY_S)
        return event, True

    async def _refuse(self, run: Run, send: BoundedSend, error: ApiError, closed: Closed) -> None:
        self._note(run, error)
        is_long = self._gateway.lifecycle.of(run.call).is_long(run)
        tiers = tiers_instead(run.call, closed.cause, is_long=is_long)
        error.details |= self._gateway.quotes_instead(run.call, tiers)
        await send.json(error.status, error.body(), encode_headers(_headers(run) | error.all_headers()))

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
            self._writer = _ChunkWriter(run.call)

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


class _ChunkWriter:
    """Turns events into server-sent events. Holds the last choice's end back for the account."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._live = call.sequences
        self._logprob_characters = [0] * call.sequences
        self._text = TextChunks(call)
        self._last: SequenceEnded | None = None
        roles = (
            [openai_responses.role_chunk(call, index) for index in range(call.sequences)] if call.chat else []
        )
        self._roles = b"".join(map(openai_responses.event, roles))

    def write(self, event: Event, refusal: ApiError | None = None) -> bytes:
        """Empty if there is nothing to write yet."""
        call = self._call
        match event:
            case InLine():
                return b""
            case Silence():
                return openai_responses.KEEP_ALIVE
            case Begun():
                return self._roles
            case SequenceOutput(parts=parts) if parts:
                return self._with_parts(event)
            case SequenceOutput(index=index, text=text, logprobs=logprobs) if not logprobs:
                return self._text.event(index, text)
            case SequenceOutput(index=index, text=text, logprobs=logprobs):
                before = self._logprob_characters[index]
                self._logprob_characters[index] += sum(len(item.text) for item in logprobs)
                return openai_responses.event(
                    openai_responses.text_chunk(call, index, text, logprobs, before)
                )
            case SequenceEnded():
                self._live -= 1
                if self._live == 0 and not call.include_usage:
                    self._last = event
                    return b""
                return openai_responses.event(self._finish_chunk(event))
            case Closed(account=account):
                return self._close(account, refusal)

    def _with_parts(self, output: SequenceOutput) -> bytes:
        """A chunk for each part, and one for the text; the first has the log probabilities of all."""
        logprobs, found = output.logprobs, []
        for part in output.parts if self._call.chat else ():
            chunk = openai_responses.parts_chunk(self._call, output.index, part, logprobs)
            found.append(openai_responses.event(chunk))
            logprobs = ()
        if output.text:
            found.append(self.write(SequenceOutput(output.index, output.text, logprobs)))
        return b"".join(found)

    def _finish_chunk(self, ended: SequenceEnded) -> dict[str, Any]:
        return openai_responses.finish_chunk(self._call, ended.index, ended.finish, ended.outcome)

    def _close(self, account: Account, error: ApiError | None) -> bytes:
        if error is not None:
            return openai_responses.error_event(error, account)
        if self._call.include_usage:
            return (
                openai_responses.event(openai_responses.usage_chunk(self._call, account))
                + openai_responses.DONE
            )
        assert self._last is not None, "a complete request has a last choice"
        chunk = self._finish_chunk(self._last) | {"fairgate": account.as_json()}
        return openai_responses.event(chunk) + openai_responses.DONE


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


def vectors_body(call: Call, vectors: str, account: Account) -> dict[str, Any]:
    """An embedding answer in OpenAI's shape, or a rerank answer in that of vLLM and Jina. `vectors`: JSON."""
    tokens = account.charged.input_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rows = msgspec.Raw(vectors.encode())
    common = {"model": call.model, "usage": usage, "fairgate": account.as_json()}
    if call.task is RequestTask.EMBED:
        return {"object": "list", "data": rows} | common
    return {"id": call.request_id, "results": rows} | common
