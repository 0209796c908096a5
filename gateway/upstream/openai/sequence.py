"""Turns the response of another server into the deltas of a sequence.

Bytes from `http/connection.py` are read by `response_reader.py` and held by `lease_buffer.py` until covered.
The last delta carries the outcome, or iterating raises why there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.messages import Delta, Submit
from gateway.asyncio_helpers import IdleTimeout
from gateway.fair_threads import INLINE_BYTES, FairThreads
from gateway.upstream.base import CountedOutcome, NotBegun, SequenceRefused, UpstreamFailed, Wording
from gateway.upstream.http.connection import Connection
from gateway.upstream.lease_buffer import BufferedChunk, End, LeaseBuffer, runs
from gateway.upstream.openai.config import OpenAIServer
from gateway.upstream.openai.outcome import CallVerdict, failure, of_fault, of_head, of_refusal, outcome_of
from gateway.upstream.openai.request import repeats, wanted_of
from gateway.upstream.openai.response import said_in
from gateway.upstream.openai.response_reader import ResponseReader
from gateway.upstream.part_text import Completeness
from gateway.upstream.vllm_plugin.server_link import ServerLink

MAX_REFUSAL_BYTES = 64 * 1024
FULL_BYTES = 512 * 1024
"""Held for the reader or for a lease before the server is held up."""
LOW_BYTES = 128 * 1024
STOP_S = 3.0
"""Then a server that was asked to end a sequence (`stop`) loses its connection."""
AFTER_DONE_S = 5.0
"""Then a response that goes on after its last event loses its connection."""


class SequenceOwner(Protocol):
    """The server of a sequence, as its calls use it and learn of it."""

    server: OpenAIServer
    tokenize: Callable[[str], int] | None
    threads: FairThreads

    def verdict(
        self, sequence: OpenAISequence, verdict: CallVerdict, reason: str
    ) -> asyncio.Future[bool] | None:
        """Called at begin and end; returns the proof of fault (`UpstreamFailed.proof`)."""

    def counted(self, answer: ResponseReader) -> None:
        """Called with answers that have come to their end."""

    def over(self, sequence: OpenAISequence) -> None:
        """Called once, when all was read."""


class OpenAISequence:
    """One sequence on another server: the `Reader` of its response, and the iterator of its deltas."""

    def __init__(
        self,
        owner: SequenceOwner,
        link: ServerLink,
        submit: Submit,
        wording: Wording,
        most_tokens: int,
        answer: ResponseReader,
        *,
        is_cache_told: bool,
        withheld: Sequence[str],
    ) -> None:
        """`link`: to the plug-in, if that leases its tokens. `most_tokens`: asked for. `is_cache_told`: the
        tenant may know cache hits. `withheld`: secrets in the server's words, such as the key."""
        self._owner = owner
        self._link = link
        self._withheld = withheld
        self.submit = submit
        self.wording = wording
        self.most_tokens = most_tokens
        self.answer = answer
        self._loop = asyncio.get_running_loop()
        self.started_s = self._loop.time()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._lease = LeaseBuffer(submit.lease_tokens)
        self._completeness = Completeness(wanted_of(wording))
        server = owner.server
        self._first_byte_s = server.whole_s(most_tokens) if answer.is_whole else server.first_byte_s
        """Timeout of the first content; of a whole answer: of the first byte."""
        self._is_cache_told = is_cache_told
        self._counting: asyncio.Task[None] | None = None
        self._stop_cause = ""
        """Why the server was asked to end it; empty: it was not."""
        self._is_over = False
        self._was_sent = False
        self._is_lost_whole = False
        self._connection: Connection | None = None
        self._status = 0
        self._refusal = b""
        self._deltas: deque[tuple[Delta, int]] = deque()
        """With the bytes that each came in."""
        self._unread_bytes = 0
        self._sent_tokens = 0
        self._error: Exception | None = None
        self._is_done = False
        self._waiter: asyncio.Future[None] | None = None
        self.is_held_up = False
        """Its reader, or its lease, is so far behind that the server is held up."""
        self._has_first_delta = False
        """The first delta is not taken yet: it goes out before more is read, of which there may be a lot."""
        self._idle_timeout = IdleTimeout(self._loop, server.connect_s + self._first_byte_s, self._late)
        self._close_timer: asyncio.TimerHandle | None = None
        self._stop_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ towards the upstream

    @property
    def emitted_tokens(self) -> int:
        return self._lease.passed_tokens

    def connected(self, connection: Connection) -> None:
        if self._is_over:
            connection.abort()
            return
        self._connection = connection
        self._was_sent = True
        self._idle_timeout.wait(self._first_byte_s)

    def not_connected(self, reason: str) -> None:
        self._fail(CallVerdict.FAILED, NotBegun("connect", f"it cannot be reached: {reason}"))

    def top_up(self, lease_tokens: int) -> None:
        self._lease.top_up(lease_tokens)
        self._pass_on()
        self._link.top_up(self.submit.sequence_id, lease_tokens)

    def rests(self, emitted_tokens: int) -> None:
        """The server has emitted so many in all and waits for a longer lease. Its stream may lack some of
        them: parsers of tool calls and reasoning send a token's text only when they know what it belongs to.
        They count once its reader has taken all that came: one that is slow gets no longer lease."""
        if not self._is_over and not self._deltas:
            self._lease.emitted(emitted_tokens)
            self._pass_on()

    def stop(self, cause: str) -> None:
        """Ends it: its plug-in within a step, of which the stream still brings the real count; else here."""
        if self._is_done or not self._link.cancel(self.submit.sequence_id, cause):
            self.cancel(cause)
        elif not self._is_over and not self._stop_cause:
            self._stop_cause = cause
            self._stop_timer = self._loop.call_later(STOP_S, self.cancel, cause)

    def cancel(self, cause: str) -> None:
        """Ends it here: closes the connection, which tells the server, and keeps what was passed on."""
        if self._is_done:
            return
        if not self._is_over:
            self._is_lost_whole = self.answer.is_whole and self._was_sent and self._status in (0, 200)
            self._over(CallVerdict.ABANDONED, "")
            self._abort()
        self._lease.cut(cause, "gateway")
        self._pass_on()

    # ------------------------------------------------------------ the reader of the response

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        if status != 200:
            return
        error = of_head(headers, self.answer.content_type)
        if error is not None:
            self._fail(CallVerdict.FAILED, error)

    def body(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._status != 200:
            self._refusal += data
            if len(self._refusal) > MAX_REFUSAL_BYTES:
                self._refused()
            return
        had_begun = self.answer.has_begun
        pieces = self.answer.feed(data)
        if pieces or self.answer.has_begun != had_begun:
            # Only content counts: comments, empty events and the later parts of a whole answer bring nothing.
            self._idle_timeout.wait(self._owner.server.between_s)
        self._take(pieces)
        if self.answer.is_overrun:
            self._abort()
        elif self.answer.is_complete and self._connection is not None:
            # Its response ends in a moment, and the connection serves another request; or it does not.
            self._close_timer = self._loop.call_later(AFTER_DONE_S, self._abort)

    def end(self) -> None:
        self._disconnected()
        if self._is_over:
            return
        if self._status != 200:
            self._refused()
        else:
            self._take(self.answer.close())

    def lost(self, reason: str) -> None:
        self._disconnected()
        if self._is_over:
            return
        if self.answer.finish is not None:
            self._complete()  # the answer is whole; only the end of the response is missing
        else:
            self._fail(CallVerdict.FAILED, self._failure("closed", reason))

    # ------------------------------------------------------------ the iterator

    def __aiter__(self) -> OpenAISequence:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._is_done:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"sequence {self.submit.sequence_id} has a reader already")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta, size = self._deltas.popleft()
        self._unread_bytes -= size
        if self._has_first_delta:
            self._has_first_delta = False
            # Not now: the waiting reader runs at the loop's next turn, before this.
            self._loop.call_soon(self._read_on)
        if self.is_held_up and self._waiting_bytes < LOW_BYTES:
            self._hold_up(False)
        return delta

    # ------------------------------------------------------------ received data

    def _take(self, pieces: Sequence[BufferedChunk]) -> None:
        answer = self.answer
        for piece in pieces:
            self._lease.push(piece)
        if pieces:
            self._saw_token()
        if answer.fault is not None:
            self._pass_on()
            error = of_fault(answer.fault, has_begun=self._has_begun)
            self._fail(CallVerdict.FAILED, error, str(answer.fault))
        elif answer.is_complete:
            self._complete()
        else:
            self._pass_on()

    def _saw_token(self) -> None:
        self.last_token_s = self._loop.time()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
            self._owner.verdict(self, CallVerdict.ANSWERS, "")
            if self._connection is not None:
                self._has_first_delta = True
                self._connection.pause()

    def _complete(self) -> None:
        """The answer is complete. Its real count is known now, or when its text is tokenised."""
        self._over(CallVerdict.ANSWERS, "")
        count = self.answer.count
        if count.bytes_to_tokenize <= INLINE_BYTES:
            self._counted(*count.final())
        else:
            self._pass_on()
            self._counting = self._loop.create_task(self._count(), name=f"count {self.submit.sequence_id}")

    async def _count(self) -> None:
        # As many as there are sequences at most: unlike prompts, none is refused.
        threads = self._owner.threads
        counted = await threads.run(self.submit.tenant_id, self.answer.count.final, is_bounded=False)
        if not self._is_done:  # cancelled meanwhile
            self._counted(*counted)

    def _counted(self, tokens: int, basis: str) -> None:
        self._owner.counted(self.answer)
        finish = self.answer.finish
        assert finish is not None
        if finish == "length" and self.most_tokens < self.submit.max_tokens:
            finish = "budget"  # it was asked for less than the client wanted: no more could be held
        elif finish == "length" and self._link.has_plugin and tokens < self.most_tokens:
            if not self._stop_cause:
                self._ended_early()
                return
            finish = self._stop_cause
        self._lease.end(End(finish, tokens, basis))
        self._pass_on()

    def _ended_early(self) -> None:
        """The server's plug-in ended it at its lease, as this gateway was silent for too long."""
        self._pass_on()
        self._error = UpstreamFailed("it ended the answer at its lease: it lost contact with the gateway")
        self._leave()
        self._wake()

    def _pass_on(self) -> None:
        """Passes on everything that is covered now, as few deltas as keep the order."""
        if self._error is not None or self._is_done:
            return
        found, end = runs(self._lease.take()), self._lease.ended()
        if not found and end is None:
            return
        if not found:
            found = [BufferedChunk(0)]
        for piece in found:
            self._completeness.feed(piece.parts, piece.text)
            is_last = end is not None and piece is found[-1]
            self._add(piece, self._outcome(end) if end is not None and is_last else None)
        if end is not None:
            self._leave()
        elif not self.is_held_up and self._waiting_bytes > FULL_BYTES:
            self._hold_up(True)
        self._wake()

    def _add(self, piece: BufferedChunk, outcome: CountedOutcome | None) -> None:
        delta = Delta(
            self.submit.sequence_id,
            self._sent_tokens,
            [0] * piece.tokens,
            piece.text,
            list(piece.logprobs),
            outcome=outcome,
            parts=tuple(map(dict, piece.parts)),
        )
        self._sent_tokens += piece.tokens
        self._deltas.append((delta, piece.size))
        self._unread_bytes += piece.size

    def _outcome(self, end: End) -> CountedOutcome:
        has_run = end.tokens > 0 or self.first_token_s is not None or self._is_lost_whole
        return outcome_of(
            self.submit,
            end,
            self.answer.count.usage,
            replica_id=self._owner.server.name,
            is_prompt_counted=self._owner.tokenize is not None and not self.wording.is_uncountable,
            is_cache_told=self._is_cache_told,
            has_run=has_run,
            first_token_s=None if self.first_token_s is None else self.first_token_s - self.started_s,
            finished_s=self._loop.time() - self.started_s,
            uncertain_tokens=self.most_tokens if self._is_lost_whole else 0,
            answer=self.answer,
            incomplete=self._completeness.lacking(end.finish),
        )

    # ------------------------------------------------------------ failures

    @property
    def _has_begun(self) -> bool:
        return self.answer.has_begun or self._lease.passed_tokens > 0

    def _failure(self, code: str, message: str) -> UpstreamFailed:
        return failure(code, message, has_begun=self._has_begun)

    def _refused(self) -> None:
        refused = of_refusal(self._status, self._refusal, *self._withheld)
        self._fail(*refused, said_in(self._refusal))

    def _fail(self, verdict: CallVerdict, error: Exception, said: str = "") -> None:
        """`said`: the server's words, for the log; left out if they repeat the request."""
        if self._is_over:
            return
        if said and repeats(self.wording, said):
            said = "(words of the request)"
        # The message of a refusal quotes the server.
        reason = (
            f"it refuses the request ({error.code})" if isinstance(error, SequenceRefused) else str(error)
        )
        proof = self._over(verdict, f"{reason}; it says: {said}" if said else reason)
        if isinstance(error, UpstreamFailed):
            error.proof = proof
        self._abort()
        # What is covered was passed on already; the rest is of no use without an end.
        self._error = error
        self._leave()
        self._wake()

    # ------------------------------------------------------------ life cycle

    def _over(self, verdict: CallVerdict, reason: str) -> asyncio.Future[bool] | None:
        self._is_over = True
        self._idle_timeout.end()
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        return self._owner.verdict(self, verdict, reason)

    def _leave(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._link.over(self.submit.sequence_id, has_outcome=self._error is None)
            self._owner.over(self)

    @property
    def _waiting_bytes(self) -> int:
        return self._unread_bytes + self._lease.held_bytes

    def _hold_up(self, is_full: bool) -> None:
        self.is_held_up = is_full
        if self._connection is not None:
            self._connection.pause() if is_full else self._connection.resume()
        if not self._is_over:
            self._idle_timeout.wait(self._owner.server.between_s)

    def _read_on(self) -> None:
        if self._connection is not None and not self.is_held_up:
            self._connection.resume()

    def _late(self) -> None:
        if self._is_over:
            return
        if self.is_held_up or self._has_first_delta or self._link.waits_there(self.submit.sequence_id):
            self._idle_timeout = IdleTimeout(self._loop, self._owner.server.between_s, self._late)
        elif self.answer.finish is not None:
            self._abort()
            self._complete()  # only the end of the response is missing
        elif not self.answer.has_begun:
            self._fail(
                CallVerdict.FAILED,
                NotBegun("first_byte", f"no answer began within {self._first_byte_s:g} s"),
            )
        else:
            self._fail(
                CallVerdict.FAILED,
                self._failure("stalled", f"its answer stood still for {self._owner.server.between_s:g} s"),
            )

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def _disconnected(self) -> None:
        self._connection = None
        if self._close_timer is not None:
            self._close_timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
