"""The choice of a replica, and the index of its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.entry import QueueEntry
from engine.messages import StepTime
from gateway.flow.controller import Ticket
from gateway.flow.knobs import Knob
from gateway.flow.placement import Score, Scorer
from gateway.flow.routing import PrefixIndex, PrefixRouter, prefix_hashes
from gateway.flow.types import InFlight
from gateway.flow.window import Replica, ReplicaLoad
from ops.reporting import quantile
from ops.simulate.machines.machines import profile_machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.predictions import Exact
from tests.support.builders import flow_controller
from tests.support.conversations import (
    BLOCK_TOKENS,
    INPUT_SCALE,
    Conversation,
    read_trace,
    shared_cache_hits,
    simulated,
)

LARGE_BLOCKS = 4096
STEP_TIME = StepTime(10e-3, 1e-3, 0.0, 0.0, samples=1, relative_error=0.0)
REPLICAS = [Replica(name, 8, 64_000, STEP_TIME, 512) for name in ("a", "b")]


class Pool:
    """Two replicas behind a router; nothing ends by itself."""

    def __init__(self, replicas: list[Replica] | None = None) -> None:
        self.replicas = replicas or REPLICAS
        self.router = PrefixRouter(block_tokens=64)
        self.flow = flow_controller(lookahead=2, scorer=self.router)
        self.number = 0

    def send(self, prompt: list[int], now_s: float = 0.0, *, computed: bool = True) -> str:
        """A request arrives and goes; returns where. `computed`: its first token comes immediately."""
        self.number += 1
        name = f"r{self.number}"
        ticket = Ticket(
            QueueEntry(name, "t", now_s, len(prompt), 10), 1, len(prompt) + 10,
            prefix_hashes=prefix_hashes(prompt, "t"),
        )  # fmt: skip
        assert self.flow.enqueue(ticket, now_s) is None
        (turn,) = self.flow.dispatch(now_s, self.replicas)
        if computed:
            self.flow.progress(name, 1, 1)
        return turn.replica_id

    def end_all(self) -> None:
        for flight in list(self.flow.in_flight):
            self.flow.finish(flight.ticket.entry.entry_id, 1, 1, 0.0)


def test_equal_prefixes_have_equal_hashes_up_to_where_they_part() -> None:
    one = prefix_hashes(list(range(1000)), "t")
    other = prefix_hashes([*range(300), *range(5000, 5700)], "t")
    assert len(one) == 999 // 64
    assert one[:4] == other[:4]
    assert not set(one[4:]) & set(other[4:])


def test_hashes_of_one_tenant_say_nothing_of_another() -> None:
    prompt = list(range(200))
    assert not set(prefix_hashes(prompt, "one")) & set(prefix_hashes(prompt, "other"))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (64, 0), (65, 1), (129, 2), (10**5, 512)])
def test_only_full_blocks_but_for_the_last_token_count_and_there_is_a_limit(tokens: int, blocks: int) -> None:
    assert len(prefix_hashes([7] * tokens, "t")) == blocks


def test_the_index_forgets_the_deepest_blocks_of_the_oldest_prompt_first() -> None:
    index = PrefixIndex(6, 100.0)
    index.note([1, 2, 3, 4], 0.0)
    index.note([5, 6, 7], 1.0)
    assert len(index) == 6
    assert index.held([1, 2, 3, 4], 2.0) == 3
    assert index.held([5, 6, 7, 8], 2.0) == 3


def test_the_index_does_not_believe_what_is_too_old() -> None:
    index = PrefixIndex(10, 100.0)
    index.note([1, 2], 0.0)
    assert index.held([1, 2], 100.0) == 2
    assert index.held([1, 2], 100.1) == 0
    index.note([1], 100.1)
    assert index.held([1, 2], 100.2) == 1


def test_a_conversation_stays_where_its_prefix_is() -> None:
    pool = Pool()
    prompt = list(range(2000))
    first = pool.send(prompt)
    other = pool.send(list(range(10_000, 12_000)))
    assert other != first, "the other one was emptier"
    pool.end_all()
    for turn in range(2, 6):
        assert pool.send(prompt + [turn] * 500 * turn, float(turn)) == first
        pool.end_all()


def test_a_hot_prefix_does_not_overload_one_replica() -> None:
    """All requests share one prefix: later ones go where less is to be computed first."""
    pool = Pool()
    prompt = list(range(600))
    chosen = [pool.send(prompt + [number] * 600, computed=False) for number in range(12)]
    assert abs(chosen.count("a") - chosen.count("b")) <= 2


def test_a_hit_counts_for_nothing_where_half_the_places_more_are_taken() -> None:
    pool = Pool()
    prompt = list(range(6000))
    first = pool.send(prompt)
    chosen = [first] + [pool.send(prompt, 1.0) for _ in range(9)]
    other = "b" if first == "a" else "a"
    assert chosen.count(first) == 5, "four places more than the other's, of eight, and one"
    assert chosen[5] == other


def test_lost_engines_hold_nothing() -> None:
    pool = Pool()
    prompt = list(range(2000))
    first = pool.send(prompt)
    pool.end_all()
    ticket = Ticket(QueueEntry("x", "t", 0.0, 2000, 10), 1, 2010, prefix_hashes=prefix_hashes(prompt, "t"))
    assert pool.router.cached_tokens(ticket, first, 1.0) == 31 * 64
    pool.flow.placement.scorer.forget(first)
    assert pool.router.cached_tokens(ticket, first, 1.0) == 0


def test_a_faster_replica_is_preferred_until_its_queue_is_longer() -> None:
    slow = StepTime(10e-3, 3e-3, 0.0, 0.0, samples=1, relative_error=0.0)
    pool = Pool([REPLICAS[0], Replica("b", 8, 64_000, slow, 512)])
    chosen = [pool.send([number] * 400, computed=False) for number in range(8)]
    assert chosen[0] == "a"
    assert 5 <= chosen.count("a") < 8


class RoundRobin(Scorer):
    """One replica after the other."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        """Replica id -> number of its last turn."""

    def scores(
        self, ticket: Ticket, rank: int, candidates: Sequence[tuple[Replica, ReplicaLoad]], now_s: float
    ) -> Sequence[Score]:
        return [(self._turns.get(replica.replica_id, 0),) for replica, _ in candidates]

    def dispatched(self, flight: InFlight, replica: Replica, now_s: float) -> None:
        self._turns[replica.replica_id] = max(self._turns.values(), default=0) + 1


def routed(trace: Sequence[Conversation], router: Scorer) -> tuple[int, float, list[int]]:
    """Block hits, TTFT p99 in seconds, and requests by replica: four replicas of a large model on eight GPUs
    (16,000 prompt tokens a second, decode steps of about 12 ms)."""
    machine = profile_machine(
        "large",
        StepTime(100e-3, INPUT_SCALE / 16_000, 0.0, 1e-3, samples=1000, relative_error=0.0),
        max_sequences=64,
        max_batched_tokens=8192 // INPUT_SCALE,
        kv_tokens=LARGE_BLOCKS * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=16_384,
    )
    pool = SimulatedPool(
        "vtc", machine, replicas=4, predictions=Exact(), stepwise=True, declared_tokens=0,
        flow={"scorer": router},
    )  # fmt: skip
    pool.run([simulated(conversation) for conversation in trace])
    records = pool.records
    return (
        sum(tokens // BLOCK_TOKENS for tokens in records.cached_tokens),
        quantile([records.ttft_s(row) for row in range(len(records))], 0.99),
        [records.replica.count(number) for number in sorted(set(records.replica))],
    )


def test_conversations_hit_nearly_what_one_shared_cache_would() -> None:
    trace = read_trace(2000)
    shared = shared_cache_hits(trace, 4 * LARGE_BLOCKS)
    hits, ttft_p99_s, requests = routed(trace, PrefixRouter(block_tokens=BLOCK_TOKENS))
    hits_in_turn, ttft_p99_in_turn_s, _ = routed(trace, RoundRobin())
    assert len(trace) == 2000
    assert hits >= 0.9 * shared
    assert ttft_p99_s <= ttft_p99_in_turn_s
    assert hits_in_turn < 0.6 * shared, "nothing was at stake"
    assert max(requests) <= 1.25 * 500


def test_what_is_cached_counts_as_much_as_its_weight_says() -> None:
    prompt = list(range(640))
    chosen = {}
    for weight in (0.0, 1.0, 4.0):
        pool = Pool()
        pool.flow.turn(Knob.PREFIX_WEIGHT, weight)
        chosen[weight] = [pool.send(prompt), pool.send(prompt)]
    assert chosen == {0.0: ["a", "b"], 1.0: ["a", "a"], 4.0: ["a", "a"]}


def test_where_every_place_is_taken_the_replica_whose_answers_end_sooner_is_chosen() -> None:
    places = 2
    pool = Pool([Replica(name, places, 64_000, STEP_TIME, 512) for name in ("a", "b")])
    where = [pool.send([number] * 60) for number in range(2 * places)]
    assert sorted(where) == ["a", "a", "b", "b"]
    for number, replica_id in enumerate(where, 1):
        pool.flow.foresee(f"r{number}", (2, 3) if replica_id == "b" else (500, 600), 0.0)
    assert pool.send([99] * 60) == "b"
