"""Token-fair decoding after the replay: weights 1 and 3 on one slot a step, by the engine's log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import httpx

from ops.sandbox import step_shares
from ops.sandbox.server import LocalServer, until
from ops.sandbox.step_shares import Step

WEIGHTS = {"turns-light": 1.0, "turns-heavy": 3.0}
STREAMS = {"turns-light": 1, "turns-heavy": 2}
SLOTS = 1
MEASURED_STEPS = 400
SETTLE_STEPS = 100
ANSWER_TOKENS = 1_400
"""More than are measured, and no request of the long lane: that has a part of the places only."""
WITHIN_S = 30.0


async def turns(
    server: LocalServer, operator: httpx.AsyncClient, keys: Mapping[str, str], ids: Mapping[str, str]
) -> dict[str, Any]:
    """Decode tokens of both; the settings' policy is in force again afterwards. Raises `httpx.HTTPError`."""
    steps: list[Step] = []

    async def are_enough() -> bool:
        nonlocal steps
        shown = await _policy(operator, "GET")
        steps = step_shares.merged(steps, shown["engines"][0]["steps"])
        return len(_contended(steps, ids)) >= MEASURED_STEPS

    await _policy(operator, "POST", {"policy": "hybrid", "options": {"slots": SLOTS}})
    streams = [
        asyncio.create_task(_stream(server, keys[name])) for name in WEIGHTS for _ in range(STREAMS[name])
    ]
    try:
        await until(are_enough, WITHIN_S)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await _policy(operator, "POST", {"from_settings": True})
    counted = _contended(steps, ids)
    tokens = {name: sum(step["decodes"].get(ids[name], 0) for step in counted) for name in WEIGHTS}
    return {
        "slots": SLOTS,
        "sequences": sum(STREAMS.values()),
        "steps": len(counted),
        "weights": dict(WEIGHTS),
        "tokens": tokens,
        "tokens_per_weight": {name: tokens[name] / WEIGHTS[name] for name in WEIGHTS},
    }


def line(turns: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"weight {turns['weights'][name]:g}: {tokens} tokens"
        f" ({turns['tokens_per_weight'][name]:.0f} per weight)"
        for name, tokens in turns["tokens"].items()
    )
    return (
        f"Inside steps, {turns['slots']} slot for {turns['sequences']} running sequences, {turns['steps']}"
        f" steps: {parts}."
    )


def _contended(steps: list[Step], ids: Mapping[str, str]) -> list[Step]:
    """Steps in which all sequences of both tenants decode, once their prompts are paid for."""
    return [
        step
        for step in step_shares.after_prompts(steps, SETTLE_STEPS)
        if all(
            step["decodes"].get(ids[name], 0) + step["waiting_decodes"].get(ids[name], 0) == count
            for name, count in STREAMS.items()
        )
    ]


async def _policy(client: httpx.AsyncClient, method: str, body: object = None) -> dict[str, Any]:
    response = await client.request(method, "/admin/v1/policy?decisions=0&steps=4096", json=body)
    response.raise_for_status()
    shown: dict[str, Any] = response.json()
    return shown


async def _stream(server: LocalServer, key: str) -> None:
    body = {"model": server.model, "prompt": "the weather", "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=None) as client:
        with contextlib.suppress(httpx.HTTPError):
            await client.post("/v1/completions", json=body)
