"""The fair shares by minute add up to the service given, and are those of the fluid simulation.

Floods on virtual time, with the real queue and a real engine core, under a fair and an unfair policy.
Whatever the policy did, each tenant's fair share is that of `FluidShare` when it has given the same service,
within one request.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.entry import QueueEntry
from engine.scheduling.options import PolicyOptions
from engine.step_time.model import PRIOR
from gateway.explain.fluid_share import FluidMachine, FluidShare
from gateway.explain.fluid_share import Job as FluidJob
from gateway.explain.ideal_share import FairTerms, IdealShare
from gateway.explain.shares import TenantTier
from tests.support.virtual_gateway import Job, VirtualGateway

SEQUENCES, BATCH, BLOCKS = 16, 256, 16_384
INPUT, OUTPUT = 8, 76
REQUEST = INPUT + 2 * OUTPUT
"""Cost tokens of one request: all are alike."""

Arrivals = list[tuple[float, Job]]


def _flood(tenant: str, since_s: float, requests: int, *, tier: int = 1, weight: float = 1.0) -> Arrivals:
    return [(since_s + number / 1000, Job(tenant, INPUT, OUTPUT, tier, weight)) for number in range(requests)]


def _stream(tenant: str, per_s: float, *, tier: int = 1) -> Arrivals:
    draw, at_s, found = random.Random(tenant), 0.0, Arrivals()
    while (at_s := at_s + draw.expovariate(per_s)) < 14.0:
        found.append((at_s, Job(tenant, INPUT, OUTPUT, tier)))
    return found


FLOODS = {
    "one floods": [*_flood("flood", 0.5, 400), *_stream("light", 3.0), *_stream("other", 2.0)],
    "two by weight": [*_flood("first", 0.5, 300), *_flood("heavier", 1.5, 300, weight=3.0)],
    "two tiers": [*_flood("lower", 0.5, 300), *_flood("higher", 1.5, 150, tier=0), *_stream("light", 2.0)],
    "many": [each for number in range(16) for each in _flood(f"crowd-{number}", number / 20, 12)],
}
SECONDS = (3, 5, 8, 14)
"""When they are compared: in the flood, and when all is over."""


@dataclass
class Measured:
    """A virtual gateway whose service is divided every second."""

    policy: str
    arrivals: Arrivals
    ideal: IdealShare = field(default_factory=IdealShare)
    jobs: list[FluidJob] = field(default_factory=list)
    served: dict[TenantTier, int] = field(default_factory=dict)
    fair: dict[TenantTier, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gateway = VirtualGateway(
            policy=self.policy,
            options=PolicyOptions(slots=0),  # the fluid machine's sequences all have a token of each step
            max_sequences=SEQUENCES,
            max_batched_tokens=BATCH,
            num_blocks=BLOCKS,
        )
        for at_s, job in self.arrivals:
            self.gateway.at(at_s, job)
        enqueue, finish = self.gateway.flow.enqueue, self.gateway.flow.finish

        def noting_arrivals(ticket, now_s):  # type: ignore[no-untyped-def]
            entry: QueueEntry = ticket.entry
            self.ideal.arrived(
                now_s, entry.tenant_id, entry.tier, entry.predicted_cost, FairTerms(entry.weight)
            )
            self.jobs.append(
                FluidJob(
                    entry.entry_id,
                    entry.tenant_id,
                    entry.tier,
                    entry.weight,
                    now_s,
                    entry.input_tokens,
                    OUTPUT,
                )
            )
            return enqueue(ticket, now_s)

        def noting_ends(entry_id, input_tokens, output_tokens, now_s):  # type: ignore[no-untyped-def]
            entry = self.gateway.flow.ticket(entry_id).entry  # type: ignore[union-attr]
            finish(entry_id, input_tokens, output_tokens, now_s)
            cost = input_tokens + 2 * output_tokens
            self.ideal.ended(now_s, entry.tenant_id, entry.tier, entry.predicted_cost, cost)

        self.gateway.flow.enqueue = noting_arrivals  # type: ignore[method-assign]
        self.gateway.flow.finish = noting_ends  # type: ignore[method-assign]

    def run_second(self, until_s: int) -> None:
        """Divides the service of one more second; its parts must add up to it."""
        self.gateway.run(until_s=until_s)
        now = {
            (flow.tenant_id, rank): served
            for flow in self.gateway.flow.tenants.all()
            for rank, served in enumerate(flow.served)
            if served
        }
        had = {whose: served - self.served.get(whose, 0) for whose, served in now.items()}
        self.served = now
        due = self.ideal.advance(self.gateway.clock.now_s, had)
        assert sum(due.values()) == pytest.approx(sum(had.values()), abs=1e-3)
        for whose, part in due.items():
            self.fair[whose] = self.fair.get(whose, 0.0) + part

    def fluid(self) -> dict[TenantTier, float]:
        """What the fluid simulation gave by the time it has given as much in all."""
        machine = FluidMachine(PRIOR, SEQUENCES, BATCH, BLOCKS * 16)
        fluid, at_s, total = FluidShare(self.jobs, machine), 0.0, sum(self.served.values())
        while sum(fluid.had.values()) < total - 1 and at_s < 60:
            at_s += 0.01
            fluid.run(until_s=at_s)
        return fluid.had


@pytest.mark.parametrize("policy", ["vtc", "fcfs"])
@pytest.mark.parametrize("name", FLOODS)
def test_fair_shares_are_those_of_the_fluid_simulation(name: str, policy: str) -> None:
    measured = Measured(policy, FLOODS[name])
    furthest = 0.0

    for second in range(1, max(SECONDS) + 1):
        measured.run_second(second)
        furthest = max(
            [furthest, *(abs(measured.served.get(each, 0) - due) for each, due in measured.fair.items())]
        )
        if second in SECONDS:
            fluid = measured.fluid()
            for whose in measured.fair.keys() | fluid.keys():
                assert measured.fair.get(whose, 0.0) == pytest.approx(fluid.get(whose, 0.0), abs=REQUEST), (
                    f"{whose} after {second} s"
                )

    if policy == "fcfs" and name != "many":
        assert furthest > 3 * REQUEST, "the flood did not push anyone aside: there was nothing to show"
