"""Bursts on virtual time: many requests at one instant, before the gateway's estimator and queue.

Between its estimate and the queue each request is on its way until its row is durable, and the ledger commits
in groups. The first scenario sends sixteen short requests at a time into an idle engine with two places; the
second bursts of 4 to 200 into one that also serves a steady stream.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import exp

from engine.messages import StepTime
from gateway.domain.estimate import Estimate
from gateway.flow.controller import Ticket
from ops.bench.estimates.calibration_pool import CalibratedPool, EstimateOutcome
from ops.simulate.machines.machines import Machine, profile_machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.traffic.requests import SimulatedRequest

TOGETHER = 16
IDLE_PLACES = 2
IDLE_S = 20.0
"""Between two bursts into an idle engine: it is idle again."""
WARM_PLACES = 16
SIZES = (4, 8, 16, 32, 64, 100, 150, 200)
WARM_PER_S = 2.0
TIERS = (0, 1, 1, 1, 2)
"""Of the steady stream; bursts are of the middle one."""
TENANTS = ("acme", "bolt", "core", "dune")
MAX_TOKENS = 512
COMMIT_S = (0.004, 0.02)
"""What a commit of the ledger takes."""
BURST, STEADY = "burst", "steady"


def idle_bursts(count: int, seed: int) -> list[EstimateOutcome]:
    """`count` times `TOGETHER` short requests of one tenant at one instant, into an idle engine."""
    rng = random.Random(f"{seed} idle")
    requests = (
        _request(rng, (1 + number) * IDLE_S, TENANTS[0], 30, 100, kind=f"{BURST} {number}")
        for number in range(count)
        for _ in range(TOGETHER)
    )
    return _outcomes(machine(IDLE_PLACES), requests, seed)


def warm_bursts(count: int, seed: int) -> list[EstimateOutcome]:
    """`count` bursts, in turn of the sizes in `SIZES`, every other time of one tenant, beside a steady
    stream."""
    return _outcomes(machine(WARM_PLACES), _beside_a_stream(random.Random(f"{seed} warm"), count), seed)


def machine(places: int) -> Machine:
    """An engine with so many places, as fast as a model of 8B on one GPU of 2023."""
    return profile_machine(
        "8B",
        StepTime(20e-3, 100e-6, 2e-9, 200e-6, samples=1000, relative_error=0.02),
        max_sequences=places,
        max_batched_tokens=512,
        kv_tokens=131_072,
        context_tokens=8192,
    )


class GroupCommit:
    """When rows are durable: one commit at a time, of all that came before it began."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ends_s = -1.0
        """Of the commit under way."""
        self._next_ends_s: float | None = None
        """Of the one after it, where rows wait for that."""

    def __call__(self, at_s: float) -> float:
        """The instant at which a row that is handed over at `at_s` is durable."""
        if at_s >= self._ends_s and self._next_ends_s is not None:
            self._ends_s, self._next_ends_s = self._next_ends_s, None
        if at_s >= self._ends_s:
            self._ends_s = at_s + self._rng.uniform(*COMMIT_S)
            return self._ends_s
        if self._next_ends_s is None:
            self._next_ends_s = self._ends_s + self._rng.uniform(*COMMIT_S)
        return self._next_ends_s


class TwoStepPool(CalibratedPool):
    """Requests come as to a gateway: first for the estimate, then, when their budget is held and durable, to
    be queued."""

    def __init__(self, machine: Machine, on_end: Callable[[EstimateOutcome], None]) -> None:
        # Under `hybrid` waits in bursts are told worse: 76 % of idle ones within 2x.
        super().__init__(machine, max_tokens=MAX_TOKENS, on_end=on_end, policy="vtc")
        self._on_the_way: dict[int, tuple[str, Estimate, float]] = {}
        """By identity of their second step: name, estimate, and when they came for it."""
        self._second_steps: dict[int, SimulatedRequest] = {}
        """By identity of the first."""

    def in_two_steps(
        self, requests: Iterable[SimulatedRequest], durable_s: Callable[[float], float]
    ) -> Iterator[SimulatedRequest]:
        """Each request twice: for its estimate, and to be queued when its row is durable, by `durable_s` of
        its arrival."""
        later: list[tuple[float, int, SimulatedRequest]] = []
        for number, request in enumerate(requests):
            while later and later[0][0] <= request.arrival_s:
                yield heapq.heappop(later)[2]
            second = replace(request, arrival_s=durable_s(request.arrival_s))
            self._second_steps[id(request)] = second
            heapq.heappush(later, (second.arrival_s, number, second))
            yield request
        while later:
            yield heapq.heappop(later)[2]

    def _arrive(self, pool: SimulatedPool, request: SimulatedRequest) -> bool:
        self._watch()
        second = self._second_steps.pop(id(request), None)
        if second is None:
            name, estimate, came_s = self._on_the_way.pop(id(request))
            self._enter(request, name, estimate, None, came_s)
            return True
        name = f"coming {len(pool.records) - 1}"
        self._on_the_way[id(second)] = name, self._estimate(request), pool.now_s
        entry = self._entry(request, name)
        kv_tokens = entry.input_tokens + entry.predicted_output_tokens
        self.estimates.forecast_cache.coming(Ticket(entry, 1, kv_tokens, MAX_TOKENS))
        return False


def _outcomes(engine: Machine, requests: Iterator[SimulatedRequest], seed: int) -> list[EstimateOutcome]:
    """In the order of arrival."""
    ended: list[EstimateOutcome] = []
    pool = TwoStepPool(engine, ended.append)
    pool.pool.run(pool.in_two_steps(requests, GroupCommit(random.Random(f"{seed} commits"))))
    return sorted(ended, key=lambda each: each.times.arrived_s)


def _beside_a_stream(rng: random.Random, count: int) -> Iterator[SimulatedRequest]:
    at_s, burst_s, number = 0.0, 60.0, 0
    while number < count or at_s < burst_s:
        at_s += rng.expovariate(WARM_PER_S)
        while at_s >= burst_s and number < count:
            size, tenant = SIZES[number % len(SIZES)], rng.choice(TENANTS)
            for _ in range(size):
                of_one = number % 2 == 1
                yield _request(
                    rng, burst_s, tenant if of_one else rng.choice(TENANTS), 40, 200, kind=f"{BURST} {number}"
                )
            number += 1
            burst_s += 8.0 + 0.16 * size
        yield _request(rng, at_s, rng.choice(TENANTS), 40, 200, kind=STEADY, tier=rng.choice(TIERS))


def _request(
    rng: random.Random, at_s: float, tenant: str, median: int, longest_input: int, *, kind: str, tier: int = 1
) -> SimulatedRequest:
    output = min(MAX_TOKENS, max(1, round(median * exp(rng.gauss(0.0, 0.5)))))
    return SimulatedRequest(at_s, tenant, rng.randint(10, longest_input), output, tier=tier, kind=kind)


def steady_after(outcomes: Sequence[EstimateOutcome], skipped: int) -> list[EstimateOutcome]:
    """Of the steady stream, what came after a burst, but for the `skipped` first after each."""
    found: list[EstimateOutcome] = []
    since = None
    for each in outcomes:
        if each.kind != STEADY:
            since = 0
        elif since is not None:
            since += 1
            if since > skipped:
                found.append(each)
    return found
