"""What a pool takes, by the context that its replicas have announced, and what runs on each."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine.entry import QueueEntry
from engine.messages import ModelInfo, Ready
from gateway.flow.types import Ticket
from gateway.flow.window import Replica
from gateway.pools.pool import ModelPool, Pools, PoolSpec
from gateway.requests.prompt import EstimatedRenderer
from gateway.upstream.capabilities import PLAIN_TEXT, Capabilities
from gateway.upstream.replica_set import ReplicaSet
from tests.support.builders import flow_controller


@dataclass
class Announced:
    """A replica that has said this of itself."""

    ready: Ready | None = None
    replica_id: str = "e"
    is_up: bool = True
    is_drained: bool = False
    name: str = "e"
    running_requests: int = 0
    capabilities: Capabilities = PLAIN_TEXT


def announced(context_tokens: int, num_blocks: int = 1000) -> Announced:
    info = ModelInfo("m", "Llama", 1, context_tokens, 500, [2], "float32", "cpu", "")
    return Announced(Ready("e", info, "vtc", 16, num_blocks, 32, 512, pid=1))


def pool_of(*replicas: Announced) -> ModelPool:
    upstreams: Any = replicas
    unused: Any = None
    lifecycle: Any = SimpleNamespace(runs_of=lambda tenant_id: [])
    flow = flow_controller(lookahead=2, ageing_s=[100.0] * 3)
    return ModelPool(
        PoolSpec("m", ReplicaSet(upstreams), EstimatedRenderer()),
        flow,
        unused,
        unused,
        lifecycle,
        unused,
        unused,
    )


def test_what_is_long_goes_by_the_smallest_context_that_was_announced() -> None:
    late = Announced()
    pool = pool_of(late, announced(8192))
    pool.fit_lanes()
    assert pool.flow.queue.lane_rule.long_tokens == 6144
    late.ready = announced(2048).ready
    pool.fit_lanes()
    assert pool.flow.queue.lane_rule.long_tokens == 1536
    nothing_yet = pool_of(Announced())
    nothing_yet.fit_lanes()
    assert nothing_yet.flow.queue.lane_rule.long_tokens == 16_384


def test_a_small_kv_cache_does_not_shorten_the_context() -> None:
    """An engine with such a cache does not start; a request that it cannot hold is refused by that name."""
    pool = pool_of(announced(2048, num_blocks=10), Announced())
    assert pool.context_tokens == pool.served("m").context_tokens == 2048


def test_what_runs_on_a_replica_counts_what_was_sent_there_and_what_moved_there() -> None:
    one, other = Announced(replica_id="a", name="a@gw"), Announced(replica_id="b", name="b")
    pool = pool_of(one, other)
    for number in range(3):
        entry = QueueEntry(f"r{number}", "t", 0.0, 10, 10)
        pool.flow.enqueue(Ticket(entry, 1, 20), 0.0)
    pool.flow.dispatch(0.0, [Replica("a", 16, 10_000)])
    pools = Pools(m=pool)
    moving: Any = SimpleNamespace(turn=SimpleNamespace(upstream=other), relocating=object())
    pool.lifecycle.runs_of = lambda tenant_id: [moving]  # type: ignore[method-assign]
    assert pools.in_flight() == [("m", "a@gw", 3), ("m", "b", 1)], (
        "it runs there until it has a place elsewhere"
    )
    pool.lifecycle.runs_of = lambda tenant_id: []  # type: ignore[method-assign]
    assert pools.in_flight() == [("m", "a@gw", 3), ("m", "b", 0)]
    one.running_requests, other.running_requests = 1, 2
    assert pools.in_flight() == [("m", "a@gw", 3), ("m", "b", 2)], "never less than runs"
