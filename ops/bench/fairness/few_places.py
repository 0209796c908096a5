"""Does who stays below its share feel a flood where an engine has few places?

The real pool of `live.py` (eight places, answers of 60 to 300 tokens) on virtual time, where no
pause of a machine adds to the tail. With few places requests that come at random leave their tenant with
nothing under way again and again, and a moment later with more than its half: whoever counts each such moment
as idleness serves the next burst at half of the speed.
"""

from __future__ import annotations

import random
from typing import Any

from engine.messages import StepTime
from ops.bench.fairness.virtual import (
    EQUAL_SHARE,
    FLOOD_FACTOR,
    MAX_RATIO,
    POLICY,
    QUIET_REQUESTS,
    QUIET_SHARE,
    STANDARD,
    WARM_UP_REQUESTS,
    fair_pool,
    stream,
)
from ops.bench.policies.figures import quantile
from ops.reporting import table
from ops.simulate.machines.machines import profile_machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.predictions import Exact
from ops.simulate.traffic.requests import SimulatedRequest

MACHINE = profile_machine(
    "the shipped model",
    # As the shipped model on one core.
    StepTime(2e-3, 100e-6, 0.0, 100e-6, samples=1000, relative_error=0.0),
    max_sequences=8,
    max_batched_tokens=512,
    kv_tokens=32_768,
    context_tokens=8192,
)
INPUT_TOKENS, OUTPUT_TOKENS = (15, 80), (60, 300)

Report = dict[str, Any]


def few_places(seed: int = 1, quiet_requests: int = QUIET_REQUESTS) -> Report:
    """A tenant at 30 % of the capacity beside one at half of it, and beside ten times that."""
    per_s = _capacity() / _mean_cost()
    quiet = _stream("quiet", QUIET_SHARE * per_s, f"{seed} quiet", count=quiet_requests)
    ends_s = quiet[-1].arrival_s
    rows: dict[str, Report] = {}
    for name, share in (("equal half", EQUAL_SHARE), ("flood", FLOOD_FACTOR * EQUAL_SHARE)):
        other = _stream("other", share * per_s, f"{seed} other", seconds=ends_s)
        pool = _pool()
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
        }
    ratio = rows["flood"]["ttft_p99_s"] / rows["equal half"]["ttft_p99_s"]
    return {"rows": rows, "ratio": round(ratio, 4), "most": MAX_RATIO, "ok": ratio <= MAX_RATIO}


def show(report: Report) -> None:
    """The table for people."""
    rows = [
        (
            name,
            f"{row['other_share']:g}",
            f"{row['requests']:,}",
            f"{row['ttft_p50_s']:.3f}",
            f"{row['ttft_p99_s']:.3f}",
            f"{row['refused_of_other']:,}",
            f"{row['places_given_up']:,}",
        )
        for name, row in report["rows"].items()
    ]
    table(
        f"flood of an engine with {MACHINE.max_sequences} places (virtual time)",
        ("the other", "its share", "requests", "TTFT p50, s", "TTFT p99, s", "refused", "places given up"),
        rows,
    )
    verdict = "ok" if report["ok"] else "NOT ok"
    print(
        f"TTFT p99 beside the flood over equal half: {report['ratio']:.3f}; at most {MAX_RATIO:g}: {verdict}"
    )


def _capacity() -> float:
    """Cost tokens a second with all places always taken."""
    pool = _pool()
    requests = [_request(0.0, "all", random.Random(f"capacity {number}")) for number in range(600)]
    pool.run(requests, until_s=20.0)
    return sum(pool.service.values()) / pool.now_s


def _mean_cost() -> float:
    rng = random.Random("mean cost")
    return sum(_request(0.0, "all", rng).cost for _ in range(5000)) / 5000


def _stream(tenant: str, per_s: float, seed: str, **until: Any) -> list[SimulatedRequest]:
    return stream(tenant, per_s, seed, draw=_request, **until)


def _request(at_s: float, tenant: str, rng: random.Random, *, tier: int = STANDARD) -> SimulatedRequest:
    return SimulatedRequest(at_s, tenant, rng.randint(*INPUT_TOKENS), rng.randint(*OUTPUT_TOKENS), tier=tier)


def _pool() -> SimulatedPool:
    """Its answers end where their requests say, as those of the real pool do."""
    return fair_pool(POLICY, MACHINE, Exact())
