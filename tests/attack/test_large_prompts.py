"""A tenant that sends the largest prompts that the server takes, again and again, stops no other tenant."""

from __future__ import annotations

import json
import math
import re
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.models.tokenizers import byte_fallback
from tests.support.server_process import CHAT_TEMPLATE, MODEL, Server, server_process
from tests.support.tiny_model import save_tiny_model

pytestmark = pytest.mark.attack

ATTACK_S = 3.0
WINDOW_S = 0.5
"""The longest lag is taken of each; what else runs on the machine makes the loop late in some, a prompt that
is tokenised on it in nearly all."""
STREAMS = 10
CONTEXT_TOKENS = 262_144
"""So long that a prompt of 1 MB might fit, and has to be tokenised to know."""
STREAM_TOKENS = 200
TEXT = " " * (2**20 - 200)
"""Each space is a word of its own to this tokenizer."""
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": TEXT, "max_tokens": 1}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
BODIES = [
    ("/v1/completions", PROMPT),
    ("/v1/chat/completions", CHAT),
    ("/v1/quotes", {"model": MODEL, "prompt": TEXT}),
]


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a long context, whose tokenizer is of a kind that takes seconds for 1 MB."""
    model_dir = tmp_path_factory.mktemp("slow-tokenizer")
    save_tiny_model(model_dir, byte_fallback(), CONTEXT_TOKENS)
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return model_dir


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Server]:
    flags = ("--engine-max-sequences", str(STREAMS))
    with server_process(tmp_path_factory.mktemp("attacked"), slow_model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def plain_s(slow_model: Path) -> float:
    """Seconds for which another thread stands still while this text is tokenised in the plain way."""
    tokenizer = Tokenizer.from_file(str(slow_model / "tokenizer.json"))
    over, gaps = threading.Event(), [0.0]

    def ticks() -> None:
        last_s = time.monotonic()
        while not over.wait(0.001):
            now_s = time.monotonic()
            gaps.append(now_s - last_s)
            last_s = now_s
        gaps.append(time.monotonic() - last_s)

    ticking = threading.Thread(target=ticks)
    ticking.start()
    tokenizer.encode(TEXT)
    over.set()
    ticking.join()
    return max(gaps)


def lags(server: Server) -> dict[float, float]:
    """How often the event loop was so late at most, by seconds."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'^fairgate_event_loop_lag_seconds_bucket\{le="(.+)"\} (.+)$', text, re.MULTILINE)
    return {float(at_most): float(count) for at_most, count in found}


def longest_lag_s(before: dict[float, float], after: dict[float, float]) -> float:
    """The longest lag between the two, rounded up to the next bound of the histogram."""
    total = after[math.inf] - before[math.inf]
    return min(at_most for at_most in after if after[at_most] - before[at_most] == total)


def streamed(server: Server, key: str, over: threading.Event) -> int:
    """Streams one answer after the other until it is over; each must be whole. Returns the tokens that
    arrived."""
    body = {"model": MODEL, "prompt": "on", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "logprobs": 0}
    arrived = 0
    with server.http(key) as client:
        while not over.is_set():
            events: list[str] = []
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                assert response.status_code == 200, response.read()
                events = [
                    line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")
                ]
            assert events[-1] == "[DONE]"
            choices = [each for event in events[:-1] for each in json.loads(event)["choices"]]
            assert choices[-1]["finish_reason"] == "length"
            tokens = sum(len(each["logprobs"]["tokens"]) for each in choices if each["logprobs"])
            assert tokens == STREAM_TOKENS
            arrived += tokens
    return arrived


def flood(server: Server, key: str, path: str, body: str, end_s: float) -> list[httpx.Response]:
    """Sends it once, and again and again until then."""
    answers: list[httpx.Response] = []
    with server.http(key) as client:
        while not answers or time.monotonic() < end_s:
            answers.append(client.post(path, content=body, headers={"content-type": "application/json"}))
    return answers


def test_the_largest_bodies_of_one_tenant_stop_no_stream_of_another(attacked: Server, plain_s: float) -> None:
    tenants = [f"streams-{number}" for number in range(STREAMS)]
    keys = [attacked.tenant(name) for name in tenants]
    for name in tenants:
        attacked.limit(name, "output_tokens", 10**9, window="day")
    attacker = attacked.tenant("floods")
    over = threading.Event()
    end_s = time.monotonic() + ATTACK_S
    with ThreadPoolExecutor(STREAMS + len(BODIES)) as threads:
        streams = [threads.submit(streamed, attacked, key, over) for key in keys]
        floods = [
            threads.submit(flood, attacked, attacker, path, json.dumps(body), end_s) for path, body in BODIES
        ]
        try:
            seen = [lags(attacked)]
            while wait(floods, WINDOW_S).not_done:
                seen.append(lags(attacked))
            answers = [answer for each in floods for answer in each.result()]
        finally:
            over.set()
        arrived = [stream.result() for stream in streams]
    longest_s = statistics.median(starmap(longest_lag_s, pairwise(seen)))
    codes = {answer.json()["error"]["code"] for answer in answers}
    assert "context_length_exceeded" in codes
    assert codes <= {"context_length_exceeded", "rate_limit_exceeded"}, codes  # the latter: too many quotes
    assert longest_s <= plain_s / 10, f"plain: {plain_s:.3f} s"
    assert [attacked.limit_state(name, "output_tokens")["used"] for name in tenants] == arrived


@pytest.mark.parametrize("meter", ["requests", "input_tokens", "total_tokens"])
def test_a_tenant_without_budget_is_refused_before_its_prompts_are_tokenised(
    attacked: Server, plain_s: float, meter: str
) -> None:
    """Its refusal says what that of a small prompt says, and takes a fraction of what tokenising takes."""
    key = attacked.tenant(f"no-{meter}")
    attacked.limit(f"no-{meter}", meter, 0 if meter == "requests" else 1_000, window="lifetime")
    path, body = BODIES[0]
    with attacked.http(key) as client:
        small = client.post(path, json=body | {"prompt": "x " * 900, "max_tokens": 900})
        larges = [client.post(path, json=body) for _ in range(2)]
        larges.append(client.post(path, json=body, headers={"idempotency-key": "one that is new"}))
    for large in larges:
        said, of_small = large.json()["error"], small.json()["error"]
        assert (
            (large.status_code, said["code"])
            == (small.status_code, of_small["code"])
            == (429, "insufficient_quota")
        )
        assert said["message"].partition(" Limit ")[0] == of_small["message"].partition(" Limit ")[0]
        varying = {"date", "x-request-id", "openai-processing-ms", "content-length"}
        # Which only the tokens tell.
        varying |= {"x-fairgate-estimate"}
        assert {name: value for name, value in large.headers.items() if name not in varying} == {
            name: value for name, value in small.headers.items() if name not in varying
        }
    assert min(large.elapsed.total_seconds() for large in larges[:2]) <= plain_s / 4
    assert larges[2].elapsed.total_seconds() <= plain_s / 2
