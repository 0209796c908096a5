"""Two gateways that share a queue in Redis act as one flow controller that sees everything.

Random histories through two gateways and, in the same order, into one controller, on one virtual clock. After
every step the same requests had their turns, in the same order, on the same replicas and with the same
counters; and what each gateway knows of its own requests agrees with it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.entry import OUTPUT_TOKEN_COST, QueueEntry, cost_of
from engine.messages import TenantShare
from engine.scheduling.brakes import Brakes
from gateway.flow.controller import FlowController, Ticket
from gateway.flow.knobs import Knob
from gateway.flow.lanes import LONG, LaneRule
from gateway.flow.shared.control_session import IN_FORCE_S
from gateway.flow.shared.mirror import Mirror
from gateway.flow.types import RESUMES
from gateway.flow.window import Replica
from gateway.pools.control_loop import queue_setters
from tests.support.builders import flow_controller
from tests.support.shared_pool import Pool, PoolGateway

MAX_QUEUED = 14
MAX_QUEUED_PER_TENANT = 6
WEIGHTS = {"one": 1.0, "two": 2.0, "three": 3.0, "half": 0.5}
NOON_US = 1_700_136_020_000_000
LIFE = "engine/1"
PLAIN, TOOLS = frozenset({"text", RESUMES}), frozenset({"text", "tools", RESUMES})
OWNERS = frozenset({"of 0", "of 1"})
"""Needs of a gateway's requests: so the one controller knows to which replicas they may go."""
REPLICAS = [
    Replica("a", 2, 120, life=LIFE, offers=TOOLS | OWNERS),
    Replica("b", 3, 200, life=LIFE, offers=PLAIN | OWNERS),
]
RESERVED = {"one": (0.0, None), "two": (30.0, None), "three": (0.0, None), "half": (8.0, None)}
"""Reserved cost tokens per second, and the tier that they are for; None: all."""
AGEING_S = (math.inf, 2.0, 1.2)
LANES = LaneRule(long_tokens=90, share_sequences=0.5, share_kv=0.6, batch_share=0.7)
BURST_S = 3.0
CASES: tuple[str, ...] = (
    "of the other",
    "refused",
    "beyond",
    "cancelled",
    "progress",
    "several turns",
    "both wait",
    "moved",
)
CASES += ("aged", "long", "reserved", "raised by a reservation", "answer lost", "late copy", "owed")
CASES += ("needs one",)
CASES += ("turned", "turned while something waits", "aged by a knob")
CASES += (
    "put back",
    "ended before its turn",
    "put back and went on",
    "put back and aged",
    "not where it is out",
)
CASES += ("had less than charged", "heard", "lifted", "foreseen longer", "foreseen shorter")
BRAKES = (Brakes(), Brakes({2: 0.4}), Brakes({1: 0.5}), Brakes({1: 0.34, 2: 0.1}))
ROUNDING = 100
"""Of millionths of a cost token: the parts of a charge are rounded by themselves."""


def controller(kind: type[FlowController], order: str) -> Any:
    return flow_controller(
        order,
        kind=kind,
        lookahead=1,
        max_queued=MAX_QUEUED,
        max_queued_per_tenant=MAX_QUEUED_PER_TENANT,
        ageing_s=AGEING_S,
        lanes=LANES,
        reservation_burst_s=BURST_S,
    )


class Histories(RuleBasedStateMachine):
    """`client` and `met` are set by the test."""

    client: ClassVar[redis.Redis]
    met: ClassVar[Counter[str]]

    @initialize(order=st.sampled_from(["vtc", "vtc", "fcfs"]))
    def begin(self, order: str) -> None:
        self.now_us = NOON_US
        self.knobs: dict[Knob, float] = {}
        self.turned_s = -math.inf
        """When they were last told: what is told counts for a while."""
        self.pool = Pool(self.client)
        self.pool.forget()
        self.union = controller(FlowController, order)
        self.gateways = [
            PoolGateway(self.pool, name, controller(Mirror, order), REPLICAS, 1) for name in ("east", "west")
        ]
        self.out: dict[str, set[int]] = {"a": set(), "b": set()}
        """Of each replica, the gateways that know it to be out."""
        self.is_out: set[str] = set()
        """As the pool knows."""
        for gateway in self.gateways:
            gateway.sees(REPLICAS)
            gateway.exchange(self.now_s)
        self.number = 0
        self.waiting: dict[str, tuple[int, Ticket]] = {}
        self.running: dict[str, tuple[int, Ticket, int, int]] = {}
        self.computed: dict[str, list[int]] = {}
        """Of running requests: prompt and output tokens that the engines reported."""
        self.serial = 0
        self.reserved: dict[str, tuple[float, int | None]] = dict(RESERVED)
        self.met["histories"] += 1

    def teardown(self) -> None:
        for gateway in getattr(self, "gateways", []):
            gateway.close()

    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    # ------------------------------------------------------------ what happens

    @rule(
        at=st.integers(0, 1),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        tier=st.sampled_from((0, 1, 1, 2, 2)),
        prompt=st.integers(1, 60),
        predicted=st.integers(1, 60),
        sequences=st.integers(1, 3),
        count=st.integers(1, 4),
    )
    def arrive(
        self, at: int, tenant: str, tier: int, prompt: int, predicted: int, sequences: int, count: int
    ) -> None:
        for _ in range(count):
            self.number += 1
            # No two at the very same time: their order goes by names here and by numbers there.
            self.now_us += 1
            name = f"r{self.number}"
            size = (prompt * sequences, predicted * sequences)
            entry = QueueEntry(name, tenant, self.now_s, *size, tier, WEIGHTS[tenant])
            rate, reserved_tier = self.reserved[tenant]
            needs = (PLAIN if self.number % 5 else TOOLS) | {f"of {at}"}
            ticket = Ticket(
                entry,
                sequences,
                sum(size),
                reserved_cost_per_s=rate,
                reserved_tier=reserved_tier,
                needs=needs,
            )
            self.met["needs one"] += needs > TOOLS
            full = self.union.enqueue(ticket, self.now_s)
            gateway = self.gateways[at]
            refused = gateway.arrive(ticket, self.now_s)
            if refused is None:
                self.waiting[name] = (at, ticket)
                self.exchange(at)
                refused = next((each for entry_id, each in gateway.refused if entry_id == name), None)
            # When to come back a gateway may say by itself, from its own turns.
            assert (refused is None) == (full is None)
            if full is not None and refused is not None:
                assert (refused.of_tenant, refused.limit) == (full.of_tenant, full.limit)
                assert 1 <= refused.retry_after_s <= 60
                self.waiting.pop(name, None)
                self.met["refused"] += 1

    @rule(at=st.integers(0, 1), small=st.integers(1, 3), many=st.integers(3, 6))
    def a_small_tenant_beside_a_large_one(self, at: int, small: int, many: int) -> None:
        """A tenant with little in flight comes back while another has had more: it may be owed a turn."""
        self.arrive(at, "one", 1, 1, 1, 1, 1)
        self.arrive(1 - at, "three", 1, 10, 10, 1, many)
        self.arrive(at, "one", 1, 1, 1, 1, small)

    @rule(at=st.integers(0, 1))
    def a_crowd_waits_so_long_that_it_ages(self, at: int) -> None:
        self.arrive(at, "three", 2, 10, 10, 1, 5)
        self.time_passes(at, 2500)

    @rule(at=st.integers(0, 1), ms=st.integers(1, 3000))
    def time_passes(self, at: int, ms: int) -> None:
        self.now_us += ms * 1000
        self.exchange(at)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        at, _ = self.waiting.pop(name)
        assert self.union.cancel(name, self.now_s)
        self.gateways[at].cancel(name, self.now_s)
        self.exchange(at)
        self.met["cancelled"] += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tier=st.integers(0, 2))
    def move(self, data: st.DataObject, tier: int) -> None:
        self.move_to(data.draw(st.sampled_from(sorted(self.waiting))), tier)

    def move_to(self, name: str, tier: int) -> None:
        at, _ = self.waiting[name]
        moved = self.union.move(name, tier, self.now_s)
        mirrored = self.gateways[at].mirror.move(name, tier, self.now_s)
        assert moved is not None
        assert moved == mirrored
        self.gateways[at].session.moved(moved)
        self.waiting[name] = (at, moved)
        self.exchange(at)
        self.met["moved"] += 1

    @rule(at=st.integers(0, 1))
    def an_answer_is_lost(self, at: int) -> None:
        """A repeated message counts once. (No turn is asked for meanwhile.)"""
        self.gateways[at].lose_answer(self.now_s)
        self.exchange(at)
        self.met["answer lost"] += 1

    @rule(at=st.integers(0, 1), data=st.data())
    def a_copy_comes_late(self, at: int, data: st.DataObject) -> None:
        """A message that was given up for lost, and repeated, was only slow: all in it has been said."""
        gateway_id = self.gateways[at].gateway_id
        copies = list(self.pool.sent.get(gateway_id, ()))
        if copies:
            # The oldest may have joined: taken for new, it would let all of the gateway's requests leave.
            late = copies[0] if data.draw(st.booleans()) else data.draw(st.sampled_from(copies))
            self.pool.send(gateway_id, late, self.now_s)
            self.met["late copy"] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def emit(self, data: st.DataObject) -> None:
        # Of several sequences first: they are rare.
        several = [
            name for name, (_, ticket, _, live) in self.running.items() if ticket.sequences > 1 and live > 1
        ]
        name = data.draw(st.sampled_from(sorted(several or self.running)))
        at, ticket, emitted, live = self.running[name]
        emitted += data.draw(st.sampled_from([1, 7, 40, 90]))
        live = data.draw(st.integers(1, live))
        self.running[name] = (at, ticket, emitted, live)
        self.union.progress(name, ticket.had[1] + emitted, live)
        self.gateways[at].progress(name, ticket.had[1] + emitted, live)
        self.exchange(at)
        self.met["beyond"] += emitted > ticket.entry.predicted_output_tokens
        self.met["progress"] += live < ticket.sequences

    @precondition(lambda self: self.running)
    @rule(data=st.data(), foreseen=st.sampled_from([0, 1, 8, 50, 170]))
    def an_engine_foresees(self, data: st.DataObject, foreseen: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        at, ticket, *_ = self.running[name]
        in_all = ticket.had[1] + foreseen, ticket.had[1] + 2 * foreseen
        self.union.foresee(name, in_all, self.now_s)
        self.gateways[at].foresee(name, in_all, self.now_s)
        self.exchange(at)
        self.met["foreseen longer"] += foreseen > ticket.entry.predicted_output_tokens
        self.met["foreseen shorter"] += foreseen < ticket.entry.predicted_output_tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.integers(0, 30), output=st.integers(0, 30), lift=st.integers(0, 2))
    def an_engine_reports(self, data: st.DataObject, prompt: int, output: int, lift: int) -> None:
        """What has not been told yet the pool cannot know: it is told here and now. No more than is charged:
        gateways settle what is beyond one by one, and one controller over all of a tenant's requests."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        entry, (computed, emitted) = self.running[name][1].entry, self.computed[name]
        flight = self.union.in_flight.get(name)
        assert flight is not None
        left = max(0, flight.charged_cost - cost_of(computed, emitted))
        prompt = min(prompt, entry.input_tokens - computed, left)
        output = min(output, (left - prompt) // OUTPUT_TOKEN_COST)
        lifts = {data.draw(st.integers(0, 2)): data.draw(st.integers(1, 60)) * 10**6} if lift == 2 else {}
        self.report(name, prompt, output, lifts)
        self.met["lifted"] += bool(lifts)
        self.exchange(self.running[name][0])

    def report(self, name: str, prompt: int, output: int, lifts: dict[int, int]) -> None:
        at, ticket, *_ = self.running[name]
        self.computed[name][0] += prompt
        self.computed[name][1] += output
        self.serial += 1
        serials = {tier: self.serial * 10 + tier for tier in range(3)}
        share = {ticket.entry.tenant_id: TenantShare(prompt, output, serials, lifts)}
        for flow in (self.union, self.gateways[at].mirror):
            flow.heard("ab"[self.serial % 2], LIFE, share)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), input_tokens=st.integers(0, 100), count=st.integers(1, 3))
    def finish(self, data: st.DataObject, input_tokens: int, count: int) -> None:
        """One, or several of one gateway that are said together."""
        first = data.draw(st.sampled_from(sorted(self.running)))
        at = self.running[first][0]
        mates = [name for name, (owner, *_) in sorted(self.running.items()) if owner == at and name != first]
        for name in [first, *mates[: count - 1]]:
            had = self.all_reported(name, input_tokens)
            del self.running[name]
            self.union.finish(name, *had, self.now_s)
            self.gateways[at].finish(name, *had, self.now_s)
        self.exchange(at)

    def all_reported(self, name: str, input_tokens: int) -> tuple[int, int]:
        """What it had in all, at most so much of its prompt."""
        _, ticket, emitted, _ = self.running[name]
        prompt, output = self.computed[name]
        emitted = max(output, emitted)
        # No more than is charged, see `an_engine_reports`.
        total = max(prompt, min(input_tokens, ticket.entry.input_tokens))
        self.report(name, total - prompt, emitted - output, {})
        return ticket.had[0] + total, ticket.had[1] + emitted

    @precondition(lambda self: self.running)
    @rule(data=st.data(), input_tokens=st.integers(0, 100), count=st.integers(1, 3))
    def put_back(self, data: st.DataObject, input_tokens: int, count: int) -> None:
        """One, or several of one gateway: their replica is lost."""
        first = data.draw(st.sampled_from(sorted(self.running)))
        at = self.running[first][0]
        mates = [name for name, (owner, *_) in sorted(self.running.items()) if owner == at and name != first]
        for name in (first, *mates[: count - 1]):
            self.put_one_back(name, self.all_reported(name, input_tokens))
        self.exchange(at)

    def put_one_back(self, name: str, had: tuple[int, int]) -> None:
        self.now_us += 1
        at = self.running.pop(name)[0]
        rest = self.gateways[at].put_back(name, *had, self.now_s)
        assert self.union.put_back(name, *had, self.now_s) == rest
        self.waiting[name] = (at, rest)
        self.met["put back"] += 1

    @precondition(lambda self: any(ticket.before for _, ticket in self.waiting.values()))
    @rule(data=st.data(), input_tokens=st.integers(0, 9), output_tokens=st.integers(0, 9))
    def ends_before_its_turn(self, data: st.DataObject, input_tokens: int, output_tokens: int) -> None:
        """It was put back, and ended where it ran before it had a place elsewhere."""
        back = sorted(name for name, (_, ticket) in self.waiting.items() if ticket.before)
        name = data.draw(st.sampled_from(back))
        at, ticket = self.waiting.pop(name)
        had = ticket.had[0] + input_tokens, ticket.had[1] + output_tokens
        self.union.finish(name, *had, self.now_s)
        self.gateways[at].finish(name, *had, self.now_s)
        self.met["ended before its turn"] += 1
        self.exchange(at)

    @rule(at=st.integers(0, 1), index=st.integers(0, 1), is_lost=st.booleans())
    def a_replica_goes(self, at: int, index: int, is_lost: bool) -> None:
        """This gateway sees it drained, or loses its own link; the other one has not seen it yet. It keeps
        one: without any none of its requests would wait in the pool."""
        name, gateway = REPLICAS[index].replica_id, self.gateways[at]
        if len(gateway.replicas) == len(REPLICAS):
            if not is_lost:
                self.out[name].add(at)
                self.is_out.add(name)
            self.see(at, [REPLICAS[1 - index]])

    @rule(at=st.integers(0, 1))
    def a_replica_is_back(self, at: int) -> None:
        for name, knowing in self.out.items():
            if at in knowing:
                knowing.remove(at)
                self.is_out.discard(name)
        self.see(at, REPLICAS)

    def see(self, at: int, replicas: list[Replica]) -> None:
        out = [name for name, knowing in self.out.items() if at in knowing]
        self.gateways[at].sees(replicas, out=out)
        self.exchange(at)

    @property
    def members(self) -> list[Replica]:
        """What each offers to the requests of which gateway."""
        return [
            replace(
                each,
                offers=each.offers - OWNERS
                | {
                    f"of {at}"
                    for at, gateway in enumerate(self.gateways)
                    if each in gateway.replicas and each.replica_id not in self.is_out
                },
            )
            for each in REPLICAS
        ]

    @rule(
        at=st.integers(0, 1),
        batch_cap=st.sampled_from([0.25, 0.5, 1.0, 1.0]),
        lookahead=st.integers(0, 3),
        ageing=st.sampled_from([0.25, 0.5, 1.0]),
        batch_share=st.sampled_from([0.1, 0.4, LANES.batch_share]),
        long_share=st.sampled_from([0.1, LANES.share_sequences, 1.0]),
    )
    def knobs_turn(
        self,
        at: int,
        batch_cap: float,
        lookahead: int,
        ageing: float,
        batch_share: float,
        long_share: float,
    ) -> None:
        """The control loop has turned knobs: in Redis, and in the one controller."""
        knobs = {
            Knob.BATCH_CAP: batch_cap,
            Knob.LOOKAHEAD: float(lookahead),
            Knob.AGEING: ageing,
            Knob.BATCH_SHARE: batch_share,
            Knob.LONG_SHARE: long_share,
        }
        for knob, value in knobs.items():
            queue_setters(self.union)[knob](value)
        self.knobs, self.turned_s = knobs, -math.inf
        self.exchange(at)
        self.met["turned"] += 1
        self.met["turned while something waits"] += bool(self.waiting)

    @rule(at=st.integers(0, 1))
    def a_crowd_ages_by_a_knob(self, at: int) -> None:
        self.knobs_turn(at, 0.25, 0, 0.25, LANES.batch_share, LANES.share_sequences)
        self.arrive(at, "three", 2, 10, 10, 1, 5)
        before = {name: self.union.queue.place(name)[0] for name in self.waiting}
        self.time_passes(at, 400)
        self.met["aged by a knob"] += any(
            self.union.queue.place(name)[0] < band for name, band in before.items() if name in self.waiting
        )

    @rule(at=st.integers(0, 1), order=st.sampled_from(["vtc", "fcfs"]))
    def another_order(self, at: int, order: str) -> None:
        self.union.set_order(order)
        self.gateways[at].mirror.set_order(order)
        self.exchange(at)

    def brake(self, at: int, brakes: Brakes) -> None:
        """Brakes are set or end; all gateways see it in the database."""
        before = {name: self.union.queue.place(name) for name in self.waiting}
        for flow in (self.union, *(gateway.mirror for gateway in self.gateways)):
            flow.set_brakes(brakes, self.now_s)
        self.met["taken back"] += any(
            self.union.queue.place(name)[0] > band for name, (band, _) in before.items()
        )
        self.exchange(at)
        self.exchange(1 - at)

    # ------------------------------------------------------------ what must hold

    def exchange(self, at: int) -> None:
        """The gateway speaks; both hear; the same turns as the controller gives now."""
        if self.knobs and self.now_s - self.turned_s > IN_FORCE_S / 2:
            self.pool.turn_knobs(self.knobs, self.now_s)
            self.turned_s = self.now_s
        heard_before = [len(gateway.turns) for gateway in self.gateways]
        self.gateways[at].exchange(self.now_s)
        self.gateways[1 - at].listen(self.now_s)
        heard = {
            turn.ticket.entry.entry_id: (index, turn)
            for index, gateway in enumerate(self.gateways)
            for turn in gateway.turns[heard_before[index] :]
        }
        given = sorted((self.pool.given[name] for name in heard), key=lambda turn: turn.number)
        turns = self.union.dispatch(self.now_s, self.members)
        assert [
            (
                turn.entry_id,
                turn.replica_id,
                turn.rank,
                turn.by_reservation,
                turn.is_owed,
            )
            for turn in given
        ] == [
            (
                turn.ticket.entry.entry_id,
                turn.replica_id,
                turn.tier,
                turn.by_reservation,
                turn.is_owed,
            )
            for turn in turns
        ]
        for turn in turns:
            name = turn.ticket.entry.entry_id
            owner, ticket = self.waiting.pop(name)
            assert heard[name][0] == owner, "it was told to another gateway"
            assert heard[name][1].counter == self.pool.given[name].place_counter
            # A tenant that comes is lifted to what another had, whose charges ahead are rounded part by part.
            assert abs(heard[name][1].counter - turn.counter) <= ROUNDING
            self.running[name] = (owner, ticket, 0, ticket.sequences)
            self.computed[name] = [0, 0]
            assert abs(heard[name][1].had - turn.had) <= ROUNDING, "what the tenant had"
            assert (heard[name][1].heard, self.pool.given[name].heard) == (turn.heard, turn.heard)
            self.met["put back and went on"] += ticket.before is not None
            self.met["put back and aged"] += ticket.before is not None and turn.tier < ticket.entry.tier
            self.met["had less than charged"] += turn.had < turn.counter - ticket.entry.predicted_cost * 10**6
            self.met["heard"] += turn.heard > 0
            self.met["of the other"] += owner != at
            self.met["reserved"] += turn.by_reservation
            assert heard[name][1].is_owed == turn.is_owed
            self.met["owed"] += turn.is_owed
            self.met["raised by a reservation"] += turn.by_reservation and ticket.entry.tier > 0
            self.met["aged"] += not turn.by_reservation and turn.tier < ticket.entry.tier
            self.met["long"] += LANES.lane(ticket.entry) == LONG and ticket.entry.tier < 2
        owners = [self.gateways[owner] for owner, _ in self.waiting.values()]
        listed = {each.replica_id for owner in owners for each in owner.replicas}
        self.met["not where it is out"] += not listed.isdisjoint(self.is_out)
        self.met["several turns"] += len(turns) > 1
        self.met["both wait"] += len({owner for owner, _ in self.waiting.values()}) == 2

    @invariant()
    def the_mirrors_agree(self) -> None:
        for index, gateway in enumerate(getattr(self, "gateways", [])):
            gateway.mirror.check()
            mine = {name for name, (owner, _) in self.waiting.items() if owner == index}
            assert {ticket.entry.entry_id for ticket in gateway.mirror.queue.tickets()} == mine
            mine = {name for name, (owner, *_) in self.running.items() if owner == index}
            assert {each.ticket.entry.entry_id for each in gateway.mirror.in_flight} == mine


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


def test_two_gateways_do_what_one_controller_does(client: redis.Redis) -> None:
    Histories.client = client
    Histories.met = Counter()
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    for case in CASES:
        assert Histories.met[case] > 0, f"no history came to: {case}"


def test_knobs_count_as_long_as_one_decides(client: redis.Redis) -> None:
    """The fewest places while the word is fresh, and the settings' own once it is too old."""
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order="vtc")
    history.knobs_turn(0, 0.25, 0, 1.0, LANES.batch_share, LANES.share_sequences)
    history.arrive(at=0, tenant="one", tier=1, prompt=1, predicted=1, sequences=1, count=6)
    assert len(history.running) == 2, "one place at each replica"
    history.now_us += round(IN_FORCE_S * 1e6) + 1
    history.knobs = {}
    for knob, value in ((Knob.BATCH_CAP, 1.0), (Knob.LOOKAHEAD, 1.0)):
        queue_setters(history.union)[knob](value)
    history.exchange(1)
    assert len(history.running) == 6
    history.the_mirrors_agree()
    history.teardown()


def test_what_waits_already_ages_by_the_knob(client: redis.Redis) -> None:
    """A batch request moves up beside a later one of the tier above, and goes first there."""
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order="fcfs")
    history.knobs_turn(0, 0.25, 0, 1.0, LANES.batch_share, LANES.share_sequences)
    history.arrive(at=0, tenant="one", tier=0, prompt=1, predicted=1, sequences=1, count=2)
    history.arrive(at=1, tenant="three", tier=2, prompt=1, predicted=1, sequences=1, count=1)
    history.arrive(at=0, tenant="one", tier=1, prompt=1, predicted=1, sequences=1, count=1)
    assert sorted(history.waiting) == ["r3", "r4"]
    history.knobs_turn(0, 0.25, 0, 0.25, LANES.batch_share, LANES.share_sequences)
    history.time_passes(1, 350)
    assert history.union.queue.place("r3")[0] == 1
    _end_one(history, random.Random(1))
    assert list(history.waiting) == ["r4"]
    history.teardown()


def test_a_reservation_in_the_pool_has_its_places_whatever_a_knob_says(client: redis.Redis) -> None:
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order="vtc")
    history.knobs_turn(0, 0.25, 0, 1.0, LANES.batch_share, LANES.share_sequences)
    history.reserved["two"] = (1e6, None)
    history.arrive(at=0, tenant="two", tier=1, prompt=1, predicted=1, sequences=1, count=6)
    for _ in range(6):
        history.time_passes(0, 10)
    assert len(history.running) == 6
    assert history.met["reserved"] >= 4
    history.the_mirrors_agree()
    history.teardown()


def test_who_is_owed_two_turns_has_two(client: redis.Redis) -> None:
    """The first does not end what it is owed: a history that few of the random ones come to."""
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order="vtc")
    # Something under way, so that it was not idle while the other had its turns.
    history.arrive(at=0, tenant="one", tier=1, prompt=1, predicted=1, sequences=1, count=1)
    history.arrive(at=1, tenant="three", tier=1, prompt=10, predicted=10, sequences=1, count=3)
    assert history.met["owed"] == 0
    history.arrive(at=0, tenant="one", tier=1, prompt=1, predicted=1, sequences=1, count=2)
    assert history.met["owed"] == 2
    history.the_mirrors_agree()
    history.teardown()


def test_hybrid_in_the_pool_is_hybrid_in_one_controller(client: redis.Redis) -> None:
    """Lines shorter than what the script compares, without waits long enough to move up a tier."""
    Histories.client = client
    Histories.met = Counter()
    assert sum(_passed_over(seed) for seed in range(6)) > 10, "all went by arrival"


def _passed_over(seed: int) -> int:
    """Plays a history; returns how often a request ran before an older one of its tenant."""
    draw = random.Random(seed)
    history = Histories()
    history.begin(order="hybrid")
    passed_over = 0
    for _ in range(60):
        act = draw.random()
        if history.running and act < 0.35:
            _end_one(history, draw)
        elif history.running and act < 0.5:
            _put_one_back(history, draw)
        else:
            history.arrive(
                at=draw.randint(0, 1),
                tenant=draw.choice(["one", "three"]),
                tier=1,
                prompt=draw.choice([1, 3, 10, 60]),
                predicted=draw.randint(1, 20),
                sequences=1,
                count=1,
            )
        oldest: dict[str, str] = {}
        for name, (_, ticket) in history.waiting.items():
            oldest.setdefault(ticket.entry.tenant_id, name)
        passed_over += any(
            history.running[name][1].entry.arrived_s > history.waiting[first][1].entry.arrived_s
            for name in history.running
            for tenant, first in oldest.items()
            if history.running[name][1].entry.tenant_id == tenant
        )
    history.teardown()
    return passed_over


def _end_one(history: Histories, draw: random.Random) -> None:
    name = draw.choice(sorted(history.running))
    at, ticket, *_ = history.running.pop(name)
    used = (ticket.had[0] + ticket.entry.input_tokens, ticket.had[1] + draw.randint(1, 60))
    history.union.finish(name, *used, history.now_s)
    history.gateways[at].finish(name, *used, history.now_s)
    history.exchange(at)


def _put_one_back(history: Histories, draw: random.Random) -> None:
    name = draw.choice(sorted(history.running))
    at, ticket, *_ = history.running[name]
    computed = draw.choice((0, ticket.entry.input_tokens // 2, ticket.entry.input_tokens))
    history.put_one_back(name, (ticket.had[0] + computed, ticket.had[1] + draw.choice((0, 5))))
    history.exchange(at)


@pytest.mark.parametrize("order", ["vtc", "fcfs"])
def test_brakes_in_the_pool_are_brakes_in_one_controller(client: redis.Redis, order: str) -> None:
    """Braked tiers that age, are taken back, and age again."""
    Histories.client = client
    Histories.met = Counter()
    for seed in range(8):
        draw = random.Random(seed)
        history = Histories()
        history.begin(order=order)
        for _ in range(60):
            act = draw.random()
            if act < 0.15:
                history.brake(draw.randint(0, 1), draw.choice(BRAKES))
            elif act < 0.35:
                history.time_passes(draw.randint(0, 1), draw.randint(100, 1500))
            elif act < 0.55 and history.running:
                _end_one(history, draw)
            else:
                tenant, tier = draw.choice(sorted(WEIGHTS)), draw.choice((0, 1, 1, 2, 2))
                sizes = draw.randint(1, 40), draw.randint(1, 40), draw.choice((1, 1, 1, 2))
                history.arrive(draw.randint(0, 1), tenant, tier, *sizes, 1)
            history.the_mirrors_agree()
            history.met["braked"] += any(
                _is_braked(history.union, ticket) for _, ticket in history.waiting.values()
            )
        history.teardown()
    for case in ("braked", "taken back", "aged", "both wait", "reserved", "of the other"):
        assert Histories.met[case] > 5, f"no history came to: {case}"


def _is_braked(flow: FlowController, ticket: Ticket) -> bool:
    """Whether its tier holds all that it may, everywhere."""
    rank, loads = ticket.entry.tier, [flow.placement.load(each.replica_id) for each in REPLICAS]
    return not any(
        flow.knobs.brakes.has_room(
            rank,
            (load.sequences[rank], load.kv_tokens[rank]),
            (ticket.sequences, ticket.kv_tokens),
            (each.max_sequences, each.kv_tokens),
        )
        for each, load in zip(REPLICAS, loads, strict=True)
    )


@pytest.mark.parametrize("order", ["vtc", "fcfs"])
def test_a_reservation_for_a_tier_in_the_pool_is_one_in_one_controller(
    client: redis.Redis, order: str
) -> None:
    """Reservations come, go, and change their tier, and requests move into it and out of it."""
    Histories.client = client
    Histories.met = met = Counter()
    for seed in range(20):
        draw = random.Random(seed)
        history = Histories()
        history.begin(order=order)
        moved: set[str] = set()
        for _ in range(80):
            act, before = draw.random(), set(history.running)
            if act < 0.06:
                history.reserved["two"] = draw.choice((0.0, 100.0, 1000.0)), draw.choice((None, 0, 1, 2))
            elif act < 0.26 and history.waiting:
                name, tier = draw.choice(sorted(history.waiting)), draw.randint(0, 2)
                history.move_to(name, tier)
                moved.add(name)
            elif act < 0.4:
                history.time_passes(draw.randint(0, 1), draw.randint(100, 1000))
            elif act < 0.6 and history.running:
                _end_one(history, draw)
            else:
                tenant, tier = draw.choice(("one", "two", "two", "two")), draw.choice((0, 1, 1, 2, 2))
                sizes = draw.randint(1, 40), draw.randint(1, 40)
                history.arrive(draw.randint(0, 1), tenant, tier, *sizes, 1, 1)
            history.the_mirrors_agree()
            rate, reserved_tier = history.reserved["two"]
            for name in history.running.keys() - before:
                entry = history.running[name][1].entry
                if entry.tenant_id == "two" and rate > 0 and reserved_tier is not None:
                    is_of_it = history.pool.given[name].by_reservation
                    met["by it"] += is_of_it
                    met["moved into it"] += is_of_it and name in moved
                    met["beside it"] += reserved_tier != entry.tier
        history.teardown()
    for case in ("by it", "moved into it", "beside it", "aged", "both wait", "of the other"):
        assert met[case] > 5, f"no history came to: {case}"


def test_what_waits_beside_a_reservation_earns_nothing_by_it(client: redis.Redis) -> None:
    """Moved into its tier, the second of two has to wait until the reservation has paid for the first."""
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order="fcfs")
    for _ in range(2):
        history.arrive(at=0, tenant="one", tier=0, prompt=1, predicted=1, sequences=1, count=5)
    history.reserved["two"] = 30.0, 0
    history.arrive(at=1, tenant="two", tier=1, prompt=10, predicted=15, sequences=1, count=2)
    history.time_passes(at=0, ms=1900)
    moved = [name for name, (owner, _) in history.waiting.items() if owner == 1]
    for name in moved:
        history.move_to(name, 0)
    for name in ("r1", "r2"):
        del history.running[name]
        history.union.finish(name, 1, 1, history.now_s)
        history.gateways[0].finish(name, 1, 1, history.now_s)
        history.exchange(0)
    assert [history.pool.given[name].by_reservation for name in moved if name in history.running] == [True]
    history.teardown()


def test_the_charges_ahead_of_a_gateway_leave_with_it(client: redis.Redis) -> None:
    """What it charged counts as had from then on."""
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order="vtc")
    east, west = history.gateways
    history.arrive(at=0, tenant="one", tier=1, prompt=10, predicted=10, sequences=1, count=1)
    history.arrive(at=1, tenant="one", tier=1, prompt=1, predicted=1, sequences=1, count=1)
    assert history.running.keys() == {"r1", "r2"}
    history.report("r2", 1, 1, {})
    history.exchange(1)
    leaves = east.session.message(history.now_s, REPLICAS, leaves=True)
    assert leaves is not None
    history.pool.send("east", leaves, history.now_s)
    entry = QueueEntry("r3", "one", history.now_s, 1, 1, 1, 1.0)
    west.arrive(Ticket(entry, 1, 2), history.now_s)
    west.exchange(history.now_s)
    turn = west.turns[-1]
    assert (turn.counter, turn.had) == ((30 + 3 + 3) * 10**6, (30 + 3) * 10**6)
    history.teardown()


@pytest.mark.parametrize("order", ["vtc", "hybrid"])
def test_a_newcomer_at_one_gateway_goes_before_the_flood_of_another_without_any_end(
    client: redis.Redis, order: str
) -> None:
    """What the flood is charged it had, so that nothing is owed by the counters."""
    Histories.client = client
    Histories.met = Counter()
    history = Histories()
    history.begin(order=order)
    for _ in range(3):
        history.arrive(at=0, tenant="one", tier=1, prompt=1, predicted=20, sequences=1, count=4)
    running = dict(history.running)
    assert len(running) == sum(each.max_sequences + 1 for each in REPLICAS)
    assert history.waiting
    for name in running:
        history.report(name, 1, 20, {})
    history.exchange(0)
    history.arrive(at=1, tenant="three", tier=1, prompt=1, predicted=1, sequences=1, count=1)
    (newcomer,) = history.running.keys() - running.keys()
    assert history.running[newcomer][1].entry.tenant_id == "three"
    assert history.gateways[1].turns[-1].is_owed
    history.teardown()
