"""Several gateways of one pool over a real Redis, on a virtual clock.

The real sessions and the real script; only the waiting for Redis is done at once, and what is published is
delivered when the test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import redis

from gateway.flow.controller import Dispatch, QueueFull, Ticket
from gateway.flow.knobs import Knob
from gateway.flow.shared import codec
from gateway.flow.shared.codec import GivenTurn, PoolRule
from gateway.flow.shared.control_session import ControlAnswer, ControlWords, control_keys, control_script
from gateway.flow.shared.mirror import Mirror
from gateway.flow.shared.protocol import PoolMessage, PoolNews, PoolSession
from gateway.flow.window import Replica

PREFIX = "fairgate-test-flow"
MAX_SENT = 8


class Pool:
    """The shared half: keys, script, clock."""

    def __init__(self, client: redis.Redis, name: str = "pool") -> None:
        self.client: Any = client
        self.name = name
        self.keys = codec.keys(PREFIX, name)
        self.script: Any = client.register_script(codec.script())
        self.control_script: Any = client.register_script(control_script())
        self.exchanges = 0
        self.given: dict[str, GivenTurn] = {}
        """Every turn that was told to anybody, the last of each request."""
        self.sent: dict[str, deque[PoolMessage]] = {}
        """The last messages of each gateway."""

    def forget(self) -> None:
        """Redis loses everything."""
        self.client.delete(*self.keys, *control_keys(PREFIX, self.name))

    def turn_knobs(self, knobs: Mapping[Knob, float], now_s: float) -> None:
        """As one that decides in the control loop does."""
        term = 0
        for decided in (b"", b"{}"):
            packed = msgspec.msgpack.encode({knob.value: value for knob, value in knobs.items()})
            words = ControlWords("control", term, b"{}", decided, packed)
            arguments = words.arguments(round(now_s * 1e6))
            answer = self.control_script(keys=control_keys(PREFIX, self.name), args=arguments)
            term = ControlAnswer.of(answer).term
        assert ControlAnswer.of(answer).is_stored

    def send(self, gateway_id: str, message: PoolMessage, now_s: float) -> bytes:
        """One round trip."""
        self.exchanges += 1
        self.sent.setdefault(gateway_id, deque(maxlen=MAX_SENT)).append(message)
        arguments = message.arguments(round(now_s * 1e6), gateway_id)
        answer: bytes = self.script(keys=self.keys, args=arguments)
        self.given |= {turn.entry_id: turn for turn in codec.answer(answer).turns}
        return answer


class PoolGateway:
    """One gateway's half. Everything that happens is said at once, unless `is_quiet`."""

    def __init__(
        self,
        pool: Pool,
        gateway_id: str,
        mirror: Mirror,
        replicas: Sequence[Replica],
        life: int,
        *,
        stale_us: int = 10**12,
    ) -> None:
        self.pool = pool
        self.gateway_id = gateway_id
        self.mirror = mirror
        self.session = PoolSession(mirror, PoolRule.of(mirror.settings, stale_us), life)
        self.replicas = list(replicas)
        self.members: dict[str, None] = {}
        """Those that it has seen."""
        self.subscription = pool.client.pubsub(ignore_subscribe_messages=True)
        self.subscription.subscribe(codec.channel(PREFIX, pool.name, gateway_id))
        self.subscription.get_message(timeout=1.0)
        self.turns: list[Dispatch] = []
        """In the order heard."""
        self.refused: list[tuple[str, QueueFull]] = []

    def close(self) -> None:
        self.subscription.close()

    def exchange(self, now_s: float) -> PoolNews:
        """Says everything, until the pool has heard it."""
        return self.exchange_at(now_s, now_s)

    def exchange_at(self, server_s: float, own_s: float) -> PoolNews:
        """As `exchange`, where the server's clock and ours disagree."""
        while True:
            message = self.session.message(own_s, self.replicas)
            assert message is not None
            heard = self.session.answered(self.pool.send(self.gateway_id, message, server_s), own_s)
            self.turns += heard.turns
            self.refused += heard.refused
            if not self.session.has_news:
                return heard

    def lose_answer(self, now_s: float) -> None:
        """Says everything, and the answer is lost."""
        message = self.session.message(now_s, self.replicas)
        assert message is not None
        self.pool.send(self.gateway_id, message, now_s)
        self.session.failed()

    def listen(self, now_s: float) -> list[Dispatch]:
        """What was published to it until now: Redis answers a ping after that."""
        heard: list[Dispatch] = []
        self.subscription.ping()
        while (said := self.subscription.get_message(timeout=10.0))["type"] != "pong":
            self.pool.given |= {turn.entry_id: turn for turn in codec.turns(said["data"])}
            heard += self.session.published(said["data"], now_s)
        self.turns += heard
        return heard

    def arrive(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        full = self.mirror.enqueue(ticket, now_s)
        if full is None:
            self.session.arrived(ticket)
        return full

    def cancel(self, entry_id: str, now_s: float) -> None:
        if self.mirror.cancel(entry_id, now_s):
            self.session.left(entry_id)

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        self.mirror.progress(entry_id, output_tokens, live_sequences)
        self.session.progressed(entry_id, output_tokens, live_sequences)

    def foresee(self, entry_id: str, foreseen_tokens: tuple[int, int], now_s: float) -> None:
        self.mirror.foresee(entry_id, foreseen_tokens, now_s)
        self.session.foreseen(entry_id)

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None:
        had = self._had(entry_id)
        self.mirror.finish(entry_id, input_tokens, output_tokens, now_s)
        self.session.finished(entry_id, input_tokens - had[0], output_tokens - had[1])

    def put_back(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> Ticket:
        had = self._had(entry_id)
        rest = self.mirror.put_back(entry_id, input_tokens, output_tokens, now_s)
        assert rest is not None
        self.session.finished(entry_id, input_tokens - had[0], output_tokens - had[1], rest)
        return rest

    def _had(self, entry_id: str) -> tuple[int, int]:
        ticket = self.mirror.ticket(entry_id)
        return (0, 0) if ticket is None else ticket.had

    def sees(self, replicas: Iterable[Replica], *, out: Collection[str] = ()) -> None:
        """The replicas that serve from now on, and those that are out for all."""
        self.replicas = list(replicas)
        self.members |= dict.fromkeys([*(each.replica_id for each in self.replicas), *out])
        for replica_id in self.members:
            self.session.member(replica_id, is_out=replica_id in out)
