"""What real clients send and expect: one test each, against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import MODEL, Server, server_process

pytestmark = pytest.mark.attack
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_sixteen_stop_strings_are_taken_and_the_setting_is_named_by_its_number(server: Server) -> None:
    stops = [f"stop {number}" for number in range(17)]
    with server.http(server.tenant("stops")) as client:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
        assert client.post(CHAT, json=body | {"stop": stops[:16]}).status_code == 200
        refused = client.post(CHAT, json=body | {"stop": stops})
    assert refused.status_code == 400
    assert "the most is 16" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("unknown", {"because": "of it"}, "messages[0].because"),
        ("spoken", {"audio": {"id": "a1"}}, "messages[0].audio"),
        (
            "called",
            {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_what_a_message_says_is_honoured_or_refused_and_never_dropped(
    server: Server, name: str, fields: dict[str, object], param: str
) -> None:
    message = {"role": "assistant", "content": "x"} | fields
    with server.http(server.tenant(f"dropped-{name}")) as client:
        body = {"model": MODEL, "messages": [message], "max_tokens": 1}
        refused = client.post(CHAT, json=body)
        as_sent_back_by_sdks = {"role": "assistant", "content": "x", "refusal": "no", "tool_calls": None}
        as_sent_back_by_sdks["reasoning_content"] = (
            "because"  # of an answer: our engine's templates leave it out
        )
        taken = client.post(CHAT, json=body | {"messages": [as_sent_back_by_sdks]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert taken.status_code == 200


def test_the_sampled_token_is_among_the_top_ones_however_unlikely(server: Server) -> None:
    hot = {"model": MODEL, "max_tokens": 24, "temperature": 2, "seed": 5, "ignore_eos": True}
    with server.http(server.tenant("sampled")) as client:
        chat = client.post(CHAT, json=hot | {"messages": HELLO, "logprobs": True, "top_logprobs": 1})
        text = client.post("/v1/completions", json=hot | {"prompt": "Hello", "logprobs": 1})
    items = chat.json()["choices"][0]["logprobs"]["content"]
    assert any(len(item["top_logprobs"]) == 2 for item in items), "no unlikely token was sampled"
    for item in items:
        assert (item["token"], item["logprob"]) in [
            (top["token"], top["logprob"]) for top in item["top_logprobs"]
        ]
    found = text.json()["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == logprob


def test_a_text_completion_without_max_tokens_has_sixteen(server: Server) -> None:
    with server.http(server.tenant("sixteen", tiers=["standard"])) as client:
        body = {"model": MODEL, "prompt": "Hello", "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (16, "length")


def test_a_budget_that_is_not_spent_says_what_would_still_fit(server: Server) -> None:
    key = server.tenant("nearly-spent")
    server.limit("nearly-spent", "total_tokens", 40, window="day")
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
    with server.http(key) as client:
        refused = client.post("/v1/completions", json=body)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, "is spent" in message) == (429, False)
        assert "available 40" in message
        assert "max_tokens of at most 35" in message, message
        assert client.post("/v1/completions", json=body | {"max_tokens": 35}).status_code == 200
        spent = client.post("/v1/completions", json=body).json()["error"]["message"]
    assert "is spent" in spent


@pytest.mark.parametrize("path", ["/health", "/healthz", "/v1/models", "/metrics", "/docs"])
def test_head_is_get_without_its_body(server: Server, path: str) -> None:
    with server.http() as client:
        head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_method_that_is_not_possible_names_those_that_are(server: Server) -> None:
    with server.http() as client:
        wrong = client.get("/v1/chat/completions")
        asked = client.options("/v1/requests/req_1")
    assert wrong.status_code == 405
    assert set(wrong.headers["allow"].split(", ")) == {"OPTIONS", "POST"}
    assert "use OPTIONS, POST" in wrong.json()["error"]["message"]
    assert asked.status_code == 204
    assert set(asked.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD", "OPTIONS"}


def test_the_openapi_document_says_ranges_and_enumerations_that_hold(server: Server) -> None:
    with server.http() as client:
        found = client.get("/openapi.json").json()
        fields = found["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        number, _ = fields["temperature"]["anyOf"]
        tier, _ = fields["service_tier"]["anyOf"]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        for value in (number["minimum"], number["maximum"]):
            assert client.post("/v1/chat/completions", json=body | {"temperature": value}).is_success
        for value in (number["minimum"] - 0.1, number["maximum"] + 0.1):
            refused = client.post("/v1/chat/completions", json=body | {"temperature": value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        for value in tier["enum"]:
            assert client.post("/v1/chat/completions", json=body | {"service_tier": value}).is_success
    [limit] = [
        each for each in found["paths"]["/admin/v1/audit"]["get"]["parameters"] if each["name"] == "limit"
    ]
    assert (limit["schema"]["minimum"], limit["schema"]["maximum"]) == (1, 1000)
    assert found["components"]["schemas"]["TenantCreate"]["properties"]["weight"]["maximum"] == 1000
    assert "enum" in found["components"]["schemas"]["LimitSet"]["properties"]["meter"]


@pytest.mark.parametrize("key", ["fg_live_0000000000000000_0000", "sk-of-another-service"])
def test_a_wrong_key_is_told_in_the_words_that_clients_look_for(server: Server, key: str) -> None:
    with server.http(key) as client:
        answer = client.get("/v1/models")
    assert answer.status_code == 401
    assert "Incorrect API key provided" in answer.json()["error"]["message"]
    assert key not in answer.text


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/realtime", "use /v1/chat/completions"),
        ("/v1/batches", "'service_tier': 'flex'"),
        ("/v1/moderations", "/v1/completions"),
        ("/v1/threads/thread_1/messages", "use /v1/responses"),
        ("/chat/completions", "use /v1/chat/completions"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/nothing", "GET /docs"),
    ],
)
def test_a_route_that_is_not_here_names_the_one_to_use(server: Server, path: str, instead: str) -> None:
    with server.http() as client:
        answer = client.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert instead in answer.json()["error"]["message"]


ORIGIN = "https://chat.example.com"


@pytest.fixture(scope="module")
def for_browsers(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server that one web page may call."""
    data_dir = tmp_path_factory.mktemp("for-browsers")
    with server_process(data_dir, chat_model, "--gateway-cors-origins", ORIGIN) as running:
        yield running


def test_a_web_page_of_an_allowed_origin_may_call_and_no_other(for_browsers: Server) -> None:
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    url = for_browsers.url + "/v1/chat/completions"
    allowed = httpx.options(url, headers=asks | {"origin": ORIGIN})
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-credentials" not in allowed.headers
    for header in ("authorization", "content-type", "x-stainless-lang"):
        assert header in allowed.headers["access-control-allow-headers"].lower()
    other = httpx.options(url, headers=asks | {"origin": "https://evil.example.com"})
    assert "access-control-allow-origin" not in other.headers
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}
    with for_browsers.http() as client:
        mine = client.post(url, json=body, headers={"origin": ORIGIN})
        theirs = client.post(url, json=body, headers={"origin": "https://evil.example.com"})
    assert mine.headers["access-control-allow-origin"] == ORIGIN
    assert mine.headers["access-control-expose-headers"] == "*"
    assert "data: [DONE]" in mine.text
    assert "access-control-allow-origin" not in theirs.headers
    refused = httpx.post(url, json=body, headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_without_the_setting_no_web_page_may_call(server: Server) -> None:
    asked = httpx.get(server.url + "/healthz", headers={"origin": ORIGIN})
    assert not [name for name in asked.headers if name.startswith("access-control")]
