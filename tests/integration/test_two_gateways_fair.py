"""Two gateways that share a queue are together as fair as one, also when one dies or Redis forgets.

On a real Redis and a virtual clock; the real sessions and script, a pool of two replicas.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.policy import UnknownPolicy
from gateway.flow.controller import Ticket
from gateway.flow.shared import codec
from gateway.flow.shared.codec import FALL, script
from gateway.flow.shared.mirror import Mirror
from gateway.flow.window import OWED_PART, Replica
from tests.support import services
from tests.support.builders import flow_controller
from tests.support.shared_pool import Pool, PoolGateway

NOON_S = 1_700_136_020.0
STALE_S = 15.0
REPLICAS = [Replica("a", 4, 10_000), Replica("b", 4, 10_000)]
PLACES = 2 * (4 + 2)
OWED = sum(each.max_sequences // OWED_PART for each in REPLICAS)
"""Places that requests of tenants below their part of them may take besides."""
WARM_UP = 100
"""Endings until everything that runs was chosen while both were waiting."""


def make_gateway(pool: Pool, name: str, *, life: int = 1, order: str = "vtc") -> PoolGateway:
    mirror = flow_controller(order, lookahead=2, kind=Mirror)
    return PoolGateway(pool, name, mirror, REPLICAS, life, stale_us=round(STALE_S * 1e6))


class House:
    """A pool with two gateways, `east` and `west`."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.pool = Pool(client)
        self.pool.forget()
        self.now_s = NOON_S
        self.east = make_gateway(self.pool, "east")
        self.west = make_gateway(self.pool, "west")
        self.number = 0

    def send(
        self,
        gateway: PoolGateway,
        tenant: str,
        count: int = 1,
        *,
        weight: float = 1.0,
        tokens: int = 100,
        tier: int = 1,
    ) -> list[str]:
        """So many requests of one tenant, said at once; returns their names."""
        names: list[str] = []
        for _ in range(count):
            self.number += 1
            name = f"{tenant}-{self.number}"
            entry = QueueEntry(name, tenant, self.now_s, tokens, tokens // 2, tier, weight)
            assert gateway.arrive(Ticket(entry, 1, tokens + tokens // 2), self.now_s) is None
            names.append(name)
        gateway.exchange(self.now_s)
        return names

    def hear(self) -> None:
        """Both speak, then both hear what came of it."""
        for gateway in (self.east, self.west):
            gateway.exchange(self.now_s)
        for gateway in (self.east, self.west):
            gateway.listen(self.now_s)
            gateway.exchange(self.now_s)

    def running(self, gateway: PoolGateway) -> list[str]:
        return [flight.ticket.entry.entry_id for flight in gateway.mirror.in_flight]

    def waiting(self, gateway: PoolGateway) -> set[str]:
        return {ticket.entry.entry_id for ticket in gateway.mirror.queue.tickets()}

    def close(self) -> None:
        self.east.close()
        self.west.close()


@pytest.fixture
def house(redis_url: str) -> Iterator[House]:
    with services.open_redis(redis_url) as client:
        made = House(client)
        made.hear()
        yield made
        made.close()


def test_weights_hold_within_one_per_cent_though_all_of_one_tenant_enters_by_one_gateway(
    house: House,
) -> None:
    """Both stay backlogged; sizes differ; what is served is counted as it ends."""
    weights, gateways = {"one": 1.0, "three": 3.0}, {"one": house.east, "three": house.west}
    served: Counter[str] = Counter()

    def refill(tenant: str) -> None:
        while len(gateways[tenant].mirror) < 30:
            tokens = 40 + 20 * (house.number % 7)
            house.send(gateways[tenant], tenant, weight=weights[tenant], tokens=tokens)

    for turn in range(WARM_UP + 3000):
        house.now_s += 0.01
        for tenant in weights:
            refill(tenant)
        gateway = gateways["one" if turn % 3 else "three"]
        under_way = house.running(gateway) or house.running(gateways["three" if turn % 3 else "one"])
        name = under_way[0]
        owner = house.east if name in house.running(house.east) else house.west
        entry = next(
            each.ticket.entry for each in owner.mirror.in_flight if each.ticket.entry.entry_id == name
        )
        emitted = entry.predicted_output_tokens + turn % 5 - 2
        owner.finish(name, entry.input_tokens, emitted, house.now_s)
        if turn >= WARM_UP:
            served[entry.tenant_id] += entry.input_tokens + 2 * emitted
        house.hear()
        assert PLACES <= len(house.running(house.east)) + len(house.running(house.west)) <= PLACES + OWED
    ratio = served["three"] / served["one"]
    assert 2.97 <= ratio <= 3.03, f"service {served}: {ratio}"


def test_the_larger_share_of_a_window_is_not_who_speaks_more(house: House) -> None:
    """Two equal tenants, one of which has a gateway that speaks ten times as often."""
    house.send(house.east, "quiet", 100)
    house.send(house.west, "loud", 100)
    house.hear()
    turns: Counter[str] = Counter()
    for turn in range(100):
        house.now_s += 0.1
        for _ in range(10):
            house.west.exchange(house.now_s)
        owner = house.east if turn % 2 else house.west
        for gateway in (owner, house.east, house.west):
            if house.running(gateway):
                gateway.finish(house.running(gateway)[0], 100, 50, house.now_s)
                gateway.exchange(house.now_s)
                break
        house.hear()
    for gateway in (house.east, house.west):
        turns.update(turn.ticket.entry.tenant_id for turn in gateway.turns)
    assert abs(turns["quiet"] - turns["loud"]) <= PLACES + 1


def test_what_a_dead_gateway_left_makes_room_when_it_is_stale_and_not_before(house: House) -> None:
    lost = house.send(house.west, "gone", 20)
    waits = house.send(house.east, "here", 20)
    house.hear()
    running = len(house.running(house.east))
    assert (running, len(house.running(house.west))) == (OWED, PLACES), "the other has its part of the places"
    house.now_s += STALE_S
    house.east.exchange(house.now_s)
    assert len(house.running(house.east)) == running, "it may still live"
    house.now_s += 0.1
    house.east.exchange(house.now_s)
    assert len(house.running(house.east)) == PLACES, "its places are free"
    assert not set(house.running(house.east)) & set(lost)
    assert set(house.running(house.east)) | house.waiting(house.east) == set(waits)


def test_a_gateway_that_was_taken_for_dead_joins_again_with_what_it_has(house: House) -> None:
    mine = house.send(house.west, "stalled", 20)
    house.send(house.east, "here", 4)
    house.hear()
    ran = house.running(house.west)
    assert len(ran) == PLACES
    for _ in range(3):
        house.now_s += STALE_S / 2 - 0.1
        house.east.exchange(house.now_s)
    assert len(house.running(house.east)) == 4
    house.now_s += 1
    house.west.exchange(house.now_s)
    assert house.running(house.west) == ran, "what runs goes on, and nothing has a second turn"
    assert house.waiting(house.west) == set(mine) - set(ran)
    # The books are full to the last: when everything has ended, everything had its turn once.
    for _ in range(40):
        for gateway in (house.east, house.west):
            for name in house.running(gateway):
                gateway.finish(name, 100, 50, house.now_s)
        house.hear()
    turns = Counter(turn.ticket.entry.entry_id for turn in house.west.turns)
    assert turns == Counter(mine)
    assert house.client.hlen(house.pool.keys[2]) == 0, "no ticket is left"


def test_a_redis_that_forgot_everything_is_told_again_and_counters_begin_equal(house: House) -> None:
    for tenant, gateway in (("rich", house.east), ("poor", house.west)):
        house.send(gateway, tenant, 30)
    house.hear()
    for _ in range(6):
        house.east.finish(house.running(house.east)[0], 100_000, 50, house.now_s)
        house.hear()
    before = {gateway: house.running(gateway) for gateway in (house.east, house.west)}
    waits = {gateway: house.waiting(gateway) for gateway in (house.east, house.west)}
    house.pool.forget()
    house.now_s += 1
    house.hear()
    # Places became free, but who spoke first did not take them: the other one had to be heard, too.
    freed = house.running(house.east)[0]
    house.east.finish(freed, 100, 50, house.now_s)
    house.now_s += 0.9
    house.hear()
    assert house.running(house.east) == before[house.east][1:]
    house.now_s += 0.2
    house.hear()
    before[house.east].remove(freed)
    for gateway in (house.east, house.west):
        assert house.running(gateway)[: len(before[gateway])] == before[gateway]
        assert set(house.running(gateway)) | house.waiting(gateway) == set(before[gateway]) | waits[gateway]
        gateway.mirror.check()
    loads = sum(len(house.running(gateway)) for gateway in (house.east, house.west))
    assert PLACES <= loads < sum(map(len, before.values())) + 1 <= PLACES + OWED, "full, and no fuller"
    # From here on turns alternate: no tenant pays for what Redis has forgotten.
    seen = [len(house.east.turns), len(house.west.turns)]
    for _ in range(16):
        for gateway in (house.east, house.west):
            if house.running(gateway):
                gateway.finish(house.running(gateway)[0], 100, 50, house.now_s)
        house.hear()
    assert abs((len(house.east.turns) - seen[0]) - (len(house.west.turns) - seen[1])) <= 2


def test_a_replica_that_took_over_behind_is_told_everything_again(house: House) -> None:
    """It lacks what was confirmed last: an arrival, ends, turns."""
    mine = house.send(house.east, "here", 8)
    house.send(house.west, "there", 8)
    house.hear()
    held = {key: house.client.dump(key) for key in house.pool.keys if house.client.exists(key)}
    late = house.send(house.east, "here", 2)
    for name in house.running(house.east):
        house.east.finish(name, 100, 50, house.now_s)
    house.hear()
    house.client.delete(*house.pool.keys)
    for key, dumped in held.items():
        house.client.restore(key, 0, dumped)
    house.hear()
    for gateway in (house.east, house.west):
        gateway.mirror.check()
    for _ in range(20):
        for gateway in (house.east, house.west):
            for name in house.running(gateway):
                gateway.finish(name, 100, 50, house.now_s)
        house.hear()
    turns = Counter(turn.ticket.entry.entry_id for turn in house.east.turns)
    assert turns == Counter([*mine, *late])
    assert house.client.hlen(house.pool.keys[2]) == 0, "no ticket is left"


def _lose_an_entry(client: Any, key: str) -> None:
    kind = client.type(key)
    if kind == b"hash":
        client.hdel(key, min(client.hkeys(key)))
    elif kind == b"zset":
        client.zremrangebyrank(key, 0, 0)


SPOIL: dict[str, Callable[[Any, str], object]] = {
    "lost": lambda client, key: client.delete(key),
    "a string": lambda client, key: client.set(key, "garbage"),
    "a list": lambda client, key: (client.delete(key), client.rpush(key, "garbage")),
    "a set": lambda client, key: (client.delete(key), client.sadd(key, "garbage")),
    "a hash": lambda client, key: (client.delete(key), client.hset(key, "garbage", "garbage")),
    "a sorted set": lambda client, key: (client.delete(key), client.zadd(key, {"garbage": 0})),
    "without an entry": _lose_an_entry,
}
OF_ENTRIES = ("tenants", "tickets", "lines")
SERVED_WITHIN_S = 5.0
TIERS = (1, 1, 2, 1, 1, 0, 1, 1, 2, 1, 1, 0, 1, 1)
MOST_RUNNING = PLACES + OWED + 2 * TIERS.count(0)
"""A tier's window counts what is of its rank and above."""


class Load:
    """Requests of two tenants wait and run at both gateways of a house, one of them with a reservation."""

    def __init__(self, client: redis.Redis) -> None:
        self.house = house = House(client)
        house.hear()
        self.gateways = (house.east, house.west)
        self.names: list[str] = []
        for number, tier in enumerate(TIERS):
            for gateway, tenant in zip(self.gateways, ("rich", "poor"), strict=True):
                name = f"{tenant}-{number}"
                entry = QueueEntry(name, tenant, house.now_s, 100, 50, tier)
                rate = 1.0 if tenant == "poor" else 0.0
                gateway.arrive(Ticket(entry, 1, 150, reserved_cost_per_s=rate), house.now_s)
                gateway.exchange(house.now_s)
                self.names.append(name)
        house.hear()
        assert all(house.waiting(each) and house.running(each) for each in self.gateways)

    def speak(self, gateway: PoolGateway) -> None:
        try:
            gateway.exchange(self.house.now_s)
        except ResponseError:
            gateway.session.refused()

    def end(self) -> None:
        """One request after another ends, until each has had its turn: soon, once, and within the windows."""
        house, spoilt_s = self.house, self.house.now_s
        had = sum(len(each.turns) for each in self.gateways)
        while any(house.running(each) or house.waiting(each) for each in self.gateways):
            house.now_s += 0.25
            for gateway in self.gateways:
                self.speak(gateway)
                gateway.listen(house.now_s)
                assert sum(len(house.running(each)) for each in self.gateways) <= MOST_RUNNING
                for name in house.running(gateway)[:1]:
                    gateway.finish(name, 100, 50, house.now_s)
            turns = [turn.ticket.entry.entry_id for each in self.gateways for turn in each.turns]
            assert len(turns) > had or house.now_s < spoilt_s + SERVED_WITHIN_S
            assert house.now_s < spoilt_s + 60, "some wait for ever"
        assert sorted(turns) == sorted(self.names)
        for gateway in self.gateways:
            self.speak(gateway)
            gateway.close()
        assert not house.client.hlen(house.pool.keys[2]), "nothing is left of them"


@pytest.mark.parametrize("how", SPOIL)
def test_a_key_that_is_lost_or_spoilt_costs_no_request(redis_url: str, how: str) -> None:
    with services.open_redis(redis_url) as client:
        for number in range(codec.NUM_KEYS):
            load = Load(client)
            key = load.house.pool.keys[number]
            # A hash of other loads is believed until something ends there.
            is_believed = how == "a hash" and key.endswith("loads")
            if key.endswith(OF_ENTRIES) or (how != "without an entry" and not is_believed):
                SPOIL[how](client, key)
                load.end()


def test_a_tenant_that_is_missing_is_not_taken_for_a_new_one(redis_url: str) -> None:
    """It would begin with no charge, and its lines with a count below nothing."""
    with services.open_redis(redis_url) as client:
        load = Load(client)
        client.hdel(load.house.pool.keys[1], "rich")
        load.house.east.finish(load.house.running(load.house.east)[0], 100, 50, load.house.now_s)
        with pytest.raises(ResponseError, match="has lost"):
            load.house.east.exchange(load.house.now_s)
        load.house.east.session.refused()
        load.end()


CUT = """
local calls = 0
local redis = {pcall = redis.pcall, call = function(...)
  calls = calls + 1
  if calls > tonumber(ARGV[8]) then
    error('cut')
  end
  return redis.call(...)
end}
"""


def _cut_after(client: Any, calls: int) -> bool:
    """Whether an exchange failed after so many commands of its script; half of it cost no request."""
    load = Load(client)
    east, now_s = load.house.east, load.house.now_s
    east.finish(load.house.running(east)[0], 100, 50, now_s)
    message = east.session.message(now_s, east.replicas)
    assert message is not None
    arguments = [*message.arguments(round(now_s * 1e6), "east"), calls]
    meta = load.house.pool.keys[0]
    epoch = client.hget(meta, "epoch")
    try:
        east.session.answered(client.eval(CUT + codec.script(), 16, *load.house.pool.keys, *arguments), now_s)
    except ResponseError:
        east.session.refused()
        load.end()
        # The first two read what is there, and say that this call has begun.
        assert calls < 2 or client.hget(meta, "epoch") != epoch, "half of it was relied on"
        return True
    return False


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_call_that_fails_half_way_costs_no_request(redis_url: str, step: int) -> None:
    with services.open_redis(redis_url) as client:
        failed = list(takewhile(lambda calls: _cut_after(client, calls), count(1, step)))
    assert len(failed) * step > 25


def test_who_is_refused_again_and_again_deletes_the_queue_once(house: House) -> None:
    """What it says is right, and an entry that no check looks at is not: the name of the order."""
    house.send(house.east, "rich", 20)
    house.send(house.west, "poor", 20)
    epochs = [house.client.hget(house.pool.keys[0], "epoch")]
    house.client.hset(house.pool.keys[0], "order", "garbage")
    for _ in range(6):
        house.now_s += 0.25
        for gateway in (house.east, house.west):
            try:
                gateway.exchange(house.now_s)
            except UnknownPolicy:
                gateway.session.refused()
            epochs.append(house.client.hget(house.pool.keys[0], "epoch"))
    assert len(set(epochs)) == 2, "the second one joins what the first has begun"
    assert not house.east.session.is_broken
    house.now_s += 1
    house.east.finish(house.running(house.east)[0], 100, 50, house.now_s)
    house.hear()
    assert len(house.running(house.east)) + len(house.running(house.west)) >= PLACES


def test_clocks_of_gateways_do_not_matter(house: House) -> None:
    """Each gateway has a clock of its own; the pool's time is the server's. Who came first goes first."""
    client = house.client
    fast, slow = (
        make_gateway(house.pool, "fast", order="fcfs"),
        make_gateway(house.pool, "slow", order="fcfs"),
    )
    house.pool.forget()
    ahead_s = {fast: 3600.0, slow: -3600.0}
    for gateway in (fast, slow):
        gateway.replicas = [Replica("a", 1, 10_000)]
        gateway.exchange_at(NOON_S, NOON_S + ahead_s[gateway])
    names: list[str] = []
    for number in range(8):
        gateway, server_s = (slow, fast)[number % 2], NOON_S + number
        own_s = server_s + ahead_s[gateway]
        name = f"r{number}"
        entry = QueueEntry(name, f"tenant-{number % 3}", own_s, 10, 10)
        assert gateway.arrive(Ticket(entry, 1, 20), own_s) is None
        gateway.exchange_at(server_s, own_s)
        names.append(name)
    server_s = NOON_S + 100
    for _ in range(20):
        for gateway in (fast, slow):
            own_s = server_s + ahead_s[gateway]
            gateway.listen(own_s)
            for name in house.running(gateway):
                gateway.finish(name, 10, 10, own_s)
            gateway.exchange_at(server_s, own_s)
    numbered = sorted(house.pool.given.values(), key=lambda turn: turn.number)
    assert [turn.entry_id for turn in numbered] == names
    fast.close()
    slow.close()
    assert client.hlen(house.pool.keys[2]) == 0


def test_a_turn_for_somebody_who_left_at_that_moment_frees_its_place(house: House) -> None:
    names = house.send(house.west, "one", PLACES + 1)
    house.hear()
    last = names[-1]
    assert house.waiting(house.west) == {last}
    house.west.cancel(last, house.now_s)  # not said yet
    house.send(house.east, "two", 1)
    house.west.finish(names[0], 100, 50, house.now_s)
    house.west.finish(names[1], 100, 50, house.now_s)
    # Of the two places one is given to the request that has just left, and free again with its own word.
    house.hear()
    house.hear()
    assert house.running(house.east) == [f"two-{house.number}"]
    assert last not in house.running(house.west)
    assert house.client.zcard(house.pool.keys[9]) == 0, "every turn is confirmed"


def test_without_an_engine_a_gateway_holds_up_nobody(house: House) -> None:
    mine = house.send(house.west, "blind", 30)
    house.hear()
    others = house.send(house.east, "sees", 10)
    house.west.replicas = []
    ran = house.running(house.west)
    house.west.exchange(house.now_s)
    for name in ran:
        house.west.finish(name, 100, 50, house.now_s)
    house.hear()
    assert set(house.running(house.east)) == set(others), "it has the engine to itself"
    assert not house.running(house.west)
    house.west.replicas = REPLICAS
    house.west.turns.clear()
    house.hear()
    # It was away for a moment only: its tenant has its part of the places, whatever is free of the windows.
    assert len(house.running(house.west)) == sum(each.max_sequences // 2 for each in REPLICAS)
    assert all(turn.is_owed for turn in house.west.turns)
    assert house.waiting(house.west) | set(house.running(house.west)) | set(ran) == set(mine)


def test_a_gateway_that_leaves_gives_its_places_back(house: House) -> None:
    house.send(house.west, "leaves", 20)
    house.send(house.east, "stays", 20)
    message = house.west.session.message(house.now_s, REPLICAS, leaves=True)
    assert message is not None
    house.pool.send("west", message, house.now_s)
    house.east.listen(house.now_s)
    assert len(house.running(house.east)) == PLACES


def test_another_order_holds_for_all_gateways(house: House) -> None:
    house.send(house.west, "one", 20)
    house.west.mirror.set_order("fcfs")
    house.hear()
    assert house.east.mirror.order_name == "fcfs"
    assert house.client.hget(house.pool.keys[0], "order") == b"fcfs"
    joined = make_gateway(house.pool, "late", order="vtc")
    joined.exchange(house.now_s)
    assert joined.mirror.order_name == "fcfs", "what is in force counts, not what a newcomer was started with"
    joined.close()


def test_a_change_of_order_forgives_no_idle_time(house: House) -> None:
    for name in house.send(house.east, "old", 3):
        house.east.finish(name, 100, 50, house.now_s)
    house.hear()
    for order in ("fcfs", "vtc"):
        house.east.mirror.set_order(order)
        house.hear()
    house.send(house.west, "new")
    [turn] = house.west.turns
    cost = turn.ticket.entry.predicted_cost * COUNTER_SCALE
    assert turn.counter == house.east.mirror.counters.value("old") + cost


def test_counters_that_come_near_the_end_of_exact_numbers_fall_together(house: House) -> None:
    house.send(house.east, "heavy", PLACES + 1, weight=1e-6)
    house.hear()
    told = 0
    for number in range(12):
        name = house.running(house.east)[0]
        house.east.finish(name, 500 * number, 50, house.now_s)
        house.send(house.east, "heavy", 1, weight=1e-6)
        house.hear()
        counter = house.east.mirror.counters.value("heavy")
        assert counter >= told, "what gateways see goes on rising"
        told = counter
    assert told > FALL
    stored = int(house.client.hget(house.pool.keys[0], "falls") or 0)
    assert stored > 0
    assert told % 1 == 0
    assert told // COUNTER_SCALE > 0


def test_a_prefix_that_a_replica_holds_draws_its_requests_but_not_beyond_its_load(house: House) -> None:
    for number in range(8):
        name = f"p{number}"
        entry = QueueEntry(name, "one", house.now_s, 100, 10)
        ticket = Ticket(entry, 1, 110)
        house.east.mirror.cached_tokens = lambda *_: {"b": 80}  # type: ignore[method-assign]
        assert house.east.arrive(ticket, house.now_s) is None
        house.east.exchange(house.now_s)
    where = [turn.replica_id for turn in house.east.turns]
    # Two places of four are half of `b`: with more than that it has no preference over the empty `a`.
    assert where[:3] == ["b"] * 3
    assert Counter(where)["b"] <= 6
    assert "a" in where


def test_the_script_runs_on_every_redis_found_here_and_in_a_cluster() -> None:
    for binary, cluster in [(each, False) for each in services.redis_binaries()] + [(None, True)]:
        server = services.start_cluster(1, 0).nodes[0] if cluster else services.start_redis(binary)
        try:
            with redis.Redis.from_url(server.url) as client:
                house = House(client)
                house.send(house.east, "one", 20)
                house.send(house.west, "two", 20, tier=2)
                house.hear()
                for _ in range(30):
                    for gateway in (house.east, house.west):
                        for name in house.running(gateway):
                            gateway.finish(name, 100, 50, house.now_s)
                    house.hear()
                assert len(house.east.turns) + len(house.west.turns) == 40
                if cluster:
                    slots = {client.execute_command("CLUSTER KEYSLOT", key) for key in house.pool.keys}
                    assert len(slots) == 1
                house.close()
        finally:
            server.stop()


def test_only_commands_of_redis_6_2_are_used() -> None:
    known = {"TIME", "HGET", "HGETALL", "HSET", "HDEL", "HKEYS", "HLEN", "PUBLISH"}
    known |= {"ZADD", "ZREM", "ZRANGE", "ZRANGEBYSCORE", "ZRANGEBYLEX", "ZCARD", "EXISTS", "DEL"}
    assert set(re.findall(r"redis\.p?call\('(\w+)'", script())) == known
