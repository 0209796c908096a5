"""The command line beside a real server: what it changes arrives, and what cannot start says why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from ops.settings.settings import SHIPPED_MODEL
from tests.support import warm_command
from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, ROOT, Server, server_process, until

CHANGE_ARRIVES_S = 5.0
"""The promise is one second; the rest is for a machine that does other things as well."""


def complete(server: Server, key: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
    with server.http(key) as client:
        return client.post("/v1/completions", json=body)


def run_serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    return warm_command.fairgate("serve", "--port", "0", *arguments, env=clean | environment)


def test_a_key_made_on_the_command_line_opens_a_running_server_until_it_is_revoked(server: Server) -> None:
    data_dir = server.data_dir
    answer_of(data_dir, "tenant", "create", "cli-keys")
    for _ in range(8):
        made = answer_of(data_dir, "key", "create", "--tenant", "cli-keys")
        assert complete(server, made["key"]).status_code == 200, "it opens the server as soon as it is shown"
    rotated = answer_of(data_dir, "key", "rotate", made["id"], "--grace", "10m")
    until(lambda: complete(server, rotated["key"]).status_code == 200, CHANGE_ARRIVES_S)
    assert complete(server, made["key"]).status_code == 200
    answer_of(data_dir, "key", "revoke", made["id"])
    until(lambda: complete(server, rotated["key"]).status_code == 401, CHANGE_ARRIVES_S)
    assert complete(server, made["key"]).status_code == 401


def test_a_suspended_tenant_is_out(server: Server) -> None:
    key = server.tenant("cli-suspended")
    assert complete(server, key).status_code == 200
    answer_of(server.data_dir, "tenant", "suspend", "cli-suspended")
    until(lambda: complete(server, key).status_code == 403, CHANGE_ARRIVES_S)


def test_a_limit_set_on_the_command_line_binds_a_running_server_until_it_is_removed(server: Server) -> None:
    key = server.tenant("cli-limits")
    assert complete(server, key).status_code == 200
    limit = answer_of(
        server.data_dir, "limit", "set", "--tenant", "cli-limits", "--meter", "total_tokens",
        "--window", "lifetime", "--amount", "3",
    )  # fmt: skip
    until(lambda: complete(server, key).status_code == 429, CHANGE_ARRIVES_S)
    refused = complete(server, key)
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert refused.headers["x-should-retry"] == "false"
    answer_of(server.data_dir, "limit", "remove", limit["id"])
    until(lambda: complete(server, key).status_code == 200, CHANGE_ARRIVES_S)


def test_the_ledger_shows_every_row_of_one_request(server: Server) -> None:
    with server.http(server.tenant("shown")) as client:
        answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 4})
    request_id = answer.headers["x-request-id"]
    shown = answer_of(server.data_dir, "ledger", "show", request_id)
    assert shown["request_id"] == request_id
    assert [row["kind"] for row in shown["rows"]] == ["reserve", "settle"]
    assert shown["rows"][1]["output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert shown["rows"][1]["detail"]["basis"] == "engine"
    text = fairgate(server.data_dir, "ledger", "show", request_id).output
    assert "reserve" in text
    assert "basis: engine" in text
    unknown = fairgate(server.data_dir, "ledger", "show", "req_none")
    assert unknown.exit_code == 1
    assert "no request 'req_none'" in unknown.output


def test_the_ledger_is_verified_against_the_counters_of_the_running_server(server: Server) -> None:
    until(server.is_idle)
    report = answer_of(server.data_dir, "ledger", "verify")
    assert report["ok"]
    assert report["counters"] == "server"
    assert report["settles"] == report["reserves"] > 0


def test_the_doctor_finds_a_running_server_healthy(server: Server) -> None:
    report = answer_of(server.data_dir, "doctor", "--model", str(server.model_dir))
    assert report["ok"]
    checks = {item["check"]: item for item in report["checks"]}
    assert {"database", "redis", "engine", "model", "clock"} <= checks.keys()
    assert server.url in checks["engine"]["detail"]


def test_the_doctor_compares_a_rule_file(tmp_path: Path) -> None:
    rules = tmp_path / "fairgate.rules.yml"
    rules.write_text("groups: []")
    [*_, found] = json.loads(
        CliRunner()
        .invoke(cli, ["doctor", "--data-dir", str(tmp_path), "--rules", str(rules), "--json"])
        .stdout
    )["checks"]
    assert (found["check"], found["ok"]) == ("alert rules", False)
    assert found["advice"] == f"run `fairgate alerts rules > {rules}`, and reload Prometheus"


def test_the_doctor_says_what_to_do_for_each_thing_that_is_wrong(tmp_path: Path) -> None:
    result = fairgate(
        tmp_path / "none", "doctor", "--json",
        "--model", str(tmp_path), "--redis-url", "redis://127.0.0.1:1/0",
    )  # fmt: skip
    assert result.exit_code == 1
    wrong = {item["check"]: item for item in json.loads(result.stdout)["checks"] if not item["ok"]}
    assert wrong.keys() == {"data directory", "database", "redis", "model"}
    assert all(item["advice"] for item in wrong.values())
    assert "fairgate serve" in wrong["database"]["advice"]
    assert not (tmp_path / "none").exists()


def test_a_second_server_on_the_same_data_directory_is_refused(server: Server) -> None:
    done = run_serve("--data-dir", str(server.data_dir), "--model", str(server.model_dir))
    assert done.returncode == 1
    assert "already runs" in done.stderr
    assert server.url in done.stderr
    assert server.is_idle()


def test_a_port_in_use_is_one_clear_line(tmp_path: Path, chat_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_serve("--data-dir", str(tmp_path), "--model", str(chat_model), "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == (
        f"fairgate serve: 127.0.0.1:{port} is in use; stop what uses it,"
        " or choose another with --port (0 takes a free one)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--database-url", "postgresql://nobody:hunter2@127.0.0.1:1/none"),
            ("--database-url", "127.0.0.1:1"),
        ),
        (("--redis-url", "redis://:hunter2@127.0.0.1:1/0"), ("--redis-url", "127.0.0.1:1")),
        (("--model", "{empty}"), ("config.json",)),
        (("--model", "{no_weights}"), ("no weights", "*.safetensors")),
        (("--model", "/no/such/directory"), ("/no/such/directory",)),
        (("--host", "203.0.113.7"), ("203.0.113.7", "--host")),
        (("--model", "acme/never-fetched"), ("acme/never-fetched", "HF_HOME", "hf download")),
    ],
    ids=["database", "redis", "not a model", "no weights", "no directory", "not our address", "not cached"],
)
def test_what_cannot_start_is_one_clear_line_without_a_driver_s_words(
    tmp_path: Path, chat_model: Path, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text("{}")
    filled = [text.format(empty=tmp_path / "empty", no_weights=tmp_path / "no_weights") for text in arguments]
    model = () if "--model" in filled else ("--model", str(chat_model))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = run_serve("--data-dir", str(tmp_path / "data"), "--log-level", "error", *model, *filled, **offline)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in said), done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_kv_cache_smaller_than_one_context_stops_the_start(tmp_path: Path) -> None:
    """The shipped model's context is 2,048 tokens."""
    done = run_serve("--data-dir", str(tmp_path), "--engine-kv-blocks", "10")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "fairgate serve: the engine did not start: the KV cache holds 160 tokens (10 blocks of 16:"
        " engine.kv_blocks), but the model's context is 2048 tokens, which take 128 blocks: set"
        " engine.kv_blocks to at least 128 (6MiB), or leave it out; or serve shorter contexts on purpose with"
        " --context 160"
    )
    assert "Traceback" not in done.stderr


def test_an_attention_kernel_that_cannot_run_stops_the_start(tmp_path: Path) -> None:
    done = run_serve("--data-dir", str(tmp_path), "--engine-attention", "triton", "--engine-device", "cpu")
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        "fairgate serve: the engine did not start: attention kernel 'triton' cannot run: it"
    )
    assert said.endswith("(engine.attention=auto takes the best that can)")
    assert "Traceback" not in done.stderr


def test_a_shorter_context_is_served_on_purpose_and_the_doctor_says_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("--engine-kv-blocks", "10", "--engine-context", "161")
    attention = ("--engine-attention", "reference", "--engine-device", "cpu")

    def finding(check: str = "sizes") -> dict[str, Any]:
        checks = json.loads(fairgate(tmp_path, "doctor", "--json").stdout)["checks"]
        return next(item for item in checks if item["check"] == check)

    with (
        server_process(tmp_path, SHIPPED_MODEL, *sizes, *attention) as server,
        server.http(server.owner_key) as client,
    ):
        body = {"model": MODEL, "prompt": [5] * 100, "max_tokens": 61}
        assert client.post("/v1/completions", json=body).status_code == 200
        refused = client.post("/v1/completions", json=body | {"max_tokens": 62})
        pool = client.get("/admin/v1/status").json()["models"]["pools"][MODEL]
        # Its engine has other sizes than a start with this shell's settings would have.
        assert "with the settings of this shell" in finding()["detail"]
        runs = "engine-0: plain forward pass, attention reference: chosen by name"
        assert runs in finding("engine")["detail"]
        labels = 'attention="reference",device="cpu",dtype="float32",forward="plain"'
        assert f'fairgate_engine_info{{{labels},replica="engine-0"}} 1.0' in client.get("/metrics").text
    assert (pool["context_tokens"], pool["long_tokens"]) == (161, 120)
    assert refused.status_code == 400
    assert "maximum context length is 161 tokens" in refused.json()["error"]["message"]

    monkeypatch.setenv("FAIRGATE_ENGINE_KV_BLOCKS", "10")
    found = finding()
    assert not found["ok"]
    assert "--context 160" in found["detail"]
    assert "attention triton: not used, it runs on a CUDA card" in finding("speed")["detail"]
    monkeypatch.setenv("FAIRGATE_ENGINE_CONTEXT", "161")
    found = finding()
    assert found["ok"]
    for part in ("context 161 tokens (engine.context)", "kv_blocks 10 blocks", "max_sequences 32 (by device"):
        assert part in found["detail"]


def test_a_model_named_by_its_id_is_served_from_the_cache(tmp_path: Path, chat_model: Path) -> None:
    """The cache as huggingface_hub lays it out; no network is asked."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "hub" / "models--acme--chat"
    shutil.copytree(chat_model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v2").write_text(commit)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "ops.cli.main", "serve", "--json", "--port", "0", "--engine-threads", "1",
            "--data-dir", str(tmp_path / "data"), "--model", "acme/chat", "--revision", "v2",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        started = json.loads(line)
        assert started["model"] == "acme/chat"
        headers = {"authorization": f"Bearer {Path(started['owner_key_file']).read_text().strip()}"}
        models = httpx.get(f"{started['url']}/v1/models", headers=headers).json()["data"]
        assert [each["id"] for each in models] == ["acme/chat"]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_bad_setting_is_exit_code_2_and_named(tmp_path: Path) -> None:
    done = run_serve("--data-dir", str(tmp_path), FAIRGATE_ENGINE_THREADS="many")
    assert done.returncode == 2
    assert "FAIRGATE_ENGINE_THREADS" in done.stderr
    assert "0 to 1024" in done.stderr


def refuses_connections(server: Server) -> bool:
    try:
        with server.http() as client:
            client.get("/healthz")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        # It stood in the listener's backlog when that was closed: ask again.
        return False
    return False


def assert_a_running_stream_outlives_sigterm(server: Server) -> None:
    """Told to end at the first token, it still sends the whole answer, and admits no new request."""
    assert server.process is not None
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with server.http() as client, client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        first = next(line for line in lines if line.startswith("data:"))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses_connections(server))
        rest = [line for line in lines if line.startswith("data:")]
    assert first != "data: [DONE]"
    assert len(rest) > 100
    assert rest[-1] == "data: [DONE]"


def test_a_server_ends_in_order_leaves_nothing_and_starts_again_with_its_keys(
    tmp_path: Path, chat_model: Path
) -> None:
    with server_process(tmp_path / "data", chat_model) as server:
        first_owner_key = server.owner_key
        assert complete(server, first_owner_key).status_code == 200
        engine: psutil.Process = server.engine()
        server_file = server.data_dir / "run" / "server.json"
        assert stat.S_IMODE(server_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.data_dir.stat().st_mode) & 0o700 == 0o700
        assert stat.S_IMODE((server.data_dir / "pepper").stat().st_mode) == 0o600
        assert_a_running_stream_outlives_sigterm(server)
        server.stop()
        assert not server_file.exists()
        assert not engine.is_running()
        offline = answer_of(server.data_dir, "ledger", "verify")
        assert (offline["ok"], offline["counters"], offline["settles"]) == (True, "none", 2)
        server.owner_key = ""
        server.start()
        assert server.owner_key == "", "the owner key is shown at the first start only"
        assert complete(server, first_owner_key).status_code == 200


def test_postgresql_and_redis_instead_of_the_embedded_default(
    tmp_path: Path, chat_model: Path, postgres_url: str, redis_url: str
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    grown_up = ("--database-url", postgres_url, "--redis-url", redis_url)
    with server_process(tmp_path / "data", chat_model, *grown_up) as server:
        at = ("--database-url", postgres_url)
        answer_of(server.data_dir, "tenant", "create", "acme", *at)
        key = answer_of(server.data_dir, "key", "create", "--tenant", "acme", *at)["key"]
        answer_of(
            server.data_dir, "limit", "set", "--tenant", "acme", "--meter", "requests",
            "--window", "lifetime", "--amount", "2", *at,
        )  # fmt: skip
        until(lambda: complete(server, key).status_code == 429, CHANGE_ARRIVES_S)
        until(server.is_idle)
        report = answer_of(server.data_dir, "ledger", "verify", *at)
        assert (report["ok"], report["limits"]) == (True, 1)
        assert not (server.data_dir / "fairgate.db").exists()
        doctor = answer_of(
            server.data_dir, "doctor", "--model", str(chat_model), "--redis-url", redis_url, *at
        )
        assert {item["check"]: item["detail"] for item in doctor["checks"]}["redis"] == "answers"
