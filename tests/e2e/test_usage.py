"""Usage through the API and the command line is what the ledger has, to the token."""

from __future__ import annotations

import asyncio
import csv
import hashlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from ops.sandbox.usage_check import usage_differences
from tenants.admin.cursor import encode_cursor
from tenants.ledger.batch_insert import insert_rows
from tenants.storage.database import create_sql_engine
from tests.support.commands import answer_of, fairgate
from tests.support.console import Browser
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.usage import row


def _tenant(server: Server, name: str, labels: dict[str, list[str]] | None = None) -> str:
    key = server.tenant(name)
    if labels:
        server.admin("PATCH", f"/tenants/{name}", {"labels": labels})
    return key


def _ask(server: Server, key: str, number: int, **more: Any) -> None:
    body = {"model": MODEL, "prompt": f"say {number}", "max_tokens": 3 + number, "ignore_eos": True} | more
    with server.http(key) as client:
        client.post("/v1/completions", json=body).raise_for_status()


def _usage(server: Server, key: str | None = None, path: str = "/admin/v1/usage", **asked: Any) -> Any:
    with server.http(key) as client:
        answer = client.get(path, params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _ledger(server: Server) -> str:
    return f"sqlite:///{server.data_dir / 'fairgate.db'}"


async def _agrees(server: Server) -> list[str]:
    headers = {"authorization": f"Bearer {server.owner_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
        return await usage_differences(client, _ledger(server))


def test_usage_is_the_ledger_by_every_group(server: Server) -> None:
    key = _tenant(server, "usage-a", {"team": ["search", "ads"]})
    for number in range(4):
        _ask(server, key, number, metadata={"team": "search" if number % 2 else "ads"})
    assert asyncio.run(_agrees(server)) == []
    answer = _usage(server, group_by="tenant,model", tenant="usage-a")
    [row] = answer["data"]
    assert (row["tenant"], row["model"], row["requests"], row["output_tokens"]) == ("usage-a", MODEL, 4, 18)
    assert row["ended_requests"] == row["waits"] == row["first_tokens"] == 4
    assert row["ttft_us"] >= row["wait_us"] > 0
    assert answer["includes_unfolded"] is True
    teams = _usage(server, group_by="label:team", tenant="usage-a", window="day")["data"]
    assert {each["label:team"]: each["output_tokens"] for each in teams} == {"ads": 3 + 5, "search": 4 + 6}


def test_a_tenant_reads_its_own_usage_and_no_other(server: Server) -> None:
    key, other = _tenant(server, "usage-b"), _tenant(server, "usage-c")
    for number in range(3):
        _ask(server, key, number)
    _ask(server, other, 9)
    for window in ("total", "hour", "day", "month"):
        answer = _usage(server, key, "/v1/usage", group_by="key,project,model,tier", window=window)
        assert [each["output_tokens"] for each in answer["data"]] == [3 + 4 + 5], window
        assert answer["data"][0]["project"] == "default"
        assert "tenant_id" not in answer["data"][0]
    with server.http(key) as client:
        theirs = server.admin("GET", "/keys?tenant=usage-c")["data"][0]["id"]
        assert client.get("/v1/usage", params={"key": theirs}).status_code == 404
        assert client.get("/v1/usage", params={"group_by": "tenant"}).status_code == 400
        assert client.get("/admin/v1/usage").status_code == 403


def test_pages_go_on_where_the_last_one_ended(server: Server) -> None:
    for name in ("usage-d", "usage-e", "usage-f"):
        _ask(server, _tenant(server, name), 1)
    asked = {"group_by": "tenant,outcome", "window": "day"}
    whole = _usage(server, **asked)["data"]
    seen: list[Any] = []
    page = _usage(server, limit=1, **asked)
    while True:
        seen += page["data"]
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
        page = _usage(server, limit=1, cursor=cursor, **asked)
    assert seen == whole
    with server.http() as client:
        for changed in ({"group_by": "tenant"}, {"window": "month"}, {"tenant": "usage-d"}):
            refused = client.get("/admin/v1/usage", params=asked | {"cursor": cursor} | changed)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cursor")


def test_pages_of_labels_go_on(server: Server) -> None:
    key = _tenant(server, "usage-h", {"team": ["a=b", "ads, Ü"], "env": ["prod"]})
    for number, team in enumerate(("a=b", "ads, Ü", "a=b")):
        _ask(server, key, number, metadata={"team": team, "env": "prod"})
    asked = {"group_by": "label:team", "window": "day", "label": "env=prod"}
    first = _usage(server, key, "/v1/usage", limit=1, **asked)
    second = _usage(server, key, "/v1/usage", limit=1, cursor=first["next_cursor"], **asked)
    rows = first["data"] + second["data"]
    assert [(row["label:team"], row["output_tokens"]) for row in rows] == [("a=b", 3 + 5), ("ads, Ü", 4)]
    assert second["next_cursor"] is None
    [one] = _usage(server, key, "/v1/usage", label=["env=prod", "team=a=b"])["data"]
    assert one["output_tokens"] == 3 + 5


def test_a_run_of_an_agent_is_shown_together(server: Server) -> None:
    key, other = _tenant(server, "usage-agent"), _tenant(server, "usage-other-agent")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 4}
    asked = [
        ("/v1/chat/completions", chat | {"prompt_cache_key": "ignored"}, {"session-id": "run-7"}),
        ("/v1/chat/completions", chat | {"prompt_cache_key": "run-7"}, {}),
        ("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 3}, {"session_id": "run-7"}),
        ("/v1/chat/completions", chat | {"prompt_cache_key": "my long name/" * 9}, {}),
        ("/v1/chat/completions", chat, {}),
    ]
    with server.http(key) as client:
        ids = []
        for path, body, headers in asked:
            answer = client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            ids.append(answer.headers["x-request-id"])
        until(lambda: len(client.get("/v1/sessions").json()["data"]) == 2)
        listed = client.get("/v1/sessions").json()
        run = client.get("/v1/sessions/run-7").json()
        named = [client.get(f"/v1/requests/{each}").json()["session"] for each in ids]
    long_name = "sha256:" + hashlib.sha256(b"my long name/" * 9).hexdigest()[:32]
    assert [each["id"] for each in listed["data"]] == [long_name, "run-7"]
    assert named == ["run-7", "run-7", "run-7", long_name, None]
    assert [each["id"] for each in run["newest"]] == ids[2::-1]
    [charged] = _usage(server, key, "/v1/usage")["data"]
    rest = _usage(server, path=f"/admin/v1/requests/{ids[4]}")
    for name in ("input_tokens", "output_tokens", "cost_nanousd"):
        assert sum(each[name] for each in listed["data"]) == charged[name] - rest[name] > 0, name
    assert answer_of(server, "usage", "sessions", "usage-agent", "run-7") == run
    assert fairgate(server, "usage", "sessions", "usage-agent").output.count("run-7") == 1
    with server.http(other) as client:
        assert client.get("/v1/sessions").json()["data"] == []
        assert client.get("/v1/sessions/run-7").status_code == 404


def _cursor_to(end_us: int) -> str:
    """A cursor of daily usage as a client might make it up."""
    return encode_cursor("usage", {"window": "day"}, (end_us - 10, end_us, 0))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"from": "2016-01-01", "to": "2026-01-01"}, "from"),
        ({"from": "2016-01-01", "to": "2026-01-01", "window": "hour"}, "from"),
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-01-01T00:00:00"}, "from"),
        ({"from": "2026-02-01", "to": "2026-01-01"}, "from"),
        ({"to": "99999-01-01"}, "to"),
        ({"to": "0001-01-01"}, "to"),
        ({"to": "0001-02-01T00:00:00Z", "window": "month", "time_zone": "America/Lima"}, "to"),
        ({"from": "9999-12-30", "to": "9999-12-31", "window": "day"}, "to"),
        ({"to": "1970-01-01"}, "from"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"time_zone": "Asia/Kolkata", "window": "day"}, "time_zone"),
        ({"window": "fortnight"}, "window"),
        ({"group_by": "colour"}, "group_by"),
        ({"label": "team"}, "label"),
        ({"tier": "golden"}, "tier"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"window": "day", "cursor": _cursor_to(2**63 - 1)}, "from"),
        ({"limit": "1001"}, "limit"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(server: Server, asked: dict[str, str], field: str) -> None:
    with server.http() as client:
        refused = client.get("/admin/v1/usage", params=asked)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == field, refused.text


def test_the_command_line_shows_verifies_and_rebuilds(server: Server) -> None:
    _ask(server, _tenant(server, "usage-g"), 5)

    asked = ("usage", "show", "--tenant", "usage-g", "--by", "tenant,tier", "--from", "7d")
    [row] = answer_of(server, *asked)["data"]
    assert (row["tenant"], row["tier"], row["output_tokens"]) == ("usage-g", "standard", 8)
    table = fairgate(server, "usage", "show", "--tenant", "usage-g")
    assert "usage-g" in table.stdout
    assert answer_of(server, "usage", "verify") == {"ok": True, "problems": []}
    assert answer_of(server, "usage", "rebuild") == {"corrected": 0}
    with server.http() as client:
        assert client.post("/admin/v1/usage/verify").json() == {"ok": True, "problems": []}
        assert client.post("/admin/v1/usage/rebuild").json() == {"corrected": 0}
    acts = server.admin("GET", "/audit?act=usage.rebuild")["data"]
    assert {each["origin"] for each in acts} >= {"cli"}


def test_a_file_of_usage_by_route_and_by_command_is_the_ledger(server: Server, tmp_path: Path) -> None:
    key, file = _tenant(server, "usage-i", {"team": ["search"]}), tmp_path / "usage"
    _ask(server, key, 1, metadata={"team": "search"})
    engine = create_sql_engine(_ledger(server), writing=False)
    with engine.connect() as connection:
        of_tenant = "FROM ledger JOIN tenants ON tenants.id = tenant_id WHERE name = 'usage-i'"
        query = f"SELECT SUM(cost_nanousd) {of_tenant} AND kind IN ('settle', 'credit', 'adjust')"
        [charged] = connection.execute(text(query)).scalars()
    engine.dispose()
    for form, column in {"focus": "BilledCost", "csv": "cost_nanousd", "jsonl": "cost_nanousd"}.items():
        with server.http() as client:
            asked = {"format": form, "tenant": "usage-i", "group_by": "label:team"}
            answer = client.get("/admin/v1/usage/export", params=asked)
        command = ("usage", "export", "--format", form, "--tenant", "usage-i", "--by", "label:team")
        assert answer_of(server, *command, "--output", str(file)) == {"format": form, "output": str(file)}
        assert answer.content == file.read_bytes() == fairgate(server, *command).stdout_bytes
        [row] = [answer.json()] if form == "jsonl" else csv.DictReader(answer.text.splitlines())
        assert Decimal(row[column]) == (Decimal(charged).scaleb(-9) if form == "focus" else charged)
        assert "search" in answer.text


def test_a_gateway_killed_between_settlement_and_fold_loses_nothing(tmp_path: Path, chat_model: Path) -> None:
    """Several times, at any point of the fold's turn."""
    with server_process(tmp_path, chat_model) as server:
        key = _tenant(server, "usage-killed")
        sent = 0
        for life in range(3):
            for _ in range(2 + life):
                _ask(server, key, sent)
                sent += 1
            server.kill()
            server.start()
        [row] = _usage(server, group_by="tenant", tenant="usage-killed")["data"]
        assert row["requests"] == sent
        assert asyncio.run(_agrees(server)) == []
        assert server.admin("POST", "/usage/verify") == {"ok": True, "problems": []}


def _metric(server: Server, name: str) -> float:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    [value] = [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == name]
    return float(value)


def test_metrics_show_for_how_long_a_transaction_left_open_holds_the_fold_back(
    tmp_path: Path, chat_model: Path, postgres_url: str
) -> None:
    lag = "fairgate_usage_fold_lag_seconds"
    engine = create_sql_engine(postgres_url, writing=True)
    with server_process(tmp_path, chat_model, "--database-url", postgres_url) as server:
        key = _tenant(server, "usage-held")
        with engine.connect() as foreign, foreign.begin():
            insert_rows(foreign, [row("foreign")])
            _ask(server, key, 1)
            # Three rounds of the fold: without the transaction the lag is no more than one.
            until(lambda: _metric(server, lag) > 3)
            [shown] = _usage(server, group_by="tenant", tenant="usage-held")["data"]
            assert shown["requests"] == 1, "an answer has what is not folded, too"
        until(lambda: _metric(server, lag) < 2)
    engine.dispose()


def test_metrics_count_the_passwords_that_were_hashed(server: Server) -> None:
    async def log_in() -> None:
        async with Browser(server.url) as browser:
            await browser.log_in("unknown")

    before = _metric(server, "fairgate_password_hashes_total")
    asyncio.run(log_in())
    assert _metric(server, "fairgate_password_hashes_total") == before + 1
    assert _metric(server, "fairgate_password_hashes_refused_total") == 0
    assert _metric(server, "fairgate_password_hashes_open") == 0
