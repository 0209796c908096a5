"""Other servers' prefix caches tell a tenant nothing of what another one has sent.

One gateway in front of a scripted server with a prefix cache, which keeps prompts apart by `cache_salt`, as
vLLM and SGLang do, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tests.support.faulty_servers import Peer, PeerRequest, in_thread, usage
from tests.support.server_process import Server, server_process

pytestmark = pytest.mark.attack

SALTING, PLAIN, IGNORING = "salting", "plain", "ignoring"
SECRET_PROMPT = [{"role": "user", "content": "The password of the safe is 4711."}]
PROMPT_TOKENS = len("<user>The password of the safe is 4711.\n<assistant>")


def caching(model: str) -> Peer:
    """A server that remembers the prompts that it has seen."""
    seen: set[str] = set()

    async def answer(request: PeerRequest) -> None:
        body = request.body
        key = json.dumps([body["messages"], body.get("cache_salt") if model == SALTING else None])
        cached = 32 if key in seen else 0
        seen.add(key)
        choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
        if body.get("stream"):
            await request.head()
            chunk = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
            await request.events({"choices": [chunk]}, usage(PROMPT_TOKENS, 1, cached), "[DONE]")
            await request.last()
        else:
            await request.json({"choices": [choice], "usage": usage(PROMPT_TOKENS, 1, cached)["usage"]})

    return Peer(answer, (model,), context_tokens=4096, owned_by="other" if model == PLAIN else "vllm")


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, Peer]]:
    with (
        in_thread(caching(SALTING)) as salting,
        in_thread(caching(PLAIN)) as plain,
        in_thread(caching(IGNORING)) as ignoring,
    ):
        yield {SALTING: salting, PLAIN: plain, IGNORING: ignoring}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, peers: dict[str, Peer], chat_model: Path) -> Path:
    lines = []
    for name, peer in peers.items():
        lines += [
            "[[upstreams]]",
            f'name = "{name}"',
            f'url = "{peer.url}"',
            f'model = "{name}"',
            "capabilities = []",
        ]
        lines.append(f'tokenizer_dir = "{chat_model}"')
    path = tmp_path_factory.mktemp("caches") / "a.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def gateway(config: Path, chat_model: Path) -> Iterator[Server]:
    prices = ",".join(f"{name}=100/300/50" for name in (SALTING, PLAIN, IGNORING))
    arguments = ["--engine-serve", "no", "--config", str(config), "--prices", prices]
    with server_process(config.parent / "data", chat_model, *arguments) as running:
        yield running


def cached_and_cost(server: Server, key: str, model: str, **fields: Any) -> tuple[int, int]:
    """Prompt tokens that the answer says were cached, and its price."""
    body = {"model": model, "messages": SECRET_PROMPT, "max_tokens": 4} | fields
    with server.http(key) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["fairgate"]["actual"]["cost_nanousd"]


FULL_PRICE = 100 * PROMPT_TOKENS + 300
CACHED_PRICE = FULL_PRICE - 50 * 32


def test_a_tenant_finds_its_own_prompts_in_a_salted_cache_and_no_others(
    gateway: Server, peers: dict[str, Peer]
) -> None:
    owner, spy = gateway.tenant("salted-owner"), gateway.tenant("salted-spy")
    assert cached_and_cost(gateway, owner, SALTING) == (0, FULL_PRICE)
    assert cached_and_cost(gateway, owner, SALTING) == (32, CACHED_PRICE)
    assert cached_and_cost(gateway, spy, SALTING) == (0, FULL_PRICE)
    salts = [request.body["cache_salt"] for request in peers[SALTING].requests]
    assert salts[0] == salts[1] != salts[2]
    tenants = json.dumps(gateway.admin("GET", "/tenants?limit=1000"))
    assert not any(salt in tenants for salt in salts)


def test_hits_in_a_cache_without_salts_are_neither_told_nor_priced(
    gateway: Server, peers: dict[str, Peer]
) -> None:
    owner, spy = gateway.tenant("plain-owner"), gateway.tenant("plain-spy")
    for key in (owner, owner, spy):
        assert cached_and_cost(gateway, key, PLAIN) == (0, FULL_PRICE)
    assert not any("cache_salt" in request.body for request in peers[PLAIN].requests)


def test_operators_find_a_server_that_ignores_salts(gateway: Server, config: Path) -> None:
    at = ["--config", str(config), "--data-dir", str(gateway.data_dir), "--json"]
    checked = CliRunner(env={"FAIRGATE_ENGINE_SERVE": "no"}).invoke(cli, ["model", "check", *at])
    findings = {each["name"]: each for each in json.loads(checked.stdout)}
    assert [findings[name]["ok"] for name in (SALTING, PLAIN, IGNORING)] == [True, True, False]
    assert "it ignores cache_salt" in findings[IGNORING]["detail"]
