"""Bursts for the benchmark of estimates: many requests at one instant, on the real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from engine.forecast.calibration import NUM_LOADS, load_of, longest_wait_s
from ops.bench.common.load import CHATS, Bench, BenchTenant, closed_loops, fresh_bench
from ops.reporting import table
from ops.sandbox.server import ServerFailed
from ops.simulate.figures.figures import covered

TOGETHER = 16
IDLE_BURSTS = 3
IDLE_PLACES = 2
WARM_PLACES = 16
SIZES = (4, 16, 64, 200)
AFTER = 40
"""Requests one after the other after each burst on a warm engine; the first half may still be off."""
MAX_TOKENS = 48
FACTOR = 2.0
FLOOR_S = 0.05
"""A smaller difference between estimated and real wait is no error."""
FRESH_SERVERS = 10
FRESH_FLOOR_S = 0.5
DRAIN_S = 600.0


@dataclass(frozen=True, slots=True)
class ToldWait:
    """One request: estimated p50 and p90, and the real wait, in seconds."""

    p50_s: float
    p90_s: float
    waited_s: float

    is_measured: bool = True
    floor_s: float = FLOOR_S

    @property
    def is_near(self) -> bool:
        low, high = sorted((self.p50_s, self.waited_s))
        return not self.is_measured or high - low <= self.floor_s or high <= FACTOR * low


async def run(model: str | None) -> list[dict[str, Any]]:
    """Rows of figures. Raises `ServerFailed`."""
    fresh = [await _fresh(model) for _ in range(FRESH_SERVERS)]
    idle = await _idle(model)
    warm, after = await _warm(model)
    name = f"{TOGETHER} at once, fresh server"
    return [
        *(figures(f"{name} {number}", told)[0] for number, told in enumerate(fresh, 1)),
        *figures(f"{name}s", [wait for told in fresh for wait in told]),
        *figures(f"{TOGETHER} at once, idle engine", idle),
        *figures("bursts, warm engine", warm),
        *figures(f"after bursts, from the {AFTER // 2}th on", after),
    ]


def figures(name: str, told: Sequence[ToldWait]) -> list[dict[str, Any]]:
    ranges = {"all": list(told)}
    for load in range(NUM_LOADS):
        ranges[f"up to {longest_wait_s(load):.3g} s"] = [one for one in told if load_of(one.p50_s) == load]
    return [
        {
            "bursts": name,
            "told": label,
            "requests": len(group),
            "share_within_2x": sum(wait.is_near for wait in group) / len(group),
            "p90_coverage": covered([(wait.p90_s, wait.waited_s) for wait in group]),
        }
        for label, group in ranges.items()
        if group
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    table(
        "estimated wait against actual wait in bursts, by the median that was told",
        ("bursts", "told", "requests", "within 2x *", "under p90"),
        [
            (
                row["bursts"],
                row["told"],
                row["requests"],
                f"{100 * row['share_within_2x']:.1f} %",
                f"{100 * row['p90_coverage']:.1f} %",
            )
            for row in rows
        ],
    )
    print(f"* or {FLOOR_S:g} s; into a fresh server {FRESH_FLOOR_S:g} s, or said not to be measured")


async def _fresh(model: str | None) -> list[ToldWait]:
    """The first burst of a fresh server."""
    arguments = ["--engine-max-sequences", str(IDLE_PLACES)]
    async with (
        fresh_bench([BenchTenant("burst", 1.0, 0)], model, arguments) as bench,
        _client(bench) as client,
    ):
        return [replace(told, floor_s=FRESH_FLOOR_S) for told in await _send(bench, client, TOGETHER)]


async def _idle(model: str | None) -> list[ToldWait]:
    parties = [BenchTenant("burst", 1.0, 0)]
    arguments = ["--engine-max-sequences", str(IDLE_PLACES)]
    told: list[ToldWait] = []
    async with fresh_bench(parties, model, arguments) as bench, _client(bench) as client:
        await _send(bench, client, IDLE_PLACES)  # steps and lengths are learned
        for _ in range(IDLE_BURSTS):
            told += await _send(bench, client, TOGETHER)
    return told


async def _warm(model: str | None) -> tuple[list[ToldWait], list[ToldWait]]:
    parties = [BenchTenant("burst", 1.0, 0), BenchTenant("steady", 1.0, WARM_PLACES // 2)]
    arguments = ["--engine-max-sequences", str(WARM_PLACES)]
    told: list[ToldWait] = []
    after: list[ToldWait] = []
    async with (
        fresh_bench(parties, model, arguments) as bench,
        closed_loops(bench, parties[1:]),
        _client(bench) as client,
    ):
        await _send(bench, client, 2 * WARM_PLACES)
        for size in SIZES:
            told += await _send(bench, client, size)
            alone = [(await _send(bench, client, 1))[0] for _ in range(AFTER)]
            after += alone[AFTER // 2 :]
    return told, after


def _client(bench: Bench) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=bench.server.url,
        headers={"authorization": f"Bearer {bench.keys['burst']}"},
        timeout=DRAIN_S,
        limits=httpx.Limits(max_connections=None),
    )


async def _send(bench: Bench, client: httpx.AsyncClient, count: int) -> list[ToldWait]:
    """`count` chats at one instant. Raises `ServerFailed`."""
    bodies = bench.chats()

    async def one(number: int) -> ToldWait:
        body = bodies[number % len(bodies)] | {"max_tokens": MAX_TOKENS, "stream": False}
        try:
            response = await client.post(CHATS, json=body)
        except httpx.HTTPError as error:
            raise ServerFailed(f"a request of a burst: {type(error).__name__}") from None
        if not response.is_success:
            raise ServerFailed(f"a request of a burst: {response.status_code} {response.text[:200]}")
        account = response.json()["fairgate"]
        estimate, waited_s = account["estimate"], account["actual"]["wait_s"]
        told = estimate["wait_s"]
        return ToldWait(told["p50"], told["p90"], waited_s, "not measured" not in estimate["basis"])

    return list(await asyncio.gather(*(one(number) for number in range(count))))
