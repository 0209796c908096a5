"""Every wrong input is refused clearly, in OpenAI's shape, without a leak."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.server_process import MODEL, Server, until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
FORBIDDEN_WORDS = ("traceback", "sqlalchemy", "sqlite", "redis.", "psycopg", 'file "/', "errno", "msgspec")


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    return server.tenant("bad-input", tiers=["standard", "batch"])


@pytest.fixture
def client(server: Server, key: str) -> Iterator[httpx.Client]:
    with server.http(key) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_leaks(server: Server) -> Iterator[None]:
    yield
    until(server.is_idle)


def refused(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """The message of a refusal in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert error["param"] == param, error
    message: str = error["message"]
    assert len(message) > 15
    assert not any(word in response.text.lower() for word in FORBIDDEN_WORDS), response.text
    return message


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 1} | fields


FIELDS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "gpt-9"}, 404, "model_not_found", "model"),
    ({"model": 5}, 400, "invalid_type", "model"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hi"}, 400, "invalid_type", "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "unsupported_parameter",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "context_length_exceeded", "messages"),
    ({"max_tokens": 1_000_000}, 400, "context_length_exceeded", "max_tokens"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": -5}, 400, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.5}, 400, "invalid_type", "max_tokens"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, 400, "invalid_value", "max_tokens"),
    ({"temperature": -0.1}, 400, "invalid_value", "temperature"),
    ({"temperature": 2.01}, 400, "invalid_value", "temperature"),
    ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
    ({"temperature": True}, 400, "invalid_type", "temperature"),
    ({"top_p": -1}, 400, "invalid_value", "top_p"),
    ({"top_p": 1.1}, 400, "invalid_value", "top_p"),
    ({"top_k": -2}, 400, "invalid_value", "top_k"),
    ({"min_p": 2}, 400, "invalid_value", "min_p"),
    ({"presence_penalty": -2.5}, 400, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": 3}, 400, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"999999": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias.5"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"n": 9}, 400, "invalid_value", "n"),
    ({"seed": 2**70}, 400, "invalid_value", "seed"),
    ({"stop": ["a"] * 17}, 400, "invalid_value", "stop"),
    ({"stop": ["x" * 10_000]}, 400, "invalid_value", "stop"),
    ({"stop": [""]}, 400, "invalid_value", "stop"),
    ({"stop": [1]}, 400, "invalid_type", "stop[0]"),
    ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ({"service_tier": "gold"}, 400, "invalid_value", "service_tier"),
    ({"service_tier": "priority"}, 403, "service_tier_not_allowed", "service_tier"),
    ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools[0].function"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "unsupported_parameter",
        "tools",
    ),
    ({"reasoning_effort": "low"}, 400, "unsupported_parameter", "reasoning_effort"),
    ({"min_tokens": 2}, 400, "unsupported_parameter", "min_tokens"),
    ({"cache_salt": "x"}, 400, "unsupported_parameter", "cache_salt"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}},
        400,
        "invalid_value",
        "response_format.json_schema.schema",
    ),
    (
        {"structured_outputs": {"whitespace": " "}},
        400,
        "unsupported_parameter",
        "structured_outputs.whitespace",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "invalid_value", "guided_choice"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 2},
        400,
        "invalid_value",
        "tools[1].function.name",
    ),
    ({"frobnicate": 1}, 400, "unknown_parameter", "frobnicate"),
]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    FIELDS,
    ids=[f"{row[3]}-{index}" for index, row in enumerate(FIELDS)],
)
def test_a_bad_field_is_named(
    client: httpx.Client, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    refused(client.post(CHAT, json=chat(**fields)), status, code, param)


TEXT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_type", "prompt"),
    ({"prompt": [99999]}, "invalid_value", "prompt"),
    ({"prompt": [-1]}, "invalid_value", "prompt"),
    ({"prompt": ["x"] * 17}, "invalid_value", "prompt"),
    ({"prompt": [1] * 9000}, "context_length_exceeded", "prompt"),
    ({"prompt": "x", "echo": True}, "unsupported_parameter", "echo"),
    ({"prompt": "x", "suffix": "y"}, "unsupported_parameter", "suffix"),
    ({"prompt": "x", "best_of": 3}, "unsupported_parameter", "best_of"),
    ({"prompt": "x", "logprobs": 100}, "invalid_value", "logprobs"),
    ({}, "missing_required_parameter", "prompt"),
]


@pytest.mark.parametrize(("fields", "code", "param"), TEXT_FIELDS)
def test_a_bad_field_of_a_text_completion_is_named(
    client: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": MODEL, "max_tokens": 1} | fields
    refused(client.post("/v1/completions", json=body), 400, code, param)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_is_named(client: httpx.Client, number: str) -> None:
    body = json.dumps(chat()).replace('"max_tokens": 1', f'"temperature": {number}')
    response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert "finite" in refused(response, 400, "invalid_value", "temperature")


@pytest.mark.parametrize(
    "body", [b"{", b"", b"nonsense", b"\xff\xfe", b"[" * 50_000, b'{"model": "tiny", "messages": [}'],
    ids=["cut", "empty", "word", "bytes", "deep", "broken"],
)  # fmt: skip
def test_a_body_that_is_not_json_is_refused(client: httpx.Client, body: bytes) -> None:
    response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] in ("invalid_json", "invalid_type")
    assert not any(word in response.text.lower() for word in FORBIDDEN_WORDS)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "multipart/form-data; boundary=x", "application/xml", ""]
)
def test_a_wrong_content_type_is_refused(client: httpx.Client, content_type: str) -> None:
    response = client.post(CHAT, content=json.dumps(chat()), headers={"content-type": content_type})
    assert "application/json" in refused(response, 415, "unsupported_media_type")


def test_a_fifty_megabyte_body_is_refused_without_reading_it(client: httpx.Client, server: Server) -> None:
    response = client.post(CHAT, content=b"x" * 50_000_000, headers={"content-type": "application/json"})
    assert "1048576 bytes" in refused(response, 413, "request_too_large")
    assert response.headers["connection"] == "close"
    # Announced, never sent: the refusal comes at once all the same.
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        authorization = client.headers["authorization"]
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: {authorization}\r\n"
            "content-type: application/json\r\ncontent-length: 50000000\r\n\r\n".encode()
        )
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        while chunk := connection.recv(65536):  # and the connection ends
            answer += chunk
    assert b"request_too_large" in answer


def test_a_large_body_of_unknown_length_is_cut_at_the_limit(client: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(60):
            yield b"x" * 65536

    response = client.post(CHAT, content=endless(), headers={"content-type": "application/json"})
    refused(response, 413, "request_too_large")


UNKNOWN_KEY = "fg_live_AAAAAAAAAAAA_" + "B" * 43


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "didn't provide"),
        ({"authorization": ""}, "didn't provide"),
        ({"authorization": "Basic dXNlcjpwYXNz"}, "didn't provide"),
        ({"authorization": "Bearer sk-something"}, "malformed"),
        ({"authorization": "Bearer " + "x" * 5000}, "malformed"),
        ({"authorization": f"Bearer {UNKNOWN_KEY}"}, "Incorrect"),
        ({"api-key": ""}, "didn't provide"),
        ({"api-key": "two words"}, "malformed"),
        ({"api-key": UNKNOWN_KEY}, "it does not exist"),
        ({"x-api-key": "two words"}, "malformed"),
        ({"authorization": f"Bearer {UNKNOWN_KEY}", "api-key": UNKNOWN_KEY}, "it does not exist"),
        ({"authorization": "Basic dXNlcjpwYXNz", "api-key": UNKNOWN_KEY}, "didn't provide"),
    ],
)
def test_a_missing_or_wrong_key_is_refused(server: Server, headers: dict[str, str], words: str) -> None:
    with httpx.Client(base_url=server.url, headers=headers) as client:
        message = refused(client.post(CHAT, json=chat()), 401, "invalid_api_key")
    assert words in message or "Incorrect" in message


def test_a_key_may_stand_in_the_header_of_azures_clients_and_never_beside_another(server: Server) -> None:
    first, second = server.tenant("azure-first"), server.tenant("azure-second")
    bearer = {"authorization": f"Bearer {first}"}
    with httpx.Client(base_url=server.url) as client:
        same = {"api-key": first, "x-api-key": first}
        for headers in ({"api-key": first}, {"x-api-key": first}, bearer | same):
            answer = client.post(CHAT, json=chat(), headers=headers)
            assert (answer.status_code, answer.headers["x-fairgate-tenant"]) == (200, "azure-first")
        for headers in (
            bearer | {"api-key": second},
            bearer | {"api-key": UNKNOWN_KEY},
            bearer | {"api-key": ""},
            bearer | {"x-api-key": second},
            {"api-key": first, "x-api-key": second},
        ):
            refused(client.post(CHAT, json=chat(), headers=headers), 401, "invalid_api_key")
        different = client.post(CHAT, json=chat(), headers=bearer | {"api-key": second})
        assert "hold different keys" in different.text


def test_a_revoked_an_expired_and_a_suspended_key_are_refused_within_a_second(server: Server) -> None:
    secret = server.tenant("short-lived")
    key_id = server.admin("GET", "/keys?tenant=short-lived")["data"][0]["id"]
    with server.http(secret) as client:
        assert client.post(CHAT, json=chat()).status_code == 200
        server.admin("DELETE", f"/keys/{key_id}")
        assert "revoked" in refused(client.post(CHAT, json=chat()), 401, "invalid_api_key")
    expiring = server.key("short-lived", expires_in_s=1)
    with server.http(expiring) as client:
        assert client.post(CHAT, json=chat()).status_code == 200
        until(lambda: client.post(CHAT, json=chat()).status_code == 401, deadline_s=5)
        assert "expired" in refused(client.post(CHAT, json=chat()), 401, "invalid_api_key")
    other = server.key("short-lived")
    with server.http(other) as client:
        server.admin("POST", "/tenants/short-lived/suspend")
        assert "tenant" in refused(client.post(CHAT, json=chat()), 403, "tenant_suspended")
        server.admin("POST", "/tenants/short-lived/resume")
        assert client.post(CHAT, json=chat()).status_code == 200


def test_a_key_does_only_what_its_scopes_say(server: Server, client: httpx.Client) -> None:
    assert "admin:read" in refused(client.get("/admin/v1/status"), 403, "insufficient_permissions")
    refused(client.post("/admin/v1/tenants", json={"name": "x"}), 403, "insufficient_permissions")
    reader = server.key("bad-input", scopes=["usage:read"])
    with server.http(reader) as other:
        refused(other.post(CHAT, json=chat()), 403, "insufficient_permissions")


def test_a_model_that_the_key_may_not_use_does_not_exist_for_it(server: Server) -> None:
    secret = server.key("bad-input", models=["something-else"])
    with server.http(secret) as client:
        refused(client.post(CHAT, json=chat()), 404, "model_not_found", "model")
        refused(client.get(f"/v1/models/{MODEL}"), 404, "model_not_found", "model")
        assert client.get("/v1/models").json()["data"] == []


def test_unknown_routes_and_methods_have_the_same_shape(client: httpx.Client) -> None:
    assert "/v1/nothing" in refused(client.get("/v1/nothing"), 404, "not_found")
    refused(client.get(CHAT), 405, "method_not_allowed")
    refused(client.delete("/healthz"), 405, "method_not_allowed")


def test_bad_admin_input_is_named(server: Server) -> None:
    with server.http() as owner:
        post = owner.post
        refused(post("/admin/v1/tenants", json={"name": ""}), 400, "invalid_value", "name")
        refused(post("/admin/v1/tenants", json={"name": "bad-input"}), 409, "already_exists", "name")
        refused(post("/admin/v1/tenants", json={"name": "w", "weight": -1}), 400, "invalid_value", "weight")
        refused(post("/admin/v1/keys", json={"tenant": "nobody"}), 404, "not_found", "tenant")
        refused(owner.get("/admin/v1/dispatch-log?limit=0"), 400, "invalid_value", "limit")
        refused(owner.get("/admin/v1/dispatch-log?since=-1"), 400, "invalid_value", "since")
        assert owner.get("/admin/v1/dispatch-log?since=x").status_code == 400
        refused(
            post("/admin/v1/limits", json={"tenant": "bad-input", "meter": "bananas", "amount": 1}),
            400,
            "invalid_value",
            "meter",
        )


def test_a_quote_needs_one_size(client: httpx.Client) -> None:
    body = {"model": MODEL}
    refused(client.post("/v1/quotes", json=body), 400, "invalid_value", "messages")
    refused(
        client.post("/v1/quotes", json=body | {"prompt_tokens": 10**9}),
        400,
        "context_length_exceeded",
        "prompt_tokens",
    )


def test_the_pages_for_people_and_machines_need_no_key_and_no_network(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json()["checks"] == {
            "database": "ok",
            "quota_store": "ok",
            "engine": "ok",
        }
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "/v1/chat/completions" in page.text
        assert "http://" not in page.text.replace(server.url, "")
        assert "https://" not in page.text
        assert "<script" not in page.text
        document = client.get("/openapi.json").json()
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatCompletionRequest")
        assert "temperature" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        metrics = client.get("/metrics").text
        assert 'fairgate_refusals_total{code="invalid_api_key"}' in metrics
        assert "bad-input" not in metrics, "tenants are no label"
        assert client.get("/").json()["docs"] == "/docs"


def test_the_server_is_as_it_was(server: Server, client: httpx.Client) -> None:
    assert client.post(CHAT, json=chat()).status_code == 200
    until(server.is_idle)
    report = server.verify()
    assert report["ok"], report
    assert "Traceback" not in server.log()
