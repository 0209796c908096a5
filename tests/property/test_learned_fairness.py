"""Fairness and freedom from starvation while learned tables switch at random.

A gateway's queue and an engine on virtual time, under the choices that the policy `learned` makes. Every few
steps all knobs that a table has go to other actions at random, which is harder than any table: it holds what
it took on. Two backlogged tenants of unlike weight keep within the bound of the paper, and none waits for
ever.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.flow.knobs import Knob
from gateway.flow.lanes import LaneRule
from gateway.flow.learned.actions import Actions
from gateway.pools.control_loop import queue_setters
from gateway.pools.engine_knobs import engine_setters
from tests.property.test_fairness import ClosedLoop
from tests.support.virtual_gateway import service

STEPS = 2500
BOUND = 2 * max(150, 2 * 8 * (150 + 400))
"""Of VTC's theorem, 2U: eight places, prompts of at most 150 tokens and answers of at most 400."""
ALARM = BOUND / 4
"""In practice it stays far below the bound."""
LONG_TOKENS = 120
EVERY_STEPS = 7


def random_actions(rng: random.Random) -> Actions:
    """Anywhere within the bounds of a table."""
    return Actions(
        slots=rng.choice((0.25, 0.5, 1.0)),
        token_budget=rng.choice((0.25, 0.6, 1.0)),
        partial_prefills=rng.choice((1, 4, 16)),
        long_share=rng.choice((0.1, 0.5, 1.0)),
        reserve_permille=rng.choice((0, 500, 1000)),
        ageing=rng.choice((0.25, 1.0)),
    )


class SwitchingLoop(ClosedLoop):
    """Two tenants that always have requests waiting, and a table that switches."""

    def __init__(self, seed: int, policy: str = "hybrid") -> None:
        super().__init__(policy, {"light": (1.0, 12), "heavy": (3.0, 14)}, seed)
        flow = self.gateway.flow
        flow.queue.lane_rule = LaneRule(LONG_TOKENS)
        self.setters = {**queue_setters(flow), **engine_setters(self.gateway.replica.core.set_knobs)}
        self.switches = 0
        self.worst = 0.0
        self.begun: dict[str, int] | None = None

    def go(self) -> None:
        """`STEPS` steps of the engine."""
        self.gateway.run(while_=lambda: self.step() and self.gateway.steps < STEPS)

    def step(self) -> bool:
        """After each step: switches sometimes, and compares the two tenants' service by weight."""
        if self.gateway.steps % EVERY_STEPS == 0:
            self.switches += 1
            for knob, value in random_actions(self.rng).knobs().items():
                if knob is not Knob.ADMISSION:
                    self.setters[knob](value)
        if not all(self.gateway.queued(tenant) for tenant in self.tenants):
            return True
        now = service(self.gateway)
        if self.begun is None:
            self.begun = now
        light, heavy = (
            (now.get(tenant, 0) - self.begun.get(tenant, 0)) / weight
            for tenant, (weight, _) in self.tenants.items()
        )
        self.worst = max(self.worst, abs(light - heavy))
        return True


@settings(max_examples=3, deadline=None, database=None)
@given(seed=st.integers(0, 10**6))
def test_the_bound_between_tenants_holds_and_none_starves_while_tables_switch(seed: int) -> None:
    loop = SwitchingLoop(seed)
    loop.go()
    assert loop.switches >= STEPS // EVERY_STEPS
    assert loop.worst <= ALARM, "weights: 1 and 3"
    now_s = loop.gateway.clock.now_s
    waits = [now_s - ticket.entry.arrived_s for ticket in loop.gateway.flow.queue.tickets()]
    assert max(waits) < 0.5 * now_s, "one that came at the beginning still waits"
    ended = {done.job.tenant_id for done in loop.gateway.done}
    assert ended == {"light", "heavy"}


def test_without_fairness_the_bound_breaks() -> None:
    loop = SwitchingLoop(1, "fcfs")
    loop.go()
    assert loop.worst > ALARM
