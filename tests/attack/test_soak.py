"""A soak with faults: two gateways under load while they, an engine and the stores are killed and stalled.

One gateway has an engine of its own, the other another server behind it; they share PostgreSQL and Redis.
`FAIRGATE_SOAK_S` says for how long: 15 minutes, if it is not set. What happens when is drawn from a seed;
each kind of fault happens, and both gateways serve again after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import create_engine, text

from tests.attack.test_both_killed import kill_both
from tests.e2e.test_stores_down import checks
from tests.support import services
from tests.support.faulty_servers import MODEL as PEER_MODEL
from tests.support.faulty_servers import Peer, PeerRequest, in_thread, usage
from tests.support.server_process import MODEL, PRICE, Server, server_process, until

SOAK_S = float(os.environ.get("FAIRGATE_SOAK_S", "900"))
SEED = 20
BETWEEN_FAULTS_S = 35
WAIT_S = 300
"""A fault and its repair may take so long, on a busy machine too."""
CLIENTS = 16
EARLY = 0.08
"""Of the streams so many are left before their end."""
HARD = {"acme": 30, "globex": 20}
"""Tokens that a tenant may have for each second of the soak: less than it asks for."""
ENDLESS = "initech"
STALE_S = 5
STALLED_S = 14
"""Longer than others wait before they take it for dead."""
RSS_GROWTH = 1.25
"""From the first half's largest resident set to the second half's."""

pytestmark = [pytest.mark.attack, pytest.mark.long, pytest.mark.timeout(2 * SOAK_S + 1_800)]


@dataclass
class Delivery:
    """What a client got of one request."""

    tenant: str
    request_id: str
    tokens: int = 0
    saw_done: bool = False


@dataclass
class Soak:
    """Everything that runs, and what its clients saw."""

    postgres: services.Service
    redis: services.Service
    one: Server
    other: Server
    keys: dict[str, str] = field(default_factory=dict)
    had: list[Delivery] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Tenants, and the codes that they got."""
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def gateways(self) -> tuple[Server, Server]:
        return self.one, self.other

    def client(self, number: int) -> None:
        """Asks one thing after another, of either gateway, until it is over."""
        chance = random.Random(f"{SEED} {number}")
        while not self.is_over.is_set():
            server, tenant = chance.choice(self.gateways), chance.choice([*HARD, ENDLESS])
            leaves_after = chance.randrange(1, 20) if chance.random() < EARLY else None
            try:
                self._ask(server, tenant, chance.randrange(20, 400), leaves_after)
            except (httpx.HTTPError, json.JSONDecodeError):
                self.is_over.wait(0.2)  # it was killed, perhaps in the middle of a line

    def _ask(self, server: Server, tenant: str, max_tokens: int, leaves_after: int | None) -> None:
        body = {"prompt": "once upon a time", "max_tokens": max_tokens, "stream": True}
        extra = {"model": MODEL, "logprobs": 0, "ignore_eos": True}
        body |= {"model": PEER_MODEL} if server is self.other else extra
        with (
            server.http(self.keys[tenant]) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                self.refused.append((tenant, json.loads(answer.read())["error"]["code"]))
                self.is_over.wait(0.2)
                return
            delivery = Delivery(tenant, answer.headers["x-request-id"])
            self.had.append(delivery)
            for line in answer.iter_lines():
                delivery.tokens += tokens_in(line)
                delivery.saw_done |= line == "data: [DONE]"
                if leaves_after is not None and delivery.tokens >= leaves_after:
                    return

    def serves(self, server: Server) -> bool:
        """Whether a request gets its answer: it is not refused, nor its connection broken."""
        body = {"model": PEER_MODEL if server is self.other else MODEL, "prompt": "x", "max_tokens": 4}
        try:
            with server.http(self.keys[ENDLESS]) as client:
                return client.post("/v1/completions", json=body).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_both_serve(self) -> None:
        until(lambda: all(map(self.serves, self.gateways)), WAIT_S)

    def resident_bytes(self) -> list[int]:
        """Of both gateways and the engine."""
        pids = [server.process.pid for server in self.gateways if server.process is not None]
        return [psutil.Process(pid).memory_info().rss for pid in (*pids, self.one.engine().pid)]

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of the whole ledger."""
        engine = create_engine(self.postgres.url.replace("postgresql://", "postgresql+psycopg://"))
        query = "SELECT ledger.*, name FROM ledger JOIN tenants ON tenants.id = tenant_id WHERE kind = :kind"
        with engine.connect() as connection:
            found = [dict(row) for row in connection.execute(text(query), {"kind": kind}).mappings()]
        engine.dispose()
        return found


def tokens_in(line: str) -> int:
    """Of one line of a stream: our engine's have a log probability each, the other server's are letters."""
    choices = json.loads(line.removeprefix("data: ")).get("choices") if line.startswith("data: {") else None
    if not choices:
        return 0
    return len(choices[0]["logprobs"]["tokens"] if choices[0].get("logprobs") else choices[0]["text"])


async def letters(request: PeerRequest) -> None:
    """Another server's answer: each piece is a letter is a token."""
    tokens = request.body["max_tokens"]
    await request.head()
    for left in range(tokens, 0, -1):
        await asyncio.sleep(0.05)
        finish = "length" if left == 1 else None
        await request.events({"choices": [{"index": 0, "text": "a", "finish_reason": finish}]})
    await request.events(usage(len(request.body["prompt"]), tokens), "[DONE]")
    await request.last()


def again(server: Server, end: Callable[[Server], None]) -> None:
    end(server)
    server.start()


def away(soak: Soak, *stores: services.Service) -> None:
    """Until both gateways have seen it."""
    for store in stores:
        store.kill()
    until(lambda: all(checks(server)[0] == 503 for server in soak.gateways), WAIT_S)
    for store in stores:
        store.start()


def stalled(process: Any) -> None:
    process.send_signal(signal.SIGSTOP)
    threading.Event().wait(STALLED_S)
    process.send_signal(signal.SIGCONT)


FAULTS: dict[str, Callable[[Soak], None]] = {
    "gateway killed": lambda soak: again(soak.one, Server.kill),
    "other gateway killed": lambda soak: again(soak.other, Server.kill),
    "gateway and engine killed": lambda soak: again(soak.one, kill_both),
    "engine killed": lambda soak: soak.one.engine().kill(),
    "Redis killed": lambda soak: away(soak, soak.redis),
    "Redis emptied": lambda soak: services.delete_keys(soak.redis.url),
    "PostgreSQL killed": lambda soak: away(soak, soak.postgres),
    "both stores killed": lambda soak: away(soak, soak.redis, soak.postgres),
    "gateway stalled": lambda soak: stalled(soak.one.process),
    "other gateway stalled": lambda soak: stalled(soak.other.process),
    "engine stalled": lambda soak: stalled(soak.one.engine()),
    "gateway stopped": lambda soak: again(soak.one, Server.stop),
    "other gateway stopped": lambda soak: again(soak.other, Server.stop),
}


@pytest.fixture
def soak(tmp_path: Path, chat_model: Path) -> Iterator[Soak]:
    with ExitStack() as closing:
        postgres, redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(redis.stop)
        url = closing.enter_context(in_thread(Peer(letters))).url
        upstream = {"name": "peer", "url": f"{url}/v1", "model": PEER_MODEL, "tokenizer_dir": str(chat_model)}
        common = ["--database-url", postgres.url, "--redis-url", redis.url]
        common += ["--gateway-stale", str(STALE_S), "--gateway-lease", str(STALE_S)]
        flags = [*common, "--engine-max-sequences", "8", "--engine-max-tokens-per-s", "200"]
        one = closing.enter_context(server_process(tmp_path / "one", chat_model, *flags))
        (tmp_path / "other").mkdir()
        shutil.copy(tmp_path / "one" / "pepper", tmp_path / "other" / "pepper")
        flags = [*common, "--engine-serve", "no", "--prices", f"{PRICE},{PEER_MODEL}=100/300/50"]
        flags += ["--upstreams", json.dumps([upstream | {"capabilities": [], "whole_tokens": 0}])]
        other = closing.enter_context(server_process(tmp_path / "other", chat_model, *flags))
        other.owner_key = one.owner_key
        soak = Soak(postgres, redis, one, other)
        for tenant in (*HARD, ENDLESS):
            soak.keys[tenant] = one.tenant(tenant)
            amount = int(HARD.get(tenant, 1_000_000) * SOAK_S)
            one.limit(tenant, "output_tokens", amount, window="lifetime")
        soak.wait_until_both_serve()
        yield soak


def test_faults_under_load_lose_nothing_charge_nothing_twice_and_pass_no_limit(soak: Soak) -> None:
    chance = random.Random(SEED)
    rounds = max(1, round(SOAK_S / BETWEEN_FAULTS_S / len(FAULTS)))
    schedule = [name for _ in range(rounds) for name in chance.sample(sorted(FAULTS), len(FAULTS))]
    happened: list[str] = []
    resident: list[list[int]] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(soak.client, number) for number in range(CLIENTS)]
        begin_s = time.monotonic()
        try:
            for number, name in enumerate([*schedule, ""]):
                due_s = begin_s + (number + 0.5) * SOAK_S / (len(schedule) + 0.5)
                threading.Event().wait(max(0.0, due_s - time.monotonic()))
                if name:
                    FAULTS[name](soak)
                    happened.append(name)
                soak.wait_until_both_serve()
                resident.append(soak.resident_bytes())
        finally:
            soak.is_over.set()
    for client in clients:
        client.result()
    for server in soak.gateways:
        until(server.is_idle, WAIT_S)
        until(lambda server=server: server.verify()["open_requests"] == 0, WAIT_S)  # type: ignore[misc]

    rows = soak.rows("settle")
    settled = {row["request_id"]: row for row in rows}
    delivered = {name: sum(each.tokens for each in soak.had if each.tenant == name) for name in soak.keys}
    unbilled = sum(max(0, each.tokens - settled[each.request_id]["output_tokens"]) for each in soak.had)
    print(f"{len(rows)} settled: {dict(Counter(row['outcome'] for row in rows))}; delivered {delivered},")
    print(f"{unbilled} of them not billed; {dict(Counter(soak.refused))}; {dict(Counter(happened))};")
    print(f"MiB resident: {[[size >> 20 for size in each] for each in resident]}")

    assert set(happened) == set(FAULTS)
    assert len(settled) == len(rows), "settled twice"
    assert sorted(settled) == sorted(row["request_id"] for row in soak.rows("reserve"))
    for each in soak.had:
        row = settled[each.request_id]
        assert each.tokens <= counted(row), f"{each}: {row}"
        if each.saw_done:  # less where its gateway stood still, and the other charged what it knew
            assert row["output_tokens"] <= each.tokens, f"{each}: {row}"
    for tenant in soak.keys:
        used = sum(counted(row) for row in rows if row["name"] == tenant)
        assert delivered[tenant] <= used
        for server in soak.gateways:
            state = server.limit_state(tenant, "output_tokens")
            assert (state["used"], state["held"]) == (used, 0)
    for tenant, tokens_per_s in HARD.items():
        assert delivered[tenant] <= tokens_per_s * SOAK_S
        assert (tenant, "insufficient_quota") in soak.refused, "it never came to its limit"
    for server in soak.gateways:
        report = server.verify()
        assert report["ok"], report
        assert "Traceback" not in server.log()
    half = len(resident) // 2
    for early, late in zip(
        zip(*resident[:half], strict=True), zip(*resident[half:], strict=True), strict=True
    ):
        assert max(late) <= RSS_GROWTH * max(early), resident


def counted(row: dict[str, Any]) -> int:
    """Output that limits count of a settlement: with what is in doubt."""
    return int(row["output_tokens"] if row["counted_output"] is None else row["counted_output"])
