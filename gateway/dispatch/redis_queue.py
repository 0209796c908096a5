"""A queue shared by several gateways in Redis.

The asynchronous edge of `flow/shared/protocol.py`: one exchange at a time carries all that happened here
since the last one, and brings the turns; those from another gateway's exchange are published. So a request
costs one round trip on arrival; later messages go along with the quota store's (`board`), or alone after
`DEFER_S`, as all do in a Redis Cluster. A heartbeat shows that this gateway lives, and brings what a broken
subscription missed.

While Redis is away nothing is dispatched, unless this gateway may go on alone (`store_failure: local`). Then
it rejoins with everything it has; lost counters start equal. Refused messages count as unavailability; after
`BROKEN_AFTER` in a row the queue is broken, and its keys are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from engine.messages import TenantShare
from engine.scheduling.policy import UnknownPolicy
from gateway.background import every
from gateway.dispatch.control_feed import ControlFeed
from gateway.dispatch.load_feed import TELL_EVERY_S, LoadFeed, LoadReports
from gateway.dispatch.queue_backend import OnRefused, OnTurns
from gateway.flow.controller import QueueFull, Ticket
from gateway.flow.shared import codec
from gateway.flow.shared.mirror import Mirror, require_shared
from gateway.flow.shared.protocol import BROKEN_AFTER, PoolMessage, PoolSession
from gateway.flow.types import Deadlines
from gateway.flow.window import Replica
from tenants.quota.redis_calls import Passenger
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.redis_client import open_client
from tenants.storage.task_stop import stop

DEFER_S = 0.05
"""What is not urgent waits this long to be sent along with something else."""
VIEWS_S = 0.25
"""Latest report of service to the pool, and so its age as other gateways see it."""
RETRY_S = 0.25
MOST_DOUBLINGS = 7
"""Of the pause while refusals go on: each try may cost the others a second."""
TELL_REFUSAL_EVERY_S = 60.0
LOOK_S = 0.5
"""How often forecasts learn what waits at other gateways."""
LOOK_TENANTS = 64
"""Next tenants of each tier and lane."""
TIMEOUT_S = 2.0
HEARTBEATS_PER_STALE = 5

log = logging.getLogger("fairgate.gateway.shared")


class RedisQueue:
    """One gateway's part of a pool's queue. Use from one event loop."""

    def __init__(
        self,
        url: str,
        pool: str,
        gateway_id: str,
        session: PoolSession,
        clock: Callable[[], float],
        *,
        may_go_alone: bool,
        reports: LoadReports | None = None,
        prefix: str = "fairgate",
        timeout_s: float = TIMEOUT_S,
        virtual_clock: Callable[[], float] | None = None,
    ) -> None:
        """`pool`: common to the gateways that share a queue. `may_go_alone`: this one decides while Redis is
        unavailable. `reports` None: its load is not shared. `virtual_clock` (Unix seconds): for tests."""
        self.round_trips = 0
        """Exchanges that were sent by themselves."""
        self._session = session
        self._clock = clock
        self._virtual_clock = virtual_clock
        self._may_go_alone = may_go_alone
        self._gateway_id = gateway_id
        self._keys = codec.keys(prefix, pool)
        self._channel = codec.channel(prefix, pool, gateway_id)
        self._epochs = self._keys[0]
        """The channel in which a gateway announces that it restarted the pool."""
        # An exchange is repeated by the session, under its number, never by the client library.
        self._redis: Any = open_client(url, timeout_s, retries=False)
        self._script = self._redis.register_script(codec.script())
        self._look_script = self._redis.register_script(codec.look_script())
        self._look_keys = codec.look_keys(prefix, pool)
        self._load = None
        if reports is not None:
            self._load = LoadFeed(self._redis, codec.load_key(prefix, pool), clock, reports)
        self.control = ControlFeed(self._redis, prefix, pool, gateway_id)
        """Where gateways agree on the control loop's decider and knobs."""
        self.control.is_alone = lambda: self.is_alone
        self._heartbeat_s = session.rule.stale_us / 1e6 / HEARTBEATS_PER_STALE
        self._news = asyncio.Event()
        self._deferred: asyncio.TimerHandle | None = None
        self._views: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_away = False
        """Redis does not answer, or refuses messages."""
        self._pause_s = RETRY_S
        self._refusal_told_s = {False: -math.inf, True: -math.inf}
        """Last logged refusal: of the first ones, and of a broken queue."""
        self.is_listening = False
        """The subscription to this gateway's channel works."""
        self._replicas: Callable[[], Sequence[Replica]] = list
        self._on_turns: OnTurns = lambda turns: None
        self._on_refused: OnRefused = lambda entry_id, full: None

    @property
    def flow(self) -> Mirror:
        return self._session.mirror

    @property
    def belongs(self) -> bool:
        return self._session.belongs

    @property
    def is_broken(self) -> bool:
        """Redis answers, and refuses this gateway."""
        return self._session.is_broken

    @property
    def is_alone(self) -> bool:
        return self.is_away and self._may_go_alone

    @property
    def pool_queued(self) -> list[int]:
        """Waiting requests of all gateways, by tier, ordinary and long; as of the last answer."""
        return self._session.queued

    def bind(
        self, replicas: Callable[[], Sequence[Replica]], on_turns: OnTurns, on_refused: OnRefused
    ) -> None:
        self._replicas, self._on_turns, self._on_refused = replicas, on_turns, on_refused

    def start(self) -> None:
        self._news.set()
        self._tasks = [
            asyncio.create_task(self._talk(), name="gateway shared queue"),
            asyncio.create_task(self._listen(), name="gateway shared queue, turns"),
            asyncio.create_task(
                every(LOOK_S, self.look, log, "the shared queue could not be read; it goes on"),
                name="gateway shared queue, look",
            ),
        ]
        if self._load is not None:
            told = every(TELL_EVERY_S, self._load.exchange, log, "the pool's load was not shared; it goes on")
            self._tasks.append(asyncio.create_task(told, name="gateway shared queue, load"))

    async def close(self) -> None:
        await stop(self._tasks)
        for timer in (self._deferred, self._views):
            if timer is not None:
                timer.cancel()
        if self._session.belongs and not self.is_away:
            self._session.failed()
            message = self._session.message(self._clock(), self._replicas(), leaves=True)
            assert message is not None, "nothing is out any more"
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._script(keys=self._keys, args=self._arguments(message))
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await self._redis.aclose()

    # ------------------------------------------------------------ what happens here

    def enqueue(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        if self.is_broken and not self.is_alone:
            raise QuotaStoreUnavailable("the shared queue (Redis) is broken")
        full = self.flow.enqueue(ticket, now_s)
        if full is None and not self.is_alone:
            self._session.arrived(ticket)
        return full

    def cancel(self, entry_id: str, now_s: float) -> bool:
        waited = self.flow.cancel(entry_id, now_s)
        if waited and not self.is_alone:
            self._session.left(entry_id)
            self._defer()
        return waited

    def move(self, entry_id: str, tier: int, now_s: float, deadlines_s: Deadlines | None = None) -> bool:
        ticket = self.flow.move(entry_id, tier, now_s, deadlines_s)
        if ticket is not None and not self.is_alone:
            self._session.moved(ticket)
        return ticket is not None

    def expire(self, now_s: float) -> list[Ticket]:
        late = self.flow.expire(now_s)
        if not self.is_alone:
            for ticket in late:
                self._session.left(ticket.entry.entry_id)
                self._defer()
        return late

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        self.flow.progress(entry_id, output_tokens, live_sequences)
        if not self.is_alone:
            self._session.progressed(entry_id, output_tokens, live_sequences)

    def foresee(self, entry_id: str, foreseen_tokens: tuple[int, int], now_s: float) -> None:
        self.flow.foresee(entry_id, foreseen_tokens, now_s)
        if not self.is_alone:
            self._session.foreseen(entry_id)
            self._defer()

    def heard(self, replica_id: str, engine_life: str, service: Mapping[str, TenantShare]) -> None:
        self.flow.heard(replica_id, engine_life, service)
        if self._views is None and not self.is_alone:
            self._views = asyncio.get_running_loop().call_later(VIEWS_S, self._views_are_due)

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None:
        ticket = self.flow.ticket(entry_id)
        self.flow.finish(entry_id, input_tokens, output_tokens, now_s)
        is_known = ticket is not None and self.flow.ticket(entry_id) is None
        if ticket is not None and is_known and not self.is_alone:
            had = ticket.had
            self._session.finished(entry_id, input_tokens - had[0], output_tokens - had[1])
            self._defer()

    def put_back(
        self,
        entry_id: str,
        input_tokens: int,
        output_tokens: int,
        now_s: float,
        expires_s: float | None = None,
    ) -> bool:
        before = self.flow.ticket(entry_id)
        ticket = self.flow.put_back(entry_id, input_tokens, output_tokens, now_s, expires_s)
        if ticket is None or before is None:
            return False
        if not self.is_alone:
            had = before.had
            self._session.finished(entry_id, input_tokens - had[0], output_tokens - had[1], ticket)
        return True

    def member(self, replica_id: str, *, is_out: bool) -> None:
        self._session.member(replica_id, is_out=is_out)

    @property
    def may_have_turns(self) -> bool:
        return True

    def pump(self, now_s: float) -> None:
        if self.is_alone:
            self._on_turns(self.flow.dispatch(now_s, self._replicas()))
        elif self._session.is_urgent or self._session.sees_others(self._replicas()):
            self._news.set()

    def require_order(self, name: str) -> None:
        require_shared(name)

    # ------------------------------------------------------------ sent along with the quota store

    def board(self) -> Passenger | None:
        """The next message, to be sent along with another call to the same Redis; None: nothing."""
        if self.is_away or not self._session.belongs or not self._session.has_news:
            return None
        message = self._session.message(self._clock(), self._replicas())
        if message is None:
            return None
        arguments = self._arguments(message)
        return Passenger(self._script, self._keys, arguments, self._ride_arrived, self._ride_failed)

    def _ride_arrived(self, packed: bytes) -> None:
        try:
            self._arrived(packed)
        except Exception:
            # The carrying call must not fail for it.
            log.exception("the shared queue's answer is not understood")
            self._ride_failed()

    def _ride_failed(self) -> None:
        """Sends it again alone, which shows whether Redis is unavailable."""
        self._session.failed()
        self._news.set()

    # ------------------------------------------------------------ exchanges

    def _defer(self) -> None:
        if self._deferred is None:
            loop = asyncio.get_running_loop()
            self._deferred = loop.call_later(DEFER_S, self._deferred_is_due)

    def _views_are_due(self) -> None:
        self._views = None
        self._news.set()

    def _deferred_is_due(self) -> None:
        self._deferred = None
        if self._session.has_news:
            self._news.set()

    async def _talk(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._news.wait()
            self._news.clear()
            try:
                await self._exchange()
            except Exception:
                log.exception("the shared queue's exchange failed; it goes on")
                self._failed()
            if self.is_away:
                await asyncio.sleep(self._pause_s)
                self._news.set()

    async def _exchange(self) -> None:
        message = self._session.message(self._clock(), self._replicas())
        if message is None:
            return  # a message is in flight: its answer checks for what came meanwhile
        self.round_trips += 1
        try:
            self._arrived(await self._script(keys=self._keys, args=self._arguments(message)))
        except (ResponseError, msgspec.DecodeError, UnknownPolicy) as error:
            self._refused(error)
        except (RedisError, OSError, TimeoutError) as error:
            if not self.is_away:
                log.warning("the shared queue (Redis) is away: %s", type(error).__name__)
            self._pause_s = RETRY_S
            self._failed()

    def _arguments(self, message: PoolMessage) -> list[Any]:
        now_us = 0 if self._virtual_clock is None else round(self._virtual_clock() * 1e6)
        return message.arguments(now_us, self._gateway_id)

    def _arrived(self, packed: bytes) -> None:
        heard = self._session.answered(packed, self._clock())
        if self.is_away:
            log.warning("the shared queue (Redis) answers again")
            self.is_away, self._pause_s = False, RETRY_S
        for entry_id, full in heard.refused:
            self._on_refused(entry_id, full)
        if heard.turns:
            self._on_turns(heard.turns)
        if heard.held_s:
            asyncio.get_running_loop().call_later(heard.held_s, self._news.set)
        if self._session.is_urgent:
            self._news.set()
        elif self._session.has_news:
            self._defer()

    def _refused(self, error: Exception) -> None:
        self._session.refused()
        self._pause_s = RETRY_S * 2 ** min(max(0, self._session.refusals - BROKEN_AFTER), MOST_DOUBLINGS)
        if self._clock() - self._refusal_told_s[self.is_broken] >= TELL_REFUSAL_EVERY_S:
            self._refusal_told_s[self.is_broken] = self._clock()
            what = "is broken, and built anew: it refuses" if self.is_broken else "refuses"
            log.error("the shared queue (Redis) %s what this gateway says: %s", what, error)
        self._failed()

    def _failed(self) -> None:
        self._session.failed()
        was_away, self.is_away = self.is_away, True
        if self._may_go_alone:
            # The pool learns of decisions made here when this gateway rejoins.
            self._session.lost()
            self.pump(self._clock())
        if not was_away:
            self._news.set()

    async def look(self) -> None:
        """Learns what waits in the whole pool; nothing is known of others while Redis does not answer."""
        if self.is_away:
            self.flow.see((), self._clock())
            return
        try:
            packed = await self._look_script(keys=self._look_keys, args=[LOOK_TENANTS])
            self._session.looked(packed, self._clock())
        except (RedisError, OSError, TimeoutError):
            pass  # the exchange notices, and says so
        except msgspec.DecodeError:
            log.error("what waits in the shared queue is not understood")

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as subscription:
                    await subscription.subscribe(self._channel, self._epochs)
                    while True:
                        heard = await subscription.get_message(timeout=self._heartbeat_s)
                        if heard is None:
                            continue
                        if heard["type"] == "subscribe":
                            self.is_listening = True
                        elif heard["type"] == "message" and heard["channel"].decode() == self._channel:
                            self._published(heard["data"])
                        elif heard["type"] == "message" and heard["data"].decode() != self._gateway_id:
                            self._news.set()
            except (RedisError, OSError, TimeoutError):
                self.is_listening = False
                # It may have lost everything: rejoin soon.
                self._news.set()
                await asyncio.sleep(RETRY_S)

    def _published(self, packed: bytes) -> None:
        try:
            turns = self._session.published(packed, self._clock())
        except msgspec.DecodeError:
            log.error("what was published to this gateway is not understood")
            return
        if turns:
            self._on_turns(turns)
