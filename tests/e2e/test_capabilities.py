"""What a server can do is found by trying it, and requests go only where they can be honoured.

The servers are stand-ins that refuse what they are told to, as vLLM does, and answer the rest in a few words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.test_upstreams import settled
from tests.support.faulty_servers import Peer, PeerRequest, in_thread, piece, usage
from tests.support.server_process import Server, server_process, until

HELLO: Any = [{"role": "user", "content": "Hello"}]
IMAGE: Any = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
]
TOOL: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TOOLS: dict[str, Any] = {"tools": [TOOL]}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
EVERYTHING = frozenset({"tools", "response_format", "reasoning_effort", "images", "min_tokens"})
MORE_THAN_FIT = 10
"""Requests: more than the window of a server with `max_concurrent = 2`."""
POOLS = ("all", "plain", "pair", "frail", "changing")


@dataclass
class StandIn:
    """A server that can do some things, by the request field that asks for them."""

    can: set[str] = field(default_factory=set)
    stalls: bool = False
    peer: Peer = field(init=False)

    def __post_init__(self) -> None:
        self.peer = Peer(self.answer, models=("m",), owned_by="vllm")

    async def answer(self, request: PeerRequest) -> None:
        body = request.body
        asked = EVERYTHING & body.keys()
        content = (body.get("messages") or HELLO)[-1]["content"]
        if isinstance(content, list) and any(part["type"] != "text" for part in content):
            asked |= {"images"}
        if request.path == "/v1/completions" and "images" not in self.can:
            return await request.json({"detail": "Not Found"}, 404)
        missing = sorted(asked - self.can)
        if request.path in ("/v1/embeddings", "/v1/rerank"):
            return await request.json({"error": {"message": "no such route"}}, 404)
        if missing:
            error = {"message": f"{missing[0]} is switched off, Bearer s3cret", "param": missing[0]}
            return await request.json({"error": error}, 400)
        if self.stalls and body["max_tokens"] > 1:
            return await request.until_gone()
        if body.get("stream"):
            await request.head()
            await request.events(piece("Hi."), piece("", "stop"), usage(4, 2), "[DONE]")
            return await request.last()
        choice = {"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop"}
        return await request.json({"choices": [choice], "usage": usage(4, 2)["usage"]})

    def stop(self) -> None:
        """Takes no connection any more, and closes those that it has."""
        assert self.peer._server is not None
        loop = self.peer._server.get_loop()
        asyncio.run_coroutine_threadsafe(self.peer.stop(), loop).result(10)

    def served(self) -> list[Any]:
        """Bodies of clients' requests: the gateway's own trials ask for one token."""
        return [each.body for each in self.peer.requests if each.body.get("max_tokens", 1) > 1]


@dataclass
class House:
    """The gateway and its servers, by name."""

    server: Server
    servers: dict[str, StandIn]
    keys: dict[str, str] = field(default_factory=dict)

    def key(self, tenant: str) -> str:
        """The tenant's key; a new tenant at the first call."""
        if tenant not in self.keys:
            self.keys[tenant] = self.server.tenant(tenant)
        return self.keys[tenant]

    def replica(self, name: str) -> dict[str, Any]:
        pools = self.server.status()["models"]["pools"].values()
        return next(each for pool in pools for each in pool["replicas"] if each["replica_id"] == name)

    def post(
        self, key: str, model: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": model, "messages": HELLO, "max_tokens": 5} | fields
        with self.server.http(key) as client:
            return client.post("/v1/chat/completions", json=body, headers=headers or {})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[House]:
    home = tmp_path_factory.mktemp("capabilities")
    servers = {
        "all-a": StandIn(set(EVERYTHING)),
        "plain-a": StandIn(),
        "pair-plain": StandIn(),
        "pair-tools": StandIn({"tools"}),
        "frail-plain": StandIn(),
        "frail-tools": StandIn({"tools"}),
        "changing-a": StandIn({"tools"}),
    }
    with ExitStack() as stack:
        lines: list[str] = []
        for name, each in servers.items():
            stack.enter_context(in_thread(each.peer))
            lines += ["[[upstreams]]", f'name = "{name}"', f'pool = "{name.split("-")[0]}"', 'model = "m"']
            lines += [f'url = "{each.peer.url}/v1"', f'tokenizer_dir = "{chat_model}"', "max_concurrent = 2"]
        lines += ["[aliases]", 'chained = { chain = ["plain", "all"], max_price = 1 }']
        toml = home / "gateway.toml"
        toml.write_text("\n".join(lines) + "\n")
        prices = ",".join(f"{pool}=100/300/50" for pool in POOLS)
        arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", prices]
        running = stack.enter_context(server_process(home / "data", chat_model, *arguments))
        found = House(running, servers)
        until(lambda: not any(found.replica(name)["untried"] for name in servers))
        yield found


def test_what_a_server_can_do_is_found_with_one_token_each_and_charged_to_none(house: House) -> None:
    able, plain = house.replica("all-a"), house.replica("plain-a")
    assert able["server"] == plain["server"] == "vllm"
    every = ["extra_fields", "forced_tools", "images", "json_object", "json_schema", "reasoning", "text"]
    assert able["capabilities"] == sorted([*every, "audio", "tools"])
    assert sorted(able["cannot"]) == ["embeddings", "rerank"]
    assert "min_tokens" in able["fields"]
    assert (plain["capabilities"], plain["fields"]) == (["text"], [])
    assert plain["cannot"]["tools"].startswith("400 tools is switched off")
    trials = [each.body for each in house.servers["all-a"].peer.requests if "max_tokens" in each.body]
    assert {body["max_tokens"] for body in trials} == {1}
    with house.server.http(house.key("no-trials")) as client:
        assert client.get("/v1/requests").json()["data"] == []


FIELDS: list[dict[str, Any]] = [
    TOOLS | {"tool_choice": "auto", "parallel_tool_calls": False},
    TOOLS | {"tool_choice": {"type": "function", "function": {"name": "now"}}},
    {"response_format": SCHEMA},
    {"response_format": {"type": "json_object"}},
    {"reasoning_effort": "low"},
    {"chat_template_kwargs": {"enable_thinking": False}, "stop_token_ids": [3, 4], "min_tokens": 2},
    {"structured_outputs": {"choice": ["a", "b"]}, "skip_special_tokens": False, "include_reasoning": True},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
@pytest.mark.parametrize("stream", [False, True])
def test_fields_reach_the_server_as_the_client_sent_them(
    house: House, fields: dict[str, Any], stream: bool
) -> None:
    key = house.key("passes")
    asked = fields | ({"stream": True} if stream else {})
    answer = house.post(key, "all", **asked)
    assert answer.status_code == 200, answer.text
    sent = house.servers["all-a"].served()[-1]
    assert {name: sent.get(name) for name in fields} == fields
    assert (sent["model"], sent["max_tokens"]) == ("m", 5)


def test_choices_are_requests_of_their_own_with_the_same_fields(house: House) -> None:
    key, before = house.key("choices-of-fields"), len(house.servers["all-a"].served())
    answer = house.post(key, "all", **TOOLS, n=2, seed=1)
    assert [each["index"] for each in answer.json()["choices"]] == [0, 1]
    sent = house.servers["all-a"].served()[before:]
    assert [(each["tools"], each.get("n")) for each in sent] == [([TOOL], None)] * 2


def test_a_refusal_names_the_server_and_the_way_out_and_the_server_is_not_asked(house: House) -> None:
    key = house.key("lacking")
    asked: list[tuple[dict[str, Any], str, str]] = [
        (TOOLS, "tools", "start it with --enable-auto-tool-choice and --tool-call-parser"),
        (TOOLS | {"tool_choice": "required"}, "tool_choice", "start it with --tool-call-parser"),
        ({"response_format": SCHEMA}, "response_format", "capabilities or fields in its [[upstreams]]"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "plain-a does not take 'reasoning_effort'"),
        ({"stop_token_ids": [1]}, "stop_token_ids", "no field of a server of the kind vllm"),
        (
            {"messages": IMAGE},
            "messages[0].content[0]",
            "plain-a does not take images (it says: 400 images is",
        ),
    ]
    before = len(house.servers["plain-a"].served())
    for fields, param, way_out in asked:
        error = house.post(key, "plain", **fields).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", param)
        assert error["message"].startswith("No server of the model 'plain' takes this request: plain-a does")
        assert way_out in error["message"]
        assert "s3cret" not in error["message"]
    assert len(house.servers["plain-a"].served()) == before
    assert settled(house.server, "lacking") == []
    with (
        OpenAI(api_key=key, base_url=f"{house.server.url}/v1", max_retries=3) as client,
        pytest.raises(BadRequestError, match="plain-a does not take 'tools'"),
    ):
        client.chat.completions.create(model="plain", messages=HELLO, tools=[TOOL])


def test_a_text_completion_for_servers_of_chats_is_refused_and_chats_go_on(house: House) -> None:
    key, server = house.key("to-chats"), house.servers["plain-a"]
    body = {"model": "plain", "prompt": "Hello", "max_tokens": 5}
    before = len(server.served())
    with house.server.http(key) as client:
        for _ in range(6):
            error = client.post("/v1/completions", json=body).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", "prompt")
            assert (
                "plain-a does not take text completions: send it to /v1/chat/completions" in error["message"]
            )
        assert client.post("/v1/completions", json=body | {"model": "all"}).status_code == 200
    assert len(server.served()) == before
    assert house.post(key, "plain").status_code == 200


HISTORY: Any = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]
ALWAYS_FINE: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none"},
    TOOLS | {"tool_choice": "none"},
    {"response_format": {"type": "text"}},
    {"messages": HISTORY},
    {"parallel_tool_calls": True},
]


@pytest.mark.parametrize("fields", ALWAYS_FINE, ids=lambda fields: json.dumps(fields)[:40])
def test_what_asks_for_nothing_is_fine_on_any_server(house: House, fields: dict[str, Any]) -> None:
    key = house.key("asks-for-nothing")
    assert house.post(key, "plain", **fields).status_code == 200
    sent = house.servers["plain-a"].served()[-1]
    assert not {"tools", "tool_choice", "response_format", "parallel_tool_calls"} & sent.keys()
    assert len(sent["messages"]) == len(fields.get("messages", HELLO))


def test_a_pool_sends_a_request_to_the_replica_that_can_do_it(house: House) -> None:
    key = house.key("to-the-able")
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: house.post(key, "pair", **TOOLS), range(12)))
        plain = list(threads.map(lambda _: house.post(key, "pair"), range(12)))
    assert {each.json()["fairgate"]["upstream"] for each in answers} == {"pair-tools"}
    assert {each.status_code for each in plain} == {200}
    assert len(house.servers["pair-tools"].served()) >= len(answers)
    assert not any("tools" in each for each in house.servers["pair-plain"].served())


def test_a_chain_goes_on_to_a_model_whose_servers_can(house: House) -> None:
    key = house.key("along-the-chain")
    answer = house.post(key, "chained", **TOOLS).json()
    assert answer["model"] == "all"
    assert answer["fairgate"]["fallback"]["tried"] == [{"model": "plain", "reason": "capability"}]
    assert house.post(key, "chained").json()["model"] == "plain"


def test_a_server_that_can_no_longer_is_noticed_by_its_refusal(house: House) -> None:
    changing, key = house.servers["changing-a"], house.key("changing")
    assert house.post(key, "changing", **TOOLS).status_code == 200
    changing.can.clear()
    refused = house.post(key, "changing", **TOOLS)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "invalid_request")
    reason = "refuses the field 'tools': tools is switched off, (a key)."
    assert (error["param"], error["message"]) == ("tools", f"The server that runs this model {reason}")
    until(lambda: "tools" not in house.replica("changing-a")["capabilities"])
    assert house.post(key, "changing", **TOOLS).json()["error"]["param"] == "tools"
    assert [row["output_tokens"] for row in settled(house.server, "changing")] == [2, 0]


def test_a_request_whose_only_server_goes_away_is_refused_while_it_waits_and_afterwards(house: House) -> None:
    able, key = house.servers["frail-tools"], house.key("only-one-can")
    able.stalls = True
    with ThreadPoolExecutor(MORE_THAN_FIT) as threads:
        asked = [threads.submit(house.post, key, "frail", **TOOLS) for _ in range(MORE_THAN_FIT)]
        until(lambda: sum(house.server.status()["models"]["pools"]["frail"]["queued"].values()) >= 2)
        able.stop()
        answers = [each.result(30) for each in asked]
    answers.append(house.post(key, "frail", **TOOLS))
    codes = [each.json()["error"]["code"] for each in answers]
    assert set(codes) == {"upstream_error", "capability_unavailable"}
    assert codes.count("capability_unavailable") >= 3
    for refused in answers:
        if refused.json()["error"]["code"] == "capability_unavailable":
            assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
    assert "frail-tools can, and is away" in answers[-1].json()["error"]["message"]
    assert house.post(key, "frail").json()["fairgate"]["upstream"] == "frail-plain"
    assert sum(row["output_tokens"] for row in settled(house.server, "only-one-can")) == 2


def test_what_weighs_itself_up_reads_other_caches_or_is_not_metered_never_passes(house: House) -> None:
    key, before = house.key("refused-by-name"), len(house.servers["all-a"].served())
    for name, value in {
        "cache_salt": "x", "priority": -100, "vllm_xargs": {"fairgate": "x"}, "use_beam_search": True,
        "max_new_tokens": 9, "request_id": "x", "kv_transfer_params": {},
    }.items():  # fmt: skip
        refused = house.post(key, "all", **{name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert f"'{name}' is not taken: " in refused.json()["error"]["message"]
    unknown = house.post(key, "all", frobnicate=1).json()["error"]
    assert (unknown["code"], unknown["param"]) == ("unknown_parameter", "frobnicate")
    assert len(house.servers["all-a"].served()) == before


def test_an_idempotency_key_compares_the_fields_too(house: House) -> None:
    key = house.key("idempotent-fields")
    headers = {"Idempotency-Key": "one"}
    assert house.post(key, "all", headers, **TOOLS).status_code == 200
    assert house.post(key, "all", headers, **TOOLS).headers.get("x-fairgate-idempotent-replay") == "true"
    other = house.post(key, "all", headers, **TOOLS, tool_choice="none")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
