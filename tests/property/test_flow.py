"""Invariants of the flow controller under any history of arrivals, departures, ends and expiries.

Random histories against the real controller. Each rule is checked after every step, and the counters at
the end of the module say that the interesting cases were really met.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.counters import ServiceCounters
from gateway.flow.ageing import effective_tier
from gateway.flow.controller import Dispatch, FlowController, QueueFull, Ticket
from gateway.flow.knobs import QueueSettings
from gateway.flow.lanes import LaneRule
from gateway.flow.types import RESUMES
from gateway.flow.window import OWED_KV_PART, OWED_PART, Replica, WindowRule
from ops.demo.audit import audit
from ops.demo.logbook import events_of
from tests.support.builders import flow_controller

REPLICA = Replica("a", 3, 1000, pauses=False, offers=frozenset({RESUMES}))
MAX_QUEUED = 12
MAX_QUEUED_PER_TENANT = 5
TTL_S = (5.0, 10.0, 20.0)
AGEING_S = (math.inf, 4.0, 7.0)
LONG_TOKENS = 100
LANES = LaneRule(LONG_TOKENS, share_sequences=0.5, share_kv=0.75, batch_share=0.9)
BURST_S = 2.0
RESERVED = {"one": 20.0, "two": 0.0, "four": 5.0, "half": 0.0}
"""Cost tokens a second."""
LOOKAHEAD = 1
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0, "half": 0.5}
"""Powers of two: scaled costs are exact, so that sums can be compared with ==."""
MET: Counter[str] = Counter()


def make_controller(policy: str) -> FlowController:
    return FlowController(
        policy,
        ServiceCounters(),
        QueueSettings(
            MAX_QUEUED,
            MAX_QUEUED_PER_TENANT,
            TTL_S,
            WindowRule(LOOKAHEAD, 1.0),
            500,
            AGEING_S,
            LANES,
            BURST_S,
        ),
    )


class Histories(RuleBasedStateMachine):
    """A gateway's life: two replicas, four tenants, three tiers."""

    @initialize(policy=st.sampled_from(["vtc", "fcfs"]))
    def begin(self, policy: str) -> None:
        self.policy = policy
        self.flow = make_controller(policy)
        offers = frozenset({RESUMES})
        self.replicas = [Replica("a", 2, 120, offers=offers), Replica("b", 3, 200, offers=offers)]
        self.now_s = 0.0
        self.number = 0
        self.waiting: dict[str, Ticket] = {}
        self.running: dict[str, tuple[Ticket, str, int]] = {}
        self.ranks: dict[str, int] = {}
        """Of what runs, at the engine."""
        self.foreseen: dict[str, int] = {}
        """Output tokens of what runs, as its engine foresees them."""
        self.gone: set[str] = set()
        self.cost: Counter[str] = Counter()
        """Cost tokens that each tenant must have been charged so far."""

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        tier=st.integers(0, 2),
        prompt=st.integers(1, 60),
        predicted=st.integers(1, 60),
        sequences=st.integers(1, 3),
        count=st.integers(1, 4),
        patience_s=st.sampled_from([None, None, 0.5, 30.0]),
    )
    def arrive(
        self,
        tenant: str,
        tier: int,
        prompt: int,
        predicted: int,
        sequences: int,
        count: int,
        patience_s: float | None,
    ) -> None:
        for _ in range(count):
            self._arrive_one(tenant, tier, prompt, predicted, sequences, patience_s)

    @rule(prompt=st.integers(45, 60))
    def a_line_of_long_ones_and_a_small_one(self, prompt: int) -> None:
        """More than the long lane takes, and something that fits beside them."""
        for tenant in ("one", "one", "two", "four"):
            self._arrive_one(tenant, 0, prompt, 56, 1, None)
        self._arrive_one("half", 1, 2, 2, 1, None)

    @rule(small=st.integers(1, 3), many=st.integers(3, 6))
    def a_small_tenant_beside_a_large_one(self, small: int, many: int) -> None:
        """A tenant with little in flight comes while another's requests fill the window: it may be owed."""
        for _ in range(many):
            self._arrive_one("half", 1, 10, 10, 1, None)
        self.dispatch((0, 1))
        for _ in range(small):
            self._arrive_one("two", 1, 1, 1, 1, None)
        self.dispatch((0, 1))

    def _arrive_one(
        self, tenant: str, tier: int, prompt: int, predicted: int, sequences: int, patience_s: float | None
    ) -> None:
        self.number += 1
        entry = QueueEntry(
            f"r{self.number}",
            tenant,
            self.now_s,
            prompt * sequences,
            predicted * sequences,
            tier,
            WEIGHTS[tenant],
        )
        ticket = Ticket(
            entry,
            sequences,
            entry.input_tokens + entry.predicted_output_tokens,
            expires_s=None if patience_s is None else self.now_s + patience_s,
            reserved_cost_per_s=RESERVED[tenant],
        )
        of_tenant = sum(each.entry.tenant_id == tenant for each in self.waiting.values())
        full = self.flow.enqueue(ticket, self.now_s)
        if of_tenant >= MAX_QUEUED_PER_TENANT:
            MET["tenant full"] += 1
            assert isinstance(full, QueueFull)
            assert full.of_tenant
            assert full.retry_after_s > 0
        elif len(self.waiting) >= MAX_QUEUED:
            MET["queue full"] += 1
            assert isinstance(full, QueueFull)
            assert not full.of_tenant
        else:
            assert full is None
            self.waiting[entry.entry_id] = ticket

    @rule(seconds=st.floats(0.01, 9.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(up=st.sampled_from([(0, 1), (0, 1), (0,), (1,), ()]))
    def dispatch(self, up: tuple[int, ...]) -> None:
        replicas = [self.replicas[index] for index in up]
        turns = self.flow.dispatch(self.now_s, replicas)
        self.flow.check(self.now_s)
        for turn in turns:
            entry = turn.ticket.entry
            assert turn.ticket == self.waiting.get(entry.entry_id), "not what waits here"
            assert turn.replica_id in [each.replica_id for each in replicas], "to an engine that is away"
            self._check_order(turn)
            self._check_displaced(turn)
            del self.waiting[entry.entry_id]
            self.running[entry.entry_id] = (turn.ticket, turn.replica_id, 0)
            self.ranks[entry.entry_id] = turn.tier
            self.cost[entry.tenant_id] += entry.predicted_cost
            MET["dispatched"] += 1
        for turn in turns:
            self._check_window(
                turn, any(each.is_owed for each in turns if each.replica_id == turn.replica_id)
            )
        if not turns and self.waiting and replicas:
            MET["blocked"] += 1
            # Work conservation: the head of the queue finds no room anywhere.
            assert all(self.running_of(each.replica_id) for each in replicas), "an engine was left idle"

    def running_of(self, replica_id: str) -> list[Ticket]:
        return [ticket for ticket, where, _ in self.running.values() if where == replica_id]

    def band(self, entry: QueueEntry) -> int:
        return effective_tier(entry.tier, entry.arrived_s, self.now_s, AGEING_S)

    def _check_order(self, turn: Dispatch) -> None:
        """Bands are strict, but for reservations and for long requests that find no place."""
        entry = turn.ticket.entry
        if turn.by_reservation:
            MET["by reservation"] += 1
            assert RESERVED[entry.tenant_id] > 0
            assert turn.tier == 0
            own = [each.entry for each in self.waiting.values() if each.entry.tenant_id == entry.tenant_id]
            ordinary = [self.band(each) for each in own if LANES.lane(each) == 0]
            assert self.band(entry) <= min(ordinary, default=9), "not its own first"
            return
        assert turn.tier == self.band(entry), "not the rank of its effective tier"
        MET["aged"] += turn.tier < entry.tier
        for other in self.waiting.values():
            if self.band(other.entry) < turn.tier:
                assert LANES.lane(other.entry) == 1, "a lower tier went before a higher one"
                MET["a long one was passed"] += 1

    def _check_displaced(self, turn: Dispatch) -> None:
        ids = [each.entry_id for each in turn.displaced]
        assert len(set(ids)) == len(ids)
        for each in turn.displaced:
            assert self.running[each.entry_id][1] == turn.replica_id, "it runs elsewhere"
            assert self.ranks[each.entry_id] > turn.tier, "a request displaces one of its own tier"
            MET["displaced"] += 1

    def _check_window(self, turn: Dispatch, is_wider: bool) -> None:
        rank = turn.tier
        size = next(replica for replica in self.replicas if replica.replica_id == turn.replica_id)
        mates = [each for each in self.running_of(turn.replica_id) if self.ranks[each.entry.entry_id] <= rank]
        if len(mates) < len(self.running_of(turn.replica_id)):
            MET["passed lower work"] += 1
        if mates:
            live = self.flow.placement.load(turn.replica_id).ahead_of(rank)
            # With this turn, or one after it, for a tenant that is owed service.
            places, kv_tokens = size.max_sequences + LOOKAHEAD, size.kv_tokens
            if is_wider:
                MET["wider for one owed"] += live[0] > places or live[1] > kv_tokens
                places += size.max_sequences // OWED_PART
                kv_tokens += size.kv_tokens // OWED_KV_PART
            assert live[0] <= places, "too many sequences in the window"
            assert live[1] <= kv_tokens or turn.ticket.kv_tokens > size.kv_tokens, "too many KV tokens"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def emit(self, data: st.DataObject) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.running)))
        ticket, where, emitted = self.running[entry_id]
        emitted += data.draw(st.sampled_from([1, 7, 40, 90]))
        live = data.draw(st.integers(1, ticket.sequences))
        before = self.charged(entry_id)
        self.flow.progress(entry_id, ticket.had[1] + emitted, live)
        self.running[entry_id] = (ticket, where, emitted)
        self.cost[ticket.entry.tenant_id] += self.charged(entry_id) - before
        MET["beyond prediction"] += self.charged(entry_id) > before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), foreseen=st.sampled_from([-5, 0, 1, 9, 60, 200, 10**9]))
    def the_engine_foresees(self, data: st.DataObject, foreseen: int) -> None:
        """Whatever it says: the charge is what was emitted at least, and at most what may be."""
        entry_id = data.draw(st.sampled_from(sorted(self.running)))
        ticket, _, emitted = self.running[entry_id]
        before = self.charged(entry_id)
        had = ticket.had[1]
        self.flow.foresee(entry_id, (had + foreseen, had + 2 * foreseen), self.now_s)
        most = ticket.max_tokens * ticket.sequences
        self.foreseen[entry_id] = max(1, emitted, min(foreseen, most))
        after = self.charged(entry_id)
        self.cost[ticket.entry.tenant_id] += after - before
        MET["foreseen shorter"] += after < before
        MET["foreseen longer"] += after > before

    def charged(self, entry_id: str) -> int:
        """By what is expected of it now."""
        ticket, _, emitted = self.running[entry_id]
        expected = self.foreseen.get(entry_id, ticket.entry.predicted_output_tokens)
        return ticket.entry.input_tokens + 2 * max(expected, emitted)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), input_tokens=st.integers(0, 100))
    def finish(self, data: st.DataObject, input_tokens: int) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.running)))
        charged = self.charged(entry_id)
        ticket, _, emitted = self.running.pop(entry_id)
        self.cost[ticket.entry.tenant_id] += input_tokens + 2 * emitted - charged
        had = ticket.had
        self.flow.finish(entry_id, had[0] + input_tokens, had[1] + emitted, self.now_s)
        self.flow.finish(entry_id, 1000, 1000, self.now_s)  # said twice, counted once
        self.gone.add(entry_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), input_tokens=st.integers(0, 100))
    def put_back(self, data: st.DataObject, input_tokens: int) -> None:
        """Charged for what it had, no more; the rest waits."""
        entry_id = data.draw(st.sampled_from(sorted(self.running)))
        charged = self.charged(entry_id)
        ticket, _, emitted = self.running.pop(entry_id)
        entry, had = ticket.entry, (ticket.had[0] + input_tokens, ticket.had[1] + emitted)
        self.cost[entry.tenant_id] += input_tokens + 2 * emitted - charged
        expected = self.foreseen.pop(entry_id, entry.predicted_output_tokens)
        rest = self.flow.put_back(entry_id, *had, self.now_s, self.now_s + 3.0)
        assert rest is not None
        assert (rest.before, rest.expires_s) == (had, self.now_s + 3.0)
        assert rest.entry.input_tokens == max(0, entry.input_tokens - input_tokens)
        assert rest.entry.predicted_output_tokens == max(1, expected - emitted)
        assert self.flow.put_back(entry_id, *had, self.now_s) is None
        self.waiting[entry_id] = rest
        MET["put back"] += 1
        MET["put back again"] += ticket.before is not None
        MET["put back into a full queue"] += len(self.waiting) > MAX_QUEUED

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.flow.cancel(entry_id, self.now_s)
        assert not self.flow.cancel(entry_id, self.now_s)
        del self.waiting[entry_id]
        self.gone.add(entry_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tier=st.integers(0, 2))
    def move(self, data: st.DataObject, tier: int) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.waiting)))
        before = self.waiting[entry_id]
        moved = self.flow.move(entry_id, tier, self.now_s)
        assert moved == replace(before, entry=replace(before.entry, tier=tier)), "more than the tier changed"
        assert self.flow.move("nobody", tier, self.now_s) is None
        self.waiting[entry_id] = moved
        MET["moved"] += before.entry.tier != tier

    @staticmethod
    def expires_s(ticket: Ticket) -> float:
        if ticket.expires_s is not None:
            return ticket.expires_s
        return ticket.entry.arrived_s + TTL_S[ticket.entry.tier]

    @rule()
    def drain(self) -> None:
        MET["drained"] += len(self.waiting)
        drained = self.flow.drain(self.now_s)
        assert {ticket.entry.entry_id for ticket in drained} == set(self.waiting)
        assert [ticket.entry.arrived_s for ticket in drained] == sorted(
            ticket.entry.arrived_s for ticket in drained
        )
        self.gone |= set(self.waiting)
        self.waiting.clear()

    @rule()
    def expire(self) -> None:
        late = {ticket.entry.entry_id for ticket in self.flow.expire(self.now_s)}
        expected = {
            entry_id for entry_id, ticket in self.waiting.items() if self.now_s >= self.expires_s(ticket)
        }
        assert late == expected
        MET["expired"] += len(late)
        for entry_id in late:
            del self.waiting[entry_id]
            self.gone.add(entry_id)

    @invariant()
    def the_books_agree(self) -> None:
        self.flow.check()
        assert {ticket.entry.entry_id for ticket in self.flow.queue.tickets()} == set(self.waiting)
        new = [each for each in self.waiting.values() if each.before is None]
        assert len(new) <= MAX_QUEUED, "the queue is bounded"
        for tenant, weight in WEIGHTS.items():
            expected = round(self.cost[tenant] * COUNTER_SCALE / weight)
            assert self.flow.counters.value(tenant) == expected, "a token was charged twice, or never"

    @invariant()
    def nobody_was_passed_over(self) -> None:
        """Every dispatch in the log went to the tenant with the least service, and to its oldest request, or
        to one that had run before."""
        put_back: set[str] = set()
        for record in self.flow.log.since(0, 1000):
            if record.event == "settle":
                put_back.add(record.request_id)
            if record.event != "dispatch" or record.rule == "reservation":
                continue
            own = next(each for each in record.backlog if each.tenant_id == record.tenant_id)
            has_run = record.request_id in put_back
            assert has_run or record.arrived_s == own.oldest_arrived_s, "a younger request went first"
            for other in record.backlog:
                if self.policy == "vtc":
                    assert record.counter <= other.counter, "a tenant above its share went first"
                elif not has_run:
                    assert record.arrived_s <= other.oldest_arrived_s, "first come was not first served"
            MET["with others waiting"] += len(record.backlog) > 1


Histories.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHistories = Histories.TestCase


def test_the_histories_met_what_they_are_about() -> None:
    """Runs after the machine above, in file order: a property that was never exercised proves nothing."""
    for case in (
        "dispatched",
        "blocked",
        "tenant full",
        "expired",
        "beyond prediction",
        "passed lower work",
        "wider for one owed",
        "with others waiting",
        "by reservation",
        "aged",
        "a long one was passed",
        "displaced",
        "moved",
        "drained",
        "foreseen shorter",
        "foreseen longer",
        "put back",
        "put back again",
        "put back into a full queue",
    ):
        assert MET[case] > 0, f"no history came to: {case}"


@given(count=st.integers(1, 6), lookahead=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_window_full_of_batch_never_keeps_an_interactive_request_out(count: int, lookahead: int) -> None:
    flow = flow_controller(lookahead=lookahead, queue_ttl_s=TTL_S)
    replica = Replica("a", count, 10_000)
    for number in range(20):
        entry = QueueEntry(f"batch-{number}", "night", 0.0, 10, 10, 2)
        assert flow.enqueue(Ticket(entry, 1, 20), 0.0) is None
    assert len(flow.dispatch(0.0, [replica])) == count + lookahead
    urgent = QueueEntry("urgent", "day", 1.0, 10, 10, 0)
    assert flow.enqueue(Ticket(urgent, 1, 20), 1.0) is None
    assert [turn.ticket.entry.entry_id for turn in flow.dispatch(1.0, [replica])] == ["urgent"]


def test_a_request_larger_than_the_whole_window_goes_when_nothing_is_ahead_of_it() -> None:
    flow = make_controller("vtc")
    replica = Replica("a", 2, 100)
    small, huge = QueueEntry("small", "one", 0.0, 10, 10), QueueEntry("huge", "one", 0.1, 400, 400)
    assert flow.enqueue(Ticket(small, 1, 20), 0.0) is None
    assert flow.enqueue(Ticket(huge, 5, 800), 0.1) is None
    assert [turn.ticket.entry.entry_id for turn in flow.dispatch(0.2, [replica])] == ["small"]
    assert flow.dispatch(0.3, [replica]) == []
    flow.finish("small", 10, 10, 0.4)
    assert [turn.ticket.entry.entry_id for turn in flow.dispatch(0.5, [replica])] == ["huge"]


def test_the_least_loaded_replica_with_room_is_chosen() -> None:
    flow = make_controller("vtc")
    replicas = [Replica("a", 4, 1000), Replica("b", 4, 1000)]
    for number in range(4):
        flow.enqueue(Ticket(QueueEntry(f"r{number}", "one", 0.0, 1, 1), 1, 2), 0.0)
    chosen = [turn.replica_id for turn in flow.dispatch(0.0, replicas)]
    assert sorted(chosen) == ["a", "a", "b", "b"]
    assert flow.dispatch(0.0, []) == []


@pytest.mark.parametrize("seed", range(6))
def test_an_audit_of_the_log_finds_nothing_where_requests_were_put_back(seed: int) -> None:
    draw = random.Random(seed)
    flow = flow_controller(log_records=1000)
    running: dict[str, Ticket] = {}
    output: Counter[str] = Counter()
    for number in range(120):
        size = draw.randint(1, 20), draw.randint(1, 20)
        tenant = draw.choice(sorted(WEIGHTS))
        ticket = Ticket(QueueEntry(f"r{number}", tenant, number, *size, weight=WEIGHTS[tenant]), 1, sum(size))
        flow.enqueue(ticket, number)
        for name in draw.sample(sorted(running), min(len(running), 1)):
            output[name] += draw.randint(0, 40)
            flow.progress(name, output[name], 1)
        if running and draw.random() < 0.7:
            name, ticket = draw.choice(sorted(running.items()))
            end = flow.finish if draw.random() < 0.6 else flow.put_back
            end(name, ticket.had[0] + draw.randint(0, ticket.entry.input_tokens), output[name], number)
            del running[name]
        for turn in flow.dispatch(number, [REPLICA]):
            running[turn.ticket.entry.entry_id] = turn.ticket
    report = audit(events_of(flow.log.since(0, 1000)))
    assert report.compared > 20
    assert (report.unfair_dispatches, report.untrue_ranks) == (0, 0)
