"""Does it make a difference that who finds nobody waiting and a free place does not get in line?

Two controllers live the same history. One is asked for a turn at once first, as the dispatcher asks; the
other puts everybody in line. After every step their turns, logs, books and standings must be the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.entry import QueueEntry
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import MAX_LANES
from gateway.flow.controller import FlowController, Ticket
from gateway.flow.lanes import LaneRule
from gateway.flow.window import NUM_RANKS, Replica, WindowRule

WEIGHTS = {"one": 1.0, "two": 2.0, "three": 3.0, "half": 0.5}
REPLICAS = [Replica("a", 2, 160), Replica("b", 3, 200)]
LOG = 400
MET: Counter[str] = Counter()


def make_controller(policy: str) -> FlowController:
    return FlowController(
        policy,
        ServiceCounters(),
        max_queued=8,
        max_queued_per_tenant=4,
        queue_ttl_s=(5.0, 10.0, 20.0),
        window=WindowRule(1, 1.0),
        log_records=LOG,
        ageing_s=(9.0, 4.0, 7.0),
        lanes=LaneRule(100, share_sequences=0.5, share_kv=0.75, batch_share=0.9),
        reservation_burst_s=2.0,
    )


class Twins(RuleBasedStateMachine):
    """`plain` and `quick`."""

    @initialize(policy=st.sampled_from(["vtc", "vtc", "vtc", "vtc", "fcfs", "hybrid"]))
    def begin(self, policy: str) -> None:
        self.plain, self.quick = self.both = make_controller(policy), make_controller(policy)
        self.now_s = 0.0
        self.number = 0
        self.running: dict[str, tuple[Ticket, int]] = {}

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        tier=st.integers(0, 2),
        prompt=st.integers(1, 60),
        predicted=st.integers(1, 60),
        sequences=st.integers(1, 2),
        reserved=st.sampled_from([0.0] * 30 + [20.0]),
        since_s=st.sampled_from([0.0, 0.0, 0.0, 5.0]),
        up=st.sampled_from([2, 2, 2, 1, 0]),
    )
    def arrive(
        self,
        tenant: str,
        tier: int,
        prompt: int,
        predicted: int,
        sequences: int,
        reserved: float,
        since_s: float,
        up: int,
    ) -> None:
        self.number += 1
        entry = QueueEntry(
            f"r{self.number}",
            tenant,
            self.now_s - since_s,
            prompt * sequences,
            predicted * sequences,
            tier,
            WEIGHTS[tenant],
        )
        kv_tokens = entry.input_tokens + entry.predicted_output_tokens
        self.come(Ticket(entry, sequences, kv_tokens, reserved_cost_per_s=reserved), up)

    @rule(tier=st.integers(0, 1), size=st.integers(10, 20))
    def a_small_one_after_large_ones(self, tier: int, size: int) -> None:
        """Of a tenant that has something under way: it had less than its share."""
        for tenant, tokens in (("half", 2), ("one", size), ("one", size), ("half", 2)):
            self.arrive(tenant, tier, tokens, tokens, 1, 0.0, 0.0, 2)

    def come(self, ticket: Ticket, up: int) -> None:
        turn = self.quick.at_once(ticket, self.now_s, lambda: REPLICAS[:up])
        full = self.plain.enqueue(ticket, self.now_s)
        turns = self.plain.dispatch(self.now_s, REPLICAS[:up])
        if turn is not None:
            MET["at once"] += 1
            MET["at once, owed"] += turn.is_owed
            MET["at once, beside others"] += bool(self.running)
            assert full is None
            assert turns == [turn]
        else:
            assert self.quick.enqueue(ticket, self.now_s) == full
            assert self.quick.dispatch(self.now_s, REPLICAS[:up]) == turns
            MET["in line"] += 1
        self.running.update((each.ticket.entry.entry_id, (each.ticket, 0)) for each in turns)

    @rule(seconds=st.floats(0.01, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def dispatch(self) -> None:
        turns, same = (flow.dispatch(self.now_s, REPLICAS) for flow in self.both)
        assert turns == same
        self.running.update((each.ticket.entry.entry_id, (each.ticket, 0)) for each in turns)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def emit(self, data: st.DataObject) -> None:
        entry_id = data.draw(st.sampled_from(sorted(self.running)))
        ticket, emitted = self.running[entry_id]
        emitted += data.draw(st.sampled_from([1, 40, 90]))
        self.running[entry_id] = (ticket, emitted)
        for flow in self.both:
            flow.progress(entry_id, emitted, ticket.sequences)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), input_tokens=st.integers(0, 100), all_of_them=st.booleans())
    def finish(self, data: st.DataObject, input_tokens: int, all_of_them: bool) -> None:
        running = sorted(self.running)
        for entry_id in running if all_of_them else [data.draw(st.sampled_from(running))]:
            _, emitted = self.running.pop(entry_id)
            for flow in self.both:
                flow.finish(entry_id, input_tokens, emitted, self.now_s)

    @rule()
    def drain(self) -> None:
        drained, same = (flow.drain(self.now_s) for flow in self.both)
        assert drained == same

    @rule(policy=st.sampled_from(["vtc", "vtc", "fcfs"]))
    def another_order(self, policy: str) -> None:
        for flow in self.both:
            flow.set_order(policy)

    @invariant()
    def nothing_differs(self) -> None:
        plain, quick = (self.seen(flow) for flow in self.both)
        assert plain == quick

    def seen(self, flow: FlowController) -> Any:
        flow.check()
        queue = flow.queue_clone(flow.counters)
        standings = [
            queue.counter(tenant, tier, lane)
            for tenant in WEIGHTS
            for tier in range(NUM_RANKS)
            for lane in range(MAX_LANES)
        ]
        tags = [flow.reservation_tag_s(tenant) for tenant in WEIGHTS]
        loads = [flow.load(replica.replica_id) for replica in REPLICAS]
        return (
            list(flow.log.since(0, LOG)),
            standings,
            tags,
            loads,
            sorted(flow.tenants(), key=lambda each: each.tenant_id),
            list(flow.in_flight()),
            flow.counters.values(),
            flow.counters.served_cost,
        )


Twins.TestCase.settings = settings(
    max_examples=300,
    derandomize=True,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTwins = Twins.TestCase


def test_the_twins_met_what_they_are_about() -> None:
    """Runs after the machine above, in file order."""
    for case in ("at once", "at once, owed", "at once, beside others", "in line"):
        assert MET[case] >= 20, (case, MET)
