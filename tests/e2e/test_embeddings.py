"""Embeddings and rerank through a running gateway, from a server that has them.

The server is a stand-in that answers by rule: vectors of the length of each input, scores by shared words.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.test_upstreams import settled
from tests.support.faulty_servers import Peer, PeerRequest, in_thread, piece, usage
from tests.support.server_process import Server, server_process, until

EMBEDDER, RERANKER, CHAT = "embedder", "reranker", "chatter"
PRICES = f"{EMBEDDER}=100/300/50,{RERANKER}=200/0/200,{CHAT}=100/300/50,counted=100/300/50"
SAID_PER_INPUT = 3
"""Tokens that the stand-in counts for each input: less than is held for it."""
left = threading.Event()
"""The stand-in's connection was closed under a request."""
both_came = asyncio.Event()
met: list[int] = []
COUNTED = {"count": 2, "tokens": [7, 8], "token_strs": None}
TOKENS_BY_TEXT: dict[str | int, tuple[Any, int]] = {
    "two": (COUNTED | {"max_model_len": 9, "secret": "x"}, 200),
    "miscounted": (COUNTED | {"count": 3}, 200),
    "negative": (COUNTED | {"tokens": [7, -8]}, 200),
    "other form": ({"tokens": [7]}, 200),
    "no route": ({"detail": "Not Found"}, 404),
    "refused": ({"error": {"message": "prompt is odd, Bearer s3cret", "param": "prompt"}}, 400),
    "broken": ({}, 500),
    7: ({"prompt": "two", "secret": "x"}, 200),
}
"""The stand-in's answers and their status, by what it is asked for."""


async def answer(request: PeerRequest) -> None:
    """What the stand-in does."""
    body = request.body
    if request.path in ("/tokenize", "/detokenize"):
        return await request.json(*TOKENS_BY_TEXT[body.get("prompt", body.get("tokens", [0])[0])])
    if request.path == "/v1/embeddings":
        if "stall" in body["input"]:
            await request.until_gone()
            return left.set()
        inputs = body["input"]
        if inputs[0] == "meet":
            met.append(len(inputs))
            if len(met) == 2:
                both_came.set()
            await both_came.wait()
        if inputs == ["lie"]:
            said = 10**6
        else:
            said = SAID_PER_INPUT * len(inputs)
        data = [
            {"object": "embedding", "index": index, "embedding": vector(each, body.get("encoding_format"))}
            for index, each in enumerate(inputs)
        ]
        if inputs == ["words"]:
            data[0]["embedding"] = ["not", "numbers"]
        if inputs == ["fewer", "than", "sent"]:
            data.pop()
        told = {} if inputs == ["untold"] else {"usage": {"prompt_tokens": said, "total_tokens": said}}
        return await request.json({"object": "list", "data": data, "model": body["model"]} | told)
    if request.path == "/v1/rerank":
        words = set(body["query"].split())
        results = [
            {
                "index": index,
                "relevance_score": len(words & set(each.split())) / 8,
                "document": {"text": each},
            }
            for index, each in enumerate(body["documents"])
        ]
        results.sort(key=lambda each: -each["relevance_score"])
        said = SAID_PER_INPUT * len(results)
        return await request.json({"results": results[: body.get("top_n")], "usage": {"total_tokens": said}})
    await request.head()
    await request.events(piece("text", "stop"), usage(4, 1), "[DONE]")
    return await request.last()


def vector(item: str | list[int], encoding: str | None) -> list[float] | str:
    """A vector that tells its input: its length, and 0.5."""
    numbers = [float(len(item)), 0.5]
    return base64.b64encode(struct.pack("<2f", *numbers)).decode() if encoding == "base64" else numbers


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with in_thread(Peer(answer, models=(EMBEDDER, RERANKER, CHAT), owned_by="vllm")) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, chat_model: Path, peer: Peer) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("vectors")
    lines: list[str] = []
    for pool, model, capabilities in (
        (EMBEDDER, EMBEDDER, ["embeddings"]),
        ("counted", EMBEDDER, ["embeddings"]),
        (RERANKER, RERANKER, ["rerank"]),
        (CHAT, CHAT, []),
    ):
        lines += ["[[upstreams]]", f'name = "{pool}-a"', f'pool = "{pool}"', f'model = "{model}"']
        lines += [f'url = "{peer.url}/v1"', f"capabilities = {json.dumps(capabilities)}", 'priority = "vllm"']
        if pool == "counted":
            lines.append(f'tokenizer_dir = "{chat_model}"')
    toml = home / "gateway.toml"
    toml.write_text("\n".join(lines) + "\n")
    arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]
    with server_process(home / "data", chat_model, *arguments) as running:
        yield running


def embed(server: Server, key: str, inputs: Any, model: str = EMBEDDER, **fields: Any) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/embeddings", json={"model": model, "input": inputs} | fields)


def test_the_openai_sdk_gets_its_embeddings_and_is_charged_by_the_servers_count(
    gateway: Server, peer: Peer
) -> None:
    key = gateway.tenant("embeds")
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        found = client.embeddings.create(model=EMBEDDER, input=["one", "three"])
    assert [each.embedding for each in found.data] == [[3.0, 0.5], [5.0, 0.5]]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (6, 6)
    sent = peer.requests[-1].body
    assert (sent["input"], sent["encoding_format"]) == (["one", "three"], "base64")
    assert len(sent["cache_salt"]) == 43
    assert sent["priority"] == 1
    assert "max_tokens" not in sent
    (row,) = settled(gateway, "embeds")
    assert (row["input_tokens"], row["output_tokens"], row["cost_nanousd"]) == (6, 0, 6 * 100)
    account = found.model_extra["fairgate"] if found.model_extra else {}
    assert (account["basis"], account["actual"]["output_tokens"]) == ("upstream", 0)
    assert account["tokens"]["held"] > account["tokens"]["charged"] == 6
    assert account["estimate"]["output_tokens"]["p90"] == 0


def test_numbers_pass_as_they_came(gateway: Server) -> None:
    key = gateway.tenant("floats")
    found = embed(gateway, key, "four", encoding_format="float").json()
    assert found["data"] == [{"object": "embedding", "index": 0, "embedding": [4.0, 0.5]}]
    assert found["object"] == "list"
    assert found["model"] == EMBEDDER


@pytest.mark.parametrize("model", [EMBEDDER, "counted"])
def test_a_server_that_counts_too_much_is_paid_what_was_held(gateway: Server, model: str) -> None:
    key = gateway.tenant(f"lied-to-{model}")
    account = embed(gateway, key, "lie", model).json()["fairgate"]
    assert account["tokens"]["charged"] == account["tokens"]["held"] < 20


def test_without_a_servers_count_what_was_held_is_charged(gateway: Server) -> None:
    account = embed(gateway, gateway.tenant("untold"), "untold").json()["fairgate"]
    assert (account["basis"], account["tokens"]["refunded"]) == ("estimate", 0)


@pytest.mark.parametrize("inputs", [["words"], ["fewer", "than", "sent"]])
def test_what_is_no_embedding_is_not_passed_on(gateway: Server, inputs: list[str]) -> None:
    refused = embed(gateway, gateway.tenant(f"garbage-{len(inputs)}"), inputs)
    assert refused.status_code == 502, refused.text
    assert refused.json()["error"]["code"] == "upstream_request_failed"


def test_documents_are_scored_and_each_is_held_with_the_query(gateway: Server) -> None:
    key = gateway.tenant("reranks")
    body = {"model": RERANKER, "query": "a b", "documents": ["c", "a b", "a"], "top_n": 2}
    with gateway.http(key) as client:
        found = client.post("/v1/rerank", json=body).json()
    assert [(each["index"], each["relevance_score"]) for each in found["results"]] == [(1, 0.25), (2, 0.125)]
    assert found["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    held = found["fairgate"]["tokens"]["held"]
    with gateway.http(key) as client:
        longer = client.post("/v1/rerank", json=body | {"query": "a b" + 40 * " c"}).json()
    assert longer["fairgate"]["tokens"]["held"] == held + 3 * 40
    (row, _) = settled(gateway, "reranks")
    assert (row["input_tokens"], row["output_tokens"], row["cost_nanousd"]) == (9, 0, 9 * 200)


def test_large_requests_for_vectors_run_beside_each_other(gateway: Server) -> None:
    """Each has more tokens than all that a model's context and the server's places could hold of answers:
    they are computed input after input, and take a place each."""
    key = gateway.tenant("large-vectors")
    inputs = ["meet", *["x" * 1_990] * 100]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: embed(gateway, key, inputs), range(2)))
    assert [each.status_code for each in found] == [200, 200]
    assert met == [101, 101]


def test_a_limit_on_input_holds_and_one_on_output_does_not_bind(gateway: Server) -> None:
    key = gateway.tenant("bounded-vectors")
    gateway.limit("bounded-vectors", "output_tokens", 0, window="lifetime")
    gateway.limit("bounded-vectors", "input_tokens", 20, window="lifetime")
    assert embed(gateway, key, "ab").status_code == 200
    refused = embed(gateway, key, "x" * 40)
    assert refused.status_code == 429, refused.text
    assert gateway.limit_state("bounded-vectors", "input_tokens")["used"] == SAID_PER_INPUT


def test_a_repeated_key_gets_the_same_vectors_and_pays_once(gateway: Server, peer: Peer) -> None:
    key = gateway.tenant("repeats-vectors")
    before = len(peer.requests)
    with gateway.http(key) as client:
        body, headers = {"model": EMBEDDER, "input": "ab"}, {"Idempotency-Key": "one"}
        first, second = (client.post("/v1/embeddings", json=body, headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == 200
    assert first.content == second.content
    assert len(peer.requests) == before + 1
    assert len(settled(gateway, "repeats-vectors")) == 1


def test_a_client_that_leaves_is_charged_its_prompt(gateway: Server, peer: Peer) -> None:
    key = gateway.tenant("leaves-vectors")
    with gateway.http(key, timeout_s=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/embeddings", json={"model": EMBEDDER, "input": ["stall"]})
    until(lambda: settled(gateway, "leaves-vectors"))
    (row,) = settled(gateway, "leaves-vectors")
    assert row["input_tokens"] > 0
    assert row["output_tokens"] == 0
    assert left.wait(20)


def test_where_the_tokenizer_is_not_known_the_server_is_asked_and_only_its_count_comes_back(
    gateway: Server, peer: Peer
) -> None:
    asked: dict[str | int, tuple[int, Any]] = {
        "two": (200, COUNTED | {"max_model_len": 1024}),
        7: (200, {"prompt": "two"}),
        "miscounted": (400, "its operator can set tokenizer_dir"),
        "negative": (400, "its operator can set tokenizer_dir"),
        "other form": (400, "its operator can set tokenizer_dir"),
        "no route": (400, "its operator can set tokenizer_dir"),
        "refused": (400, "refuses the field 'prompt': prompt is odd, (a key)"),
        "broken": (502, "did not answer properly"),
    }
    with gateway.http(gateway.tenant("asks-for-tokens")) as client:
        for what, (status, said) in asked.items():
            is_text = isinstance(what, str)
            body = {"model": CHAT} | ({"prompt": what} if is_text else {"tokens": [what]})
            answer = client.post("/tokenize" if is_text else "/detokenize", json=body)
            assert answer.status_code == status, answer.text
            if status == 200:
                assert answer.json() == said
            else:
                assert said in answer.json()["error"]["message"]
        sent = peer.requests[-1].body
        assert sent == {
            "model": CHAT,
            "prompt": "broken",
            "add_special_tokens": True,
            "return_token_strs": False,
        }
        before = len(peer.requests)
        assert client.post("/tokenize", json={"model": "counted", "prompt": "two"}).json()["count"] > 0
    assert len(peer.requests) == before, "the gateway has that tokenizer"
    assert settled(gateway, "asks-for-tokens") == []


def test_models_say_what_they_are_for_and_refuse_anything_else_by_the_servers_name(
    gateway: Server, peer: Peer
) -> None:
    key, before = gateway.tenant("kinds-of-models"), len(peer.requests)
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    with gateway.http(key) as client:
        listed = {each["id"]: each["capabilities"] for each in client.get("/v1/models").json()["data"]}
        for path, model, body, words in (
            ("/v1/chat/completions", EMBEDDER, chat, "does not generate text"),
            ("/v1/completions", RERANKER, {"prompt": "hello"}, "does not generate text"),
            ("/v1/quotes", EMBEDDER, chat, "does not generate text"),
            ("/v1/embeddings", CHAT, {"input": "a"}, "does not compute embeddings"),
            ("/v1/embeddings", RERANKER, {"input": "a"}, "does not compute embeddings"),
            ("/v1/rerank", EMBEDDER, {"query": "a", "documents": ["a"]}, "does not rerank"),
        ):
            refused = client.post(path, json={"model": model} | body)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["param"] == "model"
            assert f"{model}-a {words}" in error["message"]
    assert listed == {
        EMBEDDER: ["embeddings"],
        "counted": ["embeddings"],
        RERANKER: ["rerank"],
        CHAT: ["text"],
    }
    assert len(peer.requests) == before


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": [["a"]]}, "input[0][0]"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "priority": -9}, "priority"),
        ("/v1/embeddings", {"input": "a " * 3000, "model": "counted"}, "input"),
        ("/v1/embeddings", {"input": [10**9], "model": "counted"}, "input"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 2}, "top_n"),
        ("/v1/rerank", {"query": "a" * 40_000, "documents": ["a"] * 1100}, "documents[1016]"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_field(
    gateway: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    model = EMBEDDER if path == "/v1/embeddings" else RERANKER
    key = gateway.key("vectors-bad-input") if _bad_input else gateway.tenant("vectors-bad-input")
    _bad_input.append(param)
    with gateway.http(key) as client:
        refused = client.post(path, json={"model": model} | fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


_bad_input: list[str] = []
