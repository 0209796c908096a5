"""What a server can do, found out over real connections to servers that answer in all kinds of ways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.messages import Submit
from gateway.upstream.base import CapabilityLost, SequenceRefused, Wording
from gateway.upstream.capabilities import Capability, Endpoint
from gateway.upstream.openai.config import OpenAIServer
from gateway.upstream.openai.upstream import OpenAIUpstream
from tests.support.engine_process import until
from tests.support.faulty_servers import MODEL, Peer, PeerRequest

Status = Callable[[dict[str, Any], str], int]
"""The status that a server answers a body on a path with."""
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS = Wording(HELLO, is_streamed=False, fields={"tools": [{}]}, needs=frozenset({"text", "tools"}))


class Server:
    """A server whose answers a test decides."""

    def __init__(self) -> None:
        self.status: Status = lambda body, path: 200
        self.said = "no"
        self.peer = Peer(self.answer, owned_by="vllm")

    async def answer(self, request: PeerRequest) -> None:
        status = self.status(request.body, request.path)
        if status != 200:
            return await request.json({"error": {"message": self.said}}, status)
        choice = {"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}
        count = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return await request.json({"choices": [choice], "usage": count})


@asynccontextmanager
async def upstream_of(server: Server, **fields: Any) -> AsyncIterator[OpenAIUpstream]:
    async with server.peer:
        upstream = OpenAIUpstream(OpenAIServer("a", server.peer.url, MODEL, **fields))
        try:
            await upstream.probe()
            yield upstream
        finally:
            await upstream.close()


def refuses(*names: str, status: int = 400) -> Status:
    return lambda body, path: status if any(name in body for name in names) else 200


def words(upstream: OpenAIUpstream) -> set[str]:
    return set(upstream.capabilities.words)


async def test_before_it_was_tried_a_server_only_generates_text() -> None:
    async with upstream_of(Server()) as upstream:
        assert words(upstream) == {"text"}
        assert upstream.capabilities.untried == frozenset(Capability) - {"text"}
        await upstream.monitor.trials.try_all()
        assert words(upstream) == set(Capability)
        assert not upstream.capabilities.untried


async def test_what_fails_for_another_reason_than_a_refusal_stays_as_it_was() -> None:
    server = Server()
    async with upstream_of(server) as upstream:
        server.status = refuses("tools")
        await upstream.monitor.trials.try_all()
        known = words(upstream)
        assert "tools" not in known
        for status in (429, 502, 503, 504, 401):
            server.status = lambda body, path, status=status: status
            await upstream.monitor.trials.try_all()
            assert words(upstream) == known
        server.status = refuses("response_format", status=503)
        await upstream.monitor.trials.try_all()
        assert words(upstream) == known | {"tools", "forced_tools"}


async def test_an_error_of_its_own_is_a_refusal_where_it_still_answers_plain_text() -> None:
    server = Server()
    async with upstream_of(server) as upstream:
        server.status = refuses("tools", status=500)
        await upstream.monitor.trials.try_all()
        assert "tools" not in words(upstream)
        assert upstream.describe()["cannot"]["tools"] == "500 no"
        dead = [False]

        def dies_of_a_schema(body: dict[str, Any], path: str) -> int:
            dead[0] = dead[0] or "response_format" in body
            return 500 if dead[0] else 200

        server.status = dies_of_a_schema
        await upstream.monitor.trials.try_all()
        assert {"json_object", "json_schema"} < words(upstream), "it failed altogether: nothing is known anew"


async def test_a_server_without_a_chat_template_is_tried_by_text_completions() -> None:
    server = Server()
    async with upstream_of(server) as upstream:
        server.status = lambda body, path: 400 if "messages" in body or "input" in body else 200
        await upstream.monitor.trials.try_all()
        assert words(upstream) == {"text", "json_object", "json_schema", "extra_fields", "rerank"}


async def test_a_server_of_vectors_generates_no_text() -> None:
    server = Server()
    async with upstream_of(server) as upstream:
        server.status = lambda body, path: 200 if path == "/v1/embeddings" else 404
        await upstream.monitor.trials.try_all()
        assert words(upstream) == {"embeddings"}
        server.status = lambda body, path: 400
        await upstream.monitor.trials.try_all()
        assert words(upstream) == {"text"}, "what it refuses altogether is refused in its own words"


async def test_reasons_hold_no_key_and_little_else() -> None:
    server = Server()
    async with upstream_of(server, api_key="s3cret-key") as upstream:
        server.said = "Bearer s3cret-key is not enough\n" * 100
        server.status = refuses("tools")
        await upstream.monitor.trials.try_all()
        reason = upstream.describe()["cannot"]["tools"]
        assert "s3cret-key" not in reason
        assert len(reason) < 400


async def test_settings_go_before_trials() -> None:
    server = Server()
    fields = {"capabilities": (Capability.TOOLS, Capability.EXTRA_FIELDS), "fields": ("verbosity",)}
    async with upstream_of(server, **fields) as upstream:
        await upstream.monitor.trials.try_all()
        found = upstream.capabilities
        assert words(upstream) == {"text", "tools", "forced_tools", "extra_fields"}
        assert {"verbosity", "min_tokens"} < found.fields, "of vLLM, as its list of models says"
        assert server.peer.requests == []
    async with upstream_of(Server(), capabilities=(Capability.EMBEDDINGS,)) as upstream:
        assert words(upstream) == {"embeddings"}


async def test_nothing_is_sent_to_a_server_that_lacks_what_a_request_needs() -> None:
    server = Server()
    async with upstream_of(server, capabilities=()) as upstream:
        with pytest.raises(CapabilityLost, match="tools"):
            upstream.run(submit(), TOOLS)
        assert server.peer.requests == []


async def test_refusals_have_a_server_tried_again_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.upstream.openai.capability_probe.AGAIN_AFTER_S", 0.2)
    server = Server()
    async with upstream_of(server) as upstream:
        await upstream.start()
        await until(lambda: not upstream.capabilities.untried)
        passes = trial_passes(server)
        server.status = refuses("tools")
        for number in range(20):
            with pytest.raises(SequenceRefused):
                async for _ in upstream.run(submit(number), TOOLS):
                    pass
            if "tools" not in words(upstream):
                break
        await until(lambda: "tools" not in words(upstream))
        assert trial_passes(server) == passes + 1, "one pass for all of these refusals"


def trial_passes(server: Server) -> int:
    return sum(each.path == "/v1/rerank" for each in server.peer.requests)


def submit(number: int = 0) -> Submit:
    return Submit(f"s{number}", f"r{number}", "t", [1], 10, 10)


async def test_trials_that_show_nothing_new_become_rarer() -> None:
    """A path that never answers clearly, or a client that is refused on purpose, would have it tried every
    few seconds for ever."""
    server = Server()
    async with upstream_of(server) as upstream:
        trials = upstream.monitor.trials
        server.status = lambda body, path: 403 if path == "/v1/rerank" else 200
        await upstream.monitor.trials.try_all()
        assert upstream.capabilities.untried == {"rerank"}
        pauses = [trials.pause_s]
        for _ in range(7):
            await upstream.monitor.trials.try_all()
            pauses.append(trials.pause_s)
        assert pauses == [5, 10, 20, 40, 60, 60, 60, 60], "within a minute, while something is untried"
        server.status = lambda body, path: 200
        await upstream.monitor.trials.try_all()
        assert not upstream.capabilities.untried
        pauses = [trials.pause_s]
        for number in range(7):
            server.said = f"no, says request {number}"
            server.status = refuses("tools")
            await upstream.monitor.trials.try_all()
            pauses.append(trials.pause_s)
        assert pauses == [5, 5, 10, 20, 40, 80, 160, 300], "other words for the same are nothing new"
        assert upstream.capabilities.reasons["tools"] == "400 no, says request 6"


async def test_what_a_broken_trial_left_open_is_tried_again_within_a_minute() -> None:
    server = Server()

    def breaks(body: dict[str, Any], path: str) -> int:
        if path == "/v1/embeddings":
            raise ConnectionResetError
        return 200

    server.status = breaks
    async with upstream_of(server) as upstream:
        trials = upstream.monitor.trials
        for _ in range(9):
            await upstream.monitor.trials.try_all()
            assert upstream.capabilities.untried == {"embeddings"}
        assert trials.pause_s == 60
        server.status = lambda body, path: 200
        await upstream.monitor.trials.try_all()
        assert "embeddings" in words(upstream)


@pytest.mark.parametrize(
    ("path", "endpoint"), [("/v1/completions", Endpoint.TEXT), ("/v1/chat/completions", Endpoint.CHAT)]
)
async def test_an_endpoint_that_a_server_refuses_is_known_until_it_answers_there(
    path: str, endpoint: Endpoint
) -> None:
    server = Server()
    async with upstream_of(server) as upstream:
        for status, refused in ((404, {endpoint}), (503, {endpoint}), (200, set()), (405, {endpoint})):
            server.status = lambda body, at, status=status: status if at == path else 200
            await upstream.monitor.trials.try_all()
            assert upstream.capabilities.refused == refused
            assert "text" in words(upstream)
        server.status = lambda body, at: 400
        await upstream.monitor.trials.try_all()
        assert not upstream.capabilities.refused, "what it refuses altogether is refused in its own words"
