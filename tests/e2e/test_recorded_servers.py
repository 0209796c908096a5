"""Answers of vLLM, llama.cpp and transformers through the gateway are the same as directly, field by field.

A stand-in replays what the servers answered (`fairgate bench upstreams --record`); one gateway is in front of
all. Each answer is asked for whole and as a stream, and whole from a pool that is always streamed to here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy import create_engine, text

from ops.bench.upstreams.difference import differences, fields
from ops.bench.upstreams.models import save_text_tokenizer
from ops.bench.upstreams.recording import RecordedRequest, Recording, ServerAnswer, load, servers
from ops.bench.upstreams.request_set import TOKENS
from tests.support.every_field import every_field
from tests.support.faulty_servers import Peer
from tests.support.recorded_server import Change, RecordedServer, named, plain, recorded_server
from tests.support.server_process import PRICE, Server, server_process, until
from tests.support.strict_server import MODEL, strict_server

SERVERS = servers()
FORMS = ("whole", "streamed", "whole-of-a-stream")
SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {
        "server": "vllm",
        "capabilities": ["tools", "forced_tools", "json_schema", "json_object", "extra_fields"],
    },
    "vllm_defaults": {"server": "vllm", "capabilities": ["extra_fields"]},
    "vllm_images": {
        "server": "vllm",
        "tokenizer_dir": "",
        "capabilities": ["json_schema", "reasoning", "images", "extra_fields"],
    },
    "llama_cpp": {
        "server": "llama.cpp",
        "prefix_cache": "shared",
        "capabilities": ["tools", "forced_tools", "json_schema", "json_object", "extra_fields"],
    },
    "llama_cpp_embeddings": {"server": "llama.cpp", "capabilities": ["embeddings"]},
    "transformers": {"server": "other", "capabilities": [], "usage": "none"},
}
NEUTRAL: dict[str, Any] = {
    "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": False,
}  # fmt: skip
OURS = ("model", "stream", "stream_options", "cache_salt")
"""Fields that the gateway decides."""
RENAMED = {"max_completion_tokens": "max_tokens"}
"""Fields that the gateway sends by their other name."""
DEFAULTS = {"response_format": {"type": "text"}}
"""Fields that the gateway leaves out where they say what is so without them."""


def lie(usage: dict[str, Any] | None) -> Change:
    """A server's answers with another usage: each number times `factor`, or none."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        if answer.get("usage") is None:
            return answer
        return {name: value for name, value in answer.items() if name != "usage"} | (
            {} if usage is None else {"usage": answer["usage"] | usage}
        )

    return change


LIES: dict[str, Change] = {
    "too-much": lie({"prompt_tokens": 10**6, "completion_tokens": 10**6, "total_tokens": 2 * 10**6}),
    "nothing": lie({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}),
    "none": lie(None),
}


STRICT: dict[str, Any] = {
    "model": MODEL,
    "server": "vllm",
    "capabilities": [
        "tools", "forced_tools", "json_schema", "json_object", "extra_fields", "reasoning", "images", "audio",
    ],
    "fields": ["reasoning", "suffix", "video_url", "file"],
}  # fmt: skip
LEFT_OUT = frozenset(
    {
        "user", "safety_identifier", "metadata", "store", "prompt_cache_key", "prompt_cache_retention",
        "cache_control", "uuid", "reasoning_details", "prefix",
    }
)  # fmt: skip
"""Fields that no server is sent, of a request, a message, a part or a tool."""
LEFT_OUT_PARTS = ("thinking", "redacted_thinking", "refusal")
ADDED = ("cache_salt", "max_tokens", "stream_options")
"""Fields that a server is sent where the client said none."""


def as_passed(value: Any) -> Any:
    """What reaches a server of a request or a part of one, as docs/upstreams.md says."""
    if isinstance(value, list):
        kept = [
            each for each in value if not isinstance(each, dict) or each.get("type") not in LEFT_OUT_PARTS
        ]
        return [as_passed(each) for each in kept]
    if not isinstance(value, dict):
        return value
    found = {name: as_passed(each) for name, each in value.items() if name not in LEFT_OUT}
    if isinstance(found.get("reasoning"), dict) and found["reasoning"].keys() == {"effort"}:
        found["reasoning_effort"] = found.pop("reasoning")["effort"]
    return {
        RENAMED.get(name, name): each
        for name, each in found.items()
        if name not in DEFAULTS or DEFAULTS[name] != each
    }


class Front:
    """The gateway, and the stand-ins behind it."""

    def __init__(self, server: Server, behind: dict[str, RecordedServer], strict: Peer) -> None:
        self.server = server
        self.strict = strict
        self.behind = behind
        self.client = server.http(server.tenant("recorded"))

    def ask(self, recorded: RecordedRequest, pool: str, is_stream: bool) -> tuple[ServerAnswer, str]:
        """The answer and its request's id."""
        body = {"model": pool} | recorded.body
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        response = self.client.post(recorded.path, json=body)
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        return ServerAnswer(response.status_code, response.text, streamed), response.headers["x-request-id"]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Settle rows by request."""
        engine = create_engine(f"sqlite:///{self.server.data_dir / 'fairgate.db'}")
        try:
            with engine.connect() as connection:
                found = connection.execute(text("SELECT * FROM ledger WHERE kind = 'settle'")).mappings()
                return {row["request_id"]: dict(row) for row in found}
        finally:
            engine.dispose()


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return {name: load(name) for name in SERVERS}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, recordings: dict[str, Recording]) -> Iterator[Front]:
    home = tmp_path_factory.mktemp("recorded")
    save_text_tokenizer(home / "text")
    upstreams, behind = [], {}
    with ExitStack() as stack:

        def put(pool: str, recording: Recording, change: Change | None = None, **more: Any) -> None:
            url, behind[pool] = stack.enter_context(recorded_server(recording, change))
            upstreams.append(
                {
                    "name": pool,
                    "url": f"{url}/v1",
                    "model": recording.model,
                    "pool": pool,
                    "tokenizer_dir": str(home / "text"),
                }
                | SETTINGS[recording.server]
                | more
            )

        for name, recording in recordings.items():
            put(name, recording)
            put(f"{name}-whole-of-a-stream", recording, whole_tokens=0)
        for name, change in LIES.items():
            put(f"lie-{name}", recordings["vllm"], change)
        strict = stack.enter_context(strict_server())
        for pool, whole_tokens in ((MODEL, 512), (f"{MODEL}-whole-of-a-stream", 0)):
            more = {"name": pool, "pool": pool, "url": f"{strict.url}/v1", "whole_tokens": whole_tokens}
            upstreams.append(STRICT | more)
        prices = ",".join([PRICE, *(f"{each['pool']}=100/300/50" for each in upstreams)])
        arguments = ["--engine-serve", "no", "--upstreams", json.dumps(upstreams), "--prices", prices]
        server = stack.enter_context(server_process(home / "data", home / "text", *arguments))
        until(lambda: httpx.get(f"{server.url}/readyz").is_success)
        found = Front(server, behind, strict)
        with found.client:
            yield found


def test_the_set_is_as_large_as_it_is_meant_to_be(recordings: dict[str, Recording]) -> None:
    requests = [each for recording in recordings.values() for each in recording.requests]
    assert len(requests) >= 60
    assert len({each.name for each in requests if each.stream is None and each.whole.status >= 400}) >= 6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SERVERS)
def test_answers_are_the_same_as_without_the_gateway_and_cost_what_they_say(
    front: Front, recordings: dict[str, Recording], name: str, form: str
) -> None:
    pool = f"{name}-{form}" if form == "whole-of-a-stream" else name
    found: dict[str, list[str]] = {}
    said: dict[str, tuple[str, ServerAnswer]] = {}
    for recorded in recordings[name].requests:
        direct = recorded.stream if form == "streamed" else recorded.whole
        if direct is None or (form == "whole-of-a-stream" and recorded.stream is None):
            continue
        if form == "whole-of-a-stream":
            direct = recorded.stream
            assert direct is not None
        through, request_id = front.ask(recorded, pool, form == "streamed")
        differing = [str(each) for each in differences(direct, through, ignored=ignored(form))]
        if differing:
            found[recorded.name] = [*differing, through.body[:300]]
        if through.status == 200:
            said[request_id] = (recorded.name, through)
    assert not found, "\n".join(f"{request}: {each}" for request, all_ in found.items() for each in all_)
    until(front.server.is_idle)
    rows = front.rows()
    for request_id, (request, answer) in said.items():
        assert charged(rows[request_id]) == used(answer), request


def ignored(form: str) -> tuple[str, ...]:
    """An event's `object` is not a whole answer's."""
    return ("object",) if form == "whole-of-a-stream" else ()


def used(answer: ServerAnswer) -> tuple[int, int, int]:
    """Input, cached and output tokens, as the answer says."""
    found = fields(answer)
    return (
        found["usage.prompt_tokens"],
        found.get("usage.prompt_tokens_details.cached_tokens", 0),
        found.get("usage.completion_tokens", 0),
    )


def charged(row: dict[str, Any]) -> tuple[int, int, int]:
    """The same of the ledger, at the price of each."""
    detail = json.loads(row["detail"]) if isinstance(row["detail"], str) else row["detail"]
    found = row["input_tokens"], detail["cached_tokens"], row["output_tokens"]
    assert row["cost_nanousd"] == 100 * (found[0] - found[1]) + 50 * found[1] + 300 * found[2]
    return found


@pytest.mark.parametrize("name", SERVERS)
def test_what_a_client_asks_for_reaches_the_server(
    front: Front, recordings: dict[str, Recording], name: str
) -> None:
    """Of each request of the set, every field with its value."""
    lost = {}
    arrived = front.behind[name].arrived
    for recorded in recordings[name].requests:
        if not arrived.get(recorded.name):
            front.ask(recorded, name, False)
        for body in arrived.get(recorded.name, [])[:1]:
            for field, value in recorded.body.items():
                came = body.get(RENAMED.get(field, field), DEFAULTS.get(field))
                if plain(came) != plain(value):
                    lost[f"{recorded.name}: {field}"] = (value, came)
    assert lost == {}


@pytest.mark.parametrize("form", FORMS)
def test_a_strict_server_gets_what_was_said_and_its_client_what_it_answers(front: Front, form: str) -> None:
    """Every field of the set, but for what docs/upstreams.md lists; and it pays for two tokens."""
    found: dict[str, object] = {}
    answers: dict[str, str] = {}
    pool = f"{MODEL}-{form}" if form == "whole-of-a-stream" else MODEL
    for asked in every_field():
        if form == "streamed" and not asked.is_streamed:
            continue
        recorded = RecordedRequest(asked.name, asked.path, asked.body, ServerAnswer(0, ""))
        through, request_id = front.ask(recorded, pool, form == "streamed")
        arrived = front.strict.requests[-1].body
        passed = as_passed(asked.body) | ({"stream": True} if arrived.get("stream") else {})
        names = (arrived.keys() | passed.keys()) - {"model"}
        lost = {
            name: (passed.get(name), arrived.get(name))
            for name in names
            if plain(passed.get(name)) != plain(arrived.get(name))
            and not (name in ADDED and name not in passed)
        }
        direct = httpx.post(f"{front.strict.url}{asked.path}", json=passed | {"model": MODEL})
        is_stream = direct.headers["content-type"] == "text/event-stream"
        same = differences(
            ServerAnswer(direct.status_code, direct.text, is_stream),
            through,
            ignored=("object", "choices.*.index", "choices.*.logprobs.text_offset"),
        )
        if lost or same or direct.status_code != 200:
            found[asked.name] = (lost, [str(each) for each in same], through.body[:300], direct.text[:300])
        answers[request_id] = asked.name
    assert not found, "\n".join(f"{name}: {each}" for name, each in found.items())
    until(front.server.is_idle)
    rows = front.rows()
    assert {charged(rows[each])[::2] for each in answers} == {(7, 2)}, "no word of a prompt is output"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("said", [{}, NEUTRAL, {"temperature": 0.5, "seed": 7, "stop": "x"}])
def test_of_sampling_a_server_gets_what_was_said_and_nothing_else(
    front: Front, recordings: dict[str, Recording], said: dict[str, Any], form: str
) -> None:
    pool = f"vllm-{form}" if form == "whole-of-a-stream" else "vllm"
    for name in ("plain text", "text completion"):
        recorded = named(recordings["vllm"], name)
        prompt = {field: recorded.body[field] for field in ("messages", "prompt") if field in recorded.body}
        asked = replace(recorded, body=prompt | {"max_tokens": TOKENS} | said)
        assert front.ask(asked, pool, form == "streamed")[0].status == 200
        came = front.behind[pool].arrived[name][-1]
        assert {field: value for field, value in came.items() if field not in OURS} == asked.body


@pytest.mark.parametrize("lie_name", LIES)
def test_a_server_that_lies_about_its_usage_is_never_paid_more_than_was_held(
    front: Front, recordings: dict[str, Recording], lie_name: str
) -> None:
    accounts: dict[str, tuple[RecordedRequest, ServerAnswer, dict[str, Any]]] = {}
    answered = [each for each in recordings["vllm"].requests if each.whole.status == 200]
    for number, recorded in enumerate(answered[:: len(LIES)]):
        answer, request_id = front.ask(recorded, f"lie-{lie_name}", number % 2 == 0)
        if answer.status == 200:
            accounts[request_id] = (recorded, answer, account_of(answer))
    assert accounts
    until(front.server.is_idle)
    rows = front.rows()
    for request_id, (recorded, answer, account) in accounts.items():
        row = rows[request_id]
        assert row["input_tokens"] + row["output_tokens"] <= account["tokens"]["held"], recorded.name
        assert row["output_tokens"] <= recorded.body.get("max_tokens", TOKENS), recorded.name
        if lie_name == "nothing" and fields(answer).get("choices.0.message.content"):
            assert row["output_tokens"] > 0, recorded.name
    assert front.server.verify()["ok"]


def account_of(answer: ServerAnswer) -> dict[str, Any]:
    """The answer's own account; of a stream in the last event that has one."""
    if not answer.is_stream:
        whole: dict[str, Any] = json.loads(answer.body)["fairgate"]
        return whole
    events = [line.removeprefix("data: ") for line in answer.body.splitlines() if line.startswith("data: {")]
    found = [json.loads(each) for each in events]
    account: dict[str, Any] = [each["fairgate"] for each in found if "fairgate" in each][-1]
    return account
