"""Health checks and capacity of an OpenAI-compatible server.

Probes its list of models, reads its Prometheus page, and after a failed call asks for one token: that, and no
client's request, moves its circuit breaker. Gives whether it is up, and its size as a window.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from engine.messages import ModelInfo, Ready
from gateway.background import every
from gateway.upstream.answer_parts import Garbage
from gateway.upstream.health import saturation
from gateway.upstream.health.breaker import Breaker
from gateway.upstream.health.saturation import Saturation
from gateway.upstream.http.client import HttpClient, HttpFailed
from gateway.upstream.openai import response
from gateway.upstream.openai.capability_probe import CapabilityProbe
from gateway.upstream.openai.config import OpenAIServer, PrefixCache
from gateway.upstream.openai.outcome import CallVerdict
from gateway.upstream.openai.request import MODELS_PATH
from gateway.upstream.openai.response import ListedModel, one_line, without_secrets
from gateway.upstream.openai.server_kinds import kind_of_owner
from tenants.storage.task_stop import stop

PROBE_EVERY_S = 5.0
PROBE_DOWN_EVERY_S = 1.0
READ_METRICS_EVERY_S = 1.0
UNAUTHORIZED = 401
BUSY_S = 1.0
"""After a 429 it gets no more than it has for this time."""
BLOCK_TOKENS = 16
MAX_NAME_CHARACTERS = 128
SALTING_SERVERS = ("vllm", "sglang")
"""What servers call themselves in their lists of models that take `cache_salt`."""
CONTRADICTIONS = {
    "overrun": "sends more than it is asked for",
    "usage_low": "counts fewer tokens than its text has",
    "usage_high": "counts more tokens than it is asked for",
}
"""Kinds of `TokenCount.contradiction`."""

log = logging.getLogger("fairgate.gateway.upstream")


class ServerMonitor:
    """The monitor of one server. Use from one event loop; `is_up` may be read from threads."""

    def __init__(
        self,
        server: OpenAIServer,
        client: HttpClient,
        *,
        vocabulary: int,
        running: Callable[[], int],
        has_stand_in: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """`running`: the number of this gateway's sequences there. `has_stand_in`: whether another replica
        serves. `on_change` is called when the window or `is_up` has changed."""
        self._server = server
        self._client = client
        self._vocabulary = vocabulary
        self._running = running
        self._has_stand_in = has_stand_in
        self._on_change = on_change
        self.breaker = Breaker(server.breaker)
        self._asking: asyncio.Task[None] | None = None
        self._proof: asyncio.Future[bool] | None = None
        """For the calls that failed since it was asked last: whether it answers then."""
        self._answers_given = 0
        self.silence = ""
        """Why the breaker is open."""
        self._ready: Ready | None = None
        self._answers = False
        """The last probe found the server, and the model there."""
        self.is_up = False
        """It is there, has the model, and answers. Stored (`_notify`), as every request reads it."""
        self._changed = asyncio.Event()
        self.prefix_cache = server.prefix_cache
        """Never `auto`: until its list of models was read, the cache is hidden."""
        if server.prefix_cache is PrefixCache.AUTO:
            self.prefix_cache = PrefixCache.HIDDEN
        self.contradictions = dict.fromkeys(CONTRADICTIONS, 0)
        self.refusal = ""
        """Why it is not used, or why it does not answer."""
        self.seen: Saturation | None = None
        """Its load, as its page showed last."""
        self.failures = 0
        self._busy_until_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.trials = CapabilityProbe(server, client, is_up=lambda: self._answers, on_change=on_change)

    # ------------------------------------------------------------ state

    @property
    def ready(self) -> Ready | None:
        """Its size as a window of this gateway: it shrinks while the server is full of others' work."""
        if self._ready is not None:
            size = self.window()
            if size != self._ready.max_sequences:
                self._ready = msgspec.structs.replace(self._ready, max_sequences=size)
        return self._ready

    def window(self) -> int:
        if self.seen is None and not self._busy_until_s:
            return self._server.max_concurrent
        own = self._running()
        most = saturation.window(self.seen, self._server.max_concurrent, own)
        return max(1, min(most, own)) if now() < self._busy_until_s else most

    # ------------------------------------------------------------ results of calls

    def verdict(self, verdict: CallVerdict, reason: str) -> asyncio.Future[bool] | None:
        """Notes a call's verdict on the server. Returns the proof of whose fault a failure is: whether the
        server then answers the gateway. `reason` goes into the log, without keys and addresses."""
        if reason:
            level = logging.WARNING if verdict is CallVerdict.FAILED else logging.DEBUG
            log.log(
                level, "upstream %s: %s", self._server.name, without_secrets(reason, self._server.api_key)
            )
        match verdict:
            case CallVerdict.ANSWERS:
                self._answers_given += 1
            case CallVerdict.BUSY:
                self._busy_until_s = now() + BUSY_S
            case CallVerdict.FAILED:
                self.failures += 1
                self._notify()
                return self._suspect()
        self._notify()
        return None

    def _suspect(self) -> asyncio.Future[bool]:
        self.breaker.suspect()
        if self._proof is None:
            self._proof = asyncio.get_running_loop().create_future()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._keep_asking())
        return self._proof

    async def _keep_asking(self) -> None:
        """While it is suspected, and until the breaker is closed again."""
        while (in_s := self.breaker.ask_in_s(now())) is not None:
            if in_s > 0 or not self._answers:
                await asyncio.sleep(in_s or PROBE_DOWN_EVERY_S)
            else:
                await self._ask()

    async def _ask(self) -> None:
        """Asks it for one token, and opens or closes the breaker by its answer."""
        proof, self._proof, before = self._proof, None, self._answers_given
        self.breaker.asking(now())
        status, why = await self.trials.one_token()
        if why and self._answers_given != before:
            why = ""  # meanwhile it answered a client: it is slow, or does not take what the gateway asks
        is_open = bool(why) and (status != UNAUTHORIZED or self._has_stand_in())
        # Without another replica each client is told at once that the key is wrong, rather than wait for one.
        if is_open and not self.silence:
            log.warning("upstream %s is not used: asked for one token it fails: %s", self._server.name, why)
        elif self.silence and not is_open:
            log.info("upstream %s answers again", self._server.name)
        self.silence = f"it does not give a token that the gateway asks for: {why}" if is_open else ""
        self.breaker.answered(not is_open, now())
        if proof is not None and not proof.done():
            proof.set_result(not why)
        self._notify()

    def contradicted(self, kind: str) -> None:
        self.contradictions[kind] += 1
        if self.contradictions[kind] == 1:
            log.warning(
                "upstream %s %s: its answers are cut and counted here",
                self._server.name,
                CONTRADICTIONS[kind],
            )

    # ------------------------------------------------------------ probes

    async def start(self) -> None:
        await self.probe()
        self._tasks.append(asyncio.create_task(self._keep_probing()))
        self._tasks.append(asyncio.create_task(self.trials.keep_trying()))
        if self._server.metrics_path:
            work = every(
                READ_METRICS_EVERY_S, self.read_metrics, log, "a metrics page was not read", starts_now=True
            )
            self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        await stop(self._tasks if self._asking is None else [*self._tasks, self._asking])

    async def wait_until_up(self, timeout_s: float) -> bool:
        """Whether it came up in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_up:
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_up

    async def probe(self) -> None:
        """Checks that the server is there and has the model."""
        self._found(*await self._looked_for())

    async def _looked_for(self) -> tuple[str, int | None]:
        """Why it is not used (empty: it is), and the tokens of its model's context."""
        server = self._server
        path = server.health_path or MODELS_PATH
        try:
            status, body = await self._client.fetch(path, server.probe_s)
        except HttpFailed as error:
            return f"it does not answer: {error}", None
        if status in (401, 403):
            return f"it does not take our key ({status}): correct api_key_env", None
        if status != 200:
            return f"{path} answers with status {status}", None
        try:
            models = (
                {server.model: ListedModel(server.model)} if server.health_path else response.models(body)
            )
        except Garbage as error:
            return str(error), None
        found = models.get(server.model)
        if found is None:
            known = ", ".join(one_line(each, MAX_NAME_CHARACTERS) for each in sorted(models)[:8]) or "none"
            return f"it does not have the model {server.model!r}, but {known}", None
        self.trials.is_of_kind(kind_of_owner(found.owned_by))
        if server.prefix_cache is PrefixCache.AUTO:
            is_salted = found.owned_by in SALTING_SERVERS
            self.prefix_cache = PrefixCache.SALTED if is_salted else PrefixCache.HIDDEN
        context_tokens = server.context_tokens or found.context
        if context_tokens < 2:
            return "it does not say how long the model's context is: set context_tokens", None
        return "", context_tokens

    async def read_metrics(self) -> bool:
        """Whether its page could be read. Otherwise the window is the configured one."""
        try:
            status, page = await self._client.fetch(self._server.metrics_path, self._server.probe_s)
            self.seen = saturation.read(page.decode("utf-8", "replace") if status == 200 else "")
        except HttpFailed:
            self.seen = None
        self._notify()
        return self.seen is not None

    # ------------------------------------------------------------ inside

    def _found(self, refusal: str, context_tokens: int | None) -> None:
        server = self._server
        if refusal and refusal != self.refusal:
            log.warning("upstream %s is not used: %s", server.name, refusal)
        elif not refusal and not self._answers:
            log.info("upstream %s serves %s", server.name, server.model)
            self.trials.want()
        self.refusal = refusal
        self._answers = not refusal
        if context_tokens is not None and (
            self._ready is None or self._ready.model.context_tokens != context_tokens
        ):
            self._ready = _ready(server, self._vocabulary, context_tokens, self.window())
        self._notify()

    def _notify(self) -> None:
        """Reports every change of what it may be given; the dispatcher then looks for itself."""
        was_up, self.is_up = self.is_up, self._answers and self.breaker.is_closed
        if self.is_up != was_up or self.seen is not None:
            self._changed.set()
            self._on_change()

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S if self.is_up else PROBE_DOWN_EVERY_S)
            await self.probe()


def now() -> float:
    """Not the loop's clock: `is_up` is also read from threads."""
    return time.monotonic()


def _ready(server: OpenAIServer, vocabulary: int, context_tokens: int, window: int) -> Ready:
    info = ModelInfo(
        model_id=server.model,
        architecture="",
        parameters=0,
        context_tokens=context_tokens,
        vocabulary=vocabulary,
        eos_token_ids=[],
        dtype="",
        device="",
        attention="",
    )
    return Ready(
        engine_id=server.name,
        model=info,
        policy="",
        block_tokens=BLOCK_TOKENS,
        # Its KV memory is unknown: here only its sequences are counted.
        num_blocks=-(-context_tokens // BLOCK_TOKENS) * server.max_concurrent,
        max_sequences=window,
        max_batched_tokens=context_tokens,
        pid=0,
    )
