"""A fresh server for a benchmark, its tenants, and the processes that load it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ops.bench.common.errors import CannotBench
from ops.bench.common.load_client import Observed
from ops.bench.common.processes import end
from ops.demo.prompts.prompts import Prompts
from ops.demo.trace import load_slice
from ops.sandbox.server import ROOT, LocalServer, ServerFailed, local_server, until
from ops.settings.settings import SHIPPED_MODEL

CHATS = "/v1/chat/completions"
MOST_BODIES = 1_000
LINE_BYTES = 2**28
"""Most of an answer of a load client: the accounts of all requests since the last one."""
SEED = 20
QUIET = ("--log-level", "warning")


@dataclass(frozen=True)
class BenchTenant:
    name: str
    weight: float
    connections: int
    tiers: Sequence[str] | None = None


@dataclass(frozen=True)
class Bench:
    server: LocalServer
    keys: Mapping[str, str]
    ids: Mapping[str, str]
    prompts: Prompts

    def chats(self) -> list[dict[str, Any]]:
        return [self.prompts.body(place, self.server.model) for place in self.prompts.spread(MOST_BODIES)]


@contextlib.asynccontextmanager
async def fresh_bench(
    parties: Sequence[BenchTenant], model: str | None, arguments: Sequence[str]
) -> AsyncIterator[Bench]:
    """A server in a directory that goes away again. Raises `ServerFailed`."""
    model_dir = model_directory(model)
    making = asyncio.create_task(asyncio.to_thread(Prompts.make, model_dir, load_slice(), SEED))
    with tempfile.TemporaryDirectory(prefix="fairgate-bench-", ignore_cleanup_errors=True) as directory:
        try:
            async with local_server(
                Path(directory), arguments=["--model", str(model_dir), *priced(model_dir), *QUIET, *arguments]
            ) as server:
                keys, ids = await enrol(server, parties)
                yield Bench(server, keys, ids, await making)
        finally:
            await asyncio.gather(making, return_exceptions=True)


def priced(model_dir: Path) -> list[str]:
    """Arguments of `serve`: a model that is not the shipped one is free."""
    return [] if model_dir == SHIPPED_MODEL else ["--prices", f"{model_dir.resolve().name}=0/0"]


def model_directory(model: str | None) -> Path:
    return Path(model).absolute() if model else SHIPPED_MODEL


async def enrol(server: LocalServer, parties: Sequence[BenchTenant]) -> tuple[dict[str, str], dict[str, str]]:
    """Makes the tenants; their keys, and their ids. Raises `ServerFailed`."""
    keys, ids = {}, {}
    async with server.operator() as client:
        for party in parties:
            wanted = {"name": party.name, "weight": party.weight, "tiers": party.tiers}
            ids[party.name] = (await admin_call(client, "POST", "tenants", wanted))["id"]
            keys[party.name] = (await admin_call(client, "POST", "keys", {"tenant": party.name}))["key"]
    return keys, ids


async def admin_call(client: httpx.AsyncClient, method: str, path: str, body: object = None) -> Any:
    """The JSON answer of an operator's route. Raises `ServerFailed`."""
    try:
        response = await client.request(method, f"/admin/v1/{path}", json=body)
    except httpx.HTTPError as error:
        raise ServerFailed(f"{method} {path}: {type(error).__name__}") from None
    if not response.is_success:
        raise ServerFailed(f"{method} {path}: {response.status_code} {response.text[:200]}")
    return response.json()


async def known(client: httpx.AsyncClient, tenants: Mapping[str, int], within_s: float) -> bool:
    """Whether the gateway knows these tenants and the limits of each. Raises `ServerFailed`."""

    async def knows() -> bool:
        shown = {one["name"]: len(one["limits"]) for one in (await server_status(client))["tenants"]}
        return all(shown.get(name) == limits for name, limits in tenants.items())

    return await until(knows, within_s)


async def server_status(client: httpx.AsyncClient) -> dict[str, Any]:
    status: dict[str, Any] = await admin_call(client, "GET", "status")
    return status


class LoadClient:
    """The process that sends one tenant's requests; the orders are those of `load_client`."""

    def __init__(self, tenant: str, process: asyncio.subprocess.Process) -> None:
        self.tenant = tenant
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def closed(self, connections: int) -> None:
        await self._order("closed", connections=connections)

    async def poisson(self, per_s: float, *, count: int | None = None, most_open: int) -> None:
        await self._order("poisson", per_s=per_s, count=count, most_open=most_open)

    async def finish(self) -> Observed:
        """Waits for all requests of a stream; returns what was seen since the last order."""
        return await self._order("finish")

    async def take(self) -> Observed:
        return await self._order("take")

    async def stop(self) -> Observed:
        return await self._order("stop")

    async def _order(self, order: str, **fields: Any) -> Observed:
        assert self._process.stdout is not None
        await self.send({"order": order} | fields)
        line = await self._process.stdout.readline()
        if not line:
            raise CannotBench(f"the load client of {self.tenant} ended")
        return Observed(**json.loads(line))

    async def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()


@contextlib.asynccontextmanager
async def load_client(
    tenant: str, url: str, key: str, bodies: Sequence[Mapping[str, Any]], *, counts_tokens: bool = False
) -> AsyncIterator[LoadClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "ops.bench.common.load_client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        process_group=0,
    )
    try:
        client = LoadClient(tenant, process)
        about = {"url": url, "key": key, "bodies": [json.dumps(body) for body in bodies]}
        await client.send(about | {"seed": f"{SEED} {tenant}", "counts_tokens": counts_tokens})
        yield client
    finally:
        await end(process)


@contextlib.asynccontextmanager
async def load_clients(
    bench: Bench, path: str, bodies: Mapping[str, Sequence[Mapping[str, Any]]]
) -> AsyncIterator[dict[str, LoadClient]]:
    async with contextlib.AsyncExitStack() as closing:
        url = f"{bench.server.url}{path}"
        yield {
            tenant: await closing.enter_async_context(load_client(tenant, url, bench.keys[tenant], its))
            for tenant, its in bodies.items()
        }


@contextlib.asynccontextmanager
async def closed_loops(bench: Bench, parties: Sequence[BenchTenant]) -> AsyncIterator[dict[str, LoadClient]]:
    """Keeps every connection of every tenant busy until the block ends."""
    chats = bench.chats()
    starts = {party.name: number * len(chats) // len(parties) for number, party in enumerate(parties)}
    bodies = {name: [*chats[start:], *chats[:start]] for name, start in starts.items()}
    async with load_clients(bench, CHATS, bodies) as clients:
        for party in parties:
            await clients[party.name].closed(party.connections)
        yield clients
