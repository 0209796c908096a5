"""One queue over changing members: replicas join, are drained, die, restart and leave, and each gateway sees
it at another moment.

The real sessions and script on a virtual clock, before simulated engines. A gateway looks at a replica some
time after something happened to it, and sees what is true then. Two tenants of weights 1 and 3 always wait at
every gateway.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import redis

from engine.entry import QueueEntry
from gateway.flow.controller import Dispatch, Ticket
from gateway.flow.shared.mirror import Mirror
from gateway.flow.types import RESUMES
from gateway.flow.window import Replica
from tests.support.builders import flow_controller
from tests.support.shared_pool import Pool, PoolGateway

WEIGHTS = {"light": 1.0, "heavy": 3.0}
MOST, WAITING, PLACES = 10_000, 16, 4
STEP_S, STEPS, SEEN_LATE_S = 0.1, 400, 3.0
WINDOW = 8_000
"""Cost tokens; in flight are up to 400."""
CASES = ("drained", "left", "died", "restarted", "link lost", "put back")
OF_SEVERAL = ("joins again", "listed while out", "sent to one that is dead")


@dataclass(eq=False)
class Engine:
    """One life of a replica. Each request that it runs emits a token a step."""

    life: str
    running: dict[str, Run] = field(default_factory=dict)


DEAD = Engine("dead")


@dataclass
class Member:
    engine: Engine
    is_drained: bool = False
    is_listed: bool = True


@dataclass
class Run:
    side: Side
    ticket: Ticket
    replica_id: str
    engine: Engine
    computed: int = 0
    emitted: int = 0

    @property
    def had(self) -> tuple[int, int]:
        return self.ticket.had[0] + self.computed, self.ticket.had[1] + self.emitted


class Side:
    """A gateway, and what it knows."""

    def __init__(self, world: World, name: str) -> None:
        mirror = flow_controller(kind=Mirror, max_queued=MOST, max_queued_per_tenant=MOST)
        self.world, self.name = world, name
        self.gateway = PoolGateway(world.pool, name, mirror, [], 1)
        self.listed: dict[str, str] = {}
        """Replica -> its engine's life."""
        self.out: set[str] = set()
        self.no_link: set[str] = set()
        self.runs: dict[str, Run] = {}
        self.looks: list[tuple[float, str]] = [(0.0, each) for each in world.members]
        self.had_turns = 0
        self.unsaid: dict[str, bool] = {}
        """What it saw go out, or come back, since its last message."""
        self.said_lives: dict[str, str] = {}
        self.last_lives: dict[str, str] = {}
        """Of all replicas that it ever listed."""

    def look(self, replica_id: str) -> None:
        member = self.world.members[replica_id]
        self.listed.pop(replica_id, None)
        was_out = replica_id in self.out
        self.out.discard(replica_id)
        if member.is_drained or not member.is_listed:
            self.out.add(replica_id)
        elif member.engine is not DEAD and replica_id not in self.no_link:
            self.listed[replica_id] = member.engine.life
        if was_out != (replica_id in self.out):
            self.unsaid[replica_id] = not was_out
        for name, run in list(self.runs.items()):
            if run.replica_id == replica_id and (run.engine is not member.engine or replica_id in self.out):
                run.engine.running.pop(name, None)
                del self.runs[name]
                self.put_back(name, run.had)
        replicas = [
            Replica(each, PLACES, MOST, pauses=False, life=life, offers=frozenset({RESUMES}))
            for each, life in sorted(self.listed.items())
        ]
        self.gateway.sees(replicas, out=self.out)

    def put_back(self, name: str, had: tuple[int, int]) -> None:
        self.gateway.put_back(name, *had, self.world.now_s)
        self.world.met["put back"] += 1

    def arrivals(self) -> None:
        draw = self.world.draw
        for tenant, weight in WEIGHTS.items():
            while self.gateway.mirror.tenants.queued(tenant)[1] < WAITING:
                self.world.requests += 1
                size = draw.randint(1, 8), draw.randint(2, 10)
                name = f"r{self.world.requests}"
                entry = QueueEntry(name, tenant, self.world.now_s, *size, 1, weight)
                assert self.gateway.arrive(Ticket(entry, 1, sum(size)), self.world.now_s) is None

    def take_turns(self) -> None:
        turns, self.had_turns = self.gateway.turns[self.had_turns :], len(self.gateway.turns)
        for turn in turns:
            self.take(turn)

    def take(self, turn: Dispatch) -> None:
        """As the dispatcher does."""
        world, name, replica_id = self.world, turn.ticket.entry.entry_id, turn.replica_id
        out, lives = world.known[world.pool.given[name].number]
        assert (replica_id, "") not in out, "to a replica that is gone, as the pool knew"
        assert (replica_id, lives[self.name].get(replica_id)) not in out, "to an engine that is gone"
        if replica_id not in self.listed:
            world.met["late turn"] += 1
            self.put_back(name, turn.ticket.had)
            return
        assert not any(name in each.engine.running for each in world.members.values()), "in two engines"
        engine = world.members[replica_id].engine
        if engine.life != self.listed[replica_id]:
            # Its engine died, or another one has its place; this gateway will see it.
            world.met["sent to one that is dead"] += 1
            engine = Engine("nowhere")
        self.runs[name] = engine.running[name] = Run(self, turn.ticket, replica_id, engine)
        assert len(engine.running) <= PLACES


class World:
    def __init__(self, client: redis.Redis, sides: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.met: Counter[str] = Counter()
        self.now_s = 1e9
        self.lives = self.requests = 0
        self.later: list[tuple[float, str]] = []
        """When a replica is well again."""
        self.pool = Pool(client)
        self.pool.forget()
        self.members = {f"replica-{number}": Member(self.born()) for number in range(4)}
        self.out: dict[tuple[str, str], str] = {}
        """What the pool knows to be out, a replica or a life of it -> the gateway that said so last."""
        self.known: dict[int, tuple[frozenset[tuple[str, str]], dict[str, dict[str, str]]]] = {}
        """By turn, what was known when it was given: what is out, and the lives that gateways know."""
        self.had = Counter(dict.fromkeys(WEIGHTS, 0))
        self.service: list[tuple[int, float]] = [(0, 0.0)]
        """After each step: what all had, and how far the heavy tenant is from its share of that."""
        self.sides = [Side(self, f"gateway-{number}") for number in range(sides)]

    def born(self) -> Engine:
        self.lives += 1
        return Engine(f"life-{self.lives}")

    def step(self) -> None:
        self.now_s += STEP_S
        if self.draw.random() < 0.1:
            self.something_happens()
        for _, replica_id in (well := [each for each in self.later if each[0] <= self.now_s]):
            self.is_well(replica_id)
        self.later = [each for each in self.later if each not in well]
        for member in self.members.values():
            for name, run in list(member.engine.running.items()):
                self.emit(name, run)
        for side in self.draw.sample(self.sides, len(self.sides)):
            due = [each for at_s, each in side.looks if at_s <= self.now_s]
            side.looks = [look for look in side.looks if look[0] > self.now_s]
            for replica_id in due:
                side.look(replica_id)
            if self.draw.random() < 0.005:
                side.gateway.session.lost()
                self.met["joins again"] += 1
            side.arrivals()
            self.speak(side)
        whole = sum(self.had.values())
        self.service.append((whole, self.had["heavy"] - 0.75 * whole))

    def something_happens(self) -> None:
        replica_id, member = self.draw.choice(list(self.members.items()))
        what = self.draw.choice(["drained", "left", "died", "restarted", "link lost"])
        side = self.draw.choice(self.sides)
        if what == "drained":
            member.is_drained = True
        elif what == "left":
            member.is_listed = False
        elif what == "link lost":
            side.no_link.add(replica_id)
        else:
            member.engine = DEAD if what == "died" else self.born()
        self.met[what] += 1
        self.is_seen(replica_id)
        self.later.append((self.now_s + self.draw.uniform(0.5, 6.0), replica_id))

    def is_well(self, replica_id: str) -> None:
        member = self.members[replica_id]
        member.is_drained, member.is_listed = False, True
        if member.engine is DEAD:
            member.engine = self.born()
        for side in self.sides:
            side.no_link.discard(replica_id)
        self.is_seen(replica_id)

    def is_seen(self, replica_id: str) -> None:
        """Each gateway looks at it some time later."""
        for side in self.sides:
            side.looks.append((self.now_s + self.draw.uniform(0, SEEN_LATE_S), replica_id))

    def emit(self, name: str, run: Run) -> None:
        entry = run.ticket.entry
        self.had[entry.tenant_id] += 2 + (entry.input_tokens - run.computed)
        run.computed, run.emitted = entry.input_tokens, run.emitted + 1
        if run.emitted == entry.predicted_output_tokens:
            del run.engine.running[name], run.side.runs[name]
            run.side.gateway.finish(name, *run.had, self.now_s)

    def speak(self, side: Side) -> None:
        replicas = {each.replica_id: each.life for each in side.gateway.replicas}
        if not side.gateway.session.belongs or bool(replicas) != bool(side.said_lives):
            self.out = {what: by for what, by in self.out.items() if by != side.name}
            side.unsaid = dict.fromkeys(side.out, True)
        for replica_id, is_out in side.unsaid.items():
            self.out.pop((replica_id, ""), None)
            if is_out:
                self.out[replica_id, ""] = side.name
        for replica_id, life in replicas.items():
            if (before := side.last_lives.get(replica_id, life)) != life:
                self.out[replica_id, before] = side.name
        side.last_lives |= replicas
        side.unsaid, side.said_lives = {}, replicas
        side.gateway.exchange(self.now_s)
        given = int(self.pool.client.hget(self.pool.keys[0], "turns") or 0)
        lives = {each.name: each.said_lives for each in self.sides}
        for number in range(len(self.known) + 1, given + 1):
            self.known[number] = frozenset(self.out), lives
        listed = {each for other in self.sides for each in other.said_lives}
        self.met["listed while out"] += any((each, "") in self.out for each in listed)
        for other in self.sides:
            # What was published may come after an answer has said the same.
            if self.draw.random() < 0.3:
                other.gateway.listen(self.now_s)
            other.take_turns()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


@pytest.mark.parametrize("sides", [1, 2, 3, 4])
def test_weights_hold_and_nothing_is_sent_to_a_replica_that_is_gone(client: redis.Redis, sides: int) -> None:
    world = World(client, sides, seed=sides)
    for _ in range(STEPS):
        world.step()
    worst = max(
        abs(far - far_before) / (whole - whole_before)
        for index, (whole_before, far_before) in enumerate(world.service)
        for whole, far in world.service[index:]
        if whole - whole_before >= WINDOW
    )
    assert worst <= 0.01
    for case in (*CASES, *(OF_SEVERAL if sides > 2 else ())):
        assert world.met[case], f"nothing came to: {case}"
