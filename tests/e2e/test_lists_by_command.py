"""Ended requests, and service by minute, by the command line as by the routes of a running server."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tenants.counts import minute_store
from tenants.counts.minute_store import (
    MINUTE_US,
    EngineKey,
    EngineMinute,
    FlowKey,
    FlowMinute,
    MinutesCounted,
)
from tenants.storage.database import open_database
from tenants.storage.flushes import Flush
from tests.support.commands import answer_of
from tests.support.server_process import MODEL, Server, until

SHORT = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def ended(server: Server) -> list[str]:
    """Ids of two requests of `listed` that have ended."""
    with server.http(server.tenant("listed")) as client:
        answers = [client.post("/v1/completions", json=SHORT) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 200]
    until(
        lambda: all(each["ended_s"] for each in server.admin("GET", "/requests/ended?tenant=listed")["data"])
    )
    return [each.headers["x-request-id"] for each in answers]


def test_ended_requests_are_listed_page_by_page_with_every_filter(server: Server, ended: list[str]) -> None:
    route = server.admin("GET", "/requests/ended?tenant=listed")
    assert [each["id"] for each in route["data"]] == ended[::-1]
    shown = answer_of(server, "request", "list", "--ended", "--tenant", "listed")
    assert shown == {name: value for name, value in route.items() if name != "object"}
    first = shown["data"][0]
    assert first["ended_s"] >= first["first_token_s"] >= first["dispatched_s"] > 0
    some = ("request", "list", "--ended", "--tenant", "listed", "--limit", "1")
    page = answer_of(server, *some)
    other = answer_of(server, *some, "--cursor", page["next_cursor"])
    assert [each["id"] for each in page["data"] + other["data"]] == ended[::-1]
    filters = {
        "--project": first["project_id"],
        "--key": first["key_id"],
        "--model": MODEL,
        "--tier": first["tier"],
        "--outcome": "completed",
        "--from": "1h",
    }
    every = [part for pair in filters.items() for part in pair]
    assert answer_of(server, "request", "list", "--ended", *every)["data"] == shown["data"]
    for none in (("--to", "1h"), ("--outcome", "lost"), ("--cause", "fault"), ("--model", "other")):
        assert answer_of(server, "request", "list", "--ended", "--tenant", "listed", *none)["data"] == []
    text = CliRunner().invoke(cli, ["request", "list", "--ended", "--data-dir", str(server.data_dir)])
    assert ended[0] in text.output


@pytest.mark.parametrize(
    "wrong",
    [
        ("--ended", "--status", "running"),
        ("--ended", "--cause", "fate"),
        ("--outcome", "lost"),
        ("--from", "1h"),
    ],
)
def test_filters_that_say_nothing_are_refused(server: Server, wrong: tuple[str, ...]) -> None:
    arguments = ["request", "list", *wrong, "--data-dir", str(server.data_dir)]
    assert CliRunner().invoke(cli, arguments).exit_code == 2


@pytest.fixture(scope="module")
def minutes(server: Server) -> int:
    """Two minutes of `minuted` and of a replica, as another gateway would write them; the first one's instant
    in microseconds."""
    server.tenant("minuted")
    tenant_id = server.admin("GET", "/tenants/minuted")["id"]
    first_us = int(time.time()) // 60 * MINUTE_US - 3 * MINUTE_US
    both = (first_us, first_us + MINUTE_US)
    counted = MinutesCounted(
        {FlowKey(at_us, "pool", "batch", tenant_id): FlowMinute(1_200, 900, 600, 2, 3_000) for at_us in both},
        {EngineKey(at_us, "pool", "engine-7"): EngineMinute("up", 60_000_000, 60_000_000) for at_us in both},
    )

    async def write() -> None:
        database = open_database(f"sqlite:///{server.data_dir / 'fairgate.db'}")
        try:
            await minute_store.add(
                database, "gw-other", counted, Flush("minutes of another gateway", 1), both[1]
            )
        finally:
            await database.close()

    asyncio.run(write())
    return first_us


@pytest.mark.parametrize(
    ("shown", "route", "says"),
    [
        (
            ("flow", "show", "--tenant", "minuted", "--tier", "batch"),
            "/flow?tenant=minuted&tier=batch",
            "1,200",
        ),
        (("flow", "engines", "--pool", "pool", "--replica", "engine-7"), "/engines?replica=engine-7", "pool"),
    ],
)
def test_minutes_are_what_the_routes_show(
    server: Server, minutes: int, shown: tuple[str, ...], route: str, says: str
) -> None:
    found = answer_of(server, *shown)
    assert found["data"] == server.admin("GET", route)["data"]
    assert [each["start"] for each in found["data"]] == [
        datetime.fromtimestamp((minutes + number * MINUTE_US) / 1e6, UTC).isoformat() for number in (0, 1)
    ]
    page = answer_of(server, *shown, "--limit", "1")
    other = answer_of(server, *shown, "--limit", "1", "--cursor", page["next_cursor"])
    assert page["data"] + other["data"] == found["data"]
    assert answer_of(server, *shown, "--to", "20m")["data"] == []
    text = CliRunner().invoke(cli, [*shown, "--limit", "1", "--data-dir", str(server.data_dir)]).output
    assert says in text
    assert " --cursor " in text


def test_minutes_are_added_up_by_the_hour(server: Server, minutes: int) -> None:
    rows = answer_of(server, "flow", "show", "--tenant", "minuted", "--window", "hour", "--from", "1h")[
        "data"
    ]
    assert sum(row["served_tokens"] for row in rows) == 2_400
    assert {row["start"][14:19] for row in rows} == {"00:00"}
