"""A rate shapes a stream, and a budget ends one to the token, through a real server.

Counts and order only: how exact the pace is, a virtual clock says (`tests/integration/test_rate_shape.py`).
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.server_process import MODEL, Server, until

PROMPT = "count to ten"


def chunks(server: Server, key: str, *, chat: bool = False, **body: Any) -> list[dict[str, Any]]:
    """One streamed completion's chunks."""
    asked: dict[str, Any] = (
        {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
    )
    asked |= {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    found = []
    with server.http(key) as client, client.stream("POST", path, json=asked | body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
    return found


def test_a_rate_tops_a_stream_up_as_it_flows_and_cuts_nothing(server: Server) -> None:
    key = server.tenant("lease-slow")
    server.limit("lease-slow", "output_tokens", 10, rate_per_s=40)
    answer = chunks(server, key, max_tokens=60, ignore_eos=True)
    account = answer[-1]["fairgate"]
    assert answer[-2]["choices"][0]["finish_reason"] == "length"
    assert (account["outcome"], account["actual"]["output_tokens"]) == ("completed", 60)
    assert "stop_cause" not in account
    # Half a burst at a time, sixty tokens make at least so many.
    assert account["top_ups"] >= 60 // 5 - 1
    # 10 were there, 50 had to flow in.
    assert account["actual"]["e2e_s"] >= 50 / 40
    until(server.is_idle)
    assert server.limit_state("lease-slow", "output_tokens")["held"] == 0
    assert server.verify()["ok"]


def test_more_streams_than_the_rate_feeds_wait_and_all_of_them_end(server: Server) -> None:
    key = server.tenant("lease-crowd")
    server.limit("lease-crowd", "output_tokens", 10, rate_per_s=60)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: chunks(server, key, max_tokens=20, ignore_eos=True), range(6)))
    for answer in answers:
        assert (answer[-1]["fairgate"]["outcome"], answer[-1]["usage"]["completion_tokens"]) == (
            "completed",
            20,
        )
    until(server.is_idle)
    assert server.verify()["ok"]


@pytest.mark.parametrize("choices", [1, 3])
def test_without_max_tokens_a_budget_is_used_to_its_last_token(server: Server, choices: int) -> None:
    tenant = f"lease-last-{choices}"
    key = server.tenant(tenant)
    server.limit(tenant, "output_tokens", 97, window="lifetime")
    # An answer may end by itself: then the next one goes on with what is left.
    for seed in range(50):
        answer = chunks(server, key, chat=True, n=choices, ignore_eos=True, seed=seed)
        account = answer[-1]["fairgate"]
        if account["outcome"] == "budget":
            break
    assert account["stop_cause"] == "budget"
    assert {each["choices"][0]["finish_reason"] for each in answer if each["choices"]} <= {None, "length"}
    until(server.is_idle)
    state = server.limit_state(tenant, "output_tokens")
    assert (state["used"], state["held"]) == (97, 0)
    report = server.verify()
    assert report["ok"], report


def test_device_time_is_in_the_account_of_the_tenant(server: Server) -> None:
    key = server.tenant("lease-measured")
    server.limit("lease-measured", "gpu_ms", 1_000_000, window="lifetime")
    chunks(server, key, max_tokens=30, ignore_eos=True)
    until(server.is_idle)
    state = server.limit_state("lease-measured", "gpu_ms")
    assert state["used"] > 0
    assert state["held"] == 0
    assert server.verify()["ok"]
