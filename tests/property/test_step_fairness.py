"""Queue and steps together share service by weight on random histories.

The flow controller that serves, in front of the core of an engine on virtual time whose steps have fewer
slots than sequences: both decide, by the one counter of each tenant. Slots, the cap and the time of a step
change, some sequences have TPOT targets, answers are longer or shorter than predicted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.entry import COUNTER_SCALE
from engine.grammar.compiler import Grammars
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import make_policy
from tests.support.virtual_gateway import Job, VirtualGateway, service
from tests.support.virtual_grammars import SCHEMAS, built, compiled

PLACES = 12
LONGEST_PROMPT, LONGEST_OUTPUT = 120, 60
BOUND = 2 * (LONGEST_PROMPT + 2 * LONGEST_OUTPUT)
"""Twice a request's cost, per weight of the lightest tenant. The bound of the queue alone, by the cost of all
that runs (docs/invariants.md, Queue), is eighteen times as much."""
STEPS = 800
TENANTS = ("a", "b", "c")


@dataclass
class Together:
    """A gateway and an engine; tenants always have requests waiting, but for `modest` and `absent`."""

    seed: int
    policy: str
    modest: str = ""
    """A tenant with one stream at a time."""
    absent: tuple[str, ...] = ()
    """Tenants without any."""
    slots: tuple[int, ...] = (1, 3, 5, 8, 0)
    grammars: Grammars | None = None
    """Then all that `a` asks for has one."""
    rng: random.Random = field(init=False)
    weights: dict[str, float] = field(init=False)
    gateway: VirtualGateway = field(init=False)
    contested: int = 0
    """Steps in which a decoding sequence had no token."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.weights = {"a": 1.0, "b": self.rng.choice((1.0, 3.0)), "c": 2.0}
        self.gateway = VirtualGateway(
            policy=self.policy,
            options=self.options(),
            max_sequences=PLACES,
            max_batched_tokens=48,
            grammars=self.grammars,
        )

    def options(self) -> PolicyOptions:
        return PolicyOptions(
            slots=self.rng.choice(self.slots),
            cap_tokens=self.rng.choice((16, 32)),
            target_step_s=self.rng.choice((0.0, 0.003, 0.01)),
        )

    def job(self, tenant: str) -> Job:
        return Job(
            tenant,
            self.rng.randint(1, LONGEST_PROMPT),
            self.rng.randint(1, LONGEST_OUTPUT),
            weight=self.weights[tenant],
            max_tokens=LONGEST_OUTPUT,
            tpot_target_s=self.rng.choice((0.0, 0.0, 0.004)) if tenant == "a" else 0.0,
            grammar=built(self.rng.choice(SCHEMAS)) if self.grammars and tenant == "a" else None,
        )

    def run(self, steps: int = STEPS) -> float:
        """The largest difference of service per weight between two tenants, since the first of `steps`."""
        gateway, core = self.gateway, self.gateway.replica.core
        before, until, spread = service(gateway), gateway.steps + steps, 0.0

        def goes_on() -> bool:
            nonlocal spread
            for tenant in TENANTS:
                if tenant in self.absent:
                    continue
                if tenant == self.modest:
                    live = gateway.queued(tenant) + sum(
                        flight.ticket.entry.tenant_id == tenant for flight in gateway.flow.in_flight
                    )
                    if not live:
                        gateway.arrive(self.job(tenant))
                    continue
                # More than a step takes from the queue: none is without a waiting request for a moment.
                while gateway.queued(tenant) < 8:
                    gateway.arrive(self.job(tenant))
            if self.rng.random() < 0.05:
                core.table.set_policy(make_policy(self.policy, self.options()))
            had = service(gateway)
            per_weight = [
                (had.get(tenant, 0) - before.get(tenant, 0)) / self.weights[tenant] for tenant in TENANTS
            ]
            spread = max(spread, max(per_weight) - min(per_weight))
            self.contested += any(record.waiting_decodes for record in core.step_log.last(1))
            return gateway.steps < until

        gateway.run(while_=goes_on)
        return spread


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_backlogged_tenants_stay_within_the_bound_whatever_slots_and_targets_do(
    seed: int, policy: str
) -> None:
    history = Together(seed, policy)
    assert history.run() <= BOUND
    assert min(service(history.gateway).values()) > 1000
    assert history.contested > STEPS / 2, "there were slots for all"
    assert history.gateway.words > 100, "the gateway had heard of nothing"
    assert history.gateway.lifts > 50


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_that_was_served_whole_has_saved_nothing_up(seed: int, policy: str) -> None:
    history = Together(seed, policy, modest="c", slots=(8,))
    saved = history.run()
    assert saved > 2 * BOUND, "its part was hardly more than it asked for"
    history.modest = ""
    assert history.run() <= BOUND
    assert history.gateway.lifts > 50
    assert history.contested > STEPS / 2


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_after_others_had_long_had_all_begins_where_they_stand(seed: int) -> None:
    history = Together(seed, "hybrid", absent=("b", "c"), slots=(4,))
    assert history.run() > 2 * BOUND
    history.absent = ()
    assert history.run() <= BOUND
    assert history.contested > STEPS / 2


@pytest.mark.parametrize("seed", range(3))
def test_the_views_meet_when_all_has_ended(seed: int) -> None:
    history = Together(seed, "vtc")
    history.run()
    gateway = history.gateway
    assert any(gateway.flow.in_flight.ahead.of(tenant) > 0 for tenant in TENANTS)
    gateway.flow.drain(gateway.clock.now_s)
    gateway.run()
    assert not list(gateway.flow.in_flight)
    for tenant, had in service(gateway).items():
        assert gateway.flow.in_flight.ahead.of(tenant) == 0
        charged = gateway.flow.counters.value(tenant)
        assert abs(charged - had * COUNTER_SCALE / history.weights[tenant]) < COUNTER_SCALE


def test_a_tenant_that_sends_only_schemas_has_its_share_and_no_more() -> None:
    """What its grammars leave no choice of counts as computed input does."""
    grammars = compiled("a")
    history = Together(4, "hybrid", grammars=grammars)
    assert history.run() <= BOUND
    assert grammars.mask_calls > STEPS / 4
