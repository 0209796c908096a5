"""A gateway in front of another server keeps its promises.

Gateway A has no engine; its upstream is a second Fairgate (B) with one. Both are real processes, and B knows
nothing of A but its API key.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from sqlalchemy import create_engine, text

from gateway.requests.prompt import EstimatedRenderer
from ops.cli.main import cli
from tests.e2e.test_cli_serve import run_serve
from tests.support.server_process import MODEL, Server, save_chat_model, server_process, until

HELLO: Any = [{"role": "user", "content": "Hello"}]
KEY_VARIABLE = "UPSTREAM_KEY"
SLOW_KEY_VARIABLE = "SLOW_UPSTREAM_KEY"
PRICES = "tiny=100/300/50,quick=200/600/100,streamed=100/300/50,slow=100/300/50"


def config(path: Path, url: str, tokenizer_dir: Path | None = None, **fields: Any) -> Path:
    """A TOML file that names B."""
    lines = ["[[upstreams]]", 'name = "b"', f'url = "{url}/v1"', f'model = "{MODEL}"']
    lines.append(f'api_key_env = "{KEY_VARIABLE}"')
    if tokenizer_dir is not None:
        lines.append(f'tokenizer_dir = "{tokenizer_dir}"')
    lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    lines += ["[aliases]", f"quick = {{ {MODEL} = 1 }}"]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, chat_model: Path, server: Server) -> Iterator[Server]:
    """A, in front of the shared server."""
    home = tmp_path_factory.mktemp("gateway-a")
    key = server.tenant("gateway-a", tiers=["interactive", "standard", "batch"])
    slow_key = server.tenant("slow-gateway")
    server.limit("slow-gateway", "output_tokens", 5, rate_per_s=1)
    toml = config(home / "a.toml", server.url, chat_model, priority="service_tier", metrics="/metrics")
    with toml.open("a") as file:
        # The same server under two more names: one that streams everything, one that takes minutes.
        for name, variable, whole_tokens in (("streamed", KEY_VARIABLE, 0), ("slow", SLOW_KEY_VARIABLE, 512)):
            file.write(f'[[upstreams]]\nname = "b-{name}"\npool = "{name}"\nmodel = "{MODEL}"\n')
            file.write(f'url = "{server.url}/v1"\ntokenizer_dir = "{chat_model}"\n')
            file.write(f'api_key_env = "{variable}"\nwhole_tokens = {whole_tokens}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, key)
        patch.setenv(SLOW_KEY_VARIABLE, slow_key)
        arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]
        with server_process(home / "data", chat_model, *arguments) as running:
            yield running


def ask(server: Server, key: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | fields
    with server.http(key) as client:
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def settled(server: Server, tenant: str) -> list[dict[str, Any]]:
    """Settle rows of a tenant's requests, straight from the database, the oldest first."""
    query = (
        "SELECT ledger.* FROM ledger JOIN tenants ON tenants.id = ledger.tenant_id"
        " WHERE tenants.name = :tenant AND kind = 'settle' ORDER BY ledger.id"
    )
    engine = create_engine(f"sqlite:///{server.data_dir / 'fairgate.db'}")
    try:
        with engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(query), {"tenant": tenant}).mappings()]
    finally:
        engine.dispose()


def test_an_answer_through_two_gateways_is_the_same_and_costs_the_same(
    gateway: Server, server: Server
) -> None:
    direct = ask(server, server.tenant("direct-upstream"))
    key = gateway.tenant("through")
    through = ask(gateway, key)
    assert through["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    assert through["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert through["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"] == 6
    account = through["fairgate"]
    assert (account["upstream"], account["basis"]) == ("b", "upstream")
    assert "fair at dispatch only" in account["estimate"]["basis"]


def test_a_model_with_defaults_of_its_own_has_them_directly_and_through_another_gateway(
    tmp_path: Path,
) -> None:
    own: dict[str, Any] = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 1.3}
    neutral: dict[str, Any] = {"temperature": 1, "top_k": -1, "repetition_penalty": 1, "seed": 3}
    model_dir = save_chat_model(tmp_path / "model")
    (model_dir / "generation_config.json").write_text(json.dumps(own | {"do_sample": True}))
    with ExitStack() as stack:
        behind = stack.enter_context(server_process(tmp_path / "behind", model_dir))
        key = behind.tenant("direct")
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(KEY_VARIABLE, key)
        toml = config(tmp_path / "a.toml", behind.url, model_dir)
        arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]
        front = stack.enter_context(server_process(tmp_path / "front", model_dir, *arguments))
        clients = [stack.enter_context(each) for each in (behind.http(key), front.http(front.tenant("x")))]

        def texts(said: dict[str, Any]) -> list[str]:
            """Of a chat and of a text completion, directly and through the other gateway."""
            common = {"model": MODEL, "max_tokens": 24, "ignore_eos": True} | said
            chats = [
                client.post("/v1/chat/completions", json=common | {"messages": HELLO}) for client in clients
            ]
            plain = [client.post("/v1/completions", json=common | {"prompt": "Hello"}) for client in clients]
            found = [each.json()["choices"][0]["message"]["content"] for each in chats]
            return found + [each.json()["choices"][0]["text"] for each in plain]

        unsaid, said, drawn, greedy = (texts(each) for each in ({}, own, neutral, {"repetition_penalty": 1}))
    for found in (unsaid, said, drawn, greedy):
        assert found[::2] == found[1::2]
    assert unsaid == said
    assert all(a != b for a, b in zip(unsaid, drawn, strict=True))
    assert greedy not in (unsaid, drawn), "what is said goes before, field by field"


def test_streams_pass_through_piece_by_piece(gateway: Server) -> None:
    key = gateway.tenant("streams")
    whole = ask(gateway, key, max_tokens=20)
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as client:

        def stream(max_tokens: int) -> list[ChatCompletionChunk]:
            return list(
                client.chat.completions.create(
                    model=MODEL, messages=HELLO, max_tokens=max_tokens, temperature=0, stream=True,
                    stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                )
            )  # fmt: skip

        chunks = stream(20)
        # What comes while a process waits for a processor goes on in one piece: this is longer than that.
        many = _pieces(stream(400))
    assert "".join(_pieces(chunks)) == whole["choices"][0]["message"]["content"]
    assert len(many) > 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def _pieces(chunks: list[ChatCompletionChunk]) -> list[str]:
    return [piece for chunk in chunks if chunk.choices and (piece := chunk.choices[0].delta.content)]


def test_whole_and_streamed_answers_are_the_same_and_cost_the_same(gateway: Server) -> None:
    key = gateway.tenant("whole")
    gateway.limit("whole", "total_tokens", 1_000_000, rate_per_s=1_000_000)
    gateway.limit("whole", "cost_nanousd", 10**12, window="day")
    cases: list[dict[str, Any]] = [
        {"max_tokens": 20},
        {"max_tokens": 12, "n": 2, "seed": 5, "temperature": 1},
        {"max_tokens": 5, "logprobs": True, "top_logprobs": 2},
        {"max_tokens": 40, "ignore_eos": False, "stop": ["a", "e"]},
    ]
    before = calls(gateway)
    for fields in cases:
        ask(gateway, key, **fields)  # both find the same of its prompt cached
        came_whole, streamed = ask(gateway, key, **fields), ask(gateway, key, model="streamed", **fields)
        assert came_whole["choices"] == streamed["choices"]
        assert came_whole["usage"] == streamed["usage"]
        assert came_whole["fairgate"]["basis"] == streamed["fairgate"]["basis"] == "upstream"
    now = calls(gateway)
    sequences = sum(fields.get("n", 1) for fields in cases)
    assert now["b"]["whole_requests"] - before["b"]["whole_requests"] == 2 * sequences
    assert now["b-streamed"]["requests"] - before["b-streamed"]["requests"] == sequences
    assert now["b-streamed"]["whole_requests"] == 0
    rows = settled(gateway, "whole")
    charged = [
        [row[name] for name in ("outcome", "input_tokens", "output_tokens", "cost_nanousd")] for row in rows
    ]
    assert charged[1::3] == charged[2::3]
    assert gateway.limit_state("whole", "cost_nanousd")["used"] == sum(row["cost_nanousd"] for row in rows)


def calls(server: Server) -> dict[str, dict[str, Any]]:
    """The replicas of all pools, as the status page shows them."""
    pools = server.status()["models"]["pools"].values()
    return {each["replica_id"]: each for pool in pools for each in pool["replicas"]}


def test_a_client_that_does_not_wait_for_a_whole_answer_is_charged_its_prompt(
    gateway: Server, server: Server
) -> None:
    key = gateway.tenant("impatient")
    body = json.dumps({"model": "slow", "messages": HELLO, "max_tokens": 100, "ignore_eos": True})
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(request.encode())
        until(lambda: calls(gateway)["b-slow"]["running"] == 1)
        until(lambda: not server.is_idle())
    until(lambda: settled(gateway, "impatient"))
    (row,) = settled(gateway, "impatient")
    detail = json.loads(row["detail"]) if isinstance(row["detail"], str) else row["detail"]
    prompt_tokens = ask(gateway, key)["usage"]["prompt_tokens"]
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("disconnected", prompt_tokens, 0)
    assert (detail["uncertain_tokens"], detail["basis"]) == (100, "gateway")
    until(server.is_idle)


def test_several_choices_and_prompts_are_one_request_here(gateway: Server) -> None:
    key = gateway.tenant("choices")
    answer = ask(gateway, key, n=2, seed=3, temperature=1, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 8
    with gateway.http(key) as client:
        body = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 3, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
    assert response.json()["usage"]["completion_tokens"] == 6


def test_an_answer_without_a_length_ends_with_the_budget_to_the_token(gateway: Server) -> None:
    key = gateway.tenant("cut")
    prompt_tokens = ask(gateway, key)["usage"]["prompt_tokens"]
    gateway.limit("cut", "total_tokens", prompt_tokens + 30, window="lifetime")
    answer = ask(gateway, key, max_tokens=None)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["fairgate"]["stop_cause"] == "budget"
    assert answer["usage"]["completion_tokens"] == 30
    state = gateway.limit_state("cut", "total_tokens")
    assert (state["used"], state["held"]) == (state["amount"], 0)


def test_fifty_at_once_never_exceed_a_hard_limit(gateway: Server) -> None:
    key = gateway.tenant("many")
    gateway.limit("many", "output_tokens", 100, window="lifetime")

    def one(_: int) -> int:
        with gateway.http(key) as client:
            body = {"model": MODEL, "messages": HELLO, "max_tokens": 7, "ignore_eos": True}
            response = client.post("/v1/chat/completions", json=body)
        if response.status_code == 429:
            return 0
        assert response.status_code == 200, response.text
        tokens: int = response.json()["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(50) as threads:
        tokens = list(threads.map(one, range(50)))
    assert sum(tokens) == gateway.limit_state("many", "output_tokens")["used"] == 98
    assert gateway.verify()["ok"]


def test_a_rate_shapes_the_stream_here_while_the_server_runs_on(gateway: Server) -> None:
    key = gateway.tenant("rate")
    gateway.limit("rate", "output_tokens", 40, rate_per_s=40)
    answer = ask(gateway, key, max_tokens=80)
    assert answer["usage"]["completion_tokens"] == 80
    assert answer["fairgate"]["top_ups"] >= 1


def test_a_client_that_leaves_stops_the_other_server(gateway: Server, server: Server) -> None:
    key = gateway.tenant("leaver")
    body = {"model": MODEL, "messages": HELLO, "stream": True, "ignore_eos": True}
    with gateway.http(key) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(9):
            next(lines)
    until(lambda: settled(gateway, "leaver"))
    (row,) = settled(gateway, "leaver")
    assert row["outcome"] == "disconnected"
    assert row["output_tokens"] >= 1
    until(server.is_idle)


def test_the_tier_is_passed_on(gateway: Server, server: Server) -> None:
    key = gateway.tenant("tiers", tier="batch", tiers=["batch"])
    before = len(settled(server, "gateway-a"))
    ask(gateway, key)
    assert [row["tier"] for row in settled(server, "gateway-a")[before:]] == ["batch"]


def test_an_alias_is_a_name_with_a_price_of_its_own(gateway: Server) -> None:
    key = gateway.tenant("alias")
    answer = ask(gateway, key, model="quick")
    assert answer["model"] == "quick"
    used = answer["usage"]
    cost = 200 * used["prompt_tokens"] + 600 * used["completion_tokens"]
    cached = used["prompt_tokens_details"]["cached_tokens"]
    assert answer["fairgate"]["actual"]["cost_nanousd"] == cost - 100 * cached
    with gateway.http(key) as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == [MODEL, "streamed", "slow", "quick"]
        assert client.get("/v1/models/quick").json()["id"] == "quick"
    only = gateway.key("alias", models=["quick"])
    with gateway.http(only) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["quick"]
        refused = client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_the_status_page_shows_pools_and_replicas(gateway: Server) -> None:
    models = gateway.status()["models"]
    (replica,) = models["pools"][MODEL]["replicas"]
    assert (replica["replica_id"], replica["is_up"], replica["breaker"]) == ("b", True, "closed")
    assert models["aliases"] == {"quick": {MODEL: 1}}
    until(lambda: gateway.status()["models"]["pools"][MODEL]["replicas"][0]["saturation"] is not None)
    with httpx.Client(base_url=gateway.url) as client:
        assert client.get("/readyz").json()["checks"]["engine"] == "ok"
        assert 'fairgate_engine_up{replica="b"} 1.0' in client.get("/metrics").text


def test_the_command_line_lists_models_and_checks_their_servers(
    tmp_path: Path, server: Server, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = config(tmp_path / "a.toml", server.url, chat_model, metrics="/metrics")
    at = ["--config", str(toml), "--data-dir", str(server.data_dir), "--json"]
    runner = CliRunner(env={"FAIRGATE_ENGINE_SERVE": "no", KEY_VARIABLE: server.owner_key})
    listed = runner.invoke(cli, ["model", "list", *at])
    assert json.loads(listed.stdout) == [
        {"name": MODEL, "kind": "model", "means": {}, "replicas": ["b"], "can": {}, "priced": True},
        {"name": "quick", "kind": "alias", "means": {MODEL: 1}, "replicas": [], "can": {}, "priced": False},
    ]
    checked = runner.invoke(cli, ["model", "check", *at])
    (finding,) = json.loads(checked.stdout)
    assert (checked.exit_code, finding["ok"]) == (0, True), finding
    assert "of the kind other it can do json_object, json_schema; it refuses" in finding["detail"]
    assert "tools (400 'tools' cannot be taken: this model's chat template has no place" in finding["detail"]
    other = config(tmp_path / "b.toml", server.url, chat_model, pool="x").read_text()
    toml.write_text(other.replace(f'model = "{MODEL}"', 'model = "ghost"'))
    checked = runner.invoke(cli, ["model", "check", *at])
    server_finding, alias_finding = json.loads(checked.stdout)
    assert checked.exit_code == 1
    assert "does not have the model 'ghost'" in server_finding["detail"]
    assert "'quick' means 'tiny', which is no model here" in alias_finding["detail"]


def test_an_alias_to_nothing_stops_the_start(tmp_path: Path, chat_model: Path) -> None:
    arguments = ["--data-dir", str(tmp_path), "--model", str(chat_model), "--model-name", MODEL]
    refused = run_serve(*arguments, "--aliases", '{"quick": {"ghost": 1}}')
    assert refused.returncode == 1
    assert "'quick' means 'ghost', which is no model here; there are tiny" in refused.stderr
    lonely = run_serve(*arguments, "--engine-serve", "no")
    assert lonely.returncode == 1
    assert "engine.serve is no, and there is no other server" in lonely.stderr


def test_several_models_share_tenants_and_budgets_and_nothing_else(
    tmp_path: Path, server: Server, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, server.owner_key)
    toml = config(tmp_path / "a.toml", server.url, chat_model, pool="remote")
    toml.write_text(
        toml.read_text().partition("[aliases]")[0] + "[aliases]\nany = { tiny = 1, remote = 1 }\n"
    )
    prices = "tiny=100/300/50,remote=100/300/50,any=100/300/50"
    with server_process(tmp_path / "data", chat_model, "--config", str(toml), "--prices", prices) as gateway:
        key = gateway.tenant("acme")
        gateway.limit("acme", "output_tokens", 1_000, window="lifetime")
        here, there = ask(gateway, key), ask(gateway, key, model="remote")
        assert here["choices"][0]["message"] == there["choices"][0]["message"]
        assert (here["fairgate"]["basis"], there["fairgate"]["basis"]) == ("engine", "upstream")
        assert there["fairgate"]["upstream"] == "b"
        drawn = [ask(gateway, key, model="any", max_tokens=2)["fairgate"]["upstream"] for _ in range(24)]
        assert set(drawn) == {"b", here["fairgate"]["upstream"]}
        assert gateway.limit_state("acme", "output_tokens")["used"] == 6 + 6 + 24 * 2
        status = gateway.status()
        assert set(status["models"]["pools"]) == {MODEL, "remote"}
        (tenant,) = [each for each in status["tenants"] if each["name"] == "acme"]
        assert (tenant["finished"], tenant["output_tokens"]) == (26, 60)
        with gateway.http(key) as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [
                MODEL,
                "remote",
                "any",
            ]
            quote = client.post("/v1/quotes", json={"model": "remote", "messages": HELLO, "max_tokens": 4})
        assert quote.is_success, quote.text
        assert gateway.verify()["ok"]


def test_an_engine_of_another_model_is_not_used(tmp_path: Path, server: Server) -> None:
    """A second gateway, which takes prompts for `other-model`, is told to share the engine of the first."""
    other = save_chat_model(tmp_path / "other-model")
    address = f"ipc://{server.data_dir}/run/engine-0.sock"
    note = server.data_dir / "run" / "engine-0.address"
    if note.is_file():
        address = note.read_text().strip()
    with server_process(tmp_path / "data", other, "--engine-address", address) as gateway:
        (replica,) = gateway.status()["models"]["pools"][MODEL]["replicas"]
        assert not replica["is_up"]
        assert "this gateway's model is 'other-model'" in replica["refusal"]
        assert "is not used: it serves" in gateway.log()
        with gateway.http(gateway.tenant("acme")) as client:
            refused = client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


def test_a_server_killed_in_mid_stream_is_an_error_event_and_an_exact_charge(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_process(tmp_path / "b", chat_model) as other:
        monkeypatch.setenv(KEY_VARIABLE, other.owner_key)
        # Without a tokenizer prompts are estimated, and charged as B counts them, up to what was held.
        toml = config(tmp_path / "a.toml", other.url)
        arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]
        with server_process(tmp_path / "a", chat_model, *arguments) as gateway:
            key = gateway.tenant("acme")
            gateway.limit("acme", "total_tokens", 100_000, window="lifetime")
            complete = ask(gateway, key)
            counted = ask(other, other.owner_key)["usage"]["prompt_tokens"]
            assert complete["usage"]["prompt_tokens"] == min(counted, estimated_tokens())
            tokens, error = cut(gateway, other, key)
            assert error["code"] == "upstream_error"
            until(lambda: len(settled(gateway, "acme")) == 2)
            row = next(row for row in settled(gateway, "acme") if row["outcome"] == "upstream_error")
            assert row["output_tokens"] == tokens
            state = gateway.limit_state("acme", "total_tokens")
            rows = settled(gateway, "acme")
            assert state["held"] == 0
            assert state["used"] == sum(each["input_tokens"] + each["output_tokens"] for each in rows)
            assert gateway.verify()["ok"]
            with gateway.http(key) as client:
                until(lambda: not gateway.status()["models"]["pools"][MODEL]["is_up"])
                body = {"model": MODEL, "messages": HELLO}
                assert client.post("/v1/chat/completions", json=body).status_code == 503


def estimated_tokens() -> int:
    return len(EstimatedRenderer().chat_tokens(HELLO))


def cut(gateway: Server, other: Server, key: str) -> tuple[int, dict[str, Any]]:
    """Kills `other` in the middle of a stream; returns how many tokens came, and the error event."""
    tokens, killed = 0, False
    error: dict[str, Any] = {}
    body = {"model": MODEL, "messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 900}
    body["logprobs"] = True  # they name each token: those that arrive together are one piece
    with gateway.http(key) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error = event["error"]
                continue
            told = [choice["logprobs"] for choice in event["choices"] if choice["logprobs"]]
            tokens += sum(len(each["content"]) for each in told)
            if tokens >= 5 and not killed:
                other.kill()
                killed = True
    return tokens, error
