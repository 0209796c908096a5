"""Benchmark of wait estimates: the share within a factor of two of the actual wait, also in bursts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ops.bench.common.load import BenchTenant, closed_loops, fresh_bench
from ops.bench.estimates import bursts
from ops.reporting import quantile, table
from ops.sandbox.server import ServerFailed
from ops.simulate.figures.figures import covered, within_factor

MAX_SEQUENCES = 16
LOOKAHEAD = 2
FACTOR = 2.0
FLOOR_S = 0.1
"""Waits below this count as this: a wait of 60 ms after an estimate of 20 ms is no error."""
WANTED = 0.8
TENANTS = 4
WARM_UP_PASSES = 2
"""Answers of every connection that are not counted: the queue fills, forecasts learn."""
MAX_DEPTH_S = 600.0
POLL_S = 0.2


async def run(*, depths: Sequence[int], probes: int, model: str | None) -> dict[str, Any]:
    """All depths, each on a fresh server. Raises `ServerFailed`."""
    measured = {depth: await _one(depth, probes, model) for depth in sorted(set(depths))}
    everything = [pair for pairs in measured.values() for pair in pairs]
    waits = [(estimate["p50"], actual) for estimate, actual in everything]
    overall = {
        "share_within_2x": within_factor(waits, FACTOR, FLOOR_S),
        "constant_share_within_2x": best_constant([actual for _, actual in waits])[1],
        "p90_coverage": covered([(estimate["p90"], actual) for estimate, actual in everything]),
    }
    rows = [_depth(depth, pairs) for depth, pairs in measured.items()]
    return {
        "floor_s": FLOOR_S,
        "max_sequences": MAX_SEQUENCES,
        "depths": rows,
        "bursts": await bursts.run(model),
        "overall": overall,
        "ok": all((row["share_within_2x"] or 0.0) >= WANTED for row in rows),
    }


def best_constant(actual: Sequence[float]) -> tuple[float, float]:
    """The constant that is within a factor of two of most waits, and of what share of them."""
    candidates = [max(wait, FLOOR_S) * scale for wait in actual for scale in (0.5, 1.0, 2.0)]
    scored = [
        (within_factor([(constant, wait) for wait in actual], FACTOR, FLOOR_S) or 0.0, constant)
        for constant in sorted(set(candidates))
    ]
    share, constant = max(scored, default=(0.0, 0.0))
    return constant, share


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    rows = [
        (
            row["queued"],
            row["requests"],
            f"{row['estimate_p50_s']:.2f}",
            f"{row['actual_p50_s']:.2f}",
            f"{row['actual_p99_s']:.2f}",
            f"{100 * row['share_within_2x']:.1f} %",
            f"{100 * row['p90_coverage']:.1f} %",
        )
        for row in report["depths"]
    ]
    columns = ("queued", "requests", "told p50, s", "waited p50, s", "p99, s", "within 2x", "under p90")
    table("estimated wait against actual wait", columns, rows)
    bursts.show(report["bursts"])
    overall = report["overall"]
    print(
        f"all together: within 2x for {100 * overall['share_within_2x']:.1f} %; the best constant:"
        f" {100 * overall['constant_share_within_2x']:.1f} %; {100 * WANTED:.0f} % wanted at every depth:"
        f" {'ok' if report['ok'] else 'NOT ok'}"
    )


def _depth(queued: int, pairs: Sequence[tuple[dict[str, float], float]]) -> dict[str, Any]:
    actual = [wait for _, wait in pairs]
    constant_s, share = best_constant(actual)
    return {
        "queued": queued,
        "requests": len(pairs),
        "share_within_2x": within_factor(
            [(estimate["p50"], wait) for estimate, wait in pairs], FACTOR, FLOOR_S
        ),
        "p90_coverage": covered([(estimate["p90"], wait) for estimate, wait in pairs]),
        "estimate_p50_s": quantile([estimate["p50"] for estimate, _ in pairs], 0.5),
        "actual_p50_s": quantile(actual, 0.5),
        "actual_p99_s": quantile(actual, 0.99),
        "constant_here_s": constant_s,
        "constant_here_share_within_2x": share,
    }


async def _one(depth: int, probes: int, model: str | None) -> list[tuple[dict[str, float], float]]:
    """Keeps `depth` requests waiting; (estimate, wait) of every request after the warm-up."""
    # Nothing may wait at depth 0: half of the engine's places are used.
    connections = MAX_SEQUENCES + LOOKAHEAD + depth if depth else MAX_SEQUENCES // 2
    parties = [
        BenchTenant(f"tenant-{number}", 1.0, len(range(number, connections, TENANTS)))
        for number in range(TENANTS)
    ]
    accounts: list[dict[str, Any]] = []
    wanted = WARM_UP_PASSES * connections + probes
    arguments = ["--engine-max-sequences", str(MAX_SEQUENCES)]
    async with fresh_bench(parties, model, arguments) as bench, closed_loops(bench, parties) as clients:
        try:
            async with asyncio.timeout(MAX_DEPTH_S):
                while len(accounts) < wanted:
                    await asyncio.sleep(POLL_S)
                    for client in clients.values():
                        accounts += (await client.take()).accounts
        except TimeoutError:
            raise ServerFailed(f"only {len(accounts)} of {wanted} requests in {MAX_DEPTH_S:g} s") from None
    counted = accounts[WARM_UP_PASSES * connections :]
    return [(each["estimate"]["wait_s"], each["actual"]["wait_s"]) for each in counted]
