"""Asks the other gateways about a request that this one does not have.

A client behind a load balancer need not know which gateway has its request: an action on a request that is
neither running here nor over is published to all gateways of the Redis, and the one that has it acts and
answers (`gateway/pools/request_actions.py`). Nothing is stored and the request path is not touched.

Published messages may be lost. The asker waits for as many answers as gateways received the question, at most
`ANSWER_S`, and reports missing ones. A lost answer leaves the action done; actions are idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace
from redis.exceptions import RedisError

from gateway.pools.request_actions import ActionResult, PeerAnswers, RequestAction, Unreachable
from tenants.storage.redis_client import open_client
from tenants.storage.task_stop import stop

ANSWER_S = 5.0
"""A move writes to the ledger; everything else is answered immediately."""
TIMEOUT_S = 2.0
RETRY_S = 0.25
HEARTBEAT_S = 1.0
MAX_CONNECTIONS = 16
MAX_ASKING = 256
"""Own questions in progress."""
MAX_ACTING = 256
"""Other gateways' questions in progress; further ones are not answered."""

log = logging.getLogger("fairgate.gateway.peer_requests")

_asks = msgspec.msgpack.Decoder(RequestAction)
_answers = msgspec.msgpack.Decoder(ActionResult)


@dataclass(slots=True)
class _OpenQuestion:
    answers: list[ActionResult]
    expected: int | None
    """None: unknown."""
    ends_with_one: bool
    done: asyncio.Event


class PeerRequests:
    def __init__(
        self, url: str, *, prefix: str = "fairgate", timeout_s: float = TIMEOUT_S, answer_s: float = ANSWER_S
    ) -> None:
        self._redis: Any = open_client(url, timeout_s, most=MAX_CONNECTIONS)
        # Pub/sub ignores database numbers: two installations in one Redis must not hear one another.
        number = self._redis.connection_pool.connection_kwargs.get("db", 0)
        self._all_gateways = f"{prefix}:{number}:gateways"
        self._own = f"{self._all_gateways}:{secrets.token_hex(8)}"
        self._answer_s = answer_s
        self._act: Callable[[RequestAction], Awaitable[ActionResult]] | None = None
        self._numbers = itertools.count(1)
        self._open: dict[int, _OpenQuestion] = {}
        self._acting: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self.is_listening = asyncio.Event()
        """Set while subscribed."""

    def start(self, act: Callable[[RequestAction], Awaitable[ActionResult]]) -> None:
        """Starts answering others with `act`, which must not raise."""
        self._act = act
        self._task = asyncio.create_task(self._listen(), name="gateway peer requests")

    async def close(self) -> None:
        await stop([*self._acting, *([self._task] if self._task is not None else [])])
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._redis.aclose()

    async def ask(
        self, ask: RequestAction, *, wants_all: bool = False, within_s: float = math.inf
    ) -> PeerAnswers:
        """Asks all other gateways; returns when the one that has the request has answered, with `wants_all`
        when all have, and in any case `within_s`. Raises `Unreachable`."""
        if len(self._open) >= MAX_ASKING or not self.is_listening.is_set():
            raise Unreachable
        number = next(self._numbers)
        waiting = self._open[number] = _OpenQuestion([], None, not wants_all, asyncio.Event())
        packed = msgspec.msgpack.encode(replace(ask, number=number, reply_to=self._own))
        try:
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.publish(self._all_gateways, packed)
                    # How many PUBLISH reached is in a cluster the number of those at one node.
                    pipe.pubsub_numsub(self._all_gateways)
                    _, [(_, listeners)] = await pipe.execute()
            except (RedisError, OSError, TimeoutError) as error:
                raise Unreachable from error
            waiting.expected = max(0, listeners - 1)  # this gateway is one of them
            _end_if_complete(waiting)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(within_s, self._answer_s)):
                    await waiting.done.wait()
        finally:
            del self._open[number]
        return PeerAnswers(waiting.answers, max(0, waiting.expected - len(waiting.answers)))

    # ------------------------------------------------------------ received messages

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await subscription.subscribe(self._all_gateways, self._own)
                    greeted = 0
                    while True:
                        message = await subscription.get_message(timeout=HEARTBEAT_S)
                        if message is None:
                            continue
                        if message["type"] == "subscribe":
                            greeted += 1
                            if greeted == 2:
                                self.is_listening.set()
                        elif message["type"] == "message":
                            self._published(message["channel"].decode(), message["data"])
            except (RedisError, OSError, TimeoutError):
                self.is_listening.clear()
                await asyncio.sleep(RETRY_S)

    def _published(self, channel: str, packed: bytes) -> None:
        try:
            if channel == self._own:
                self._answered(_answers.decode(packed))
            else:
                self._asked(_asks.decode(packed))
        except msgspec.DecodeError:
            log.error("what another gateway said is not understood")

    def _asked(self, ask: RequestAction) -> None:
        if ask.reply_to == self._own or len(self._acting) >= MAX_ACTING:
            return
        task = asyncio.create_task(self._answer(ask), name="gateway peer requests, act")
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    async def _answer(self, ask: RequestAction) -> None:
        assert self._act is not None
        answered = await self._act(ask)
        packed = msgspec.msgpack.encode(replace(answered, number=ask.number, by=self._own))
        try:
            await self._redis.publish(ask.reply_to, packed)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("another gateway was not answered: %s", type(error).__name__)

    def _answered(self, answered: ActionResult) -> None:
        waiting = self._open.get(answered.number)
        # Where a node of a cluster was lost, a question or an answer may have been published twice.
        if waiting is not None and all(each.by != answered.by for each in waiting.answers):
            waiting.answers.append(answered)
            _end_if_complete(waiting)


def _end_if_complete(waiting: _OpenQuestion) -> None:
    is_complete = waiting.expected is not None and len(waiting.answers) >= waiting.expected
    if is_complete or (waiting.ends_with_one and waiting.answers and waiting.answers[-1].is_found):
        waiting.done.set()
