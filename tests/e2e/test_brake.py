"""A tier is braked on a running server: what it holds, how it is shown, and how it ends by itself."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, Server, server_process, until

PLACES = 20
SHARE = 0.1
MOST = 2
"""Places of a braked tier."""
FLOOD = 8
ENDLESS = {"model": MODEL, "prompt": "on and on", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", str(PLACES), "--gateway-ttl-batch", "20000"]
    with server_process(tmp_path_factory.mktemp("wide"), chat_model, *arguments) as running:
        yield running


def set_brake(server: Server, *arguments: str) -> dict[str, Any]:
    result = fairgate(server, "brake", *arguments, "--json")
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def audit(server: Server) -> list[tuple[Any, ...]]:
    """What the audit has of the brake on batch: action, actor, what it was and what it is."""
    with sqlite3.connect(server.data_dir / "fairgate.db") as database:
        return database.execute(
            "SELECT action, actor, json_extract(before, '$.share'), json_extract(after, '$.share') FROM audit"
            " WHERE target = 'brake.batch' ORDER BY seq"
        ).fetchall()


def test_a_brake_holds_batch_back_while_others_go_on_and_ends_by_itself(wide: Server) -> None:
    night, day = wide.tenant("night", tier="batch"), wide.tenant("day")
    made = set_brake(wide, "--tier", "batch", "--share", str(SHARE), "--for", "20h", "--reason", "night job")
    assert (made["tier"], made["share"], made["reason"]) == ("batch", SHARE, "night job")
    until(lambda: wide.status()["brakes"] == [made])
    assert answer_of(wide, "brake") == [made]
    assert wide.admin("GET", "/brake")["data"] == [made]
    shown = fairgate(wide, "brake").stdout
    assert "night job" in shown
    assert made["until"] in shown
    with ExitStack() as stack:
        flood = stack.enter_context(wide.http(night))
        for _ in range(FLOOD):
            stack.enter_context(
                flood.stream("POST", "/v1/completions", json=ENDLESS, headers={"x-fairgate-progress": "1"})
            )
        until(lambda: wide.status()["queued"]["batch"] == FLOOD - MOST)
        assert wide.status()["running"] == MOST, "the rest stays idle"
        with OpenAI(api_key=day, base_url=f"{wide.url}/v1", max_retries=0) as client:
            done = client.completions.create(
                model=MODEL, prompt="in the day", max_tokens=20, extra_body={"ignore_eos": True}
            )
        assert done.usage is not None
        assert done.usage.completion_tokens == 20
        status = wide.status()
        assert (status["queued"]["batch"], status["running"]) == (FLOOD - MOST, MOST)
        [engine] = wide.admin("GET", "/policy?decisions=0&steps=500")["engines"]
        tenant = next(each["tenant_id"] for each in status["tenants"] if each["name"] == "night")
        tokens = [each["decodes"].get(tenant, 0) + each["prompts"].get(tenant, 0) for each in engine["steps"]]
        assert 0 < max(tokens) <= status["engines"][0]["max_batched_tokens"] * SHARE
        set_brake(wide, "--tier", "batch", "--share", "0.15", "--for", "1s")
        until(lambda: wide.status()["brakes"] == [])
        until(lambda: wide.status()["running"] == FLOOD)
        with wide.http(night) as other:
            for each in other.get("/v1/requests").json()["data"]:
                other.delete(f"/v1/requests/{each['id']}")
    until(wide.is_idle)
    until(lambda: len(audit(wide)) == 3)
    (first, second, end) = audit(wide)
    assert first[0] == second[0] == "brake.set"
    assert first[1].startswith("cli:")
    assert (second[2], second[3]) == (SHARE, 0.15)
    assert end == ("brake.end", "system", 0.15, None)
    assert fairgate(wide, "brake", "--tier", "batch", "--clear").exit_code == 1, "it is over"


def test_it_is_set_and_ended_over_http_also_for_two_tiers(wide: Server) -> None:
    for tier, share in (("batch", 0.2), ("standard", 0.5)):
        made = wide.admin("PUT", "/brake", {"tier": tier, "share": share, "for_s": 3600})
        assert made["by"].startswith("key:")
        assert made in wide.status()["brakes"], "in force before it is answered"
    assert [each["tier"] for each in wide.status()["brakes"]] == ["standard", "batch"]
    wide.admin("DELETE", "/brake?tier=standard")
    assert [each["tier"] for each in wide.status()["brakes"]] == ["batch"]
    cleared = answer_of(wide, "brake", "--tier", "batch", "--clear")
    assert (cleared["tier"], cleared["share"]) == ("batch", 0.2)
    until(lambda: wide.status()["brakes"] == [])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--tier", "batch", "--share", "1.5", "--for", "5m"),
            1,
            "share: is 1.5, and must be above 0",
        ),
        (("--tier", "batch", "--share", "0", "--for", "5m"), 1, "one request of a braked tier may always"),
        (
            ("--tier", "batch", "--share", "nan", "--for", "5m"),
            2,
            "'nan' is not a number, such as 12.5 or 50 %",
        ),
        (("--tier", "batch", "--share", "0.1"), 2, "a brake needs an end: give --for, such as --for 30m"),
        (("--tier", "batch", "--share", "0.1", "--for", "2d"), 1, "for_s: must be 1 to 86400 seconds (24 ho"),
        (("--tier", "interactive", "--share", "0.1", "--for", "5m"), 1, "interactive is never braked: bound"),
        (("--tier", "gold", "--share", "0.1", "--for", "5m"), 1, "tier: 'gold' is not one of interactive"),
        (("--share", "0.1", "--for", "5m"), 2, "give --tier and --share, such as --tier batch"),
        (("--tier", "batch", "--clear", "--share", "0.1"), 2, "--clear takes --tier and neither"),
        (("--tier", "standard", "--clear"), 1, "no such brake: 'standard'"),
    ],
)
def test_what_makes_no_sense_is_named_with_the_way_out(
    wide: Server, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = fairgate(wide, "brake", *arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())
    assert wide.status()["brakes"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tier": "batch", "share": 2, "for_s": 60}, "share"),
        ({"tier": "batch", "share": 0.1}, "for_s"),
        ({"tier": "batch", "share": 0.1, "for_s": 86_401}, "for_s"),
        ({"tier": "interactive", "share": 0.1, "for_s": 60}, "tier"),
        ({"tier": "batch", "share": 0.1, "for_s": 60, "reason": "x" * 201}, "reason"),
    ],
)
def test_over_http_the_field_is_named(wide: Server, body: dict[str, Any], param: str) -> None:
    with wide.http() as client:
        refused = client.put("/admin/v1/brake", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_a_tenants_key_neither_sets_nor_reads_it(wide: Server) -> None:
    with wide.http(wide.tenant("curious")) as client:
        body = {"tier": "batch", "share": 0.1, "for_s": 60}
        for answer in (
            client.get("/admin/v1/brake"),
            client.put("/admin/v1/brake", json=body),
            client.delete("/admin/v1/brake?tier=batch"),
        ):
            assert answer.status_code == 403
