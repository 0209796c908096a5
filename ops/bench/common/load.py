"""How is a server kept under a steady load? Closed loops: each connection sends its next request at once."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ops.demo.prompts import Prompts
from ops.demo.trace import load_slice
from ops.sandbox.server import LocalServer, ServerFailed, local_server
from ops.serving import datadir
from ops.settings.settings import SHIPPED_MODEL, Settings
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.commands import KeyCreate, TenantCreate
from tenants.storage.database import open_database

ACTOR = Actor("bench", "bench")
RETRY_S = 0.2
TIMEOUT_S = 300.0
SEED = 20


@dataclass(frozen=True)
class BenchTenant:
    """One tenant of a benchmark."""

    name: str
    weight: float
    connections: int


@dataclass(frozen=True)
class Bench:
    """A fresh server with its tenants, and what to send."""

    server: LocalServer
    keys: Mapping[str, str]
    ids: Mapping[str, str]
    prompts: Prompts


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
                Path(directory),
                arguments=[
                    "--model",
                    str(model_dir),
                    *priced(model_dir),
                    "--log-level",
                    "warning",
                    *arguments,
                ],
            ) as server:
                keys, ids = await enrol(server, parties)
                yield Bench(server, keys, ids, await making)
        finally:
            await asyncio.gather(making, return_exceptions=True)


def priced(model_dir: Path) -> list[str]:
    """Arguments of `serve`: a model that is not the shipped one is free, as a benchmark charges nobody."""
    return [] if model_dir == SHIPPED_MODEL else ["--prices", f"{model_dir.resolve().name}=0/0"]


def model_directory(model: str | None) -> Path:
    """The one that is named, or the shipped one."""
    return Path(model).absolute() if model else SHIPPED_MODEL


async def enrol(server: LocalServer, parties: Sequence[BenchTenant]) -> tuple[dict[str, str], dict[str, str]]:
    """Makes the tenants; their keys, and their ids."""
    settings = Settings(data_dir=server.data_dir)
    database = open_database(settings.resolved_database_url)
    keys, ids = {}, {}
    try:
        admin = Admin(database, datadir.pepper(settings, create=False))
        for party in parties:
            made = await admin.create_tenant(ACTOR, TenantCreate(name=party.name, weight=party.weight))
            ids[party.name] = made.tenant_id
            _, keys[party.name] = await admin.create_key(ACTOR, KeyCreate(tenant=party.name))
    finally:
        await database.close()
    return keys, ids


@contextlib.asynccontextmanager
async def closed_loops(
    bench: Bench, parties: Sequence[BenchTenant], on_answer: Callable[[str, dict[str, Any]], None]
) -> AsyncIterator[None]:
    """Keeps every connection of every party busy until the block ends; all draw from the same mix.

    `on_answer` gets the party's name and the answer of each request that succeeded.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=bench.server.url, limits=limits, timeout=httpx.Timeout(TIMEOUT_S, connect=30.0)
    ) as client:
        loops = [
            asyncio.create_task(_loop(client, bench, party, number, on_answer))
            for party in parties
            for number in range(party.connections)
        ]
        try:
            yield
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)


async def _loop(
    client: httpx.AsyncClient,
    bench: Bench,
    party: BenchTenant,
    number: int,
    on_answer: Callable[[str, dict[str, Any]], None],
) -> None:
    headers = {"authorization": f"Bearer {bench.keys[party.name]}"}
    # Every party walks through the same mix; each connection starts elsewhere in it.
    place = number * 7919
    while True:
        body = bench.prompts.body(place % len(bench.prompts.chats), bench.server.model)
        place += 1 + party.connections
        try:
            response = await client.post("/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError:
            await asyncio.sleep(RETRY_S)
            continue
        if response.status_code == 200:
            on_answer(party.name, response.json())
        else:
            await asyncio.sleep(RETRY_S)


async def server_status(client: httpx.AsyncClient) -> dict[str, Any]:
    """The status page. Raises `ServerFailed`."""
    response = await client.get("/admin/v1/status")
    if response.status_code != 200:
        raise ServerFailed(f"the status page answers {response.status_code}")
    found: dict[str, Any] = response.json()
    return found
