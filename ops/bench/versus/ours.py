"""Our gateway in a comparison: before vLLM, before vLLM with our scheduler in it, or our own engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.bench.common.errors import CannotBench
from ops.bench.common.load import QUIET, admin_call, known, priced
from ops.bench.common.processes import toml
from ops.bench.versus.stack import PLACES, SLOTS, ServedStack, TenantTerms
from ops.bench.versus.vllm_server import CONTEXT_TOKENS, MODEL
from ops.sandbox.server import LocalServer, ServerFailed, local_server, until
from ops.settings.settings import SHIPPED_MODEL

KNOWN_S = 20.0
SETTLED_S = 40.0
KV_BLOCKS = 9_000


@dataclass(frozen=True, slots=True)
class OurGateway:
    """Implements `Contestant`. `upstream`: fields of the one server behind it; empty: our own engine."""

    name: str
    upstream: Mapping[str, Any] = field(default_factory=dict)
    is_fair_by_itself: bool = True
    limit_window_s: float = math.inf

    @contextlib.asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[ServedStack]:
        """See `Contestant`. Raises `CannotBench`."""
        served = OurServed(directory / "data", self._arguments(directory))
        try:
            await served.start()
            if not self.upstream:
                await served.set_slots(SLOTS)
            yield served
        except ServerFailed as error:
            raise CannotBench(f"{self.name}: {error}") from None
        finally:
            await served.close()

    def _arguments(self, directory: Path) -> list[str]:
        if not self.upstream:
            return [
                *("--model", str(SHIPPED_MODEL), *priced(SHIPPED_MODEL), *QUIET),
                *("--engine-max-sequences", str(PLACES), "--engine-kv-blocks", str(KV_BLOCKS)),
            ]
        config = directory / "fairgate.toml"
        config.write_text(toml(self.upstream), encoding="utf-8")
        return ["--config", str(config), "--prices", f"{MODEL}=150/600", *QUIET]


def stock_upstream(url: str) -> dict[str, Any]:
    """vLLM as it comes: as many requests are sent to it as it computes in a step, the others wait here."""
    return {
        "name": "vllm",
        "url": f"{url}/v1",
        "model": MODEL,
        "tokenizer_dir": str(SHIPPED_MODEL),
        "context_tokens": CONTEXT_TOKENS,
        "usage": "each",
        "max_concurrent": SLOTS,
    }


def plugin_upstream(url: str, key_file: Path) -> dict[str, Any]:
    """vLLM with our scheduler: it is sent more than it computes in a step, and chooses from it."""
    more = {"max_concurrent": PLACES, "priority": "fairgate", "plugin_key_file": str(key_file)}
    return stock_upstream(url) | more


class OurServed:
    def __init__(self, data_dir: Path, arguments: Sequence[str]) -> None:
        self._data_dir = data_dir
        self._arguments = arguments
        self._closing = contextlib.AsyncExitStack()
        self._server: LocalServer | None = None
        self._ids: dict[str, str] = {}

    async def start(self) -> None:
        """Starts the gateway, for the first time or again on the data that it left. Raises `ServerFailed`."""
        await self.close()
        self._server = await self._closing.enter_async_context(
            local_server(self._data_dir, arguments=self._arguments)
        )

    async def close(self) -> None:
        await self._closing.aclose()
        self._server = None

    async def set_slots(self, slots: int) -> None:
        """Sets the sequences that our engine computes in a step. Raises `ServerFailed`."""
        async with self._serving.operator() as client:
            policy = {"policy": "hybrid", "options": {"slots": slots}}
            await admin_call(client, "POST", "policy", policy)

    @property
    def _serving(self) -> LocalServer:
        assert self._server is not None
        return self._server

    @property
    def url(self) -> str:
        return self._serving.url

    @property
    def pid(self) -> int:
        return self._serving.process.pid

    async def enrol(self, terms: TenantTerms) -> str:
        """See `ServedStack`. `most_parallel` is not needed: the queue shares by weight."""
        async with self._serving.operator() as client:
            tenant = {"name": terms.name, "weight": terms.weight}
            self._ids[terms.name] = (await admin_call(client, "POST", "tenants", tenant))["id"]
            if terms.limit_tokens is not None:
                limit = {"tenant": terms.name, "meter": "total_tokens", "amount": terms.limit_tokens}
                await admin_call(client, "POST", "limits", limit | {"window": "lifetime", "mode": "hard"})
            key = await admin_call(client, "POST", "keys", {"tenant": terms.name})
            if not await known(client, {terms.name: int(terms.limit_tokens is not None)}, KNOWN_S):
                raise CannotBench(f"the gateway did not learn of tenant {terms.name} within {KNOWN_S:g} s")
        return str(key["key"])

    async def kill(self) -> None:
        process = self._serving.process
        process.kill()
        await process.wait()

    async def charged_tokens(self, tenant: str) -> int:
        """See `ServedStack`. Read from the ledger's table, once nothing of the tenant's is left unsettled."""
        if self._serving.process.returncode is not None:
            await self.start()
        tenant_id = self._ids[tenant]
        if not await until(lambda: asyncio.to_thread(self._is_settled, tenant_id), SETTLED_S):
            raise CannotBench(f"requests of tenant {tenant} are not settled after {SETTLED_S:g} s")
        return (await asyncio.to_thread(self._ledger, tenant_id)).get("settle", (0, 0))[1]

    def _is_settled(self, tenant_id: str) -> bool:
        rows = self._ledger(tenant_id)
        return rows.get("reserve", (0, 0))[0] == rows.get("settle", (0, 0))[0]

    def _ledger(self, tenant_id: str) -> dict[str, tuple[int, int]]:
        query = (
            "SELECT kind, count(*), sum(input_tokens + output_tokens) FROM ledger"
            " WHERE tenant_id = ? GROUP BY kind"
        )
        with contextlib.closing(sqlite3.connect(self._data_dir / "fairgate.db")) as connection:
            return {kind: (rows, tokens) for kind, rows, tokens in connection.execute(query, [tenant_id])}

    async def why(self, headers: Mapping[str, str], key: str) -> str | None:
        """See `ServedStack`. The tenant's own view: `GET /v1/requests/{id}`."""
        lines: list[str] = []
        about = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=about, timeout=10.0) as client:

            async def is_explained() -> bool:
                answer = await client.get(f"/v1/requests/{headers.get('x-request-id', '')}")
                if answer.status_code == 200:
                    lines[:] = answer.json().get("explanation", ())
                return bool(lines)

            # A timeline is written within a second of the request's end.
            await until(is_explained, 5.0)
        return "; ".join(lines) or None
