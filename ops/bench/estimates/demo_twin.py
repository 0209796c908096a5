"""The demo on virtual time: its plan, the real queue and estimator, a virtual engine as fast as its own.

Lengths are predicted as well as the demo's are. Replays take a fixed time, so that runs are deterministic.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from heapq import merge
from math import exp
from statistics import NormalDist

from engine.messages import TIER_RANKS, StepTime
from gateway.domain.estimate import Times
from ops.bench.estimates.calibration_pool import CalibratedPool, EstimateOutcome
from ops.demo.cast import CAST
from ops.demo.run import MAX_DRAIN_S, MAX_SEQUENCES
from ops.demo.trace import (
    LENGTH_FACTOR,
    MAX_OUTPUT_TOKENS,
    SPAN_S,
    TraceRequest,
    load_slice,
    plan,
    scale_lengths,
)
from ops.simulate.machines.machines import profile_machine
from ops.simulate.traffic.requests import SimulatedRequest
from tenants.types import LimitMode

MACHINE = profile_machine(
    "demo",
    # Tokens at the ceiling of the demo's engine.
    StepTime(0.25e-3, 0.82e-3, 1e-8, 30e-6, samples=1000, relative_error=0.05),
    kv_tokens=65_536,
    context_tokens=2048,
    max_sequences=MAX_SEQUENCES,
    max_batched_tokens=512,
)
CAPACITY_COST_PER_S = 1_830.0
"""What `MACHINE` serves of the demo's requests while others wait."""
OVERLOADED_S = 75.0
STATIONARY_S = 200.0
ANSWERED_OF_LIMITED = 0.36
"""Share of the requests of a tenant with a hard limit that the demo answers: the first ones."""
LENGTH_SIGMA = 0.517
"""Of the logarithm of predicted over actual length: 82 % within 2x."""
REPLAY_S = 0.001
REPLAY_S_PER_WAITING = 0.6e-3
MOST_REPLAYED = 100
"""A replay's time grows with up to so many waiting requests: some 60 ms with the demo's full queue."""
TOGETHER = 24
QUOTED_EVERY_S = 10.0
QUOTING_BESIDE = 0.15
"""Load of the requests that come without a quote meanwhile."""
REDEEM_WITHIN_S = 1.0
QUOTED_S = 600.0
LEARNING_S = 120.0
"""Of the quotes; what came before is not judged."""
TENANTS = {tenant.name: tenant for tenant in CAST}


@dataclass(frozen=True, slots=True)
class PredictedRequest(SimulatedRequest):
    predicted: tuple[int, int] = (1, 1)
    """p50 and p90 of its output tokens."""


class DemoTwin(CalibratedPool):
    def __init__(self, policy: str) -> None:
        self.outcomes: list[EstimateOutcome] = []
        self._replayed_s = 0.0
        super().__init__(
            MACHINE,
            policy=policy,
            max_tokens=MAX_OUTPUT_TOKENS,
            on_end=self.outcomes.append,
            stopwatch=self._stopwatch,
            replays_in_s=self._replay_s,
        )

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        assert isinstance(request, PredictedRequest)
        return request.predicted

    def serve(self, requests: Iterable[SimulatedRequest], until_s: float) -> list[EstimateOutcome]:
        """The outcomes, with what was cut at `until_s`."""
        self.pool.run(requests, until_s=until_s)
        for row, (request, estimate, is_quote, came_s, _) in self._open.items():
            dispatched_s = self.pool.records.dispatched_s[row]
            times = Times(came_s, dispatched_s if dispatched_s >= 0 else None, ended_s=self.pool.now_s)
            self.outcomes.append(EstimateOutcome(estimate, times, 0, 0, is_quote, request.kind, request.tier))
        return self.outcomes

    def _stopwatch(self) -> float:
        """Read before and after each replay."""
        self._replayed_s += self._replay_s() / 2
        return self._replayed_s

    def _replay_s(self) -> float:
        return REPLAY_S + REPLAY_S_PER_WAITING * min(MOST_REPLAYED, len(self.pool.flow))


def served(seed: int, load: float, policy: str) -> list[EstimateOutcome]:
    """Above a load of 1 the demo's plan, as overloaded as that; else its requests in a stationary stream."""
    requests = overloaded(seed, load) if load > 1 else stationary(f"{seed}", load, STATIONARY_S)
    return DemoTwin(policy).serve(requests, (OVERLOADED_S if load > 1 else STATIONARY_S) + MAX_DRAIN_S)


def overloaded(seed: int, load: float) -> Iterator[PredictedRequest]:
    """The demo's plan; each seed but the first begins at another place of the trace."""
    begin_s = (seed - 1) * 0.618 % 1 * SPAN_S
    trace = [replace(one, arrival_s=(one.arrival_s - begin_s) % SPAN_S) for one in load_slice()]
    trace.sort(key=lambda one: one.arrival_s)
    planned = plan(
        trace, capacity_cost_per_s=CAPACITY_COST_PER_S, overload=load, span_s=OVERLOADED_S
    ).requests
    limited = {one.name for one in CAST if one.limit and one.limit.mode is LimitMode.HARD}
    asked, seen = Counter(one.tenant for one in planned), Counter[str]()
    rng = random.Random(f"{seed} lengths")
    for one in planned:
        seen[one.tenant] += 1
        if one.tenant not in limited or seen[one.tenant] <= ANSWERED_OF_LIMITED * asked[one.tenant]:
            yield _predicted(one, one.arrival_s, rng)


def stationary(seed: str, load: float, span_s: float) -> Iterator[PredictedRequest]:
    rng = random.Random(f"{seed} stationary")
    among = scale_lengths(load_slice(), LENGTH_FACTOR)
    per_s = load * CAPACITY_COST_PER_S * len(among) / sum(one.cost for one in among)
    at_s = rng.expovariate(per_s)
    while at_s < span_s:
        yield _predicted(rng.choice(among), at_s, rng)
        at_s += rng.expovariate(per_s)


def quoted(policy: str) -> list[EstimateOutcome]:
    """Beside a stationary stream, groups that quote at one instant and all come within a second."""
    twin, rng = DemoTwin(policy), random.Random("quotes")
    # Half of the trace's longest answers end at one cap: a sketch of lengths puts its p90 just below.
    among = [
        replace(
            one, output_tokens=min(MAX_OUTPUT_TOKENS, round(one.output_tokens * rng.uniform(0.7, 1.3)) or 1)
        )
        for one in scale_lengths(load_slice(), LENGTH_FACTOR)
    ]
    redeemed: list[PredictedRequest] = []
    at_s = QUOTED_EVERY_S
    while at_s < QUOTED_S:
        redeem_s = sorted(at_s + rng.uniform(0, REDEEM_WITHIN_S) for _ in range(TOGETHER))
        group = [_predicted(rng.choice(among), each_s, rng) for each_s in redeem_s]
        twin.pool.at(at_s, partial(twin.quote, group))
        redeemed += group
        at_s += QUOTED_EVERY_S
    beside = stationary("beside", QUOTING_BESIDE, QUOTED_S)
    requests = merge(beside, redeemed, key=lambda one: one.arrival_s)
    outcomes = twin.serve(requests, QUOTED_S + MAX_DRAIN_S)
    return [one for one in outcomes if one.times.arrived_s >= LEARNING_S]


def _predicted(one: TraceRequest, at_s: float, rng: random.Random) -> PredictedRequest:
    tenant = TENANTS[one.tenant]
    p50 = one.output_tokens * exp(rng.gauss(0.0, LENGTH_SIGMA))
    p90 = p50 * exp(NormalDist().inv_cdf(0.9) * LENGTH_SIGMA)
    median, high = (max(1, min(MAX_OUTPUT_TOKENS, round(count))) for count in (p50, p90))
    return PredictedRequest(
        at_s,
        one.tenant,
        one.input_tokens,
        one.output_tokens,
        tier=TIER_RANKS[tenant.tier],
        weight=tenant.weight,
        predicted=(median, high),
    )
