"""Attacks of low severity: one test each, against a running server, its files or its commands."""

from __future__ import annotations

import gzip
import json
import os
import socket
import stat
import subprocess
import sys
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.test_crash import ledger
from tests.support.server_process import MODEL, ROOT, Server, server_process, until
from tests.support.warm_command import fairgate

pytestmark = pytest.mark.attack


def test_answers_under_idempotency_keys_fill_no_more_than_the_tenants_bytes(
    tmp_path: Path, chat_model: Path
) -> None:
    config = tmp_path / "fairgate.toml"
    config.write_text("[gateway]\nidempotent_bytes = 65536\n", encoding="utf-8")
    body = {"model": MODEL, "prompt": "count", "max_tokens": 64, "logprobs": 5, "ignore_eos": True, "n": 2}
    with server_process(tmp_path / "data", chat_model, "--config", str(config)) as server:
        server.tenant("hoarder")
        # Keys of one tenant fill one room.
        clients = [server.http(server.key("hoarder")) for _ in range(2)]
        answers = []
        for number in range(14):
            headers = {"Idempotency-Key": f"k{number}"}
            answers.append(clients[number % 2].post("/v1/completions", json=body, headers=headers))
        refused = [answer.json()["error"] for answer in answers if answer.status_code != 200]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert "gateway.idempotent_bytes" in refused[0]["message"]
        again = clients[0].post("/v1/completions", json=body, headers={"Idempotency-Key": "k0"})
        assert again.content == answers[0].content, "what is kept is kept"
        other = server.http(server.tenant("neighbour"))
        for client in (other, *clients):
            headers = {"Idempotency-Key": "other"} if client is other else {}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
            client.close()


def connected(server: Server) -> socket.socket:
    """A plain connection."""
    address = urlsplit(server.url)
    assert address.port is not None
    return socket.create_connection((address.hostname or "", address.port), timeout=20)


def request_bytes(key: str, *headers: str, **fields: Any) -> bytes:
    """A completion as it goes over the wire."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4, "ignore_eos": True} | fields).encode()
    head = [
        "POST /v1/completions HTTP/1.1", "host: x", f"authorization: Bearer {key}",
        "content-type: application/json", f"content-length: {len(body)}", *headers,
    ]  # fmt: skip
    return "\r\n".join([*head, "", ""]).encode() + body


def test_a_request_in_the_pipeline_does_not_hide_that_the_client_has_left(server: Server) -> None:
    key = server.tenant("pipeline")
    traces = server.log().count("Traceback")
    with connected(server) as connection:
        connection.sendall(request_bytes(key, stream=True, max_tokens=7_000) + request_bytes(key))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    with server.http() as client:
        mine = {"tenant": "pipeline"}
        until(lambda: not client.get("/admin/v1/requests", params=mine).json()["data"], deadline_s=5)
    [row] = [
        each for each in ledger(server) if each["kind"] == "settle" and each["outcome"] == "disconnected"
    ]
    assert row["output_tokens"] < 7_000
    assert server.log().count("Traceback") == traces, "no trace of a closed transport"


def test_numbers_in_headers_are_numbers(server: Server) -> None:
    with server.http(server.tenant("numbers")) as client:
        for name in ("X-Fairgate-Timeout-S", "X-Fairgate-Max-Wait-S", "X-Fairgate-Max-Cost-Usd"):
            for text in ("inf", "1_0", "nan", "-1", "1e999"):
                response = client.post(
                    "/v1/completions",
                    json={"model": MODEL, "prompt": "x", "max_tokens": 1},
                    headers={name: text},
                )
                assert (response.status_code, response.json()["error"]["param"]) == (400, name), text


def test_a_compressed_body_is_refused_by_its_name(server: Server) -> None:
    with server.http(server.tenant("compressed")) as client:
        response = client.post(
            "/v1/completions",
            content=gzip.compress(b"{}"),
            headers={"content-encoding": "gzip", "content-type": "application/json"},
        )
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert response.headers["accept-encoding"] == "identity"


def test_a_wish_for_http_2_is_passed_over_and_the_body_is_read(server: Server) -> None:
    key = server.tenant("h2c")
    wish = ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA"]
    with connected(server) as connection:
        for _ in range(2):  # the connection goes on
            connection.sendall(request_bytes(key, *wish))
            response = HTTPResponse(connection)
            response.begin()
            answer = json.loads(response.read())
            assert (response.status, answer["usage"]["completion_tokens"]) == (200, 4)


def test_a_refusal_is_not_as_large_as_what_it_quotes(server: Server) -> None:
    long = "y" * 500_000
    request = {"model": MODEL, "prompt": "x"}
    with server.http(server.tenant("cut-quotes")) as client:
        for response in (
            client.post("/v1/completions", json=request | {long: 1}),
            client.post("/v1/completions", json=request | {"model": long}),
            client.post("/v1/completions", json=request | {"service_tier": long}),
            client.post("/v1/completions", json=request | {"metadata": {long: "x"}}),
            client.post("/v1/completions", json=request, headers={"X-Fairgate-Timeout-S": long[:50_000]}),
            client.get(f"/v1/{long[:50_000]}"),
            client.get(f"/v1/requests/{long[:50_000]}"),
        ):
            assert 400 <= response.status_code < 500
            assert len(response.content) < 2_000
    with server.http() as client:
        for response in (
            client.get(f"/admin/v1/tenants/{long[:50_000]}"),
            client.get("/admin/v1/audit", params={"act": long[:50_000]}),
            client.post("/admin/v1/tenants", json={"name": long}),
            client.post("/admin/v1/limits", json={"tenant": long, "meter": long, "amount": 1}),
        ):
            assert 400 <= response.status_code < 500
            assert len(response.content) < 8_000


def environment() -> dict[str, str]:
    """Without settings of Fairgate's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}


def examined(*arguments: str) -> dict[str, Any]:
    """What the doctor finds, by check. It probes no model."""
    done = fairgate("doctor", "--json", *arguments, env=environment() | {"FAIRGATE_ENGINE_SERVE": "no"})
    return {each["check"]: each for each in json.loads(done.stdout)["checks"]}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_commands_write_is_for_their_user_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "ops.cli.main", "db", "upgrade", "--data-dir", str(tmp_path)],
        env=environment() | {"PYTHONPATH": str(ROOT)}, umask=0o022, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert mode(tmp_path / "fairgate.db") == 0o600


def test_a_refused_start_leaves_no_new_pepper_and_the_doctor_says_what_is_missing(
    tmp_path: Path, server: Server
) -> None:
    url = f"sqlite:///{server.data_dir / 'fairgate.db'}"
    where = ("--data-dir", str(tmp_path), "--database-url", url)
    refused = fairgate("serve", "--port", "0", "--model", str(server.model_dir), *where)
    assert refused.returncode == 1
    assert "made with another pepper" in refused.stderr
    listed = fairgate("tenant", "list", *where)
    assert listed.returncode == 0, "what makes no key needs no pepper"
    refused_key = fairgate("key", "create", "--tenant", "owner", *where)
    assert refused_key.returncode == 1
    assert not (tmp_path / "pepper").exists()
    found = examined(*where)
    assert not found["pepper"]["ok"]
    assert f"{tmp_path / 'pepper'}, which is missing" in found["pepper"]["detail"]
    assert examined("--data-dir", str(server.data_dir))["pepper"]["ok"]


def test_the_owner_key_goes_into_no_log(server: Server) -> None:
    kept = server.data_dir / "owner-key"
    assert kept.read_text().strip() == server.owner_key
    assert mode(kept) == 0o600
    assert json.loads(server.announced)["owner_key_file"] == str(kept)
    assert server.owner_key not in server.announced + server.log()


def test_the_doctor_wants_a_password_of_a_redis_that_other_hosts_reach(tmp_path: Path) -> None:
    found = examined("--data-dir", str(tmp_path), "--redis-url", "redis://192.0.2.7:6379/0")["redis"]
    assert not found["ok"]
    assert "without a password" in found["detail"]
    assert "requirepass" in found["advice"]
