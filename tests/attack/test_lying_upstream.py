"""A server behind the gateway that lies, does not stop, or never ends: what its tenants get and pay.

One gateway without an engine; each model is another way to misbehave, of one scripted server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tests.support.faulty_servers import Handler, Peer, PeerRequest, in_thread, piece, usage
from tests.support.server_process import Server, server_process, until

pytestmark = pytest.mark.attack

SECRET = "sk-live-0123456789abcdef"
MOST_SENT_BYTES = 16 * 2**20
"""What lies in the sockets' buffers on the way is sent, too."""
PIECE = b"a" * 65_536


def endless(before: bytes, again: bytes) -> Handler:
    """Sends `again` for ever."""

    async def answer(request: PeerRequest) -> None:
        await request.send(before)
        while True:
            await request.send(again)
            sent[request.body["model"]] = sent.get(request.body["model"], 0) + len(again)

    return answer


sent: dict[str, int] = {}
"""Bytes that endless answers sent, by model."""


async def ignores_max_tokens(request: PeerRequest) -> None:
    if request.body.get("stream"):
        await request.head()
        for _ in range(2_000):
            await request.events(piece("abcdefghij" * 100))
        await request.events(piece("", "stop"), usage(4, 10), "[DONE]")
        await request.last()
    else:
        choice = {"index": 0, "message": {"content": "abcdefghij" * 200_000}, "finish_reason": "stop"}
        await request.json({"choices": [choice], "usage": usage(4, 10)["usage"]})


async def counts_too_little(request: PeerRequest) -> None:
    await request.head()
    await request.events(*[piece("abcdefghij")] * 50, piece("", "stop"), usage(1, 1), "[DONE]")
    await request.last()


async def tells_its_secrets(request: PeerRequest) -> None:
    message = f"key {SECRET} of the organisation acme-prod was refused at http://10.0.0.7:8000"
    await request.json({"error": {"message": message, "code": SECRET, "param": SECRET}}, 400)


async def fails_with_its_secrets(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"), {"error": {"message": f"cannot reach {SECRET}"}})


async def pings_for_ever(request: PeerRequest) -> None:
    await request.head()
    while True:
        await request.send(b"8\r\n: ping\n\n\r\n")
        await asyncio.sleep(0.05)


async def goes_on_with_nothing(request: PeerRequest) -> None:
    await request.head()
    await request.events(piece("a"))
    while True:
        await request.events({"choices": [{"index": 0, "delta": {}, "finish_reason": None}]})
        await asyncio.sleep(0.05)


STREAM = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "line-of-a-head": endless(b"HTTP/1.1 200 x\r\nx: ", PIECE),
    "headers": endless(b"HTTP/1.1 200 x\r\n", b"x: y\r\n" * 4_096),
    "interim-answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1_024),
    "chunk-extension": endless(STREAM + b"5;x=", PIECE),
    "trailers": endless(STREAM + b"0\r\nx: ", PIECE),
    "refusal": endless(b"HTTP/1.1 400 x\r\ntransfer-encoding: chunked\r\n\r\n", b"10000\r\n%s\r\n" % PIECE),
}  # fmt: skip
MODELS: dict[str, Handler] = ENDLESS | {
    "counted": ignores_max_tokens,
    "estimated": ignores_max_tokens,
    "counts-too-little": counts_too_little,
    "tells-its-secrets": tells_its_secrets,
    "fails-with-its-secrets": fails_with_its_secrets,
    "pings": pings_for_ever,
    "empty-events": goes_on_with_nothing,
}
WITHOUT_TOKENIZER = "estimated"


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    async def answer(request: PeerRequest) -> None:
        await MODELS[request.body["model"]](request)

    with in_thread(Peer(answer, tuple(MODELS), context_tokens=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, peer: Peer, chat_model: Path) -> Path:
    lines = []
    for name in MODELS:
        lines += ["[[upstreams]]", f'name = "{name}"', f'url = "{peer.url}"', f'model = "{name}"']
        lines += ["first_byte_s = 3.0", "between_s = 2.0", "capabilities = []"]
        if name != WITHOUT_TOKENIZER:
            lines.append(f'tokenizer_dir = "{chat_model}"')
    path = tmp_path_factory.mktemp("lying") / "a.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def gateway(config: Path, chat_model: Path) -> Iterator[Server]:
    prices = ",".join(f"{name}=100/300/50" for name in MODELS)
    arguments = ["--engine-serve", "no", "--config", str(config), "--prices", prices]
    with server_process(config.parent / "data", chat_model, *arguments) as running:
        yield running


def ask(server: Server, key: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 10} | fields
    with server.http(key, timeout_s=15.0) as client:
        return client.post("/v1/chat/completions", json=body)


def text_of(response: httpx.Response) -> str:
    """The whole text of a stream."""
    assert response.status_code == 200, response.text[:500]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def replica(server: Server, model: str) -> dict[str, Any]:
    (found,) = server.status()["models"]["pools"][model]["replicas"]
    return dict(found)


@pytest.mark.parametrize(("model", "most_characters"), [("counted", 10), ("estimated", 160)])
def test_a_server_that_ignores_max_tokens_delivers_what_is_charged(
    gateway: Server, peer: Peer, model: str, most_characters: int
) -> None:
    key = gateway.tenant(f"pays-{model}")
    gateway.limit(f"pays-{model}", "output_tokens", 1_000, window="lifetime")
    gone = peer.gone
    streamed = text_of(ask(gateway, key, model, stream=True))
    until(lambda: peer.gone > gone)  # it is stopped, not read to its end
    whole = ask(gateway, key, model).json()["choices"][0]
    assert len(streamed) == len(whole["message"]["content"]) == most_characters
    assert whole["finish_reason"] == "length"
    assert gateway.limit_state(f"pays-{model}", "output_tokens")["used"] == 20
    assert replica(gateway, model)["contradictions"]["overrun"] == 2
    with httpx.Client(base_url=gateway.url) as client:
        line = f'fairgate_upstream_contradictions_total{{kind="overrun",replica="{model}"}} 2.0'
        page = client.get("/metrics").text.splitlines()
        assert line in [each for each in page if "contradictions" in each]
    assert gateway.verify()["ok"]


def test_a_server_that_counts_less_than_it_sends_is_counted_here(gateway: Server) -> None:
    key = gateway.tenant("counted-here")
    answer = ask(gateway, key, "counts-too-little", max_tokens=1_000).json()
    assert len(answer["choices"][0]["message"]["content"]) == 500
    assert answer["usage"]["completion_tokens"] == 500
    # The prompt, too: the server says that it was one token.
    assert answer["usage"]["prompt_tokens"] == len("<user>Hello\n<assistant>")
    assert answer["fairgate"]["basis"] == "tokenizer"
    assert replica(gateway, "counts-too-little")["contradictions"]["usage_low"] == 1


@pytest.mark.parametrize("model", ENDLESS)
def test_what_never_ends_is_not_read_for_ever(gateway: Server, model: str) -> None:
    response = ask(gateway, gateway.tenant(f"meets-{model}"), model, stream=True)
    assert response.status_code in (400, 502, 503) or "upstream_error" in response.text
    assert sent[model] < MOST_SENT_BYTES


@pytest.mark.parametrize("model", ["tells-its-secrets", "fails-with-its-secrets"])
def test_the_keys_and_addresses_in_what_a_server_says_reach_no_client(gateway: Server, model: str) -> None:
    key = gateway.tenant(model)
    for stream in (True, False):
        response = ask(gateway, key, model, stream=stream)
        assert "error" in response.text
        assert ("acme-prod was refused" in response.text) is (model == "tells-its-secrets")
        for secret in (SECRET, "10.0.0.7"):
            assert secret not in response.text


@pytest.mark.parametrize("model", ["pings", "empty-events"])
def test_keep_alives_that_bring_nothing_end_as_silence_does(gateway: Server, model: str) -> None:
    key = gateway.tenant(f"waits-for-{model}")
    response = ask(gateway, key, model, stream=True)
    assert response.status_code == 502 or "upstream_error" in response.text


def test_operators_find_a_server_that_lies(gateway: Server, config: Path) -> None:
    at = ["--config", str(config), "--data-dir", str(gateway.data_dir), "--json"]
    runner = CliRunner(env={"FAIRGATE_ENGINE_SERVE": "no"})
    ask(gateway, gateway.tenant("before-the-doctor"), "counted")
    examined = json.loads(runner.invoke(cli, ["doctor", *at]).stdout)
    (finding,) = [each for each in examined["checks"] if each["check"] == "other servers"]
    assert not finding["ok"]
    assert "counted contradicts itself (overrun" in finding["detail"]
    checked = runner.invoke(cli, ["model", "check", *at])
    findings = {each["name"]: each for each in json.loads(checked.stdout)}
    assert checked.exit_code == 1
    for model in ("counted", "estimated"):
        assert "sends more than it is asked for" in findings[model]["detail"]
