"""Sixteen requests at one instant into an idle engine with two places: each is told of those that came before
it, and its explanation has the queue's own count of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_process import MODEL, Server, server_process, until

PLACES = 2
TOGETHER = 16
BURSTS = 3
TOKENS = 40


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("bursts")
    with server_process(data_dir, chat_model, "--engine-max-sequences", str(PLACES)) as running:
        yield running


@pytest.fixture(scope="module")
def bursts(small: Server) -> list[list[dict[str, Any]]]:
    """What each request was told, each burst by itself: its account, and its timeline."""
    key = small.tenant("burst")

    async def burst() -> list[dict[str, Any]]:
        async with AsyncOpenAI(api_key=key, base_url=f"{small.url}/v1", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=MODEL, prompt="all at once", max_tokens=TOKENS, extra_body={"ignore_eos": True}
                    )
                    for _ in range(TOGETHER)
                )
            )
        return [(answer.model_extra or {})["fairgate"] for answer in answers]

    told: list[list[dict[str, Any]]] = []
    for _ in range(BURSTS):
        until(small.is_idle)
        accounts = asyncio.run(burst())
        told.append([each | explained(small, each["request_id"]) for each in accounts])
    return told


def explained(server: Server, request_id: str) -> dict[str, Any]:
    """Once its timeline is written."""
    found: dict[str, Any] = {}

    def is_there() -> bool:
        found.update(server.admin("GET", f"/requests/{request_id}"))
        return bool(found["timeline"])

    until(is_there)
    return found


def queued(request: dict[str, Any]) -> dict[str, Any]:
    (event,) = (each for each in request["timeline"] if each["event"] == "queued")
    return event


def test_tokens_ahead_are_the_queue_s_own_count(small: Server, bursts: list[list[dict[str, Any]]]) -> None:
    """Recomputed from the dispatch log: what had lined up before and had not had its turn."""
    log = small.admin("GET", "/dispatch-log?limit=5000")["records"]
    costs = {each["request_id"]: each["predicted_cost"] for each in log if each["event"] == "arrive"}
    ahead: dict[str, tuple[list[int], int]] = {}
    waiting: list[str] = []
    running: list[str] = []
    for place, record in enumerate(log):
        request_id = record["request_id"]
        match record["event"]:
            case "arrive":
                # Turns that were given as it lined up are in the log behind it, and may be in the count.
                gone = [
                    each["request_id"]
                    for each in itertools.takewhile(
                        lambda each: each["event"] == "dispatch", log[place + 1 :]
                    )
                ]
                left = [
                    sum(costs[x] for x in waiting if x not in gone[:turns]) for turns in range(len(gone) + 1)
                ]
                ahead[request_id] = (
                    ([0], 0) if gone[:1] == [request_id] else (left, sum(costs[x] for x in running))
                )
                waiting.append(request_id)
            case "dispatch":
                waiting.remove(request_id)
                running.append(request_id)
            case "settle":
                running.remove(request_id)
    waited = 0
    for request in itertools.chain(*bursts):
        event = queued(request)
        before, dispatched = ahead[request["id"]]
        assert event["own_tokens"] - event["running_tokens"] in before
        assert event["others_tokens"] == event["higher_tier_tokens"] == 0
        assert 0 <= event["running_tokens"] <= dispatched + max(before) - min(before)
        if dispatched:
            waited += 1
            assert event["running_tokens"] > 0
            assert any("tokens ahead (" in sentence for sentence in request["explanation"])
    assert waited >= BURSTS * (TOGETHER // 4)


def test_a_burst_s_requests_are_told_of_one_another(bursts: list[list[dict[str, Any]]]) -> None:
    for burst in bursts:
        estimates = [(queued(each)["own_tokens"], each["estimate"]) for each in burst]
        waits = sorted(
            (own, estimate["wait_s"]["p50"], sum(estimate["tokens_ahead"].values()))
            for own, estimate in estimates
        )
        behind = [each for each in waits if each[0]]
        assert len(behind) >= TOGETHER // 4, "a slow client sends them one after the other, but not so slowly"
        # On a slow machine some are told before those that then line up in front of them.
        assert sum(wait_s > 0 and ahead > 0 for _, wait_s, ahead in behind) >= len(behind) / 2
        told = [wait_s for _, wait_s, _ in behind]
        half = len(told) // 2
        assert sum(told[-half:]) > sum(told[:half]), "who lines up later is told to wait longer"


def test_the_coverage_of_waits_is_reported_by_tier_and_by_the_told_wait(
    small: Server, bursts: list[list[dict[str, Any]]]
) -> None:
    with small.http() as client:
        page = client.get("/metrics").text
    (family,) = (
        each for each in text_string_to_metric_families(page) if each.name == "fairgate_wait_coverage"
    )
    labels = [sample.labels for sample in family.samples]
    assert {each["tier"] for each in labels} == {"standard"}
    assert len({each["told_up_to"] for each in labels}) >= 2, "some were told to go immediately, some to wait"
    assert all(0.0 <= sample.value <= 1.0 for sample in family.samples)
