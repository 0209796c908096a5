"""A tenant whose requests a server fails at, without pause: what the others get, and what it is told.

One gateway without an engine; the prompt says how the scripted server behaves. It answers the gateway's own
question well, as a server does that is up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.faulty_servers import Handler, Peer, PeerRequest, in_thread, piece, usage
from tests.support.server_process import Server, server_process, until

pytestmark = pytest.mark.attack

REPLICAS = {"one": 1, "three": 3}
"""Pools, by their number of replicas."""
OTHERS_ASK = 100


def status(number: int) -> Handler:
    async def answer(request: PeerRequest) -> None:
        await request.json({"error": {"message": "no"}}, number)

    return answer


async def garbage(request: PeerRequest) -> None:
    await request.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


async def says_nothing(request: PeerRequest) -> None:
    await request.until_gone()


def ends_with(finish: str) -> Handler:
    async def answer(request: PeerRequest) -> None:
        choice = {"index": 0, "message": {"content": "a"}, "finish_reason": finish}
        if not request.body.get("stream"):
            return await request.json({"choices": [choice], "usage": usage(1, 1)["usage"]})
        await request.head()
        await request.events(piece("a"), piece("", finish), usage(1, 1), "[DONE]")
        return await request.last()

    return answer


FAULTS: dict[str, tuple[Handler, set[tuple[int, str]]]] = {
    "403": (status(403), {(400, "invalid_request")}),
    "404": (status(404), {(400, "invalid_request")}),
    "500": (status(500), {(502, "upstream_request_failed"), (429, "requests_keep_failing")}),
    "garbage": (garbage, {(502, "upstream_request_failed"), (429, "requests_keep_failing")}),
    "slow": (says_nothing, {(502, "upstream_request_failed"), (429, "requests_keep_failing")}),
    "finish": (ends_with("eos"), {(200, "eos")}),
}
"""What the server does, and all that the tenant may be told."""
GOOD = ends_with("stop")


async def answer(request: PeerRequest) -> None:
    word = request.body["messages"][0]["content"]
    await (FAULTS[word][0] if word in FAULTS else GOOD)(request)


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, list[Peer]]]:
    with ExitStack() as stack:
        yield {
            pool: [
                stack.enter_context(in_thread(Peer(answer, (pool,), is_sound=True))) for _ in range(number)
            ]
            for pool, number in REPLICAS.items()
        }


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, peers: dict[str, list[Peer]], chat_model: Path
) -> Iterator[Server]:
    lines = []
    for pool, servers in peers.items():
        for index, peer in enumerate(servers):
            lines += ["[[upstreams]]", f'name = "{pool}-{index}"', f'url = "{peer.url}"', f'model = "{pool}"']
            lines += ["first_byte_s = 2", "whole_tokens = 0", "capabilities = []"]
    path = tmp_path_factory.mktemp("failing") / "a.toml"
    path.write_text("\n".join(lines))
    prices = ",".join(f"{pool}=1/1/1" for pool in peers)
    arguments = ["--engine-serve", "no", "--config", str(path), "--prices", prices]
    with server_process(path.parent / "data", chat_model, *arguments) as running:
        yield running


def ask(client: httpx.Client, pool: str, word: str) -> tuple[int, str]:
    """Status, and the error's code or the server's own finish reason."""
    body = {"model": pool, "messages": [{"role": "user", "content": word}], "max_tokens": 5}
    response = client.post("/v1/chat/completions", json=body)
    found = response.json()
    if response.status_code == 200:
        assert found["choices"][0]["finish_reason"] == "stop"
        return 200, found["fairgate"].get("server_finish_reason", "")
    if response.status_code == 429:
        assert float(response.headers["retry-after-ms"]) > 0
        assert "Your tenant's last" in found["error"]["message"]
    return response.status_code, found["error"]["code"]


ROWS = [
    pytest.param(
        fault, connections, pool, marks=() if (fault, connections, pool) in QUICK else pytest.mark.long
    )
    for QUICK in [{("500", 4, "one"), ("garbage", 8, "three")}]
    for fault in FAULTS
    for connections in (1, 4, 8)
    for pool in REPLICAS
]


@pytest.mark.parametrize(("fault", "connections", "pool"), ROWS)
def test_others_are_served_and_the_failing_tenant_is_told_whose_fault_it_is(
    gateway: Server, peers: dict[str, list[Peer]], fault: str, connections: int, pool: str
) -> None:
    name = f"{fault}-{connections}-{pool}"
    bad, good, is_over = gateway.tenant(f"bad-{name}"), gateway.tenant(f"good-{name}"), threading.Event()
    began_s, asked = time.monotonic(), sum(each.asked for each in peers[pool])

    def fail() -> Counter[tuple[int, str]]:
        told: Counter[tuple[int, str]] = Counter()
        with gateway.http(bad) as client:
            while not is_over.is_set() or not told:
                told[ask(client, pool, fault)] += 1
        return told

    with ThreadPoolExecutor(connections) as threads:
        failing = [threads.submit(fail) for _ in range(connections)]
        try:
            with gateway.http(good) as client:
                got = Counter(ask(client, pool, "Hello") for _ in range(OTHERS_ASK))
        finally:
            is_over.set()
        told = sum((each.result() for each in failing), Counter())
    assert got == {(200, ""): OTHERS_ASK}
    assert set(told) <= FAULTS[fault][1], told
    most = REPLICAS[pool] * (time.monotonic() - began_s + 1)
    assert sum(each.asked for each in peers[pool]) - asked <= most, "asked once a second and replica at most"
    assert all(each["breaker"] == "closed" for each in replicas(gateway, pool))


def replicas(gateway: Server, pool: str) -> list[dict[str, object]]:
    return list(gateway.status()["models"]["pools"][pool]["replicas"])


def test_a_server_that_is_down_is_closed_at_once_and_comes_back_by_the_gateways_own_question(
    gateway: Server, peers: dict[str, list[Peer]]
) -> None:
    [peer], key = peers["one"], gateway.tenant("meets-one-that-is-down")
    peer.answer, peer.is_sound = status(503), False
    try:
        with gateway.http(key) as client:
            assert ask(client, "one", "Hello") in {(502, "upstream_error"), (503, "engine_unavailable")}
            until(lambda: replicas(gateway, "one")[0]["breaker"] != "closed", 5.0)
            sent = len(peer.requests)
            peer.answer, peer.is_sound = answer, True
            until(lambda: replicas(gateway, "one")[0]["breaker"] == "closed", 10.0)
            assert len(peer.requests) == sent, "no client's request found out"
            assert ask(client, "one", "Hello") == (200, "")
    finally:
        peer.answer, peer.is_sound = answer, True
