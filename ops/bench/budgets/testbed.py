"""Test bed of the budget benchmark: PostgreSQL, Redis, one engine and N gateways, each killable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from engine.process.options import EngineOptions
from ops.bench.common.load import QUIET, admin_call, known, priced
from ops.sandbox.server import PROGRAM, ROOT, LocalServer, ServerFailed, local_server, until
from ops.sandbox.services import Service, start_postgres, start_redis
from ops.settings.settings import SHIPPED_MODEL

STALE_S = 4
LEASE_S = 3
"""Short, so that dead gateways are detected within a scenario's minute."""
MAX_SEQUENCES = 64
KV_BLOCKS = 4096
READY_S = 90.0


class ScenarioFailed(Exception):
    """A scenario failed before its audit; the message says what it waited for."""


@dataclass
class Gateways:
    """Servers of one installation, each killable."""

    directory: Path
    arguments: Sequence[str] = ()
    program: Sequence[str] = PROGRAM
    """Of the servers that start next."""
    servers: list[LocalServer] = field(default_factory=list)
    _gateways: list[contextlib.AsyncExitStack] = field(default_factory=list)

    @property
    def model(self) -> str:
        return self.servers[0].model

    async def start_gateways(self, count: int) -> None:
        while len(self.servers) < count:
            number = len(self.servers)
            closing = contextlib.AsyncExitStack()
            self._gateways.append(closing)
            self.servers.append(await closing.enter_async_context(self._gateway(number)))

    def _gateway(self, number: int) -> contextlib.AbstractAsyncContextManager[LocalServer]:
        data_dir = self.directory / f"gateway-{number}"
        if number and not data_dir.exists():
            data_dir.mkdir(mode=0o700)
            # Keys are hashed with it: gateways that share keys share the pepper.
            shutil.copy(self.directory / "gateway-0" / "pepper", data_dir / "pepper")
        return local_server(data_dir, arguments=self._arguments(), program=self.program)

    def _arguments(self) -> list[str]:
        return [*QUIET, *self.arguments]

    async def close(self) -> None:
        for gateway in reversed(self._gateways):
            with contextlib.suppress(ServerFailed):
                await gateway.aclose()

    def living(self) -> LocalServer:
        """A gateway that was not killed. Raises `ScenarioFailed`."""
        for server in self.servers:
            if server.process.returncode is None:
                return server
        raise ScenarioFailed("no gateway is left")

    async def kill_gateway(self, number: int) -> None:
        process = self.servers[number].process
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def restart_gateway(self, number: int) -> None:
        await self._gateways[number].aclose()
        self.servers[number] = await self._gateways[number].enter_async_context(self._gateway(number))

    async def ready(self, numbers: range | list[int] | None = None) -> None:
        """Waits until these gateways (None: all) are ready. Raises `ScenarioFailed`."""
        async with httpx.AsyncClient(timeout=5.0) as client:
            for number in range(len(self.servers)) if numbers is None else numbers:
                url = f"{self.servers[number].url}/readyz"
                last = ""

                async def serves(url: str = url) -> bool:
                    nonlocal last
                    try:
                        answer = await client.get(url)
                    except httpx.HTTPError as error:
                        last = type(error).__name__
                        return False
                    last = answer.text
                    return answer.status_code == 200

                if not await until(serves, READY_S):
                    raise ScenarioFailed(f"gateway {number} was not ready within {READY_S:g} s: {last}")

    async def tenant(self, name: str, **limit: Any) -> BudgetTenant:
        """Makes a tenant with a key and, if given, one limit. Raises `ServerFailed`."""
        async with self.servers[0].operator() as client:
            made = await admin_call(client, "POST", "tenants", {"name": name})
            key = await admin_call(client, "POST", "keys", {"tenant": name})
            if limit:
                await admin_call(client, "POST", "limits", {"tenant": name, "mode": "hard", **limit})
        is_budget = "window" in limit
        meter, amount = (limit["meter"], limit["amount"]) if is_budget else (None, None)
        return BudgetTenant(name, made["id"], key["key"], meter, amount, bool(limit))

    async def known(self, *tenants: BudgetTenant) -> None:
        """Waits until every gateway knows these tenants and their limits. Raises `ScenarioFailed`."""
        wanted = {tenant.name: int(tenant.has_limit) for tenant in tenants}
        for server in self.servers:
            async with server.operator() as client:
                if not await known(client, wanted, 10.0):
                    raise ScenarioFailed("a gateway did not learn of a new tenant within 10 s")


@dataclass
class Testbed(Gateways):
    postgres: Service = field(kw_only=True)
    redis: Service = field(kw_only=True)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    engine: asyncio.subprocess.Process | None = None

    @property
    def engine_address(self) -> str:
        return f"ipc://{self.directory}/engine.sock"

    async def start_engine(self) -> None:
        options = EngineOptions(
            model_dir=SHIPPED_MODEL,
            address=self.engine_address,
            data_dir=self.directory / "engine",
            num_blocks=KV_BLOCKS,
            threads=1,
            orphan_s=30.0,
            **{"max_sequences": MAX_SEQUENCES, **self.engine_options},
        )
        options.data_dir.mkdir(exist_ok=True)
        with (self.directory / "engine.log").open("ab") as log:
            self.engine = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "engine.process.server", *options.arguments()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                process_group=0,
            )

    async def kill_engine(self) -> None:
        assert self.engine is not None
        if self.engine.returncode is None:
            self.engine.kill()
        await self.engine.wait()

    def _arguments(self) -> list[str]:
        arguments = shared_stores(self.postgres, self.redis)
        arguments += ["--engine-address", self.engine_address, *priced(SHIPPED_MODEL)]
        return [*arguments, *super()._arguments()]


def shared_stores(postgres: Service, redis: Service) -> list[str]:
    """Arguments of gateways that share them, where a dead one is found out within seconds."""
    arguments = ["--database-url", postgres.url, "--redis-url", redis.url, "--gateway-drain", "1"]
    return [*arguments, "--gateway-stale", str(STALE_S), "--gateway-lease", str(LEASE_S)]


@dataclass(frozen=True, slots=True)
class BudgetTenant:
    """A tenant that is charged; `meter` and `amount` are those of its budget, if it has one."""

    name: str
    tenant_id: str
    key: str
    meter: str | None = None
    amount: int | None = None
    has_limit: bool = False


@contextlib.asynccontextmanager
async def open_testbed(
    progress: Callable[[str], None],
    engine_options: Mapping[str, Any] = MappingProxyType({}),
    arguments: Sequence[str] = (),
    program: Sequence[str] = PROGRAM,
) -> AsyncIterator[Testbed]:
    """Database, Redis, engine and the first gateway. Raises `NoServer`, `ServerFailed`."""
    with contextlib.ExitStack() as closing:
        directory = Path(tempfile.mkdtemp(prefix="fairgate-bench-"))
        closing.callback(shutil.rmtree, directory, ignore_errors=True)
        progress("starting PostgreSQL and Redis")
        # From this thread: they die with the thread that started them.
        postgres = start_postgres(is_durable=True)
        closing.callback(postgres.stop)
        redis = start_redis()
        closing.callback(redis.stop)
        testbed = Testbed(
            directory, arguments, program, postgres=postgres, redis=redis, engine_options=engine_options
        )
        try:
            progress("starting the engine and the first gateway")
            await testbed.start_engine()
            await testbed.start_gateways(1)
            await testbed.ready()
            yield testbed
        finally:
            await testbed.close()
            if testbed.engine is not None:
                await testbed.kill_engine()
