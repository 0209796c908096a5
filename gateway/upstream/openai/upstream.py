"""Any server that speaks OpenAI's API as an upstream: vLLM, SGLang, TensorRT-LLM, another Fairgate.

Budgets are exact: no more is asked for than could be held, and output is passed on only as covered. A vLLM
with our plug-in (`vllm_plugin/`) is as our own engine: it stops at leases, shares steps by weight, reports
service and keeps outcomes. With others fairness ends at the dispatch: a stream over its rate is shaped here
while the server runs on. Device time is not counted. Cancelling closes the connection.

Answers come as a stream, or whole if fully covered and not read piece by piece. A dead gateway's sequences
are settled by its last report.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from engine.messages import (
    Delta,
    EngineKnobs,
    Explained,
    Inventory,
    ModelInfo,
    Ready,
    RunningSequence,
    Snapshot,
    Submit,
)
from engine.vllm_plugin.protocol import PolicyChoice
from gateway.fair_threads import FairThreads
from gateway.upstream.base import (
    CapabilityLost,
    NotBegun,
    OnService,
    RequestTask,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnavailable,
    Wording,
)
from gateway.upstream.capabilities import Capabilities, Capability
from gateway.upstream.failover import may_be_requests, next_replica, until_begun
from gateway.upstream.http.client import ConnectFailed, FetchFailed, HttpClient
from gateway.upstream.http.target import target_of
from gateway.upstream.openai import request as openai_request
from gateway.upstream.openai.capability_probe import described
from gateway.upstream.openai.classify import CallVerdict, of_refusal
from gateway.upstream.openai.config import OpenAIServer, PrefixCache
from gateway.upstream.openai.load_estimate import LoadEstimate, running
from gateway.upstream.openai.monitor import ServerMonitor, now
from gateway.upstream.openai.request import PriorityStyle, UsageWish
from gateway.upstream.openai.response_reader import Echo, ResponseReader, StreamedResponse, WholeResponse
from gateway.upstream.openai.sequence import OpenAISequence
from gateway.upstream.openai.server_kinds import COUNTED_FIELDS
from gateway.upstream.openai.token_count import TokenCount
from gateway.upstream.openai.vectors import VectorsResponse
from gateway.upstream.vllm_plugin.link import PluginLink, explained
from gateway.upstream.vllm_plugin.transport import transport_of
from tenants.storage.task_stop import stop

MOST_ASKED = 4
"""Of `SPARE_CONNECTIONS`, for questions beside sequences."""
SPARE_CONNECTIONS = 16
"""Beyond `max_concurrent`: for requests with many choices, and for probes."""
USAGE_AGAIN_AFTER_S = 300.0
"""A server that sent no usage is then tried again with requests that only it can count."""
UNKNOWN_VOCABULARY = 2**31 - 1
PROOF_WAIT_S = 5.0
"""Longest wait of a failed request for the proof of fault; then the server is to blame."""

log = logging.getLogger("fairgate.gateway.upstream")


class OpenAIUpstream:
    """Implements `Upstream`. Use from one event loop."""

    def __init__(
        self,
        server: OpenAIServer,
        *,
        vocabulary: int | None = None,
        tokenize: Callable[[str], int] | None = None,
        cache_secret: bytes | None = None,
        threads: FairThreads | None = None,
        gateway_id: str = "",
    ) -> None:
        """`vocabulary`, `tokenize`: the configured tokenizer, run in `threads` (None: own ones).
        `cache_secret` makes cache salts, equal in all gateways; None: random. Raises `BadUrl`."""
        self.server = server
        self._timeouts = server.timeouts
        self._cache_secret = cache_secret or secrets.token_bytes(32)
        self._tokenize = tokenize
        self._threads = threads or FairThreads()
        self._client = HttpClient(
            target_of(server.url),
            max_connections=server.max_concurrent + SPARE_CONNECTIONS,
            api_key=server.api_key,
        )
        self._sequences: dict[str, OpenAISequence] = {}
        self._monitor = ServerMonitor(
            server,
            self._client,
            vocabulary=vocabulary or UNKNOWN_VOCABULARY,
            running=self._sequences.__len__,
            has_stand_in=lambda: any(each.is_up for each in self.stand_ins),
            on_change=self._notify,
        )
        self._link: PluginLink | None = None
        if server.priority is PriorityStyle.FAIRGATE:
            self._link = PluginLink(
                server.name,
                gateway_id,
                server.plugin_key,
                transport_of(server.plugin_socket, target_of(server.url), server.api_key),
                on_change=self._notify,
                on_rest=self._rests,
            )
        self.is_drained = False
        self._watchers: list[Callable[[], None]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._load = LoadEstimate(server.name)
        self._moving: dict[str, _FailoverSequence] = {}
        """What was sent here first, wherever it runs now."""
        self.stand_ins: Sequence[OpenAIUpstream] = ()
        """Other replicas of the model, for sequences that this one does not begin."""
        self._without_usage = {"stream"} if server.usage is UsageWish.NONE else set()
        """Kinds of answers, `stream` and `whole`, of which the last one came without token counts."""
        self._usage_timers: list[asyncio.TimerHandle] = []
        self._limited: tuple[Capabilities, Capabilities] | None = None
        """Its capabilities, with and without token counts."""
        self._asked = asyncio.Semaphore(MOST_ASKED)
        self.requests = 0
        self.whole_requests = 0

    # ------------------------------------------------------------ state

    @property
    def replica_id(self) -> str:
        return self.server.name

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def address(self) -> str:
        return self.server.url

    @property
    def is_up(self) -> bool:
        return self._monitor.is_up and (self._link is None or self._link.is_up)

    @property
    def ready(self) -> Ready | None:
        ready = self._monitor.ready
        return ready if ready is None or self._link is None else self._link.ready(ready)

    @property
    def model(self) -> ModelInfo | None:
        return self._monitor.model

    @property
    def capabilities(self) -> Capabilities:
        found = self._monitor.trials.found
        if not self._without_usage:
            return found
        if self._limited is None or self._limited[0] is not found:
            self._limited = found, found.without_usage(COUNTED_FIELDS)
        return self._limited[1]

    @property
    def running_requests(self) -> int:
        """Requests of this gateway with a sequence here, also such as were sent to another replica first."""
        return len({sequence.submit.request_id for sequence in self._sequences.values()})

    @property
    def has_plugin(self) -> bool:
        return self._link is not None

    @property
    def failures(self) -> int:
        return self._monitor.failures

    @property
    def is_salted(self) -> bool:
        return self._monitor.prefix_cache is PrefixCache.SALTED

    @property
    def contradictions(self) -> Mapping[str, int]:
        return self._monitor.contradictions

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot as of our own engine, of this gateway's sequences; times as observed."""
        if not self.is_up:
            return None
        now_s = now()
        if (latest := self._load.latest(now_s)) is not None:
            return latest
        ready = self._monitor.ready
        return None if ready is None else self._load.snapshot(ready, self._sequences.values(), now_s)

    def describe(self) -> dict[str, Any]:
        monitor = self._monitor
        seen = monitor.seen
        return {
            "replica_id": self.replica_id,
            "kind": "openai",
            "url": self.server.url,
            "model": self.server.model,
            "is_up": self.is_up,
            "is_drained": self.is_drained,
            "refusal": self._refusal,
            "refusal_code": "" if self._link is None else self._link.refusal_code,
            "breaker": monitor.breaker_state.value,
            "retry_in_s": round(monitor.retry_in_s, 3),
            "window": monitor.window(),
            "running": len(self._sequences),
            "held_up": sum(sequence.is_held_up for sequence in self._sequences.values()),
            "connections": self._client.connections,
            "requests": self.requests,
            "whole_requests": self.whole_requests,
            "failures": self.failures,
            "contradictions": monitor.contradictions,
            "prefix_cache": monitor.prefix_cache.value,
            **described(monitor.trials),
            "capabilities": sorted(self.capabilities.words),
            "tells_usage": not self._without_usage,
            "saturation": None
            if seen is None
            else {"running": seen.running, "waiting": seen.waiting, "kv_usage": seen.kv_usage},
            "plugin": None if self._link is None else self._link.describe(),
        }

    def watch(self, on_change: Callable[[], None]) -> None:
        self._watchers.append(on_change)

    def listen(self, on_service: OnService) -> None:
        if self._link is not None:
            self._link.on_service = on_service

    async def start(self) -> None:
        await self._monitor.start()
        if self._link is not None:
            await self._link.start()

    async def probe(self) -> None:
        await self._monitor.probe()
        if self._link is not None:
            await self._link.probe()

    async def try_capabilities(self) -> None:
        await self._monitor.trials.try_all()

    async def read_metrics(self) -> bool:
        """Reads its Prometheus page now; returns whether that worked."""
        return await self._monitor.read_metrics()

    async def wait_until_up(self, timeout_s: float) -> bool:
        return await self._monitor.wait_until_up(timeout_s)

    async def close(self) -> None:
        await self._monitor.close()
        await stop(self._sending)
        for timer in self._usage_timers:
            timer.cancel()
        for sequence in list(self._sequences.values()):
            sequence.cancel("cancelled")
        if self._link is not None:
            await self._link.close()
        self._client.close()

    async def ask(self, path: str, fields: Mapping[str, Any]) -> bytes:
        """The answer to a question beside sequences, a few at a time; its health is not judged by it. Raises
        `CapabilityLost` without such a path, `SequenceRefused`, `UpstreamFailed`."""
        timeout_s = self.server.timeouts.probe_s
        body = openai_request.encode({**fields, "model": self.server.model})
        try:
            async with asyncio.timeout(timeout_s), self._asked:
                status, answer = await self._client.post(path, body, timeout_s)
        except (TimeoutError, ConnectFailed, FetchFailed) as error:
            raise UpstreamFailed(f"it does not answer {path}: {error}") from None
        if status == 200:
            return answer
        if status in (404, 405, 501):
            raise CapabilityLost(path)
        raise of_refusal(status, answer, self.server.api_key)[1]

    # ------------------------------------------------------------ sequences

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        sequence_id = submit.sequence_id
        moving = self._moving[sequence_id] = _FailoverSequence(submit, wording, [self])
        try:
            first = self._first(moving)
        except UpstreamUnavailable:
            del self._moving[sequence_id]
            raise
        return until_begun(
            first,
            partial(self._move, moving),
            partial(self._settled, moving),
            lambda: self._moving.pop(sequence_id, None),
        )

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        if (moving := self._moving.get(sequence_id)) is not None:
            moving.lease_tokens = max(moving.lease_tokens, lease_tokens)
            if (sequence := moving.at._sequences.get(sequence_id)) is not None:
                sequence.top_up(lease_tokens)
                if moving.at._link is not None:
                    moving.at._link.top_up(sequence_id, lease_tokens)

    def cancel(self, sequence_id: str, cause: str) -> None:
        if (moving := self._moving.get(sequence_id)) is not None:
            moving.cancelled.set()
            if (sequence := moving.at._sequences.get(sequence_id)) is not None:
                moving.at._stop(sequence, cause)
        elif self._link is not None:
            self._link.cancel(sequence_id, cause)  # of an earlier life

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        """Where there is no plug-in no outcome is kept. A sequence may have moved to another replica."""
        for replica in (self, *self.stand_ins):
            if replica._link is not None:
                replica._link.acknowledge(sequence_ids)

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        """Of its plug-in; without one the server has a policy of its own."""
        if self._link is not None:
            await self._link.set_policy(PolicyChoice(name, dict(options)))

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """Of its plug-in only, which has no token budget of its own."""
        if self._link is not None:
            self._link.set_knobs(knobs)

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Does nothing: what is sent there is bounded at the dispatch."""

    def set_drained(self, is_drained: bool) -> None:
        if is_drained != self.is_drained:
            self.is_drained = is_drained
            self._notify()

    async def explain(self, steps: int = 0) -> Explained:
        if self._link is None or (about := self._link.about) is None:
            raise UpstreamLost("it does not tell its decisions")
        return explained(about)

    async def collect(self, *, adopt: bool = False) -> Inventory:
        def own() -> list[RunningSequence]:
            return [running(each) for each in self._sequences.values()]

        if self._link is None:
            return Inventory(self.replica_id, own(), [])
        return await self._link.collect(own, adopt=adopt)

    # ------------------------------------------------------------ attempts

    def _first(self, moving: _FailoverSequence) -> OpenAISequence:
        """The first attempt, on this server or, where it is not available, on another one."""
        try:
            return self._begin(moving.submit, moving.wording)
        except UpstreamUnavailable as error:
            other = self._move(moving, error)
            if other is None:
                raise
            return other

    def _move(self, moving: _FailoverSequence, error: Exception) -> OpenAISequence | None:
        """Another attempt, on any replica."""
        able = [each for each in self.stand_ins if each.capabilities.lacks(moving.wording.needs) is None]
        moving.errors.append(error)
        is_cancelled = moving.cancelled.is_set()
        replica = None if is_cancelled else next_replica(moving.tried, able, moving.errors)
        if replica is None:
            return None
        log.info("sequence %s goes to %s: %s", moving.submit.sequence_id, replica.replica_id, error)
        moving.tried.append(replica)
        submit = msgspec.structs.replace(moving.submit, lease_tokens=moving.lease_tokens)
        return replica._begin(submit, moving.wording)

    async def _settled(self, moving: _FailoverSequence, error: Exception) -> Exception:
        """The error of a request after the server's probe: whose fault it is, or a refusal."""
        if not isinstance(error, UpstreamFailed) or error.proof is None or not may_be_requests(error):
            return error
        proof, left = error.proof, asyncio.ensure_future(moving.cancelled.wait())
        waiting: set[asyncio.Future[Any]] = {proof, left}
        try:
            await asyncio.wait(waiting, timeout=PROOF_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        error.is_requests = proof.done() and not proof.cancelled() and proof.result()
        refusal = error.refusal if isinstance(error, NotBegun) and error.is_requests else None
        return refusal or error

    def _begin(self, submit: Submit, wording: Wording) -> OpenAISequence:
        """One attempt, on this server."""
        if not self.is_up:
            raise UpstreamUnavailable(self._refusal or "it is tried again shortly")
        if (lacking := self.capabilities.lacks(wording.needs)) is not None:
            raise CapabilityLost(lacking)
        server = self.server
        # What computes vectors emits nothing that could be leased.
        link = self._link if wording.task is RequestTask.COMPLETE else None
        most_tokens = submit.max_tokens
        if wording.most_tokens is not None and link is None:
            # A plug-in stops at the lease, and goes on from there.
            most_tokens = max(1, min(most_tokens, wording.most_tokens()))
        answer, salt = self._reader(submit, wording, most_tokens), self._cache_salt(submit.tenant_id)
        is_whole, timeouts = answer.is_whole, self._timeouts
        sequence = OpenAISequence(
            submit,
            most_tokens,
            answer,
            replica_id=self.replica_id,
            timeouts=timeouts,
            first_byte_s=timeouts.whole_s(most_tokens) if is_whole else timeouts.first_byte_s,
            is_prompt_counted=self._tokenize is not None and not wording.is_uncountable,
            is_cache_told=self._monitor.prefix_cache is not PrefixCache.HIDDEN,
            wanted=openai_request.wanted_of(wording),
            threads=self._threads,
            on_verdict=partial(self._verdict, bool(wording.fields or wording.needs - {Capability.TEXT})),
            on_contradiction=self._monitor.contradicted,
            on_complete=self._complete,
            on_over=partial(self._over, submit.sequence_id),
            waits_there=None if link is None else partial(link.waits_there, submit.sequence_id),
            repeats=partial(openai_request.repeats, wording),
            withheld=(server.api_key, salt),
        )
        self._sequences[submit.sequence_id] = sequence
        self.requests += 1
        self.whole_requests += is_whole
        fields = openai_request.fields_for(wording.fields, self.capabilities, most_tokens)
        body = openai_request.body(
            submit,
            msgspec.structs.replace(wording, fields=fields) if wording.fields else wording,
            model=server.model,
            max_tokens=most_tokens,
            priority=server.priority,
            # With leases every chunk's count has to be the server's.
            usage=server.usage if link is None else UsageWish.EACH,
            stream=not is_whole,
            cache_salt=salt,
            claims="" if link is None else link.begin(submit),
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
        count = TokenCount(most_tokens, self._tokenize)
        echo = Echo(wording.prompt) if wording.fields.get("echo") else None
        is_covered = most_tokens <= min(self.server.whole_tokens, submit.lease_tokens)
        # No stream has those of a prompt; a plug-in's lease grows with what comes of one.
        must_be = "prompt_logprobs" in wording.fields and self._link is None
        if not wording.is_streamed and (is_covered or must_be):
            return WholeResponse(count, echo)
        return StreamedResponse(count, echo)

    @property
    def _refusal(self) -> str:
        monitor = self._monitor
        return monitor.refusal or monitor.silence or ("" if self._link is None else self._link.refusal)

    def _stop(self, sequence: OpenAISequence, cause: str) -> None:
        """A plug-in ends it within a step, and the stream still brings the end."""
        sequence_id = sequence.submit.sequence_id
        if self._link is not None and self._link.runs(sequence_id):
            self._link.cancel(sequence_id, cause)
            if self._link.is_up:
                sequence.stopping(cause)
                return
        sequence.cancel(cause)

    def _rests(self, sequence_id: str, emitted_tokens: int) -> None:
        if (sequence := self._sequences.get(sequence_id)) is not None:
            sequence.rests(emitted_tokens)

    def _cache_salt(self, tenant_id: str) -> str:
        return openai_request.cache_salt(self._cache_secret, tenant_id) if self.is_salted else ""

    async def _send(self, sequence: OpenAISequence, request: bytes) -> None:
        try:
            connection = await self._client.send(request, sequence, self.server.timeouts.connect_s)
        except ConnectFailed as error:
            sequence.not_connected(str(error))
        else:
            sequence.connected(connection)

    def _verdict(self, has_fields: bool, verdict: CallVerdict, reason: str) -> asyncio.Future[bool] | None:
        """A call's verdict. `has_fields`: it asks for more than plain text."""
        if has_fields and verdict in (CallVerdict.REFUSED, CallVerdict.FAILED):
            self._monitor.trials.doubt()
        return self._monitor.verdict(verdict, reason)

    def _over(self, sequence_id: str) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            if self._link is not None:
                self._link.over(sequence_id, has_outcome=not sequence.has_failed)
            self._load.learn(sequence, len(self._sequences))

    def _complete(self, answer: ResponseReader) -> None:
        """Learns whether it sends token counts; a response without its end may have lost them."""
        if not answer.is_complete:
            return
        kind = "whole" if answer.is_whole else "stream"
        if not answer.count.chunks or (answer.count.usage is None) == (kind in self._without_usage):
            return
        if answer.count.usage is None:
            self._without_usage.add(kind)
            log.warning(
                "upstream %s sends no usage: tools, reasoning and images are refused for it",
                self.server.name,
            )
            loop = asyncio.get_running_loop()
            self._usage_timers = [each for each in self._usage_timers if each.when() > loop.time()]
            self._usage_timers.append(loop.call_later(USAGE_AGAIN_AFTER_S, self._believe_usage, kind))
        else:
            self._without_usage.discard(kind)
            log.info("upstream %s sends usage", self.server.name)
        self._notify()

    def _believe_usage(self, kind: str) -> None:
        """The next answer shows whether it sends its token counts now."""
        if kind in self._without_usage and self.server.usage is not UsageWish.NONE:
            self._without_usage.discard(kind)
            self._notify()

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


@dataclass(slots=True)
class _FailoverSequence:
    """A sequence and the replicas that it was sent to."""

    submit: Submit
    wording: Wording
    tried: list[OpenAIUpstream]
    lease_tokens: int = 0
    errors: list[Exception] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.lease_tokens = self.submit.lease_tokens

    @property
    def at(self) -> OpenAIUpstream:
        return self.tried[-1]
