"""The unchanged `openai` SDK gets from the server what it gets from OpenAI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from tests.support.server_process import MODEL, Server, until

HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = {"ignore_eos": True}


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    return server.tenant("sdk", tier="standard", tiers=["interactive", "standard", "batch"])


@pytest.fixture
def client(server: Server, key: str) -> Iterator[OpenAI]:
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0, timeout=60) as made:
        yield made


def fairgate(value: Any) -> dict[str, Any]:
    """The vendor object beside OpenAI's fields."""
    found: dict[str, Any] = value.model_extra["fairgate"]
    return found


def test_a_chat_completion_has_usage_and_the_account_beside_the_estimate(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=7, temperature=0, extra_body=LONG
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.service_tier == "default"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == 0
    assert answer.usage.prompt_tokens == len("<user>Hello\n<assistant>")
    account = fairgate(answer)
    assert account["outcome"] == "completed"
    assert account["actual"]["output_tokens"] == 7
    assert account["estimate"]["output_tokens"]["p90"] <= 7
    assert account["actual"]["cost_nanousd"] == 100 * answer.usage.prompt_tokens + 300 * 7
    assert account["actual"]["cost_nanousd"] <= account["estimate"]["cost_nanousd"]["max"]
    assert account["tokens"]["held"] == account["tokens"]["charged"] + account["tokens"]["refunded"]
    assert account["actual"]["e2e_s"] >= account["actual"]["ttft_s"] >= account["actual"]["wait_s"] >= 0


def test_raw_headers_name_request_limits_tier_and_estimate(server: Server) -> None:
    key = server.tenant("headers")
    server.limit("headers", "total_tokens", 10_000, window="minute")
    server.limit("headers", "requests", 50, window="hour")
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=5, extra_body=LONG
        )
    headers = raw.headers
    assert re.fullmatch(r"req_[0-9a-z]{26}", headers["x-request-id"])
    assert int(headers["openai-processing-ms"]) >= 0
    assert headers["x-ratelimit-limit-tokens"] == "10000"
    held = len("<user>Hello\n<assistant>") + 5
    assert headers["x-ratelimit-remaining-tokens"] == str(10_000 - held)
    assert re.fullmatch(r"(\d+m)?\d+s|\d+ms", headers["x-ratelimit-reset-tokens"])
    assert headers["x-ratelimit-limit-requests"] == "50"
    assert headers["x-ratelimit-remaining-requests"] == "49"
    assert headers["x-fairgate-tenant"] == "headers"
    assert headers["x-fairgate-tier"] == "standard"
    times = r"p50=\d+\.\d{3};p90=\d+\.\d{3}"
    assert re.fullmatch(
        rf"wait;{times}, ttft;{times}, latency;{times}, output-tokens;p50=\d+;p90=\d+, "
        r'cost;p50=\d+;p90=\d+;max=\d+, basis="replay[^"\\]*";samples=\d+(;saturated)?',
        headers["x-fairgate-estimate"],
    )
    completion = raw.parse()
    assert completion.choices[0].finish_reason == "length"


def test_a_stream_gives_the_text_of_the_whole_answer_and_ends_with_usage(client: OpenAI) -> None:
    settings: Any = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": LONG,
    }
    whole = client.chat.completions.create(**settings).choices[0].message.content
    chunks = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes[-1] == "length"
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    details = chunks[-1].usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == 0
    assert fairgate(chunks[-1])["actual"]["output_tokens"] == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_carries_the_account_in_its_last_chunk(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4, stream=True, extra_body=LONG
        )
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert fairgate(chunks[-1])["outcome"] == "completed"
    assert all("fairgate" not in (chunk.model_extra or {}) for chunk in chunks[:-1])


async def test_the_async_client_streams_many_at_once(server: Server, key: str) -> None:
    async with AsyncOpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0) as client:

        async def one(number: int) -> tuple[int, int]:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=HELLO,
                max_tokens=10 + number,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=LONG,
            )
            tokens = 0
            async for chunk in stream:
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
            return number, tokens

        answers = await asyncio.gather(*(one(number) for number in range(20)))
    assert answers == [(number, 10 + number) for number in range(20)]


def test_choices_have_indexes_and_one_prompt_is_billed_once(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, max_tokens=6, seed=4, temperature=1.5, extra_body=LONG
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1, "seeded choices must differ"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens == len("<user>Hello\n<assistant>")
    again = client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, max_tokens=6, seed=4, temperature=1.5, extra_body=LONG
    )
    assert [choice.message.content for choice in again.choices] == [
        choice.message.content for choice in answer.choices
    ]


def test_log_probabilities_of_a_chat_have_a_token_each(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
        extra_body=LONG,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for item in logprobs.content:
        assert len(item.top_logprobs) == 3
        assert item.logprob == pytest.approx(max(top.logprob for top in item.top_logprobs))
        assert item.logprob <= 0


def test_log_probabilities_are_the_same_streamed_and_whole(client: OpenAI) -> None:
    settings: Any = {
        "model": MODEL, "messages": HELLO, "max_tokens": 6, "logprobs": True, "temperature": 0,
        "extra_body": LONG,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    streamed = [
        item.token
        for chunk in client.chat.completions.create(**settings, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for item in choice.logprobs.content or []
    ]
    assert streamed == [item.token for item in whole.content]


def test_text_completions_take_strings_tokens_and_batches(server: Server, client: OpenAI) -> None:
    one = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=4, logprobs=2, temperature=0, extra_body=LONG
    )
    assert one.object == "text_completion"
    assert one.choices[0].logprobs is not None
    assert len(one.choices[0].logprobs.tokens or []) == 4
    assert one.choices[0].logprobs.text_offset == sorted(one.choices[0].logprobs.text_offset or [])
    # "abc" is three byte tokens; the same prompt as ids gives the same answer.
    ids = Tokenizer.from_file(str(server.model_dir / "tokenizer.json")).encode("abc").ids
    same = client.completions.create(model=MODEL, prompt=ids, max_tokens=4, temperature=0, extra_body=LONG)
    assert same.choices[0].text == one.choices[0].text
    batch = client.completions.create(
        model=MODEL, prompt=["abc", "xyzxyz"], n=2, max_tokens=3, temperature=0, extra_body=LONG
    )
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert batch.choices[0].text == batch.choices[1].text == one.choices[0].text[: len(batch.choices[0].text)]
    assert batch.usage is not None
    assert (batch.usage.prompt_tokens, batch.usage.completion_tokens) == (9, 12)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "prompt": "stop here", "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**settings, extra_body=LONG).choices[0].text
    letters = [letter for letter in text if letter != "\ufffd"]
    assert letters, "the model says nothing printable"
    stop = letters[len(letters) // 2]
    cut = client.completions.create(**settings, stop=[stop], extra_body=LONG)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 60


@pytest.mark.parametrize(
    ("asked", "tier", "said"),
    [
        ("priority", "interactive", "priority"),
        ("default", "standard", "default"),
        ("auto", "standard", "default"),
        ("flex", "batch", "flex"),
    ],
)
def test_service_tier_chooses_the_tier_and_the_answer_says_which(
    client: OpenAI, asked: Any, tier: str, said: str
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=2, service_tier=asked, extra_body=LONG
    )
    assert raw.headers["x-fairgate-tier"] == tier
    assert raw.parse().service_tier == said


def test_models_are_listed_and_described(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    described = client.models.retrieve(MODEL)
    assert described.owned_by == "fairgate"
    assert described.max_model_len == described.context_tokens > 0  # type: ignore[attr-defined]


# ---------------------------------------------------------------- error classes


def test_a_wrong_key_is_an_authentication_error(server: Server) -> None:
    client = OpenAI(api_key="fg_live_nope_nope", base_url=f"{server.url}/v1")
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.code == "invalid_api_key"
    assert caught.value.request_id is not None


def test_a_spent_budget_is_a_rate_limit_error_that_is_not_retried(server: Server) -> None:
    key = server.tenant("spent")
    server.limit("spent", "output_tokens", 10, window="lifetime")
    calls = 0

    def count(request: httpx.Request) -> None:
        nonlocal calls
        calls += 1

    http = httpx.Client(event_hooks={"request": [count]})
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=3, http_client=http) as client:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, extra_body=LONG)
        calls = 0
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "output_tokens" in caught.value.message
    assert calls == 1


def test_a_rate_says_when_to_come_back(server: Server) -> None:
    key = server.tenant("rated")
    server.limit("rated", "requests", 1, rate_per_s=0.5)
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        assert caught.value.code == "rate_limit_exceeded"
        headers = caught.value.response.headers
        assert 0 < int(headers["retry-after-ms"]) <= 2000
        assert int(headers["retry-after"]) in (1, 2)
        # The SDK's own retry obeys it and succeeds.
        patient = client.with_options(max_retries=2)
        patient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)


def test_bad_requests_unknown_models_and_forbidden_tiers_have_their_classes(
    server: Server, client: OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    only_batch = server.tenant("only-batch", tier="batch", tiers=["batch"])
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        client.with_options(api_key=only_batch).chat.completions.create(
            model=MODEL, messages=HELLO, service_tier="priority"
        )
    assert "Allowed tiers: batch" in forbidden.value.message
    with pytest.raises(openai.APIStatusError) as status:
        client.with_options(api_key=only_batch).post("/quotes", body={"model": MODEL}, cast_to=object)
    assert status.value.status_code == 400


def test_a_client_that_leaves_is_charged_what_was_emitted(server: Server) -> None:
    key = server.tenant("leaver")
    server.limit("leaver", "output_tokens", 100_000, window="lifetime")
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=5000, stream=True, extra_body=LONG
        )
        received = 0
        for chunk in stream:
            received += 1 if chunk.choices and chunk.choices[0].delta.content else 0
            if received >= 5:
                break
        stream.close()
    until(lambda: server.limit_state("leaver", "output_tokens")["held"] == 0)
    used = server.limit_state("leaver", "output_tokens")["used"]
    assert 5 <= used < 5000
    until(server.is_idle)


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_the_engine(server: Server) -> None:
    key = server.tenant("impatient")
    server.limit("impatient", "output_tokens", 100_000, window="lifetime")
    with server.http(key, timeout_s=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 8000, "ignore_eos": True},
        )
    until(server.is_idle)
    assert 0 < server.limit_state("impatient", "output_tokens")["used"] < 8000


def test_quotes_name_every_tier_that_the_key_may_use(server: Server, key: str) -> None:
    with server.http(key) as client:
        answer = client.post("/v1/quotes", json={"model": MODEL, "prompt": "hello", "max_tokens": 100}).json()
    assert [quote["tier"] for quote in answer["quotes"]] == ["interactive", "standard", "batch"]
    for quote in answer["quotes"]:
        assert quote["cost_nanousd"]["p50"] <= quote["cost_nanousd"]["p90"] <= quote["cost_nanousd"]["max"]
        assert quote["wait_s"]["p50"] <= quote["ttft_s"]["p50"] <= quote["e2e_s"]["p50"]
        assert set(quote["tokens_ahead"]) == {"own", "others", "higher_tier"}
    most = {quote["tier"]: quote["cost_nanousd"]["max"] for quote in answer["quotes"]}
    assert most["interactive"] == 2 * most["standard"] == 4 * most["batch"]


def test_everything_settled_and_nothing_leaked(server: Server) -> None:
    until(server.is_idle)
    report = server.verify()
    assert report["ok"], report
    assert report["open_requests"] == 0
