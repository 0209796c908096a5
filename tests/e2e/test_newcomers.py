"""A small request beside another tenant's flood of long streams: it goes to the engine without waiting for an
end, and begins within three steps; also that of a tenant that comes for the first time.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gateway.flow.dispatch_log import LogRecord
from ops.sandbox import step_shares
from ops.sandbox.server import LogReader
from ops.sandbox.step_shares import Step
from tests.support import services
from tests.support.engine_process import engine_options, running_engine
from tests.support.server_process import MODEL, Server, server_process, until

PLACES = 32
"""The default."""
FLOOD = PLACES + 40
FLOOD_TOKENS = 4_000
TENANTS = 6
"""Each sends two requests: the first one is a newcomer's."""
MOST_STEPS = 3
PATIENT = ("--gateway-ttl-standard", "86400")
"""The flood waits as long as it takes: on a slow machine its requests would be refused as too late."""
READ_S = 0.2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[list[Server]]:
    """One gateway with its own engine."""
    with server_process(tmp_path_factory.mktemp("newcomers"), chat_model, *PATIENT) as running:
        yield [running]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[list[Server]]:
    """Two gateways that share a Redis and an engine."""
    with ExitStack() as closing:
        postgres, own_redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(own_redis.stop)
        base = tmp_path_factory.mktemp("newcomers-shared")
        options = engine_options(chat_model, base / "engine", num_blocks=10_240)
        closing.enter_context(running_engine(options))
        gateways: list[Server] = []
        for name in ("one", "other"):
            data_dir = base / name
            if name == "other":
                data_dir.mkdir()
                shutil.copy(base / "one" / "pepper", data_dir / "pepper")
            arguments = ["--database-url", postgres.url, "--redis-url", own_redis.url]
            arguments += ["--engine-address", options.address, *PATIENT]
            gateways.append(closing.enter_context(server_process(data_dir, chat_model, *arguments)))
        gateways[1].owner_key = gateways[0].owner_key
        yield gateways


class Watch:
    """The engine's steps and the gateways' dispatch logs, read while they run."""

    def __init__(self, servers: Sequence[Server], closing: list[httpx.AsyncClient]) -> None:
        headers = {"authorization": f"Bearer {servers[0].owner_key}"}
        self._clients = [httpx.AsyncClient(base_url=each.url, headers=headers) for each in servers]
        closing += self._clients
        self.logs = [LogReader(client) for client in self._clients]
        self.steps: list[Step] = []
        self._is_full = asyncio.Event()

    async def read(self) -> None:
        """Reads what came since the last time."""
        shown = await self._clients[0].get("/admin/v1/policy?decisions=0&steps=4096")
        self.steps = step_shares.merged(self.steps, shown.json()["engines"][0]["steps"])
        if self.steps and step_shares.decoding(self.steps[-1]) >= PLACES:
            self._is_full.set()
        for log in self.logs:
            await log.read()

    async def keep_reading(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READ_S)

    async def until_all_places_are_taken(self) -> None:
        """Returns when the flood has all places and more of it waits. Steps lost until then do not
        count."""
        async with asyncio.timeout(60):
            await self._is_full.wait()
        self.steps = self.steps[-1:]


async def flooded(flood: Server, small: Server, keys: dict[str, str], policy: str) -> Watch:
    """All requests of the small tenants, one after the other, beside the flood. Returns what was seen."""
    clients: list[httpx.AsyncClient] = []
    watch = Watch([flood] if flood is small else [flood, small], clients)
    long = {"model": MODEL, "prompt": "the flood", "max_tokens": FLOOD_TOKENS, "ignore_eos": True}
    short = {"model": MODEL, "prompt": "a word", "max_tokens": 5, "ignore_eos": True}
    limits = httpx.Limits(max_connections=FLOOD)
    headers = {"authorization": f"Bearer {keys[f'flood-{policy}']}"}
    flooding = httpx.AsyncClient(base_url=flood.url, headers=headers, timeout=120, limits=limits)
    asking = httpx.AsyncClient(base_url=small.url, timeout=60)
    clients += [flooding, asking]

    async def stream() -> None:
        while True:
            answer = await flooding.post("/v1/completions", json=long)
            assert answer.status_code == 200, answer.text

    tasks = [asyncio.create_task(stream()) for _ in range(FLOOD)]
    reading = asyncio.create_task(watch.keep_reading())
    try:
        await watch.until_all_places_are_taken()
        for number in (*range(TENANTS), *range(TENANTS)):
            key = {"authorization": f"Bearer {keys[f'small-{policy}-{number}']}"}
            answer = await asking.post("/v1/completions", json=short, headers=key)
            assert answer.status_code == 200, answer.text
        ended = [task.exception() for task in (reading, *tasks) if task.done()]
        assert ended == [], "the reader or clients of the flood failed"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await watch.read()
    finally:
        for task in [reading, *tasks]:
            task.cancel()
        await asyncio.gather(reading, *tasks, return_exceptions=True)
        for client in clients:
            await client.aclose()
    return watch


def waits(records: Sequence[LogRecord], tenants: set[str]) -> list[tuple[LogRecord, LogRecord]]:
    """Arrival and dispatch of each request of these tenants."""
    arrived = {each.request_id: each for each in records if each.event == "arrive"}
    return [
        (arrived[each.request_id], each)
        for each in records
        if each.event == "dispatch" and each.tenant_id in tenants
    ]


def longest_wait_steps(steps: Sequence[Step], tenant: str) -> int:
    """The most consecutive steps after which a sequence of the tenant still waited in the engine."""
    longest = waited = 0
    for step in steps:
        waited = waited + 1 if step["waiting"].get(tenant) else 0
        longest = max(longest, waited)
    return longest


def assert_small_ones_pass(flood: Server, small: Server, policy: str) -> None:
    flood.admin("POST", "/policy", {"policy": policy})
    names = [f"flood-{policy}", *(f"small-{policy}-{number}" for number in range(TENANTS))]
    ids = {name: flood.admin("POST", "/tenants", {"name": name})["id"] for name in names}
    keys = {name: flood.key(name) for name in names}
    if flood is not small:
        until(lambda: all(_knows(small, key) for key in keys.values()))
        until(lambda: small.status()["policy"] == policy)
    watch = asyncio.run(flooded(flood, small, keys, policy))
    assert not step_shares.lost_steps(watch.steps)
    assert not any(log.lost for log in watch.logs)
    tenants = {ids[name] for name in names[1:]}
    ends = [each.at_s for log in watch.logs for each in log.records if each.event == "settle"]
    seen = waits(watch.logs[-1].records, tenants)
    assert len(seen) == 2 * TENANTS
    # A turn from the shared queue takes a moment, in which something may end by chance; one that has to wait
    # for an end always has one in between.
    by_chance = 0 if flood is small else len(seen) // 10
    waited = [
        arrived.tenant_id
        for arrived, dispatched in seen
        if any(arrived.at_s <= at_s < dispatched.at_s for at_s in ends)
    ]
    assert len(waited) <= by_chance, f"{waited} waited for an end"
    assert max(longest_wait_steps(watch.steps, tenant) for tenant in tenants) <= MOST_STEPS
    for server in (flood, small):
        until(server.is_idle)


def _knows(server: Server, key: str) -> bool:
    with server.http(key) as client:
        return client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("policy", ["hybrid", "vtc"])
def test_a_small_request_goes_past_a_flood_of_long_streams(alone: list[Server], policy: str) -> None:
    assert_small_ones_pass(alone[0], alone[0], policy)


def test_also_where_the_flood_enters_by_another_gateway(pair: list[Server]) -> None:
    assert_small_ones_pass(pair[0], pair[1], "hybrid")
