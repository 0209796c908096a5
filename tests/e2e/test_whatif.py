"""Servers of several sizes are replayed from what they recorded, whatever the shell that asks is set to."""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.domain.server_description import RequestTerms, terms_of
from ops.cli.main import cli
from tenants.ledger import timelines
from tenants.storage.database import open_database
from tests.support.server_process import MODEL, Server, server_process

REQUESTS = 300
THINK_S = 0.02
OTHER_SETTINGS = {
    "FAIRGATE_ENGINE_MAX_SEQUENCES": "77",
    "FAIRGATE_ENGINE_MAX_BATCHED_TOKENS": "999",
    "FAIRGATE_POLICY": "sjf",
    "FAIRGATE_GATEWAY_BATCH_SHARE": "10",
}


def load(server: Server, keys: list[str], clients: int) -> None:
    """So many clients ask one by one, and think in between."""
    rng = random.Random(clients)
    asks = [
        (
            key,
            {"model": MODEL, "prompt": "sun " * rng.randint(5, 40), "max_tokens": rng.randint(2, 12)},
            rng.expovariate(1 / THINK_S),
        )
        for key in rng.choices(keys, [3, 2, 1], k=REQUESTS)
    ]

    def ask(what: tuple[str, dict[str, Any], float]) -> int:
        key, body, think_s = what
        headers = {"authorization": f"Bearer {key}"}
        time.sleep(think_s)
        return client.post("/v1/completions", json=body | {"ignore_eos": True}, headers=headers).status_code

    with server.http() as client, ThreadPoolExecutor(clients) as threads:
        assert set(threads.map(ask, asks)) == {200}


def whatif(server: Server, *arguments: str) -> Result:
    asked = ["whatif", "--data-dir", str(server.data_dir), *arguments]
    return CliRunner().invoke(cli, asked, prog_name="fairgate", env=OTHER_SETTINGS)


async def recorded_terms(server: Server) -> list[RequestTerms]:
    """Of every request, in order of their ends."""
    database = open_database(f"sqlite:///{server.data_dir / 'fairgate.db'}")
    try:
        rows = await timelines.recorded(database, from_us=0, to_us=2**60, most=100)
        ids = [row.terms for row in rows if row.terms is not None]
        contents = await timelines.described(database, ids)
    finally:
        await database.close()
    return [terms_of(contents[each]) for each in ids]


@pytest.mark.parametrize(
    ("sequences", "tokens", "policy", "options"),
    [(2, 32, "vtc", {"slots": 1}), (16, 256, "hybrid", {})],
)
def test_a_baseline_is_within_its_stated_error(
    tmp_path: Path,
    chat_model: Path,
    sequences: int,
    tokens: int,
    policy: str,
    options: dict[str, int],
) -> None:
    flags = ["--engine-max-sequences", str(sequences), "--engine-max-batched-tokens", str(tokens)]
    flags += ["--policy", policy]
    for name, value in options.items():
        flags += ["--policy-option", f"{name}={value}"]
    with server_process(tmp_path / "served", chat_model, *flags) as server:
        keys = [server.tenant(f"t{number}", weight=number + 1.0) for number in range(3)]
        server.limit("t0", "requests", 20, rate_per_s=500.0)
        server.limit("t1", "output_tokens", 1_000_000, window="day")
        load(server, keys, 2 + sequences // 2)

    answered = whatif(server, "--policy", f"{policy},srpt", "--json")
    assert answered.exit_code == 0, answered.output
    report = json.loads(answered.stdout)
    assert report["recorded"]["requests"] == REQUESTS
    assert (report["max_sequences"], report["max_batched_tokens"]) == (sequences, tokens)
    assert [row["policy"] for row in report["policies"]] == [policy, "srpt"]
    assert report["policies"][0]["is_baseline"]
    assert [row["refused"] for row in report["policies"]] == [0, 0]
    assert (report["overrides"], report["warning"]) == ([], None), report["warning"]
    for each in report["baseline"]:
        assert each["is_within"], each
        assert each["stated_error"] > 0
        assert abs(each["off"]) <= each["stated_error"]


def test_a_server_that_was_changed_is_replayed_as_it_was_at_the_time(
    tmp_path: Path, chat_model: Path
) -> None:
    with server_process(tmp_path / "served", chat_model, "--engine-max-sequences", "4") as server:
        key = server.tenant("limited", weight=3.0)

        def answer() -> None:
            with server.http(key) as client:
                body = {"model": MODEL, "prompt": "sun and rain", "max_tokens": 4, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200

        answer()
        server.limit("limited", "requests", 1, rate_per_s=0.5)
        answer()
        server.admin("POST", "/policy", {"policy": "fcfs"})
        server.admin("PATCH", "/tenants/limited", {"weight": 1.0})
        server.limit("limited", "requests", 100, rate_per_s=100.0)
        answer()

    terms = asyncio.run(recorded_terms(server))
    assert [each.weight for each in terms] == [3.0, 3.0, 1.0]
    assert [[(limit.amount, limit.rate_per_s) for limit in each.limits] for each in terms] == [
        [],
        [(1, 0.5)],
        [(100, 100.0)],
    ]
    refused = whatif(server)
    assert refused.exit_code == 1
    assert "the server changed in that time" in refused.output
    before, after = [line.split(": ")[0].split() for line in refused.output.splitlines() if "--from" in line]
    first = json.loads(whatif(server, *before, "--json").stdout)
    assert (first["policies"][0]["policy"], first["recorded"]["requests"]) == ("hybrid", 2)
    second = json.loads(whatif(server, *after, "--json").stdout)
    assert (second["policies"][0]["policy"], second["recorded"]["requests"]) == ("fcfs", 1)
