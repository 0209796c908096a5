"""Trace contexts from a client to another server; the log of a running gateway: its ids, and no secrets."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.faulty_servers import Peer, PeerRequest, in_thread
from tests.support.prometheus import value
from tests.support.server_process import MODEL, Server, server_process, until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
STATE = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
CANARY = "canary-7f3a"
"""In all that the log must not have."""
DROPPED = "fairgate_trace_headers_dropped_total"


async def answered(request: PeerRequest) -> None:
    """One token; to a prompt that says so an error that repeats it."""
    if "fail" in json.dumps(request.body):
        prompt = request.body["messages"][0]["content"]
        await request.json({"error": {"message": f"cannot answer {prompt!r}"}}, 500)
        return
    message = {"role": "assistant", "content": f"{CANARY} of the answer"}
    choice = {"index": 0, "message": message, "text": "1", "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    await request.json({"object": "chat.completion", "choices": [choice], "usage": usage})


class House(NamedTuple):
    """A gateway that logs JSON, and the server behind it."""

    server: Server
    peer: Peer

    def ask(self, key: str, text: str = "hello", **headers: str) -> httpx.Response:
        """One completion."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        with self.server.http(key) as client:
            return client.post("/v1/chat/completions", json=body, headers=headers)

    def sent_for(self, text: str) -> PeerRequest:
        """The one request that reached the server with this prompt."""
        (found,) = [each for each in self.peer.requests if text in json.dumps(each.body)]
        return found

    def switch(self, level: str) -> None:
        """Switches the log's level, which is then `level`."""
        said = self.server.log().count(f"the log's level is {level}")
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGUSR1)
        until(lambda: self.server.log().count(f"the log's level is {level}") == said + 1)

    def logged(self, request_id: str) -> list[dict[str, Any]]:
        """The lines of one request."""
        lines = [json.loads(line) for line in self.server.log().splitlines()]
        return [line for line in lines if line.get("request_id") == request_id]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[House]:
    home = tmp_path_factory.mktemp("traced")
    with in_thread(Peer(answered, (MODEL,), 4_096, "x")) as peer:
        upstream = {"name": "b", "url": f"{peer.url}/v1", "model": MODEL}
        flags = ["--engine-serve", "no", "--upstreams", json.dumps([upstream])]
        with server_process(home / "data", chat_model, *flags, "--log-format", "json") as running:
            yield House(running, peer)


def test_a_trace_goes_on_to_the_server_and_into_the_timeline(house: House) -> None:
    key = house.server.tenant("traced")
    answer = house.ask(key, "with a trace", traceparent=PARENT, tracestate=STATE)
    assert answer.status_code == 200, answer.text
    sent = house.sent_for("with a trace").headers
    version, trace_id, span_id, flags = sent["traceparent"].split("-")
    assert (version, trace_id, flags, sent["tracestate"]) == ("00", TRACE_ID, "01", STATE)
    assert len(span_id) == 16
    assert span_id != SPAN_ID
    with house.server.http(key) as client:
        path = f"/v1/requests/{answer.headers['x-request-id']}"
        until(lambda: "explanation" in client.get(path).json())
        events = client.get(path).json()["timeline"]
    (traced,) = [each for each in events if each["event"] == "traced"]
    assert (traced["trace_id"], traced["parent_span_id"]) == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize(
    ("headers", "dropped", "passed_on"),
    [
        ({}, None, set()),
        ({"traceparent": "garbage", "tracestate": STATE}, "traceparent", set()),
        ({"traceparent": PARENT + "-" + "x" * 10_000}, "traceparent", set()),
        ({"traceparent": PARENT, "tracestate": "garbage"}, "tracestate", {"traceparent"}),
        ({"traceparent": PARENT, "tracestate": "a=" + "x" * 10_000}, "tracestate", {"traceparent"}),
    ],
)
def test_what_is_no_trace_context_is_dropped_and_the_request_goes_on(
    house: House, headers: dict[str, str], dropped: str | None, passed_on: set[str]
) -> None:
    def counted() -> dict[str, float]:
        with house.server.http() as client:
            page = client.get("/metrics").text
        return {name: value(page, DROPPED, header=name) or 0 for name in ("traceparent", "tracestate")}

    text = f"{dropped} of {sum(map(len, headers.values()))} characters"
    key, before = house.server.key("owner"), counted()
    assert house.ask(key, text, **headers).status_code == 200
    assert counted() == {name: number + (name == dropped) for name, number in before.items()}
    assert house.sent_for(text).headers.keys() & {"traceparent", "tracestate"} == passed_on


def test_debug_is_switched_on_and_off_and_each_line_has_its_ids(house: House) -> None:
    key = house.server.tenant("logged")
    tenant_id = house.server.admin("GET", "/tenants/logged")["id"]
    quiet = house.ask(key, "quiet", traceparent=PARENT).headers["x-request-id"]
    house.switch("debug")
    ended = house.ask(key, "loud", traceparent=PARENT).headers["x-request-id"]
    refused = house.ask("fg_live_wrong", "loud", traceparent=PARENT).headers["x-request-id"]
    until(lambda: house.logged(ended) and house.logged(refused))
    house.switch("info")
    again = house.ask(key, "quiet again").headers["x-request-id"]

    assert (house.logged(quiet), house.logged(again)) == ([], [])
    ids = {"request_id", "trace_id", "tenant_id"}
    for line in house.logged(ended):
        shown = {name: line.get(name) for name in ids}
        assert shown == {"request_id": ended, "trace_id": TRACE_ID, "tenant_id": tenant_id}, line
        assert line.keys() >= {"time", "level", "logger", "message"}
    (line,) = house.logged(refused)
    assert line["message"] == "refused: invalid_api_key"
    assert {name: line[name] for name in ids & line.keys()} == {"request_id": refused, "trace_id": TRACE_ID}


def test_no_line_has_a_prompt_an_answer_or_a_secret(house: House) -> None:
    server = house.server
    house.switch("debug")
    key = server.tenant(f"secretive-{CANARY}")
    wrong = f"fg_live_{CANARY}"
    begun = len(server.log())
    assert house.ask(key, f"{CANARY} of the prompt", **{"idempotency-key": CANARY}).status_code == 200
    failed = house.ask(key, f"{CANARY}, fail")
    assert failed.status_code >= 500
    assert house.ask(wrong, f"{CANARY} of the prompt").status_code == 401
    with server.http(key) as client:
        for path, body in (
            ("/v1/completions", {"model": CANARY, "prompt": CANARY}),
            ("/v1/chat/completions", {"model": MODEL, "messages": CANARY}),
            ("/v1/embeddings", {"model": MODEL, "input": CANARY}),
            ("/v1/quotes", {"model": MODEL, "messages": [{"role": "user", "content": CANARY}]}),
        ):
            client.post(path, json=body, headers={"x-fairgate-quote": CANARY, "cookie": f"a={CANARY}"})
        client.post("/v1/chat/completions", content=f'{{"model": "{CANARY}'.encode())
        client.get(f"/{CANARY}?password={CANARY}")
        client.post("/console/log-in", data={"name": CANARY, "password": CANARY})
    link = server.admin("POST", "/people", {"name": "canary", "role": "auditor"})["link"]
    until(lambda: len(house.logged(failed.headers["x-request-id"])) > 0)
    house.switch("info")
    text = server.log()[begun:]
    assert text.count('"level": "debug"') >= 5
    for secret in (CANARY, key, server.owner_key, link.partition("token=")[2]):
        assert [line for line in text.splitlines() if secret in line] == []
