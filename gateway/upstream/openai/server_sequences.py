"""Sends sequences to one OpenAI-compatible server, and learns from their answers what it does."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import msgspec

from engine.messages import Submit
from gateway.fair_threads import FairThreads
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.capabilities import Capabilities, Capability
from gateway.upstream.http.client import HttpClient, HttpFailed
from gateway.upstream.openai import request as openai_request
from gateway.upstream.openai.config import OpenAIServer, PrefixCache
from gateway.upstream.openai.load_estimate import LoadEstimate
from gateway.upstream.openai.monitor import ServerMonitor
from gateway.upstream.openai.outcome import CallVerdict
from gateway.upstream.openai.request import UsageWish
from gateway.upstream.openai.response_reader import Echo, ResponseReader, StreamedResponse, WholeResponse
from gateway.upstream.openai.sequence import OpenAISequence
from gateway.upstream.openai.server_kinds import COUNTED_FIELDS
from gateway.upstream.openai.token_count import TokenCount
from gateway.upstream.openai.vectors import VectorsResponse
from gateway.upstream.vllm_plugin.server_link import ServerLink
from tenants.storage.task_stop import stop

USAGE_AGAIN_AFTER_S = 300.0
"""A server that sent no usage is then tried again with requests that only it can count."""

log = logging.getLogger("fairgate.gateway.upstream")


class ServerSequences:
    """The `SequenceOwner` of one server. Use from one event loop."""

    def __init__(
        self,
        server: OpenAIServer,
        client: HttpClient,
        monitor: ServerMonitor,
        link: ServerLink,
        running: dict[str, OpenAISequence],
        *,
        tokenize: Callable[[str], int] | None,
        cache_secret: bytes | None,
        threads: FairThreads | None,
        on_change: Callable[[], None],
    ) -> None:
        """`running`: by sequence id. `on_change` is called when its capabilities have changed."""
        self.server = server
        self.tokenize = tokenize
        self.threads = threads or FairThreads()
        self.load = LoadEstimate(server.name)
        self.requests = 0
        self.whole_requests = 0
        self._client = client
        self._monitor = monitor
        self._link = link
        self._running = running
        self._cache_secret = cache_secret or secrets.token_bytes(32)
        self._on_change = on_change
        self._sending: set[asyncio.Task[None]] = set()
        self.without_usage = {"stream"} if server.usage is UsageWish.NONE else set()
        """Kinds of answers, `stream` and `whole`, of which the last one came without token counts."""
        self._usage_timers: list[asyncio.TimerHandle] = []
        self._limited: tuple[Capabilities, Capabilities] | None = None
        """Its capabilities, with and without token counts."""

    @property
    def capabilities(self) -> Capabilities:
        found = self._monitor.trials.found
        if not self.without_usage:
            return found
        if self._limited is None or self._limited[0] is not found:
            self._limited = found, found.without_usage(COUNTED_FIELDS)
        return self._limited[1]

    async def close(self) -> None:
        await stop(self._sending)
        for timer in self._usage_timers:
            timer.cancel()
        for sequence in list(self._running.values()):
            sequence.cancel("cancelled")

    def begin(self, submit: Submit, wording: Wording) -> OpenAISequence:
        server, link = self.server, self._link
        if wording.task is not RequestTask.COMPLETE:
            link = ServerLink(server.name)  # vectors are no tokens that could be leased
        most_tokens = submit.max_tokens
        if wording.most_tokens is not None and not link.has_plugin:
            # A plug-in stops at the lease, and goes on from there.
            most_tokens = max(1, min(most_tokens, wording.most_tokens()))
        salt, prefix_cache = "", self._monitor.prefix_cache
        if prefix_cache is PrefixCache.SALTED:
            salt = openai_request.cache_salt(self._cache_secret, submit.tenant_id)
        answer = self._reader(submit, wording, most_tokens)
        sequence = OpenAISequence(
            self,
            link,
            submit,
            wording,
            most_tokens,
            answer,
            is_cache_told=prefix_cache is not PrefixCache.HIDDEN,
            withheld=(server.api_key, salt),
        )
        self._running[submit.sequence_id] = sequence
        self.requests += 1
        self.whole_requests += answer.is_whole
        fields = openai_request.fields_for(wording.fields, self.capabilities, most_tokens)
        body = openai_request.body(
            submit,
            msgspec.structs.replace(wording, fields=fields) if wording.fields else wording,
            model=server.model,
            max_tokens=most_tokens,
            priority=server.priority,
            # With leases every chunk's count has to be the server's.
            usage=UsageWish.EACH if link.has_plugin else server.usage,
            stream=not answer.is_whole,
            cache_salt=salt,
            claims=link.begin(submit, sequence.rests),
        )
        request = self._client.request("POST", openai_request.path(wording), body, wording.trace_headers)
        connection = self._client.send_now(request, sequence)
        if connection is not None:
            sequence.connected(connection)
        else:
            task = asyncio.create_task(self._send(sequence, request))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return sequence

    def _reader(self, submit: Submit, wording: Wording, most_tokens: int) -> ResponseReader:
        """Reads the answer as it is asked for: whole where it is not read as it comes and is covered."""
        if wording.task is not RequestTask.COMPLETE:
            return VectorsResponse(wording)
        count = TokenCount(most_tokens, self.tokenize)
        echo = Echo(wording.prompt) if wording.fields.get("echo") else None
        is_covered = most_tokens <= min(self.server.whole_tokens, submit.lease_tokens)
        # No stream has those of a prompt; a plug-in's lease grows with what comes of one.
        must_be = "prompt_logprobs" in wording.fields and not self._link.has_plugin
        if not wording.is_streamed and (is_covered or must_be):
            return WholeResponse(count, echo)
        return StreamedResponse(count, echo)

    async def _send(self, sequence: OpenAISequence, request: bytes) -> None:
        try:
            connection = await self._client.send(request, sequence, self.server.connect_s)
        except HttpFailed as error:
            sequence.not_connected(str(error))
        else:
            sequence.connected(connection)

    # ------------------------------------------------------------ called by sequences

    def verdict(
        self, sequence: OpenAISequence, verdict: CallVerdict, reason: str
    ) -> asyncio.Future[bool] | None:
        wording = sequence.wording
        asks_more = bool(wording.fields or wording.needs - {Capability.TEXT})
        if asks_more and verdict in (CallVerdict.REFUSED, CallVerdict.FAILED):
            self._monitor.trials.doubt()
        return self._monitor.verdict(verdict, reason)

    def over(self, sequence: OpenAISequence) -> None:
        self._running.pop(sequence.submit.sequence_id, None)
        self.load.learn(sequence, len(self._running))

    def counted(self, answer: ResponseReader) -> None:
        """Learns whether it sends token counts; a response without its end may have lost them."""
        if contradiction := answer.count.contradiction:
            self._monitor.contradicted(contradiction)
            return
        if not answer.is_complete:
            return
        kind = "whole" if answer.is_whole else "stream"
        if not answer.count.chunks or (answer.count.usage is None) == (kind in self.without_usage):
            return
        if answer.count.usage is None:
            self.without_usage.add(kind)
            log.warning(
                "upstream %s sends no usage: tools, reasoning and images are refused for it",
                self.server.name,
            )
            loop = asyncio.get_running_loop()
            self._usage_timers = [timer for timer in self._usage_timers if timer.when() > loop.time()]
            self._usage_timers.append(loop.call_later(USAGE_AGAIN_AFTER_S, self._believe_usage, kind))
        else:
            self.without_usage.discard(kind)
            log.info("upstream %s sends usage", self.server.name)
        self._on_change()

    def _believe_usage(self, kind: str) -> None:
        """The next answer shows whether it sends its token counts now."""
        if kind in self.without_usage and self.server.usage is not UsageWish.NONE:
            self.without_usage.discard(kind)
            self._on_change()
