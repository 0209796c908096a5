"""A hard limit is never exceeded by a token when fifty requests hit it together, in any dialect.

With the counters in the process, and with Redis.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import services
from tests.support.server_process import MODEL, Server, server_process, until

CONCURRENT = 50
PROMPT = "count to ten"
MAX_TOKENS = 12
HELD = len(PROMPT) + MAX_TOKENS
"""Of one request; the tiny model's tokens are bytes."""
TEXT = "/v1/completions"
DIALECTS = ("chat", "responses", "messages")
MIXED, BUDGET = 30, 400


@pytest.fixture(scope="module", params=["memory", "redis"])
def limited(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, chat_model: Path
) -> Iterator[Server]:
    """A server with its counters in the process, and one with them in a Redis."""
    arguments: list[str] = []
    if request.param == "redis":
        url = request.getfixturevalue("redis_server")
        services.delete_keys(url)
        arguments = ["--redis-url", url]
    data_dir = tmp_path_factory.mktemp(f"limited-{request.param}")
    with server_process(data_dir, chat_model, "--engine-max-sequences", "16", *arguments) as running:
        yield running


async def burst(server: Server, key: str, asked: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    """All at once, on as many connections: routes and bodies."""
    limits = httpx.Limits(max_connections=len(asked))
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120, limits=limits) as client:
        return list(await asyncio.gather(*(client.post(path, json=body) for path, body in asked)))


async def test_fifty_at_once_never_exceed_it_and_the_books_agree(limited: Server) -> None:
    amount = 20 * HELD + HELD // 2
    key = limited.tenant("crowd")
    limited.limit("crowd", "total_tokens", amount, window="lifetime")
    # Half of them end where max_tokens says, half by a stop string or by themselves: refunds and holds mix.
    bodies = [
        {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": number % 2 == 0,
            "seed": number,
        }
        for number in range(CONCURRENT)
    ]
    used = 0
    refused_before = False
    for _ in range(4):
        answers = await burst(limited, key, [(TEXT, body) for body in bodies])
        assert {answer.status_code for answer in answers} <= {200, 429}
        served = [answer.json() for answer in answers if answer.status_code == 200]
        for body in served:
            used += body["usage"]["total_tokens"]
        for answer in answers:
            if answer.status_code == 429:
                refused_before = True
                # While others hold what is left it is worth asking again; not any more when it is spent.
                code = answer.json()["error"]["code"]
                assert code in (
                    {"insufficient_quota", "rate_limit_exceeded"} if served else {"insufficient_quota"}
                )
                assert answer.headers["x-should-retry"] == (
                    "false" if code == "insufficient_quota" else "true"
                )
        assert used <= amount, "the limit was exceeded"
        state = limited.limit_state("crowd", "total_tokens")
        assert state["held"] == 0, "something is still held after all have ended"
        assert state["used"] == used, "counters and answers disagree"
        if not served:
            break
    assert refused_before
    assert amount - used < HELD, "what was left would have held one more request"
    report = limited.verify()
    assert report["ok"], report
    assert report["open_requests"] == 0


async def test_a_concurrency_limit_admits_so_many_at_once(limited: Server) -> None:
    key = limited.tenant("narrow")
    limited.limit("narrow", "concurrency", 3)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60, "ignore_eos": True}
    answers = await burst(limited, key, [(TEXT, body)] * 12)
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses.count(200) >= 3
    assert set(statuses) <= {200, 429}
    assert 429 in statuses
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert float(answer.headers["retry-after-ms"]) > 0
    until(limited.is_idle)
    assert limited.limit_state("narrow", "concurrency")["held"] == 0
    assert limited.verify()["ok"]


def test_a_request_larger_than_the_limit_itself_is_told_so(limited: Server) -> None:
    key = limited.tenant("tiny-budget")
    limited.limit("tiny-budget", "output_tokens", 5, window="day")
    with limited.http(key) as client:
        answer = client.post(TEXT, json={"model": MODEL, "prompt": "x", "max_tokens": 6})
    assert answer.status_code == 429
    assert "larger than the whole limit" in answer.json()["error"]["message"]
    assert answer.headers["x-ratelimit-remaining-tokens"] == "5"


def asked_in(dialect: str, number: int, most_tokens: int | None) -> tuple[str, dict[str, Any]]:
    """The route and body of one question, in turn whole and streamed. `most_tokens` None: without a length,
    where the dialect can leave it out."""
    body: dict[str, Any] = {"model": MODEL, "ignore_eos": True, "stream": number % 2 == 1}
    said = [{"role": "user", "content": PROMPT}]
    match dialect:
        case "chat":
            length = {} if most_tokens is None else {"max_completion_tokens": most_tokens}
            options = {"stream_options": {"include_usage": True}} if body["stream"] else {}
            return "/v1/chat/completions", body | options | length | {"messages": said}
        case "responses":
            length = {} if most_tokens is None else {"max_output_tokens": most_tokens}
            return "/v1/responses", body | length | {"input": PROMPT}
    return "/v1/messages", body | {"messages": said, "max_tokens": most_tokens or 1_000}


def ended_of(answer: httpx.Response) -> dict[str, Any]:
    """What a 200 says at its end, whole or streamed: usage, `fairgate` and what stands beside them."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        whole: dict[str, Any] = answer.json()
        return whole
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    last = next(event for event in reversed(events) if "usage" in (event | event.get("response", {})))
    ended: dict[str, Any] = last.get("response", last)
    if "choices" in ended:
        ended["choices"] = [
            choice for event in events for choice in event["choices"] if choice["finish_reason"]
        ]
    return ended


def delivered(answer: httpx.Response) -> int:
    usage = ended_of(answer)["usage"]
    tokens: int = usage.get("output_tokens", usage.get("completion_tokens"))
    return tokens


async def test_dialects_share_a_budget_to_the_token(limited: Server) -> None:
    """Thirty at once, half of them without a length where that is allowed: all is delivered, and no more."""
    key = limited.tenant("agents", on_low_budget="truncate")
    limited.limit("agents", "output_tokens", BUDGET, window="lifetime")
    used, answers = 0, list[httpx.Response]()
    while used < BUDGET:
        asked = [
            asked_in(DIALECTS[number % 3], number // 3, None if number % 2 else 25) for number in range(MIXED)
        ]
        answers = await burst(limited, key, asked)
        assert {answer.status_code for answer in answers} <= {200, 429}
        served = [answer for answer in answers if answer.status_code == 200]
        assert served, "what is left is served"
        used += sum(map(delivered, served))
    assert used == BUDGET
    until(limited.is_idle)
    assert limited.limit_state("agents", "output_tokens")["used"] == BUDGET
    (row,) = limited.admin("GET", "/usage?window=total&group_by=&tenant=agents")["data"]
    assert row["output_tokens"] == BUDGET
    assert limited.verify()["ok"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_spent_budget_ends_each_dialect_in_its_own_words(
    limited: Server, dialect: str, is_stream: bool
) -> None:
    name = f"spent-{dialect}-{is_stream}"
    key = limited.tenant(name, on_low_budget="truncate")
    limited.limit(name, "output_tokens", 50, window="lifetime")
    path, body = asked_in(dialect, int(is_stream), None)
    with limited.http(key) as client:
        answer = client.post(path, json=body)
        refused = client.post(path, json=body)
    assert delivered(answer) == 50
    ended = ended_of(answer)
    assert ended["fairgate"]["stop_cause"] == "budget"
    error = refused.json()["error"]
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert error["code"] == "insufficient_quota"
    match dialect:
        case "chat":
            assert ended["choices"][0]["finish_reason"] == "length"
        case "responses":
            assert (ended["status"], ended["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )
        case "messages":
            said = ended if not is_stream else ended["delta"]
            assert said["stop_reason"] == "max_tokens"
            assert (refused.json()["type"], error["type"]) == ("error", "rate_limit_error")
