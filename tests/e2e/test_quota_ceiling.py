"""On an idle server the bucket of a batch tenant refills faster, up to its ceiling, until others need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, Server, server_process, until

RATE, CEILING, BURST = 2.0, 40.0, 2_000
SPENT = 160


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("ceiling")
    with server_process(data_dir, chat_model, "--gateway-control", "acting") as running:
        yield running


def shown(server: Server, limit_id: str) -> Any:
    return server.admin("GET", f"/limits/{limit_id}")


def resets_s(server: Server, key: str, tokens: int) -> dict[str, int]:
    """By limit what the headers of one more answer say until its bucket is full again; 0: it is full. Its
    account says what was in force."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
    with server.http(key) as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == tokens
    assert answer.json()["fairgate"]["refills"] == [
        {
            "meter": "output_tokens",
            "rate_per_s": RATE,
            "ceiling_per_s": CEILING,
            "refill_per_s": CEILING,
        }
    ]
    return {
        entry.partition(";")[0].strip(' "'): int(entry.partition(";t=")[2] or 0)
        for entry in answer.headers["ratelimit"].split(",")
    }


def test_a_batch_bucket_refills_by_spare_capacity_and_goes_back_when_others_need_it(acting: Server) -> None:
    key, late = acting.tenant("nightly", tiers=["batch"], tier="batch"), acting.tenant("daily")
    limit_id = acting.limit(
        "nightly", "output_tokens", BURST, rate_per_s=RATE, ceiling_per_s=CEILING, tier="batch"
    )
    plain = acting.limit("nightly", "total_tokens", BURST, rate_per_s=RATE, tier="batch")
    assert shown(acting, limit_id)["ceiling_per_s"] == CEILING

    # Nothing runs: some looks of the control loop later all of it is lent.
    until(lambda: shown(acting, limit_id)["usage"]["refill_per_s"] == CEILING)
    assert shown(acting, plain)["usage"]["refill_per_s"] == RATE, "it has no ceiling"
    asked = fairgate(acting, "limit", "show", limit_id)
    assert f"{RATE:g} output_tokens a second (up to {CEILING:g} by spare capacity)" in asked.stdout
    assert f"refills at {CEILING:g} a second now" in asked.stdout
    assert answer_of(acting, "limit", "show", limit_id)["usage"]["refill_per_s"] == CEILING
    assert acting.limit_state("nightly", "output_tokens")["refill_per_s"] == CEILING
    with acting.http(acting.key("nightly", scopes=["usage:read"])) as client:
        own = {each["id"]: each for each in client.get("/v1/limits").json()["data"]}
    assert (own[limit_id]["ceiling_per_s"], own[limit_id]["usage"]["refill_per_s"]) == (CEILING, CEILING)
    control = acting.status()["models"]["pools"][MODEL]["control"]
    moves = [move for move in control["moves"] if move["knob"] == "quota"]
    assert [(move["after"], move["is_made"]) for move in moves] == [
        (0.25, True), (0.5, True), (0.75, True), (1.0, True),
    ]  # fmt: skip
    assert "spare capacity" in moves[-1]["reason"]

    # The headers go by what is in force: both buckets lack some 160 tokens, the one gets 40 a second.
    resets_s(acting, key, SPENT)
    told = resets_s(acting, key, 1)
    assert told["tenant-output_tokens-rate-batch"] <= SPENT / CEILING + 1
    assert told["tenant-total_tokens-rate-batch"] > SPENT / RATE / 2

    # A target that cannot be kept is about to be missed: what was lent goes back, what the bucket has stays.
    acting.admin(
        "POST", "/slos", {"tier": "standard", "metric": "ttft", "target_s": 0.0001, "tenant": "daily"}
    )

    def has_gone_back() -> bool:
        with acting.http(late) as client:
            client.post("/v1/completions", json={"model": MODEL, "prompt": "in time", "max_tokens": 2})
        return bool(shown(acting, limit_id)["usage"]["refill_per_s"] == RATE)

    until(has_gone_back)
    control = acting.status()["models"]["pools"][MODEL]["control"]
    last = [move for move in control["moves"] if move["knob"] == "quota"][-1]
    assert (last["before"], last["after"]) == (1.0, 0.0)
    assert "targets are about to be missed" in last["reason"]
    assert acting.verify()["problems"] == []
