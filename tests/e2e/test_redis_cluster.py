"""Four workers on a Redis Cluster: slots move, masters die, no limit is exceeded, and the books agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import redis
from redis.crc import key_slot

from tests.e2e.test_hard_limit import burst
from tests.support import services
from tests.support.server_process import MODEL, Server, server_process, until

pytestmark = pytest.mark.long

COMPLETIONS = "/v1/completions"
ASKED = {"model": MODEL, "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
TOKENS = len("abc") + 8
AMOUNT = 100_000
FAILOVER_S = 60


@dataclass
class Load:
    """One tenant's client: what it was answered, and when."""

    name: str
    slot: int
    """Of the tenant's counters."""
    key: str
    answers: list[tuple[float, int, int]] = field(default_factory=list)
    """End, status, tokens."""

    def served_since(self, since_s: float) -> int:
        return sum(1 for at_s, status, _ in self.answers if at_s > since_s and status == 200)

    async def run(self, server: Server) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            while True:
                answer = await client.post(COMPLETIONS, json=ASKED)
                tokens = answer.json()["usage"]["total_tokens"] if answer.is_success else 0
                self.answers.append((time.monotonic(), answer.status_code, tokens))
                if not answer.is_success:
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def loaded(server: Server, loads: list[Load]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(load.run(server)) for load in loads]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(load: Load, more: int = 5, deadline_s: float = FAILOVER_S) -> None:
    since_s = time.monotonic()
    await asyncio.to_thread(until, lambda: load.served_since(since_s) >= more, deadline_s)


@pytest.fixture(scope="module", params=["redis", "valkey"])
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, chat_model: Path
) -> Iterator[tuple[Server, services.Cluster]]:
    binary = None
    if request.param == "valkey" and not (binary := next(iter(services.valkey_binaries()), None)):
        pytest.skip("no valkey-server on PATH")
    with ExitStack() as closing:
        postgres, cluster = services.start_postgres(), services.start_cluster(binary=binary)
        closing.callback(postgres.stop)
        closing.callback(cluster.stop)
        arguments = ["--workers", "4", "--database-url", postgres.url, "--redis-url", cluster.url]
        arguments += ["--engine-max-sequences", "32", "--gateway-stale", "4"]
        data_dir = tmp_path_factory.mktemp("clustered")
        yield closing.enter_context(server_process(data_dir, chat_model, *arguments)), cluster


def slots_of(cluster: services.Cluster, node: services.Service, prefix: bytes) -> set[int]:
    """Of the keys at a node that do not belong to tenants."""
    with redis.Redis.from_url(node.url) as client:
        keys = [key for key in client.scan_iter(count=1_000) if key.startswith(prefix)]
    return {key_slot(key) for key in keys if b"{ten_" not in key}


async def test_500_at_once_with_a_limit_of_all_tenants_too(house: tuple[Server, services.Cluster]) -> None:
    server, _ = house
    amounts = {name: count * TOKENS + TOKENS // 2 for name, count in (("a", 40), ("b", 80), ("c", 20))}
    keys = {name: server.tenant(name) for name in amounts}
    for name, amount in amounts.items():
        server.limit(name, "total_tokens", amount, window="lifetime")
    of_all = 100 * TOKENS + 1
    limit = {"platform": True, "meter": "total_tokens", "window": "day", "mode": "hard", "amount": of_all}
    made = server.admin("POST", "/limits", limit)
    answers = await asyncio.gather(
        *(burst(server, key, [(COMPLETIONS, ASKED)] * 167) for key in keys.values())
    )
    used = {}
    for name, answered in zip(amounts, answers, strict=True):
        assert {answer.status_code for answer in answered} <= {200, 429}
        used[name] = sum(answer.json()["usage"]["total_tokens"] for answer in answered if answer.is_success)
        assert used[name] == server.limit_state(name, "total_tokens")["used"] <= amounts[name]
    [state] = server.status()["platform_limits"]
    assert (sum(used.values()), 0) == (state["used"], state["held"])
    assert sum(used.values()) == 100 * TOKENS, "the limit of all is what ends it: no hold was lost in between"
    assert server.verify()["ok"]
    server.admin("DELETE", f"/limits/{made['id']}")


async def test_slots_move_and_masters_die_under_load(house: tuple[Server, services.Cluster]) -> None:
    server, cluster = house
    victim, heir, other = cluster.nodes[: cluster.masters]
    by_master: dict[str, list[Load]] = {node.url: [] for node in (victim, heir, other)}
    number = 0
    while any(len(loads) < 2 for loads in by_master.values()):
        number += 1
        made = server.admin("POST", "/tenants", {"name": f"moved-{number}"})
        slot = key_slot(made["id"].encode())
        home = by_master[cluster.master_of(slot).url]
        if len(home) < 2:
            key = server.admin("POST", "/keys", {"tenant": made["name"]})
            server.limit(made["name"], "total_tokens", AMOUNT, window="lifetime")
            home.append(Load(made["name"], slot, key["key"]))
    lost, kept = by_master[victim.url], [*by_master[heir.url], *by_master[other.url]]
    async with loaded(server, [*lost, *kept]):
        for load in (*lost, *kept):
            await eventually(load)
        # What all need goes elsewhere first, under load: then the victim has tenants only.
        for slot in sorted(slots_of(cluster, victim, b"fairgate")):
            with cluster.moving(slot, heir):
                await eventually(kept[0], 2)
        for load in (*lost, *kept):
            await eventually(load)

        killed_s = time.monotonic()
        victim.kill()
        for load in kept:
            await eventually(load)
        await asyncio.to_thread(until, lambda: cluster.master_of(lost[0].slot) is not victim, FAILOVER_S)
        took_over_s = time.monotonic()
        meanwhile = [
            sum(status == 200 for at_s, status, _ in load.answers if killed_s < at_s < took_over_s)
            for load in kept
        ]
        assert all(meanwhile), meanwhile
        for load in (*lost, *kept):
            await eventually(load)

        # At once back, and empty: the one with the registry, the shared queue and tenants.
        heir.kill()
        heir.start()
        for load in (*lost, *kept):
            await eventually(load)
    await asyncio.to_thread(until, server.is_idle, 60)
    for load in (*lost, *kept):
        assert {status for _, status, _ in load.answers} <= {200, 429, 503}
        state = server.limit_state(load.name, "total_tokens")
        delivered = sum(tokens for _, _, tokens in load.answers)
        # What was under way when the client left was charged, too.
        assert (state["held"], 0 <= state["used"] - delivered <= TOKENS) == (0, True), (state, delivered)
    assert server.verify()["ok"]
