"""A key that is taken away, and a tenant that is suspended, while their requests wait and run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import Server, server_process, until
from tests.support.waiting_streams import ENDLESS, events, full, waiting
from tests.support.warm_command import fairgate

pytestmark = pytest.mark.attack


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """Its engine runs one sequence at a time, so that there is a line to stand in."""
    arguments = ["--engine-max-sequences", "1", "--gateway-long-tokens", "8192"]
    arguments += ["--gateway-ttl-standard", "20000"]
    with server_process(tmp_path_factory.mktemp("suspended"), chat_model, *arguments) as running:
        running.tenant("crowd", tier="interactive")
        yield running


def settled(server: Server, request_id: str) -> dict[str, Any]:
    """Its settle row."""
    with sqlite3.connect(f"file:{server.data_dir / 'fairgate.db'}?mode=ro", uri=True) as database:
        database.row_factory = sqlite3.Row
        rows = database.execute("SELECT * FROM ledger WHERE request_id = ? AND kind = 'settle'", [request_id])
        [row] = rows.fetchall()
    return dict(row)


def last_error(lines: Iterator[str]) -> dict[str, Any]:
    """The error that ends a stream."""
    kind, said = next(each for each in events(lines) if each[0] in ("error", "done"))
    assert kind == "error", said
    error: dict[str, Any] = said["error"]
    return error


@pytest.mark.parametrize("what", ["tenant", "project", "key"])
def test_what_waits_ends_and_is_refunded(narrow: Server, what: str) -> None:
    name = f"waits-{what}"
    narrow.tenant(name)
    made = narrow.admin("POST", "/keys", {"tenant": name})
    with full(narrow, narrow.key("crowd")), waiting(narrow, made["key"]) as (request_id, lines):
        match what:
            case "tenant":
                narrow.admin("POST", f"/tenants/{name}/suspend")
            case "project":
                narrow.admin("POST", f"/projects/{made['project_id']}/suspend")
            case _:
                narrow.admin("DELETE", f"/keys/{made['id']}")
        error = last_error(lines)
    codes = {"tenant": "tenant_suspended", "project": "project_suspended", "key": "invalid_api_key"}
    assert (error["status"], error["code"]) == (401, codes[what])
    row = settled(narrow, request_id)
    assert row["outcome"] == "withdrawn"
    assert (row["input_tokens"], row["output_tokens"], row["cost_nanousd"], row["requests"]) == (0, 0, 0, 0)


def test_what_runs_goes_on_unless_it_is_to_end_now(narrow: Server) -> None:
    key = narrow.tenant("runs")
    with (
        narrow.http(key) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS | {"logprobs": 0}) as response,
    ):
        request_id, said = response.headers["x-request-id"], events(response.iter_lines())
        next(said)
        narrow.admin("POST", "/tenants/runs/suspend")
        before = [next(said)[0] for _ in range(50)]
        assert set(before) == {"data"}, "a plain suspension lets it go on"
        where = ["--data-dir", str(narrow.data_dir)]
        done = fairgate("tenant", "suspend", "runs", "--now", "--json", *where)
        assert done.returncode == 0, done.stderr
        delivered, error = 51, None
        for kind, value in said:
            delivered += kind == "data"
            error = value["error"] if kind == "error" else error
    assert error is not None
    assert (error["status"], error["code"]) == (401, "tenant_suspended")
    row = settled(narrow, request_id)
    assert row["outcome"] == "withdrawn"
    assert 51 <= row["output_tokens"] < ENDLESS["max_tokens"], "charged for what was emitted, not more"
    shown = json.loads(done.stdout)
    assert (shown["status"], shown["now"]) == ("suspended", True)
    until(narrow.is_idle)
    assert narrow.verify()["ok"]
    narrow.admin("POST", "/tenants/runs/resume")
    with narrow.http(key) as client:
        answer: httpx.Response = client.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}
        )
    assert answer.status_code == 200, "a resumed tenant is served again"


def test_a_revoked_key_ends_its_own_stream_and_no_other(narrow: Server) -> None:
    narrow.tenant("keys")
    leaked, other = (narrow.admin("POST", "/keys", {"tenant": "keys"}) for _ in range(2))
    with narrow.http(leaked["key"]) as one, one.stream("POST", "/v1/completions", json=ENDLESS) as taken:
        said = events(taken.iter_lines())
        next(said)
        with waiting(narrow, other["key"]) as (request_id, lines):
            narrow.admin("DELETE", f"/keys/{leaked['id']}", {"now": True})
            error = next(value["error"] for kind, value in said if kind == "error")
            assert (error["status"], error["code"]) == (401, "invalid_api_key")
            assert [kind for kind, _ in events(lines)][-1] == "done", "the other key's request had its turn"
    assert settled(narrow, request_id)["output_tokens"] == 4
