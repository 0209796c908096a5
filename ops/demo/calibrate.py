"""Capacity of this machine: a few seconds of full load, by the engine's own counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.sandbox.server import LocalServer, ServerFailed

WARM_UP_S = 2.0
"""The first steps are slow: memory is touched for the first time."""
MEASURE_S = 5.0
CONNECTIONS = 96
FULL_S = 60.0


@dataclass(frozen=True)
class Capacity:
    """What the engine served per second while it was full and others waited."""

    cost_tokens_per_s: float
    output_tokens_per_s: float
    measured_s: float
    sequences: int


async def engine_status(client: httpx.AsyncClient) -> dict[str, Any]:
    """The first engine's part of the status page. Raises `httpx.HTTPError`."""
    response = await client.get("/admin/v1/status")
    response.raise_for_status()
    engine: dict[str, Any] = response.json()["engines"][0]
    return engine


def served(engine: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens computed and tokens emitted since the engine started."""
    pairs = engine.get("service", {}).values()
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


async def calibrate(server: LocalServer, bodies: Sequence[dict[str, Any]]) -> Capacity:
    """Sends `bodies` over and over on `CONNECTIONS` streams. Raises `ServerFailed`."""
    assert server.owner_key is not None, "calibration needs a fresh server"
    load = asyncio.create_task(_keep_full(server.url, server.owner_key, bodies))
    try:
        async with server.operator() as client:
            await _until_full(client)
            await asyncio.sleep(WARM_UP_S)
            before, before_s = await engine_status(client), time.monotonic()
            await asyncio.sleep(MEASURE_S)
            after, after_s = await engine_status(client), time.monotonic()
    finally:
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
    inputs, outputs = (late - early for late, early in zip(served(after), served(before), strict=True))
    measured_s = after_s - before_s
    if not outputs:
        raise ServerFailed("the engine emitted nothing while it was measured; see logs/engine-0.log")
    return Capacity(
        cost_tokens_per_s=(inputs * INPUT_TOKEN_COST + outputs * OUTPUT_TOKEN_COST) / measured_s,
        output_tokens_per_s=outputs / measured_s,
        measured_s=measured_s,
        sequences=after.get("running", 0),
    )


async def _keep_full(url: str, key: str, bodies: Sequence[dict[str, Any]]) -> None:
    """Closed loops, so that a fast machine does not run out of requests while it is measured."""
    async with (
        httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=None),
            timeout=httpx.Timeout(FULL_S, connect=FULL_S),
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CONNECTIONS):
            group.create_task(_send_on(client, bodies, number))


async def _send_on(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], number: int) -> None:
    place = number
    while True:
        body = bodies[place % len(bodies)] | {"stream": True}
        place += CONNECTIONS + 1
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_raw():
                pass


async def _until_full(client: httpx.AsyncClient) -> None:
    until_s = time.monotonic() + FULL_S
    while time.monotonic() < until_s:
        engine = await engine_status(client)
        if engine.get("running", 0) >= engine.get("max_sequences", 1):
            return
        await asyncio.sleep(0.1)
    raise ServerFailed(f"the engine was not full after {FULL_S:g} s; see logs/engine-0.log")


async def until_idle(client: httpx.AsyncClient, timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        response = await client.get("/admin/v1/status")
        response.raise_for_status()
        status = response.json()
        if not (any(status["queued"].values()) or status["running"] or status["settlements_pending"]):
            return
        await asyncio.sleep(0.1)
    raise ServerFailed(f"requests are still running after {timeout_s:g} s")
