"""A gateway's forecast includes what waits at the other gateways of its pool.

Two gateways' parts over a real Redis, on virtual time; the queue that a forecast replays is looked at itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis

from engine.entry import QueueEntry
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.messages import StepTime
from gateway.flow.controller import Ticket
from gateway.flow.shared import codec
from gateway.flow.shared.mirror import MAX_OTHERS, Mirror
from gateway.flow.types import TokensAhead
from gateway.flow.window import Replica
from tests.support.builders import flow_controller
from tests.support.pictures import forecast_of, picture
from tests.support.shared_pool import PREFIX, Pool, PoolGateway

NOW_S = 1_700_000_000.0
REPLICAS = [Replica("a", 1, 1_000_000)]


class House:
    def __init__(self, client: redis.Redis) -> None:
        self.pool = Pool(client, "forecast")
        self.pool.forget()
        self.gateways = {
            name: PoolGateway(self.pool, name, self.mirror(), REPLICAS, 1) for name in ("east", "west")
        }
        for gateway in self.gateways.values():
            gateway.exchange(NOW_S)
        self.look_script: Any = client.register_script(codec.look_script())
        self.number = 0

    @staticmethod
    def mirror() -> Mirror:
        return flow_controller(kind=Mirror)

    def arrive(self, at: str, tenant: str, count: int = 1, *, tier: int = 1, weight: float = 1.0) -> None:
        gateway = self.gateways[at]
        for _ in range(count):
            self.number += 1
            entry = QueueEntry(f"r{self.number}", tenant, NOW_S, 30, 50, tier, weight)
            assert gateway.arrive(Ticket(entry, 1, 80), NOW_S) is None
        gateway.exchange(NOW_S)
        for each in self.gateways.values():
            each.listen(NOW_S)

    def look(self, at: str) -> Mirror:
        gateway = self.gateways[at]
        packed = self.look_script(keys=codec.look_keys(PREFIX, self.pool.name), args=[64])
        gateway.session.looked(packed, NOW_S)
        return gateway.mirror

    def waits(self, at: str) -> dict[tuple[str, int], int]:
        """Requests by tenant and tier in the queue that a forecast at this gateway replays."""
        mirror = self.look(at)
        found: dict[tuple[str, int], int] = {}
        for entry in mirror.queue_clone(mirror.counters.clone()).entries():
            assert (entry.input_tokens, entry.predicted_output_tokens) == (30, 50)
            found[entry.tenant_id, entry.tier] = found.get((entry.tenant_id, entry.tier), 0) + 1
        return found


@pytest.fixture
def house(redis_url: str) -> Iterator[House]:
    with redis.Redis.from_url(redis_url) as client:
        made = House(client)
        yield made
        for gateway in made.gateways.values():
            gateway.close()
        made.pool.forget()


def test_both_gateways_see_everything_that_waits_and_nothing_twice(house: House) -> None:
    house.arrive("east", "first")  # has the only place
    house.arrive("east", "acme", 5)
    house.arrive("west", "acme", 2)
    house.arrive("west", "umbrella", 3, tier=2)
    everything = {("acme", 1): 7, ("umbrella", 2): 3}
    assert house.waits("east") == everything
    assert house.waits("west") == everything
    assert house.gateways["east"].mirror.queued_up_to(1) == 7
    assert house.gateways["east"].mirror.queued_up_to(2) == 10
    assert len(house.gateways["east"].mirror) == 5, "its own are its own"


def test_what_has_left_is_forgotten(house: House) -> None:
    house.arrive("east", "first")
    house.arrive("west", "acme", 2)
    assert house.waits("east") == {("acme", 1): 2}
    west = house.gateways["west"]
    for ticket in list(west.mirror.queue.tickets()):
        west.cancel(ticket.entry.entry_id, NOW_S)
    west.exchange(NOW_S)
    assert house.waits("east") == {}


def test_a_wait_is_forecast_behind_the_other_gateways_requests(house: House) -> None:
    house.arrive("east", "first")
    waits = []
    for count in (0, 10):
        house.arrive("west", "acme", count)
        mirror = house.look("east")
        counters = mirror.counters.clone()
        candidate = QueueEntry("candidate", "acme", NOW_S, 30, 50)
        load = EngineLoad("a", StepTime(0.01, 0.0, 0.0, 0.0, 100, 0.1), 1, 512, 1, 1_000_000, [])
        seen = forecast_of(candidate, picture(mirror.queue_clone(counters), counters, [load], NOW_S))
        waits.append((seen.wait_s[0], sum(seen.tokens_ahead.values())))
    assert waits[0] == (0.0, 0)
    assert waits[1][0] == pytest.approx(10 * 50 * 0.01, rel=0.3)
    assert waits[1][1] == pytest.approx(10 * (30 + 2 * 50), rel=0.1)


def test_tokens_ahead_of_a_request_include_what_waits_at_other_gateways(house: House) -> None:
    house.arrive("east", "first")
    house.arrive("west", "acme", 5)
    house.arrive("west", "umbrella", 2, tier=0)  # one of them runs: that is not known here
    house.arrive("east", "acme")
    cost = 30 + 2 * 50
    ahead = house.look("east").tokens_ahead(f"r{house.number}", NOW_S)
    assert ahead == TokensAhead(own=5 * cost, others=cost, higher_tier=cost, running=cost)


def test_counters_of_the_others_are_those_of_the_pool(house: House) -> None:
    house.arrive("west", "ran")
    house.arrive("west", "ran", 3)
    house.arrive("west", "new", 2)
    mirror = house.look("east")
    counters = mirror.counters.clone()
    queue = mirror.queue_clone(counters)
    west = house.gateways["west"].mirror
    for tenant in ("ran", "new"):
        assert queue.counter(tenant, 1) == west.queue_clone(west.counters.clone()).counter(tenant, 1)
    assert queue.counter("ran", 1) > queue.counter("new", 1), "which stands by what the other had"


def test_no_forecast_counts_with_more_than_a_bounded_number(house: House) -> None:
    house.arrive("east", "first")
    house.arrive("west", "acme", MAX_OTHERS + 50)
    mirror = house.look("east")
    assert len(mirror.queue_clone(mirror.counters.clone())) == MAX_OTHERS


def test_garbage_is_refused(house: House) -> None:
    with pytest.raises(msgspec.DecodeError):
        house.gateways["east"].session.looked(b"\xc1", NOW_S)
