"""A gateway in front of a vLLM with Fairgate's plug-in: a real gateway process, and a stand-in of vLLM.

Budgets hold inside the server's decode, outcomes outlive the gateway, and a server whose plug-in is missing,
foreign or of another version is not used, and says why.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from engine.vllm_plugin.signature import encode_refusal
from ops.cli.main import cli
from tests.e2e.test_upstreams import settled
from tests.support.faulty_servers import MODEL, in_thread
from tests.support.plugged_vllm import KEY, PluggedVllm
from tests.support.server_process import Server, server_process, until

HELLO: Any = [{"role": "user", "content": "Hello"}]
PRICES = f"{MODEL}=100/300/50"


def config(directory: Path, *servers: tuple[str, PluggedVllm, str]) -> Path:
    """A TOML file with these servers: name, server, and the gateway's key for it."""
    lines: list[str] = []
    for name, vllm, key in servers:
        key_file = directory / f"{name}.key"
        key_file.write_text(f"{key}\n")
        key_file.chmod(0o600)
        lines += [
            "[[upstreams]]",
            f'name = "{name}"',
            f'url = "{vllm.peer.url}/v1"',
            f'model = "{MODEL}"',
            'priority = "fairgate"',
            f'plugin_key_file = "{key_file}"',
            "max_concurrent = 64",
            "capabilities = []",
        ]
    path = directory / "fairgate.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(toml: Path) -> list[str]:
    return ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]


@pytest.fixture(scope="module")
def vllm() -> Iterator[PluggedVllm]:
    found = PluggedVllm(slots=16)
    found.held_back = 20
    with in_thread(found.peer):
        yield found


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory, chat_model: Path, vllm: PluggedVllm
) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("plugged")
    toml = config(home, ("vllm-a", vllm, KEY))
    with server_process(home / "data", chat_model, *arguments(toml)) as running:
        yield running


def said_by(*command: str, toml: Path, data_dir: Path) -> Any:
    """What a command says as JSON."""
    at = ["--config", str(toml), "--data-dir", str(data_dir), "--json"]
    result = CliRunner(env={"FAIRGATE_ENGINE_SERVE": "no"}).invoke(cli, [*command, *at])
    return json.loads(result.stdout)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 40} | fields


def ask(server: Server, key: str, **fields: Any) -> Any:
    with server.http(key) as client:
        response = client.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def burst(server: Server, key: str, number: int, **fields: Any) -> list[httpx.Response]:
    """All at once, on as many connections."""
    limits = httpx.Limits(max_connections=number)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60, limits=limits) as client:
        asked = (client.post("/v1/chat/completions", json=body(**fields)) for _ in range(number))
        return list(await asyncio.gather(*asked))


def test_an_answer_is_token_fair_and_its_claims_are_the_tenants(gateway: Server, vllm: PluggedVllm) -> None:
    key = gateway.tenant("plugged", weight=3)
    answer = ask(gateway, key)
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["fairgate"]["upstream"] == "vllm-a"
    assert answer["fairgate"]["estimate"]["basis"].endswith("; token-fair")
    sent = vllm.all[-1].terms
    assert (sent.is_verified, sent.submit.weight, sent.submit.max_tokens) == (True, 3.0, 40)
    (row,) = settled(gateway, "plugged")
    assert (row["output_tokens"], json.loads(row["detail"])["basis"]) == (40, "upstream")
    until(lambda: not vllm.outcomes(), 5)


def test_a_client_signs_nothing(gateway: Server, vllm: PluggedVllm) -> None:
    with gateway.http(gateway.tenant("forger")) as client:
        refused = client.post("/v1/chat/completions", json=body(vllm_xargs={"fairgate": "x.y"}))
    assert refused.status_code == 400
    assert "vllm_xargs" in refused.json()["error"]["message"]


async def test_fifty_at_once_never_pass_a_hard_limit(gateway: Server, vllm: PluggedVllm) -> None:
    key = gateway.tenant("plugged-crowd", on_low_budget="truncate")
    amount = 50 * 30 + 7
    gateway.limit("plugged-crowd", "output_tokens", amount, window="lifetime")
    before = len(vllm.all)
    answers = await burst(gateway, key, 50)
    used = 0
    causes = set()
    for answer in answers:
        assert answer.status_code in (200, 429), answer.text
        if answer.status_code == 200:
            found = answer.json()
            used += found["usage"]["completion_tokens"]
            causes.add((found["choices"][0]["finish_reason"], found["fairgate"].get("stop_cause")))
    assert used <= amount
    assert sum(each.emitted_tokens for each in vllm.all[before:]) == used, (
        "what the server emitted is what was told"
    )
    until(lambda: gateway.limit_state("plugged-crowd", "output_tokens")["held"] == 0)
    assert gateway.limit_state("plugged-crowd", "output_tokens")["used"] == used
    assert ("length", "budget") in causes
    assert gateway.verify()["ok"]


def test_a_stream_is_topped_up_and_ends_at_its_budget(gateway: Server, vllm: PluggedVllm) -> None:
    key = gateway.tenant("plugged-stream", on_low_budget="truncate")
    gateway.limit("plugged-stream", "output_tokens", 700, window="lifetime")
    last = stream(gateway, key, max_tokens=2000)
    assert last["usage"]["completion_tokens"] == 700
    assert last["fairgate"]["stop_cause"] == "budget"
    sequence = vllm.all[-1]
    assert (sequence.emitted_tokens, sequence.max_tokens) == (700, 2000)
    assert sequence.terms.submit.lease_tokens < 700, "it was topped up"


def test_of_two_streams_the_second_ends_with_what_the_first_left(gateway: Server, vllm: PluggedVllm) -> None:
    key = gateway.tenant("plugged-two")
    gateway.limit("plugged-two", "output_tokens", 400, window="day")
    before = len(vllm.all)
    with ThreadPoolExecutor() as beside:
        first = beside.submit(stream, gateway, key, max_tokens=60)
        until(lambda: len(vllm.all) > before and vllm.all[-1].emitted_tokens)
        ended = [stream(gateway, key, max_tokens=None), first.result()]
    assert [each["usage"]["completion_tokens"] for each in ended] == [340, 60]
    finishes = [(each["choices"][0]["finish_reason"], each["fairgate"].get("stop_cause")) for each in ended]
    assert finishes == [("length", "budget"), ("length", None)]
    assert sum(row["output_tokens"] for row in settled(gateway, "plugged-two")) == 400


def stream(gateway: Server, key: str, **fields: Any) -> Any:
    """What the events of a stream said last, field by field; it ends within 20 s."""
    asked = body(stream=True, stream_options={"include_usage": True}, **fields)
    said: dict[str, Any] = {}
    end_s = time.monotonic() + 20
    with gateway.http(key) as client, client.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            assert time.monotonic() < end_s, "the stream does not end"
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                said |= {name: value for name, value in event.items() if value}
    return said


def test_a_policy_sets_queue_and_server(gateway: Server, vllm: PluggedVllm) -> None:
    gateway.admin("POST", "/policy", {"policy": "vtc"})
    until(lambda: vllm.scheduler.policy == "vtc")
    shown = gateway.admin("GET", "/policy")
    assert [(each["engine_id"], each["policy"]) for each in shown["engines"]] == [("vllm-a", "vtc")]
    with gateway.http() as client:
        refused = client.post("/admin/v1/policy", json={"policy": "edf"})
    assert refused.status_code in (400, 422)
    assert "edf does not go with this server" in refused.text
    until(lambda: vllm.scheduler.policy == "vtc")
    gateway.admin("POST", "/policy", {"from_settings": True})
    until(lambda: vllm.scheduler.policy == "hybrid")


def test_check_and_doctor_say_what_holds(gateway: Server, vllm: PluggedVllm) -> None:
    toml = gateway.data_dir.parent / "fairgate.toml"
    (finding,) = said_by("model", "check", toml=toml, data_dir=gateway.data_dir)
    assert finding["ok"], finding
    assert "Fairgate's plug-in 0.0.test in vLLM" in finding["detail"]
    assert "16 slots a step, 8 places; never tried with LoRA" in finding["detail"]
    (servers,) = [
        each
        for each in said_by("doctor", toml=toml, data_dir=gateway.data_dir)["checks"]
        if each["check"] == "other servers"
    ]
    assert servers["ok"], servers
    assert "vllm-a has Fairgate's plug-in" in servers["detail"]


def test_a_killed_gateway_is_charged_by_the_plugins_outcome(gateway: Server, vllm: PluggedVllm) -> None:
    key = gateway.tenant("killed", on_low_budget="truncate")
    gateway.limit("killed", "output_tokens", 100_000, window="lifetime")
    asked = body(stream=True, max_tokens=1700, n=2)
    with gateway.http(key) as client, client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        lines = reply.iter_lines()
        for _ in range(60):
            next(lines)
        gateway.kill()
    sequences = vllm.all[-2:]
    until(lambda: not any(sequence in vllm.live for sequence in sequences))
    gateway.start()
    until(lambda: len(settled(gateway, "killed")) == 1)
    (row,) = settled(gateway, "killed")
    emitted = [sequence.emitted_tokens for sequence in sequences]
    assert min(emitted) > 0, "of both choices"
    assert (row["outcome"], row["output_tokens"]) == ("recovered", sum(emitted))
    assert json.loads(row["detail"])["basis"] == "engine"
    assert gateway.verify()["ok"]
    until(lambda: not vllm.outcomes())


def test_servers_that_cannot_be_used_say_why(tmp_path: Path, chat_model: Path, vllm: PluggedVllm) -> None:
    bare, old = PluggedVllm(), PluggedVllm()
    bare.has_plugin = False
    refusal = encode_refusal("protocol_version", "the plug-in speaks protocol 7")
    old.channel.answer = lambda frame, is_core_thread: refusal  # type: ignore[method-assign]
    with in_thread(bare.peer), in_thread(old.peer):
        toml = config(
            tmp_path, ("bare", bare, KEY), ("old", old, KEY), ("foreign", vllm, "of another gateway " * 3)
        )
        with server_process(tmp_path / "data", chat_model, *arguments(toml)) as gateway:
            replicas = gateway.status()["models"]["pools"][MODEL]["replicas"]
            said = {each["replica_id"]: (each["is_up"], each["refusal"]) for each in replicas}
            assert not any(is_up for is_up, _ in said.values())
            assert "no Fairgate plug-in: start it with --scheduler-cls" in said["bare"][1]
            assert "install the fairgate-vllm of the gateway's version" in said["old"][1]
            assert "its plug-in has another key" in said["foreign"][1]
            before = len(vllm.all), len(bare.all), len(old.all)
            with gateway.http(gateway.tenant("nowhere")) as client:
                refused = client.post("/v1/chat/completions", json=body())
            assert refused.status_code == 503
            assert (len(vllm.all), len(bare.all), len(old.all)) == before, "nothing unmetered was sent"
            found = said_by("doctor", toml=toml, data_dir=gateway.data_dir)["checks"]
            (servers,) = [each for each in found if each["check"] == "other servers"]
            assert "bare is not used: it has no Fairgate plug-in" in servers["detail"]
            assert KEY not in gateway.log()


def test_a_key_file_that_others_can_read_stops_the_start(
    tmp_path: Path, chat_model: Path, vllm: PluggedVllm
) -> None:
    toml = config(tmp_path, ("vllm-o", vllm, KEY))
    (tmp_path / "vllm-o.key").chmod(0o644)
    (finding,) = said_by("model", "check", toml=toml, data_dir=tmp_path)
    assert "can be read by others" in finding["detail"]
