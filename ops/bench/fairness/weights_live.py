"""Do weights of 1 and 3 give service of 1 and 3, when the light tenant has ten times the connections?"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.bench.common.load import Bench, BenchTenant, closed_loops, fresh_bench, server_status
from ops.bench.fairness.virtual import jain_index
from ops.demo.prompts import MAX_TOKENS
from ops.reporting import table
from ops.sandbox.server import ServerFailed

HEAVY_WEIGHT = 3.0
CONNECTIONS_FACTOR = 10
MAX_SEQUENCES = 16
WARM_UP_S = 12.0
"""Forecasts learn, and both queues fill."""
EVERY_S = 0.25
LEAST_QUEUED = 4
TOLERANCE = 0.03
MAX_RUN_S = 600.0


@dataclass(frozen=True)
class _Reading:
    at_s: float
    light: int
    heavy: int
    """Service in cost tokens."""
    light_tokens: int
    """Tokens, each counted once: when the light tenant has had enough, the run ends."""
    light_queued: int
    heavy_queued: int


async def run(*, runs: int, light_tokens: int, connections: int, model: str | None) -> dict[str, Any]:
    """All runs and their spread. Raises `ServerFailed`."""
    done = [await _one(light_tokens, connections, model) for _ in range(runs)]
    ratios = [item["ratio"] for item in done]
    widest = max(item["gap_over_bound"] for item in done)
    worst = max(item["deviation"] for item in done)
    return {
        "weights": [1, HEAVY_WEIGHT],
        "max_sequences": MAX_SEQUENCES,
        "runs": done,
        "median_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "worst_deviation": worst,
        "least_jain_index": min(item["jain_index"] for item in done),
        "widest_gap_over_bound": widest,
        "ok": worst <= TOLERANCE
        and widest <= 1
        and all(min(item["least_queued"].values()) >= LEAST_QUEUED for item in done),
    }


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    rows = [
        (
            number,
            f"{item['light_cost_tokens']:,}",
            f"{item['heavy_cost_tokens']:,}",
            f"{item['ratio']:.4f}",
            f"{100 * item['deviation']:.2f} %",
            f"{item['seconds']:.1f}",
            item["least_queued"]["light"],
            item["least_queued"]["heavy"],
        )
        for number, item in enumerate(report["runs"], 1)
    ]
    columns = ("run", "light", "heavy", "ratio", "off 3 by", "seconds", "light queued >=", "heavy queued >=")
    table("service in cost tokens (input + 2 x output), weights 1:3", columns, rows)
    print(
        f"ratio {report['median_ratio']:.4f} (median), {report['least_ratio']:.4f} to"
        f" {report['most_ratio']:.4f}; worst deviation {100 * report['worst_deviation']:.2f} %,"
        f" {100 * TOLERANCE:.0f} % allowed; Jain index {report['least_jain_index']:.6f}; widest gap"
        f" {report['widest_gap_over_bound']:.3f} of the bound 2U: {'ok' if report['ok'] else 'NOT ok'}"
    )


async def _one(light_tokens: int, connections: int, model: str | None) -> dict[str, Any]:
    parties = [
        BenchTenant("light", 1.0, connections * CONNECTIONS_FACTOR),
        BenchTenant("heavy", HEAVY_WEIGHT, connections),
    ]
    arguments = ["--engine-max-sequences", str(MAX_SEQUENCES)]
    longest = [1]

    def note(name: str, answer: dict[str, Any]) -> None:
        longest[0] = max(longest[0], answer["usage"]["prompt_tokens"])

    async with (
        fresh_bench(parties, model, arguments) as bench,
        bench.server.operator() as client,
        closed_loops(bench, parties, note),
    ):
        await asyncio.sleep(WARM_UP_S)
        first = await _read(client, bench)
        readings = [first]
        while readings[-1].light_tokens - first.light_tokens < light_tokens:
            if readings[-1].at_s - first.at_s > MAX_RUN_S:
                raise ServerFailed(f"the light tenant had no {light_tokens} tokens in {MAX_RUN_S:g} s")
            await asyncio.sleep(EVERY_S)
            readings.append(await _read(client, bench))
    last = readings[-1]
    light, heavy = last.light - first.light, last.heavy - first.heavy
    # VTC's bound (Sheng et al., OSDI 2024): 2U, U = the output cost of all tokens that the batch can hold.
    bound = 2 * OUTPUT_TOKEN_COST * MAX_SEQUENCES * (longest[0] + MAX_TOKENS)
    gaps = [
        abs(each.light - first.light - (each.heavy - first.heavy) / HEAVY_WEIGHT) for each in readings[1:]
    ]
    return {
        "light_cost_tokens": light,
        "heavy_cost_tokens": heavy,
        "ratio": heavy / light,
        "deviation": abs(heavy / light / HEAVY_WEIGHT - 1),
        "jain_index": jain_index([light, heavy / HEAVY_WEIGHT]),
        "widest_gap_cost_tokens": round(max(gaps)),
        "bound_cost_tokens": bound,
        "gap_over_bound": max(gaps) / bound,
        "seconds": last.at_s - first.at_s,
        "least_queued": {
            "light": min(reading.light_queued for reading in readings),
            "heavy": min(reading.heavy_queued for reading in readings),
        },
        "connections": {"light": parties[0].connections, "heavy": parties[1].connections},
    }


async def _read(client: httpx.AsyncClient, bench: Bench) -> _Reading:
    """Service as the engine counted it, token by token, at one instant. Raises `ServerFailed`."""
    status = await server_status(client)
    service = status["engines"][0].get("service")
    if service is None:
        raise ServerFailed("the engine is down")
    queued = {item["name"]: sum(item["queued"].values()) for item in status["tenants"]}

    def cost(name: str) -> int:
        computed, emitted = service.get(bench.ids[name], (0, 0))
        return int(computed * INPUT_TOKEN_COST + emitted * OUTPUT_TOKEN_COST)

    return _Reading(
        at_s=time.monotonic(),
        light=cost("light"),
        heavy=cost("heavy"),
        light_tokens=sum(service.get(bench.ids["light"], (0, 0))),
        light_queued=queued["light"],
        heavy_queued=queued["heavy"],
    )
