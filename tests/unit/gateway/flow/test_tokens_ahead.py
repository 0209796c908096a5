"""The queue's own count of what goes before a request, against a queue that is served to the end."""

from __future__ import annotations

import random

import pytest

from engine.entry import QueueEntry
from gateway.flow.controller import FlowController
from gateway.flow.types import NOTHING_AHEAD, Ticket, TokensAhead
from gateway.flow.window import Replica
from tests.support.builders import flow_controller

REPLICA = Replica("a", 2, 1_000_000, pauses=False)


def arrive(
    flow: FlowController, name: str, tenant: str, *, tier: int = 1, output: int = 50, weight: float = 1.0
) -> TokensAhead:
    """Lines up, as the dispatcher has it: what may go goes first."""
    entry = QueueEntry(name, tenant, float(len(flow)), 100, output, tier, weight)
    assert flow.enqueue(Ticket(entry, 1, 100 + output), 0.0) is None
    flow.dispatch(0.0, [REPLICA])
    return flow.tokens_ahead(name, 0.0)


def test_a_burst_of_one_tenant_counts_what_lined_up_before_and_what_runs() -> None:
    flow = flow_controller()
    counted = [arrive(flow, f"r{number}", "me") for number in range(6)]
    assert counted[:2] == [NOTHING_AHEAD] * 2, "they had their turn"
    assert counted[2:] == [TokensAhead(400 + 200 * number, 0, 0, 400) for number in range(4)]
    flow.progress("r0", 30, 1)
    assert arrive(flow, "late", "me") == TokensAhead(200 + 40 + 800, 0, 0, 240), "what it had is not ahead"


def test_causes_are_told_apart_and_lower_tiers_do_not_count() -> None:
    flow = flow_controller()
    for number in range(2):
        arrive(flow, f"runs{number}", "busy", tier=0)
    arrive(flow, "high", "boss", tier=0)
    arrive(flow, "low", "late", tier=2)
    arrive(flow, "mine", "me")
    assert arrive(flow, "second", "me") == TokensAhead(200, 0, 3 * 200, 400)
    assert arrive(flow, "own high", "me", tier=0) == TokensAhead(0, 200 + 400, 0, 400)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", ["vtc", "fcfs", "sjf"])
def test_it_is_what_the_queue_then_serves_before_it(order: str, seed: int) -> None:
    rng = random.Random(seed)
    flow = flow_controller(order)
    weights = {"one": 1.0, "two": 2.0, "four": 4.0}
    largest = 0
    for number in range(40):
        tenant = rng.choice(list(weights))
        output = rng.randint(1, 200)
        largest = max(largest, 100 + 2 * output)
        counted = arrive(flow, f"r{number}", tenant, output=output, weight=weights[tenant])
        if counted == NOTHING_AHEAD:
            continue
        counters = flow.counters.clone()
        queue, served = flow.queue_clone(counters), 0
        while (head := queue.pop(0.0)).entry_id != f"r{number}":
            served += head.predicted_cost
            counters.charge(head.tenant_id, head.weight, head.predicted_cost)
        waiting = counted.own + counted.others - counted.running
        # Turns end between two requests of another tenant: one of each may be more or less.
        assert abs(waiting - served) <= (2 * largest if order == "vtc" else 0)


def test_what_does_not_wait_has_nothing_ahead() -> None:
    assert flow_controller().tokens_ahead("unknown", 0.0) == NOTHING_AHEAD
