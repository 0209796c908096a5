"""The operator's commands against a live server with two tenants: top, requests, projects, audit.

Its engine runs one sequence at a time, so that there is a line to look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI, PermissionDeniedError

from tests.support.commands import answer_of, fairgate
from tests.support.server_process import MODEL, Server, server_process, until

PATIENCE_S = 20_000
ENDLESS = {"model": MODEL, "prompt": "on and on", "max_tokens": 8000, "ignore_eos": True, "stream": True}
SHORT = {"model": MODEL, "prompt": "short", "max_tokens": 4, "ignore_eos": True}
PROGRESS = {"x-fairgate-progress": "1"}
WIDTH = 80
CHANGE_ARRIVES_S = 5.0
"""The promise is one second; the rest is for a machine that does other things as well."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "1", "--gateway-long-tokens", "8192"]
    arguments += ["--gateway-ttl-standard", str(PATIENCE_S), "--gateway-ttl-batch", str(PATIENCE_S)]
    with server_process(tmp_path_factory.mktemp("doors"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def keys(narrow: Server) -> dict[str, str]:
    every = ["interactive", "standard", "batch"]
    return {name: narrow.tenant(name, tiers=every) for name in ("acme", "globex")}


def refusal_of(server: Server, *arguments: str) -> str:
    result = fairgate(server, *arguments)
    assert result.exit_code == 1, result.output
    return result.stderr


def complete(server: Server, key: str) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/completions", json=SHORT)


def models(server: Server, key: str) -> httpx.Response:
    """An answer that needs a key and no turn."""
    with server.http(key) as client:
        return client.get("/v1/models")


@contextmanager
def crowded(server: Server, keys: dict[str, str], each: int = 2) -> Iterator[dict[str, list[str]]]:
    """Endless streams of both tenants, of which one runs: their ids, by tenant. They end here."""
    ids: dict[str, list[str]] = {name: [] for name in keys}
    with ExitStack() as stack:
        for _ in range(each):
            for name, key in keys.items():
                client = stack.enter_context(server.http(key))
                stream = client.stream("POST", "/v1/completions", json=ENDLESS, headers=PROGRESS)
                ids[name].append(stack.enter_context(stream).headers["x-request-id"])
        yield ids
        for request_id in (one for some in ids.values() for one in some):
            server.admin("DELETE", f"/requests/{request_id}")
    until(server.is_idle)


def test_top_shows_the_line_the_shares_the_waits_and_the_refusals(
    narrow: Server, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in keys.values():
        assert complete(narrow, key).status_code == 200
    with narrow.http("fg_live_AAAAAAAAAAAA_" + "B" * 43) as stranger:
        assert stranger.get("/v1/models").status_code == 401
    with crowded(narrow, keys):
        until(lambda: sum(answer_of(narrow, "top")["queued"].values()) >= 1)
        until(lambda: any(row["share"] for row in answer_of(narrow, "top")["tenants"]))
        seen = answer_of(narrow, "top")
        monkeypatch.setenv("COLUMNS", str(WIDTH))
        drawn = fairgate(narrow, "top", "--once").output
    rows = {row["name"]: row for row in seen["tenants"]}
    assert set(rows) == {"acme", "globex"}
    assert sum(row["running"] + row["queued"] for row in rows.values()) == 4
    assert sum(row["share"] or 0 for row in rows.values()) == pytest.approx(1)
    assert sum(row["fair_share"] or 0 for row in rows.values()) == pytest.approx(1)
    for row in rows.values():
        waits = row["waits"]
        assert waits["requests"] >= 1
        assert waits["told_p50_s"] <= waits["told_p90_s"]
        assert waits["had_p50_s"] <= waits["had_p90_s"]
    (replica,) = seen["replicas"]
    assert (replica["is_up"], replica["places"], replica["model"]) == (True, 1, MODEL)
    assert 0 < replica["kv_used"] <= 1
    assert seen["refusals"]["invalid_api_key"] >= 1
    for word in ("acme", "globex", "standard", "engine-0", "told p50/p90", "invalid_api_key"):
        assert word in drawn, drawn
    assert max(map(len, drawn.splitlines())) <= WIDTH, drawn


def test_requests_are_listed_moved_and_cancelled_by_an_operator(narrow: Server, keys: dict[str, str]) -> None:
    with crowded(narrow, keys) as ids:
        listed = answer_of(narrow, "request", "list")
        assert {each["id"] for each in listed["data"]} == {one for some in ids.values() for one in some}
        assert {each["tenant"] for each in listed["data"]} == set(keys)
        assert {each["project"] for each in listed["data"]} == {"default"}
        assert (listed["has_more"], listed["gateways_missing"]) == (False, 0)
        mine = answer_of(narrow, "request", "list", "--tenant", "acme")["data"]
        assert [each["id"] for each in mine] == ids["acme"]
        waiting = answer_of(narrow, "request", "list", "--tenant", "globex", "--status", "waiting")["data"]
        request_id = waiting[-1]["id"]
        shown = fairgate(narrow, "request", "list", "--tenant", "globex").output
        assert "globex" in shown
        assert request_id in shown
        # As OpenAI's SDK shows it.
        completion_id = "cmpl-" + request_id.removeprefix("req_")
        assert answer_of(narrow, "request", "show", completion_id)["tenant"] == "globex"
        preview = answer_of(narrow, "request", "move", completion_id, "interactive", "--preview")
        assert (preview["moved"], preview["tier"]) == (False, "standard")
        moved = answer_of(narrow, "request", "move", request_id, "interactive")
        assert (moved["moved"], moved["id"], moved["tier"]) == (True, request_id, "interactive")
        assert [
            each["id"] for each in answer_of(narrow, "request", "list", "--tier", "interactive")["data"]
        ] == [request_id]
        assert (
            "only a waiting request"
            in refusal_of(narrow, "request", "move", listed["data"][0]["id"], "batch").lower()
        )
        cancelled = answer_of(narrow, "request", "cancel", completion_id)
        assert (cancelled["id"], cancelled["tenant"]) == (request_id, "globex")
        until(lambda: answer_of(narrow, "request", "show", request_id)["status"] == "ended")
        assert "has ended: cancelled" in fairgate(narrow, "request", "cancel", request_id).output
        # A tenant sees only its own, with no names of others.
        with narrow.http(keys["acme"]) as client:
            own = client.get("/v1/requests").json()["data"]
            assert [each["id"] for each in own] == ids["acme"]
            assert "tenant_id" not in own[0]
            assert client.get(f"/v1/requests/{request_id}").status_code == 404
    acts = answer_of(narrow, "audit", "list", "--tenant", "globex", "--act", "request")["data"]
    assert {(row["action"], row["target"]) for row in acts} >= {
        ("request.move", request_id),
        ("request.cancel", request_id),
    }
    unknown = refusal_of(narrow, "request", "cancel", "req_00000000000000000000000000")
    assert "`fairgate request list`" in unknown
    assert "GET /" not in unknown
    assert "no such tenant" in refusal_of(narrow, "request", "list", "--tenant", "nobody").lower()


def test_a_suspended_project_is_out_within_a_second_and_what_runs_goes_on(
    narrow: Server, keys: dict[str, str]
) -> None:
    made = answer_of(narrow, "project", "create", "chatbot", "--tenant", "acme")
    assert (made["tenant"], made["name"], made["status"]) == ("acme", "chatbot", "active")
    key = narrow.key("acme", project="chatbot")
    with narrow.http(key) as client, client.stream("POST", "/v1/completions", json=ENDLESS) as stream:
        lines = stream.iter_lines()
        next(lines)
        suspended = fairgate(narrow, "project", "suspend", "chatbot", "--tenant", "acme").output
        assert "requests that run go on to their end" in suspended
        until(lambda: models(narrow, key).status_code == 403, CHANGE_ARRIVES_S)
        assert next(line for line in lines if line.startswith("data: "))
        running = answer_of(narrow, "request", "list", "--tenant", "acme")["data"]
        assert [each["project"] for each in running] == ["chatbot"]
        answer_of(narrow, "request", "cancel", running[0]["id"])
    sdk = OpenAI(base_url=f"{narrow.url}/v1", api_key=key, max_retries=0)
    with sdk, pytest.raises(PermissionDeniedError) as caught:
        sdk.models.list()
    assert caught.value.code == "project_suspended"
    assert complete(narrow, keys["acme"]).status_code == 200, "the tenant's other projects go on"
    listed = answer_of(narrow, "project", "list", "--tenant", "acme")
    assert {each["name"]: each["status"] for each in listed} == {"chatbot": "suspended", "default": "active"}
    assert "tenant" in refusal_of(narrow, "project", "resume", "chatbot")
    assert answer_of(narrow, "project", "resume", made["id"])["status"] == "active"
    until(lambda: models(narrow, key).status_code == 200, CHANGE_ARRIVES_S)
    again = answer_of(narrow, "project", "suspend", "chatbot", "--tenant", "acme")
    assert (again["status"], again["tenant"]) == ("suspended", "acme")
    # The same over HTTP, in force when it is answered.
    assert narrow.admin("GET", "/projects?tenant=acme")["data"][0] == again
    narrow.admin("POST", "/projects/chatbot/suspend?tenant=acme")
    refused = models(narrow, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "project_suspended")
    assert narrow.admin("POST", f"/projects/{made['id']}/resume")["tenant"] == "acme"
    assert complete(narrow, key).status_code == 200
    with narrow.http() as owner:
        assert owner.post("/admin/v1/projects", json={"tenant": "acme", "name": "chatbot"}).status_code == 409


def test_an_act_is_found_by_actor_subject_and_time_and_exported(
    narrow: Server, keys: dict[str, str], tmp_path: Path
) -> None:
    before = datetime.now(UTC).isoformat()
    answer_of(narrow, "tenant", "set", "globex", "--weight", "3")
    between = datetime.now(UTC).isoformat()
    narrow.admin("PATCH", "/tenants/globex", {"weight": 4})

    def rows(*filters: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = answer_of(narrow, "audit", "list", *filters)["data"]
        return found

    by_key, by_cli = rows("--subject", "tenant:globex", "--act", "tenant.update")
    assert by_cli["actor"].startswith("cli")
    assert by_key["actor"].startswith("key:fg_live_")
    assert (by_cli["target_name"], by_cli["tenant"]) == ("globex", "globex")
    assert (
        rows("--actor", by_cli["actor"], "--subject", "globex", "--since", before)[0]["seq"] == by_cli["seq"]
    )
    assert rows("--subject", "globex", "--since", before, "--until", between) == [by_cli]
    assert rows("--subject", "globex", "--since", between) == [by_key]
    assert "weight 3.0 -> 4.0" in fairgate(narrow, "audit", "list", "--subject", "globex").output
    # Pages, over HTTP: the same rows, and a cursor of another filter says which, and what to do.
    with narrow.http() as owner:

        def page(**query: str | int) -> httpx.Response:
            return owner.get("/admin/v1/audit", params=query)

        seen: list[dict[str, Any]] = []
        cursor: dict[str, str] | None = {}
        while cursor is not None:
            answered = page(tenant="globex", limit=1, **cursor).json()
            seen += answered["data"]
            cursor = {"cursor": answered["next_cursor"]} if answered["next_cursor"] else None
        assert seen == rows("--tenant", "globex")
        stolen = page(tenant="globex", limit=1).json()["next_cursor"]
        refused = page(tenant="acme", cursor=stolen)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cursor")
        for word in ("tenant=globex", "tenant=acme", "leave the cursor out"):
            assert word in refused.json()["error"]["message"]
        assert page(act="tennant").json()["error"]["param"] == "act"
    assert "leave the cursor out" in refusal_of(narrow, "audit", "list", "--cursor", stolen)
    # A tenant's keys read no audit.
    with narrow.http(keys["acme"]) as client:
        assert client.get("/admin/v1/audit").status_code == 403
    file = tmp_path / "audit.jsonl"
    exported = answer_of(narrow, "audit", "export", "--output", str(file))
    [_, *lines] = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if "checkpoint" not in line]
    assert exported == {"rows": len(lines), "output": str(file)}
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    # Each export is a row itself.
    again = fairgate(narrow, "audit", "export").stdout.splitlines()
    assert set(file.read_text().splitlines()[1:]) < set(again)
    assert [line for line in again if '"access.export"' in line]
    everything = file.read_text()
    for secret in (*keys.values(), narrow.owner_key):
        assert secret.rpartition("_")[2] not in everything
