"""Token-fair decoding on a running server, counted from its log of steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ops.sandbox import step_shares
from ops.sandbox.step_shares import Step
from tests.support.server_process import MODEL, Server, server_process, until

SLOTS = 16
SEQUENCES = 64
WINDOW_STEPS = 500
SETTLE_STEPS = 100
READ_S = 0.25
LONG_PROMPT_TOKENS = 1_500


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", str(SEQUENCES), "--engine-kv-blocks", "10000"]
    with server_process(tmp_path_factory.mktemp("token-fair"), chat_model, *arguments) as running:
        yield running


def set_policy(server: Server, **options: Any) -> None:
    server.admin("POST", "/policy", {"policy": "hybrid", "options": options})


def tenants(server: Server, **weights: float) -> tuple[dict[str, str], dict[str, str]]:
    """Keys and ids by name."""
    made = {
        name: server.admin("POST", "/tenants", {"name": name, "weight": weight})["id"]
        for name, weight in weights.items()
    }
    return {name: server.key(name) for name in made}, made


class Log:
    """The steps of a server's engine, read while it runs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.steps: list[Step] = []

    async def read(self) -> None:
        """Reads what came since the last time."""
        shown = await asyncio.to_thread(self._server.admin, "GET", "/policy?decisions=0&steps=2048")
        self.steps = step_shares.merged(self.steps, shown["engines"][0]["steps"])


@asynccontextmanager
async def load(
    server: Server, key: str, connections: int, bodies: list[dict[str, Any]]
) -> AsyncIterator[None]:
    """While each connection sends its next request when it has its answer."""
    headers = {"authorization": f"Bearer {key}"}
    left = iter(bodies)

    async def loop(client: httpx.AsyncClient) -> None:
        for body in left:
            answer = await client.post("/v1/completions", json={"model": MODEL, "ignore_eos": True} | body)
            assert answer.status_code == 200, answer.text

    limits = httpx.Limits(max_connections=connections)
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(loop(client)) for _ in range(connections)]
        try:
            yield
            assert not any(task.done() and task.exception() for task in tasks), "a client failed"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def endless(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {"prompt": [rng.randint(1, 250) for _ in range(rng.randint(8, 20))], "max_tokens": 2_400}
        for _ in range(SEQUENCES)
    ]


async def measured_turns(server: Server, keys: dict[str, str], ids: dict[str, str]) -> list[Step]:
    """The steps with all sequences of both tenants running, after the prompts."""
    log = Log(server)

    def are_enough() -> bool:
        if len(step_shares.after_prompts(log.steps, SETTLE_STEPS)) <= WINDOW_STEPS:
            return False
        return step_shares.decoding(log.steps[-1]) == SEQUENCES

    async with (
        load(server, keys["light"], SEQUENCES // 2, endless(1)),
        load(server, keys["heavy"], SEQUENCES // 2, endless(2)),
        asyncio.timeout(120),
    ):
        while not are_enough():
            await asyncio.sleep(READ_S)
            await log.read()
    measured = step_shares.after_prompts(log.steps, SETTLE_STEPS)
    assert not step_shares.lost_steps(measured)
    assert ids.keys() == keys.keys()
    return measured


def test_turns_inside_steps_go_by_weight_and_without_slots_all_are_served(house: Server) -> None:
    keys, ids = tenants(house, light=1, heavy=3)
    set_policy(house, slots=SLOTS)
    fair = asyncio.run(measured_turns(house, keys, ids))
    assert all(sum(step["decodes"].values()) == SLOTS for step in fair)
    assert step_shares.worst_ratio(fair, ids["light"], ids["heavy"], 3.0, WINDOW_STEPS) <= 0.01
    for name, weight in (("light", 1.0), ("heavy", 3.0)):
        most = step_shares.most_rounds(SEQUENCES // 2, SLOTS, weight, 4.0)
        assert 0 < step_shares.longest_gap(fair, ids[name]) <= most
    until(house.is_idle)
    set_policy(house)
    default = asyncio.run(measured_turns(house, keys, ids))
    told = house.admin("GET", "/policy")["engines"][0]["decode_slots"]
    assert (told["places"], told["is_auto"]) == (SEQUENCES, True)
    assert SEQUENCES // 2 <= told["slots"] <= SEQUENCES
    assert all(sum(step["decodes"].values()) == min(step["slots"], SEQUENCES) for step in default)
    due = step_shares.max_min(default, SEQUENCES // 2, 3.0)
    assert step_shares.worst_ratio(default, ids["light"], ids["heavy"], due, WINDOW_STEPS) <= 0.03
    until(house.is_idle)
    set_policy(house, compose="decode-first")
    control = asyncio.run(measured_turns(house, keys, ids))
    assert all(sum(step["decodes"].values()) == SEQUENCES for step in control)
    assert step_shares.worst_ratio(control, ids["light"], ids["heavy"], 1.0, WINDOW_STEPS) == 0
    until(house.is_idle)


def test_long_prompts_without_end_cost_another_tenant_nothing_but_their_share(house: Server) -> None:
    keys, ids = tenants(house, long=1, short=1)
    rng = random.Random(3)
    prompts = [
        {"prompt": [rng.randint(1, 250) for _ in range(LONG_PROMPT_TOKENS)], "max_tokens": 4}
        for _ in range(200)
    ]
    chats = [
        {"prompt": [rng.randint(1, 250) for _ in range(rng.randint(8, 24))], "max_tokens": 24}
        for _ in range(30)
    ]
    # No time limit of a step: on a busy machine steps are slow, and the default one would leave tokens.
    set_policy(house, target_step_s=0)
    log = Log(house)

    async def run() -> None:
        async with load(house, keys["long"], 4, prompts), asyncio.timeout(120):
            await log.read()
            while not any(step["prompts"].get(ids["long"]) for step in log.steps[-20:]):
                await asyncio.sleep(READ_S)
                await log.read()
            async with load(house, keys["short"], 3, chats):
                while sum(step["decodes"].get(ids["short"], 0) for step in log.steps) < 28 * 23:
                    await asyncio.sleep(READ_S)
                    await log.read()

    asyncio.run(run())
    both = step_shares.both_work(log.steps, ids["long"], ids["short"])
    assert len(both) > 100
    chunk = max(step["prompts"].get(ids["long"], 0) for step in both)
    assert chunk > 0
    assert step_shares.least_surplus(both, ids["long"], 0.5) >= -chunk
    assert step_shares.idle_tokens(log.steps, ids["long"]) == 0
    assert step_shares.without_token(log.steps, ids["short"]) == 0
    assert step_shares.not_begun(log.steps, ids["short"]) == 0
    until(house.is_idle)
