"""Fairness of the queue on virtual time: floods, weights, tiers and reservations.

The flow controller that serves in front of an engine's own scheduler (`ops/simulate/pool.py`); requests
from a seeded generator, outputs predicted by their median only, so that charges are corrected all the time.
Scenarios:

- `flood`: a tenant that uses 30 % of the capacity, beside one of the same weight that sends ten times its
  share, which may raise the first one's TTFT p99 to at most `MAX_RATIO` times what it is beside one that uses
  exactly its share. What that is can be read in two ways, and both are held to: half of the capacity, and
  what the first one leaves (the max-min fair share, 70 %). For comparison, alone.
- `weights`: two tenants that always wait, of weights 1 and 3.
- `tiers`: interactive work that comes and goes over standard and batch that always wait; then an interactive
  flood without end, under which batch must still have its turn within its ageing.
- `reservations`: two standard tenants with reservations under four interactive floods.
- `few_places`: the flood on the engine of `live.py` (eight places, answers of 60 to 300 tokens), where no
  pause of a machine adds to the tail. With few places, requests that come at random leave their tenant with
  none running again and again, and a moment later with more than half of the places: a queue that counted
  each such moment as idleness would serve the next burst at half of the speed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.messages import StepTime
from ops.reporting import Report, all_ok, jain_index, quantile, verdict
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
MAX_RATIO = 1.2
WEIGHTS = (1.0, 3.0)
WEIGHT_TOLERANCE = 0.01
AGEING_S = (math.inf, 20.0, 30.0)
RESERVED_SHARES = (0.3, 0.1)
LEAST_RESERVED = 0.98
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


def run(*, seed: int = 1, progress: Callable[[str], None] = lambda name: None) -> Figures:
    """All scenarios; `ok` says whether each kept its limits."""
    report: Figures = {"seed": seed, "capacity_cost_per_s": round(capacity(), 1)}
    for name, scenario in SCENARIOS.items():
        progress(name)
        report[name] = scenario(seed)
    report["ok"] = all_ok(report[name] for name in SCENARIOS)
    return report


def capacity() -> float:
    """Cost tokens a second of one replica with its places always taken."""
    return _capacity(_request, _pool, requests=1500, seconds=60.0)


def flood(seed: int = 1, quiet_requests: int = QUIET_REQUESTS) -> Figures:
    """A tenant at 30 % of the capacity beside others of every load."""
    fair_share = 1 - QUIET_SHARE
    others = {
        "alone": 0.0,
        "equal half": EQUAL_SHARE,
        "fair share": fair_share,
        "flood": FLOOD_FACTOR * fair_share,
    }
    rows = _floods(_request, _pool, capacity(), others, seed, quiet_requests)
    worst_s = rows["flood"]["ttft_p99_s"]
    ratios = {name: round(worst_s / rows[name]["ttft_p99_s"], 4) for name in ("equal half", "fair share")}
    return {
        "rows": rows,
        "ratios": ratios,
        "most": MAX_RATIO,
        "ok": max(ratios.values()) <= MAX_RATIO,
    }


def few_places(seed: int = 1, quiet_requests: int = QUIET_REQUESTS) -> Figures:
    """A tenant at 30 % of a small engine's capacity beside one at half of it, and beside ten times that."""
    full = _capacity(_small_request, _small_pool, requests=600, seconds=20.0)
    others = {"equal half": EQUAL_SHARE, "flood": FLOOD_FACTOR * EQUAL_SHARE}
    rows = _floods(_small_request, _small_pool, full, others, seed, quiet_requests)
    ratio = rows["flood"]["ttft_p99_s"] / rows["equal half"]["ttft_p99_s"]
    return {"rows": rows, "ratio": round(ratio, 4), "most": MAX_RATIO, "ok": ratio <= MAX_RATIO}


def _capacity(draw: Draw, make_pool: Callable[[], SimulatedPool], *, requests: int, seconds: float) -> float:
    pool = make_pool()
    every = [
        draw(0.0, "all", random.Random(f"capacity {number}"), tier=STANDARD) for number in range(requests)
    ]
    pool.run(every, until_s=seconds)
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
    per_s = full / _mean_cost(draw)
    quiet = stream("quiet", QUIET_SHARE * per_s, f"{seed} quiet", count=quiet_requests, draw=draw)
    ends_s = quiet[-1].arrival_s
    rows: dict[str, Figures] = {}
    for name, share in others.items():
        other = stream("other", share * per_s, f"{seed} other", seconds=ends_s, draw=draw) if share else []
        pool = make_pool()
        # What the flood left behind need not be served.
        pool.run(sorted([*quiet, *other], key=lambda each: each.arrival_s), until_s=ends_s + 60.0)
        records = pool.records
        ttfts = [records.ttft_s(row) for row in records.rows_of("quiet")]
        ttfts = ttfts[min(WARM_UP_REQUESTS, len(ttfts) // 10) :]
        rows[name] = {
            "other_share": share,
            "requests": len(ttfts),
            "ttft_p50_s": round(quantile(ttfts, 0.5), 4),
            "ttft_p99_s": round(quantile(ttfts, 0.99), 4),
            "refused_of_other": sum(records.refused),
            "places_given_up": sum(records.set_back),
            "most_of_one_request": max(records.set_back),
        }
    return rows


def weights(seed: int = 1, seconds: float = 240.0) -> Figures:
    """Weights of 1 and 3, both always waiting; the light one in ten times as many requests."""
    light, heavy = WEIGHTS
    gaps: list[float] = []

    def refill(pool: SimulatedPool) -> None:
        _keep_waiting(pool, "light", 200, weight=light, seed=seed)
        _keep_waiting(pool, "heavy", 20, weight=heavy, seed=seed)
        had = pool.service
        gaps.append(abs(had.get("light", 0) / light - had.get("heavy", 0) / heavy))

    pool = _pool(refill)
    pool.run([_request(0.0, "light", random.Random(seed), weight=light)], until_s=seconds)
    served = [pool.service["light"] / light, pool.service["heavy"] / heavy]
    ratio = pool.service["heavy"] / pool.service["light"]
    deviation = abs(ratio / (heavy / light) - 1)
    bound = service_bound(min(light, heavy))
    return {
        "light_cost_tokens": pool.service["light"],
        "heavy_cost_tokens": pool.service["heavy"],
        "ratio": round(ratio, 4),
        "deviation": round(deviation, 5),
        "jain_index": round(jain_index(served) or 0.0, 6),
        "widest_gap_cost_tokens": round(max(gaps)),
        "bound_cost_tokens": bound,
        "gap_over_bound": round(max(gaps) / bound, 4),
        "ok": deviation <= WEIGHT_TOLERANCE and max(gaps) <= bound,
    }


def tiers(seed: int = 1) -> Figures:
    """What comes first, and whether the last is still served."""
    per_s = capacity() / _mean_cost(_request)
    interactive = stream("day", 0.5 * per_s, f"{seed} day", seconds=90.0, tier=INTERACTIVE, draw=_request)

    def refill(pool: SimulatedPool) -> None:
        _keep_waiting(pool, "office", 20, tier=STANDARD, seed=seed)
        _keep_waiting(pool, "night", 20, tier=BATCH, seed=seed)

    pool = _pool(refill)
    pool.run(interactive, until_s=90.0)
    records = pool.records
    total = sum(pool.service.values())
    ttfts = [records.ttft_s(row) for row in records.rows_of("day") if records.first_s[row] >= 0]
    displaced = [tokens for tokens in records.displaced_tokens if tokens]
    wait_s, bound_s = _longest_aged_wait(seed)
    return {
        "service_shares": {tenant: round(cost / total, 4) for tenant, cost in sorted(pool.service.items())},
        "interactive_ttft_p99_s": round(quantile(ttfts, 0.99), 4),
        "interactive_requests": len(ttfts),
        "requests_that_displaced": len(displaced),
        "displaced_kv_tokens": sum(displaced),
        "batch_longest_wait_under_flood_s": round(wait_s, 3),
        "batch_wait_bound_s": bound_s,
        "ok": pool.service.get("night", 0) == 0 and bool(displaced) and wait_s <= bound_s,
    }


def reservations(seed: int = 1, seconds: float = 120.0) -> Figures:
    """Two standard tenants that paid for 30 % and 10 % of the capacity under four interactive floods."""
    full = capacity()
    rows: dict[str, Figures] = {}
    for is_reserved in (True, False):

        def refill(pool: SimulatedPool, is_reserved: bool = is_reserved) -> None:
            for number, share in enumerate(RESERVED_SHARES):
                _keep_waiting(
                    pool,
                    f"paid {number}",
                    20,
                    tier=STANDARD,
                    seed=seed,
                    reserved=share * full if is_reserved else 0.0,
                )
            for number in range(4):
                _keep_waiting(pool, f"flood {number}", 30, tier=INTERACTIVE, seed=seed)

        pool = _pool(refill)
        pool.run([_request(0.0, "first", random.Random(seed))], until_s=seconds)
        for number, share in enumerate(RESERVED_SHARES):
            row = rows.setdefault(f"paid {number}", {"reserved_cost_per_s": round(share * full, 1)})
            had = pool.service.get(f"paid {number}", 0) / (share * full * seconds)
            row["served_of_reserved" if is_reserved else "without_reservation"] = round(had, 4)
    return {
        "rows": rows,
        "least": LEAST_RESERVED,
        "ok": all(row["served_of_reserved"] >= LEAST_RESERVED for row in rows.values())
        and all(row["without_reservation"] < 0.5 for row in rows.values()),
    }


SCENARIOS: dict[str, Callable[[int], Figures]] = {
    "flood": flood,
    "weights": weights,
    "tiers": tiers,
    "reservations": reservations,
    "few_places": few_places,
}


FLOOD_COLUMNS = (
    ("name", "the other"),
    ("other_share", "its share", ".2f"),
    ("requests", "requests"),
    ("ttft_p50_s", "TTFT p50, s", ".3f"),
    ("ttft_p99_s", "TTFT p99, s", ".3f"),
    ("refused_of_other", "refused"),
    ("places_given_up", "places given up"),
)


def show(report: Figures) -> None:
    """The tables for people."""
    part = report["flood"]
    _show_floods("flood: a tenant at 30 % of the capacity beside another (virtual time)", part)
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in part["ratios"].items())
    print(f"TTFT p99 beside the flood over: {ratios}; at most {MAX_RATIO:g}: {verdict(part)}\n")
    fair = report["weights"]
    print(
        f"weights 1:3: service {fair['ratio']:.4f}, off by {100 * fair['deviation']:.2f} % (at most"
        f" {100 * WEIGHT_TOLERANCE:g} %); Jain index {fair['jain_index']:.6f}; widest gap"
        f" {fair['widest_gap_cost_tokens']:,} cost tokens = {fair['gap_over_bound']:.3f} of the bound 2U:"
        f" {verdict(fair)}"
    )
    shares = ", ".join(f"{name} {share:.1%}" for name, share in report["tiers"]["service_shares"].items())
    print(
        f"tiers: {shares}; interactive TTFT p99 {report['tiers']['interactive_ttft_p99_s']:.3f} s;"
        f" {report['tiers']['requests_that_displaced']} requests took the places of"
        f" {report['tiers']['displaced_kv_tokens']:,} tokens; under an endless flood batch waited"
        f" {report['tiers']['batch_longest_wait_under_flood_s']:.1f} s"
        f" (at most {report['tiers']['batch_wait_bound_s']:g}): {verdict(report['tiers'])}"
    )
    for name, row in report["reservations"]["rows"].items():
        print(
            f"reservations: {name} had {row['served_of_reserved']:.1%} of what it reserved under a flood"
            f" (at least {LEAST_RESERVED:.0%}), without a reservation {row['without_reservation']:.1%}"
        )
    print(f"reservations: {verdict(report['reservations'])}")
    part = report["few_places"]
    _show_floods(f"flood of an engine with {SMALL_MACHINE.max_sequences} places (virtual time)", part)
    ratio = f"{part['ratio']:.3f}; at most {MAX_RATIO:g}"
    print(f"TTFT p99 beside the flood over equal half: {ratio}: {verdict(part)}")


def _show_floods(title: str, part: Figures) -> None:
    Report(title, FLOOD_COLUMNS, [{"name": name} | row for name, row in part["rows"].items()]).show()


# ---------------------------------------------------------------- figures


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


def _request(
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


def _mean_cost(draw: Draw) -> float:
    rng = random.Random("mean cost")
    return sum(draw(0.0, "all", rng, tier=STANDARD).cost for _ in range(5000)) / 5000


def _keep_waiting(
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
    waiting = sum(each.num_queued for each in pool.flow.tenants() if each.tenant_id == tenant)
    for _ in range(depth - waiting):
        rng = random.Random(f"{seed} {tenant} {len(pool.records)}")
        pool.arrive(_request(pool.now_s, tenant, rng, tier=tier, weight=weight, reserved=reserved))


def _longest_aged_wait(seed: int) -> tuple[float, float]:
    """The longest wait of batch requests that arrive under an interactive flood without end, of a tenant with
    a night of service behind it; and its bound."""

    def refill(pool: SimulatedPool) -> None:
        _keep_waiting(pool, "day", 60, tier=INTERACTIVE, seed=seed)

    pool = _pool(refill, ageing_s=AGEING_S)
    pool.flow.counters.charge("night", 1.0, 10**9)
    batch = [
        _request(5.0 * number, "night", random.Random(f"{seed} {number}"), tier=BATCH) for number in range(10)
    ]

    pool.run(batch, until_s=150.0)
    # Up two tiers; then its share of the band, and the longest answer that runs.
    bound_s = 2 * AGEING_S[BATCH] + 5.0
    return max(pool.records.ttft_s(row) for row in pool.records.rows_of("night")), bound_s


def _pool(
    on_event: Callable[[SimulatedPool], None] = lambda pool: None,
    ageing_s: Sequence[float] = (math.inf,) * 3,
) -> SimulatedPool:
    return fair_pool(
        POLICY, MACHINE, Constant(MEDIAN_OUTPUT, 0), watch=PoolObserver(on_event=on_event), ageing_s=ageing_s
    )


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
