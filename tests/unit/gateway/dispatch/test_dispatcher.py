"""Turns that were decided by the members of a moment ago, and what a shared queue hears of members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.entry import QueueEntry
from engine.messages import ModelInfo, Ready
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.queue_backend import LocalQueue
from gateway.flow.types import Ticket
from gateway.flow.window import Replica
from gateway.upstream.capabilities import PLAIN_TEXT, Capabilities
from gateway.upstream.replica_set import ReplicaSet
from tests.support.builders import flow_controller

INFO = ModelInfo("m", "Llama", 1, 2048, 500, [2], "float32", "cpu", "")
READY = Ready("e", INFO, "vtc", 16, 100, 32, 512, pid=1)


@dataclass
class Drainable:
    replica_id: str
    is_up: bool = True
    is_drained: bool = False
    ready: Ready = READY
    snapshot: None = None
    capabilities: Capabilities = PLAIN_TEXT
    watchers: list[Callable[[], None]] = field(default_factory=list)

    def watch(self, on_change: Callable[[], None]) -> None:
        self.watchers.append(on_change)

    def listen(self, on_service: Any) -> None:
        pass

    def changes(self, **now: bool) -> None:
        for name, value in now.items():
            setattr(self, name, value)
        for watcher in self.watchers:
            watcher()


class ElsewhereDecided(LocalQueue):
    """Gives a turn when the test says so."""

    def __init__(self) -> None:
        super().__init__(flow_controller(lookahead=2))
        self.members: list[tuple[str, bool]] = []

    def pump(self, now_s: float) -> None:
        pass

    def member(self, replica_id: str, *, is_out: bool) -> None:
        self.members.append((replica_id, is_out))

    def give(self, replica_id: str) -> None:
        self._on_turns(self.flow.dispatch(0.0, [Replica(replica_id, 4, 1000)]))


def dispatching(*upstreams: Any) -> tuple[Dispatcher, ElsewhereDecided, ReplicaSet]:
    backend, replicas = ElsewhereDecided(), ReplicaSet(upstreams)
    return (
        Dispatcher(backend.flow, replicas, lambda: 0.0, engine_grace_s=9.0, state=backend),
        backend,
        replicas,
    )


async def test_a_turn_at_a_drained_replica_is_put_back() -> None:
    one, other = Drainable("one"), Drainable("other")
    dispatcher, backend, replicas = dispatching(one, other)
    turn = dispatcher.line_up(Ticket(QueueEntry("r", "acme", 0.0, 10, 10), 1, 20))
    one.changes(is_drained=True)
    backend.give("one")
    assert not turn.done()
    assert len(backend.flow) == 1
    replicas.remove(one)
    backend.give("one")
    assert not turn.done()
    backend.give("other")
    assert turn.result().upstream is other


async def test_the_queue_hears_who_is_drained_resumed_joins_and_leaves_and_nothing_of_links() -> None:
    one, other = Drainable("one"), Drainable("other", is_drained=True)
    _, backend, replicas = dispatching(one)
    assert set(backend.members) == {("one", False)}
    one.changes(is_up=False)
    assert set(backend.members) == {("one", False)}
    for act, expected in (
        (lambda: one.changes(is_drained=True), ("one", True)),
        (lambda: one.changes(is_drained=False), ("one", False)),
        (lambda: replicas.add(other), ("other", True)),
        (lambda: replicas.remove(one), ("one", True)),
        (lambda: one.changes(is_up=True), ("one", True)),
    ):
        act()
        assert backend.members[-1] == expected
