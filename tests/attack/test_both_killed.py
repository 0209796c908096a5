"""Gateway and engine killed together while a request holds all that it may use: it never reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from tests.e2e.test_crash import Stream, settlements, start_streams
from tests.support.server_process import MODEL, Server, server_process, until

pytestmark = pytest.mark.attack

LIMIT = 1_500
TOKENS = 1_200
"""Of each request: two never fit into the limit."""
TOKENS_PER_S = 200
"""Of the engine at most, so that a request still runs when it is killed, however slow the machine is."""


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    flags = ("--engine-max-sequences", "4", "--engine-max-tokens-per-s", str(TOKENS_PER_S))
    with server_process(tmp_path_factory.mktemp("both"), chat_model, *flags) as running:
        yield running


def kill_both(server: Server) -> None:
    """The gateway first, as it would otherwise settle what a dead engine ran; the engine before it can write
    down what it knows."""
    engine = server.engine()
    assert server.process is not None
    server.process.kill()
    engine.kill()
    server.process.wait()
    engine.wait(10)


def written(server: Server, request_id: str) -> bool:
    """Whether the progress record has something of this request."""
    engine = create_engine(f"sqlite:///{server.data_dir / 'fairgate.db'}")
    try:
        with engine.connect() as connection:
            found = connection.execute(text("SELECT counts FROM progress")).scalars()
            return any(request_id.encode() in packed for packed in found)
    finally:
        engine.dispose()


def test_a_hard_limit_holds_however_often_both_are_killed(crashing: Server) -> None:
    key = crashing.tenant("attacker")
    crashing.limit("attacker", "output_tokens", LIMIT, window="lifetime")
    delivered = 0
    streams: list[Stream] = []
    for _ in range(2):
        (stream,) = start_streams(crashing, key, 1, max_tokens=TOKENS)
        streams.append(stream)
        assert stream.has_tokens.wait(60)  # or it has ended
        kill_both(crashing)
        stream.join(30)
        delivered += stream.delivered
        crashing.start()
    ran = [stream for stream in streams if stream.status == 200]
    assert ran, "nothing ran at all"
    assert len(ran) == 1, "what may have been delivered was given out again"
    assert [stream.status for stream in streams if stream not in ran] == [429]
    (row,) = settlements(crashing, ran[0].request_id)
    assert row["outcome"] == "lost"
    state = crashing.limit_state("attacker", "output_tokens")
    assert state["held"] == 0
    assert delivered <= state["used"] == TOKENS <= LIMIT
    report = crashing.verify()
    assert report["ok"]
    assert report["in_doubt"] == [ran[0].request_id]
    assert report["in_doubt_tokens"] > 0


def test_what_was_held_in_doubt_can_be_given_back_once(crashing: Server) -> None:
    key = crashing.tenant("unlucky")
    crashing.limit("unlucky", "output_tokens", LIMIT, window="lifetime")
    crashing.limit("unlucky", "cost_nanousd", 10**9, window="lifetime")
    (stream,) = start_streams(crashing, key, 1, max_tokens=TOKENS)
    assert stream.has_tokens.wait(60)
    until(lambda: written(crashing, stream.request_id))
    kill_both(crashing)
    stream.join(30)
    crashing.start()
    (row,) = settlements(crashing, stream.request_id)
    billed: int = row["output_tokens"]
    in_doubt: list[int] = json.loads(row["detail"])["in_doubt"]
    assert billed > 0, "the record of its progress is billed"
    assert billed + in_doubt[1] == row["counted_output"] == TOKENS
    assert row["cost_nanousd"] + in_doubt[2] == row["counted_cost"] == used(crashing, "cost_nanousd")
    body = {"request_id": stream.request_id, "reason": "the client has all of its answer"}
    given = [crashing.admin("POST", "/ledger/adjust", body) for _ in range(2)]
    assert [each["output_tokens"] for each in given] == [in_doubt[1]] * 2
    assert [each["is_new"] for each in given] == [True, False]
    assert used(crashing, "output_tokens") == billed
    assert used(crashing, "cost_nanousd") == row["cost_nanousd"]
    assert crashing.verify()["ok"]
    (act,) = crashing.admin("GET", "/audit?act=ledger.adjust")["data"]
    assert (act["target"], act["after"]["reason"]) == (stream.request_id, body["reason"])
    with crashing.http(key) as client:
        more = {"model": MODEL, "prompt": "x", "max_tokens": LIMIT - billed - 10, "ignore_eos": True}
        assert client.post("/v1/completions", json=more | {"max_tokens": 300}).status_code == 200
    # It counts so after a restart, too, when the counters are filled from the ledger.
    crashing.kill()
    crashing.start()
    assert used(crashing, "output_tokens") == billed + 300
    assert crashing.verify()["ok"]
    with crashing.http() as client:
        nothing = client.post("/admin/v1/ledger/adjust", json=body | {"request_id": "req_unknown"})
        assert nothing.status_code == 404


def used(server: Server, meter: str) -> Any:
    return server.limit_state("unlucky", meter)["used"]
