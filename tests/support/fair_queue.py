"""Floods, weights, tiers and reservations of the queue, on virtual time.

The flow controller that serves in front of an engine's own scheduler; outputs are predicted by their median
only, so that charges are corrected all the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.messages import StepTime
from ops.reporting import quantile
from ops.simulate.machines.machines import Machine, profile_machine
from ops.simulate.pool import PoolObserver, SimulatedPool
from ops.simulate.predictions import Constant, Exact, Predictions
from ops.simulate.traffic.requests import SimulatedRequest

MACHINE = profile_machine(
    "8B",
    # About a model of 8B on one GPU of 2023: 20 ms a step, 10,000 prompt tokens a second.
    StepTime(20e-3, 100e-6, 0.0, 200e-6, samples=1000, relative_error=0.0),
    max_sequences=32,
    max_batched_tokens=512,
    kv_tokens=131_072,
    context_tokens=8192,
)
POLICY = "vtc"
LONGEST_INPUT, LONGEST_OUTPUT = 200, 200
MEDIAN_OUTPUT = 40
OUTPUT_SPREAD = 0.6
"""Standard deviation of the logarithm of an answer's length."""
QUIET_SHARE = 0.3
EQUAL_SHARE = 0.5
QUIET_REQUESTS = 2_200
WARM_UP_REQUESTS = 200
FLOOD_FACTOR = 10.0
INTERACTIVE, STANDARD, BATCH = 0, 1, 2

SMALL_MACHINE = profile_machine(
    "the shipped model",
    # As the shipped model on one core.
    StepTime(2e-3, 100e-6, 0.0, 100e-6, samples=1000, relative_error=0.0),
    max_sequences=8,
    max_batched_tokens=512,
    kv_tokens=32_768,
    context_tokens=8192,
)
SMALL_INPUT, SMALL_OUTPUT = (15, 80), (60, 300)

Figures = dict[str, Any]


class Draw(Protocol):
    """Draws the sizes of one request."""

    def __call__(self, at_s: float, tenant: str, rng: random.Random, *, tier: int) -> SimulatedRequest: ...


def capacity() -> float:
    """Cost tokens a second of one replica with its places always taken."""
    return _capacity(request, make_pool, requests=1500, seconds=60.0)


def flood(seed: int = 1, quiet_requests: int = QUIET_REQUESTS) -> Figures:
    """TTFT of a tenant at 30 % of the capacity beside one of the same weight and ten times its share.

    Compared with the same beside a tenant at half of the capacity, and at all that the first one leaves.
    """
    fair_share = 1 - QUIET_SHARE
    others = {"equal half": EQUAL_SHARE, "fair share": fair_share, "flood": FLOOD_FACTOR * fair_share}
    rows = _floods(request, make_pool, capacity(), others, seed, quiet_requests)
    worst_s = rows["flood"]["ttft_p99_s"]
    ratios = {name: worst_s / rows[name]["ttft_p99_s"] for name in ("equal half", "fair share")}
    return {"rows": rows, "ratios": ratios}


def few_places(seed: int = 1, quiet_requests: int = QUIET_REQUESTS) -> Figures:
    """A tenant at 30 % of a small engine's capacity beside one at half of it, and beside ten times that."""
    full = _capacity(_small_request, _small_pool, requests=600, seconds=20.0)
    others = {"equal half": EQUAL_SHARE, "flood": FLOOD_FACTOR * EQUAL_SHARE}
    rows = _floods(_small_request, _small_pool, full, others, seed, quiet_requests)
    ratio = rows["flood"]["ttft_p99_s"] / rows["equal half"]["ttft_p99_s"]
    return {"rows": rows, "ratio": ratio}


def _capacity(draw: Draw, make_pool: Callable[[], SimulatedPool], *, requests: int, seconds: float) -> float:
    pool = make_pool()
    pool.run(
        [draw(0.0, "all", random.Random(f"capacity {number}"), tier=STANDARD) for number in range(requests)],
        until_s=seconds,
    )
    return sum(pool.service.values()) / pool.now_s


def _floods(
    draw: Draw,
    make_pool: Callable[[], SimulatedPool],
    full: float,
    others: Mapping[str, float],
    seed: int,
    quiet_requests: int,
) -> dict[str, Figures]:
    """The quiet tenant's figures beside another that uses these parts of the capacity `full`."""
    per_s = full / mean_cost(draw)
    quiet = stream("quiet", QUIET_SHARE * per_s, f"{seed} quiet", count=quiet_requests, draw=draw)
    ends_s = quiet[-1].arrival_s
    rows: dict[str, Figures] = {}
    for name, share in others.items():
        other = stream("other", share * per_s, f"{seed} other", seconds=ends_s, draw=draw)
        pool = make_pool()
        # What the flood left behind need not be served.
        pool.run(sorted([*quiet, *other], key=lambda request: request.arrival_s), until_s=ends_s + 60.0)
        records = pool.records
        ttfts = [records.ttft_s(row) for row in records.rows_of("quiet")]
        ttfts = ttfts[min(WARM_UP_REQUESTS, len(ttfts) // 10) :]
        rows[name] = {
            "requests": len(ttfts),
            "ttft_p99_s": quantile(ttfts, 0.99),
            "refused_of_other": sum(records.refused),
            "places_given_up": sum(records.set_back),
            "most_of_one_request": max(records.set_back),
        }
    return rows


def service_bound(least_weight: float) -> int:
    """2U / min(w), U = max(longest input, 2 x tokens in the running batch): how far two backlogged tenants'
    service per weight may lie apart (Sheng et al., OSDI 2024), in cost tokens."""
    in_batch = min(MACHINE.kv_tokens, MACHINE.max_sequences * (LONGEST_INPUT + LONGEST_OUTPUT))
    return round(2 * max(LONGEST_INPUT, 2 * in_batch) / least_weight)


# ---------------------------------------------------------------- requests


def stream(
    tenant: str,
    per_s: float,
    seed: str,
    *,
    count: int | None = None,
    seconds: float = math.inf,
    tier: int = STANDARD,
    draw: Draw,
) -> list[SimulatedRequest]:
    """A Poisson stream of `count` requests, or of those within `seconds`; `draw` makes each."""
    rng = random.Random(seed)
    requests: list[SimulatedRequest] = []
    at_s = rng.expovariate(per_s)
    while at_s < seconds and (count is None or len(requests) < count):
        requests.append(draw(at_s, tenant, rng, tier=tier))
        at_s += rng.expovariate(per_s)
    return requests


def request(
    at_s: float,
    tenant: str,
    rng: random.Random,
    *,
    tier: int = STANDARD,
    weight: float = 1.0,
    reserved: float = 0.0,
) -> SimulatedRequest:
    output = round(MEDIAN_OUTPUT * rng.lognormvariate(0.0, OUTPUT_SPREAD))
    return SimulatedRequest(
        at_s,
        tenant,
        rng.randint(LONGEST_INPUT // 10, LONGEST_INPUT),
        min(LONGEST_OUTPUT, max(1, output)),
        tier=tier,
        weight=weight,
        reserved_cost_per_s=reserved,
    )


def _small_request(at_s: float, tenant: str, rng: random.Random, *, tier: int = STANDARD) -> SimulatedRequest:
    return SimulatedRequest(at_s, tenant, rng.randint(*SMALL_INPUT), rng.randint(*SMALL_OUTPUT), tier=tier)


def mean_cost(draw: Draw) -> float:
    rng = random.Random("mean cost")
    return sum(draw(0.0, "all", rng, tier=STANDARD).cost for _ in range(5000)) / 5000


def keep_waiting(
    pool: SimulatedPool,
    tenant: str,
    depth: int,
    *,
    seed: int,
    tier: int = STANDARD,
    weight: float = 1.0,
    reserved: float = 0.0,
) -> None:
    """Sends requests until `depth` of the tenant wait."""
    waiting = sum(flow.num_queued for flow in pool.flow.tenants.all() if flow.tenant_id == tenant)
    for _ in range(depth - waiting):
        rng = random.Random(f"{seed} {tenant} {len(pool.records)}")
        pool.arrive(request(pool.now_s, tenant, rng, tier=tier, weight=weight, reserved=reserved))


def make_pool(
    on_event: Callable[[SimulatedPool], None] = lambda pool: None, ageing_s: Sequence[float] = (math.inf,) * 3
) -> SimulatedPool:
    return fair_pool(POLICY, MACHINE, Constant(), watch=PoolObserver(on_event=on_event), ageing_s=ageing_s)


def fair_pool(
    policy: str,
    machine: Machine,
    predictions: Predictions,
    *,
    watch: PoolObserver | None = None,
    max_queued_per_tenant: int = 2_000,
    **flow: Any,
) -> SimulatedPool:
    """One engine core whose answers end where their requests say, behind a queue with a limit."""
    return SimulatedPool(
        policy,
        machine,
        predictions=predictions,
        prefix_caching=False,
        watch=watch,
        stepwise=True,
        declared_tokens=LONGEST_OUTPUT,
        flow={"max_queued_per_tenant": max_queued_per_tenant, **flow},
    )


def _small_pool() -> SimulatedPool:
    """Its answers end where their requests say, as those of the real pool do."""
    return fair_pool(POLICY, SMALL_MACHINE, Exact())
