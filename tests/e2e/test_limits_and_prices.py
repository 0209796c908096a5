"""Limits, overrides and prices changed over HTTP and on the command line act on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import MODEL, ROOT, Server, server_process

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server whose settings price another model than the one it serves."""
    data_dir = tmp_path_factory.mktemp("limits-and-prices")
    with server_process(data_dir, chat_model, "--prices", "other=1/2") as running:
        yield running


def complete(server: Server, key: str, **fields: Any) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/completions", json={**BODY, **fields})


def command(server: Server, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "ops.cli.main", *arguments, "--data-dir", str(server.data_dir), "--json"],
        capture_output=True, text=True, check=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    return json.loads(done.stdout)


def last_settled(server: Server, key: str) -> Any:
    """The account that the answer to one more request carries."""
    answer = complete(server, key)
    assert answer.status_code == 200, answer.text
    return answer.json()["fairgate"]


def test_an_unpriced_model_is_refused_until_it_has_a_price_and_free_is_one(server: Server) -> None:
    key = server.tenant("prices")
    refused = complete(server, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_priced")
    assert refused.headers["x-should-retry"] == "false"
    assert "price set" in server.log()
    listed = server.admin("GET", "/prices")["data"]
    assert {(row["model"], row["version"]) for row in listed} == {("other", 1)}
    # On the command line, and followed by the server within a second.
    command(server, "price", "set", MODEL, "--free")
    deadline_s = time.monotonic() + 10
    while (answer := complete(server, key)).status_code != 200:
        assert answer.json()["error"]["code"] == "model_not_priced"
        assert time.monotonic() < deadline_s
    assert last_settled(server, key)["cost_nanousd"]["charged"] == 0
    # Over HTTP: in force when the answer comes.
    change = {"model": MODEL, "input_nanousd": 100, "output_nanousd": 1_000, "cached_input_nanousd": 100}
    rows = server.admin("POST", "/prices", change)["data"]
    assert {(row["version"], row["input_nanousd"]) for row in rows} == {(3, 100)}
    assert last_settled(server, key)["cost_nanousd"]["charged"] == 3 * 100 + 4 * 1_000
    assert command(server, "price", "list") == server.admin("GET", "/prices")["data"]
    history = server.admin("GET", f"/prices/history?model={MODEL}&limit=3")["data"]
    assert command(server, "price", "history", MODEL, "--most", "3") == history
    assert server.admin("GET", "/status")["tenants"]
    report = command(server, "ledger", "verify")
    assert report["problems"] == []


def test_weights_limit_overrides_and_events_on_a_real_server(server: Server) -> None:
    weights = {"input_weight": 500, "cached_input_weight": 500, "output_weight": 2_500}
    server.admin("POST", "/prices", {"model": MODEL, "free": True, **weights})
    key = server.tenant("limits")
    daily = {"tenant": "limits", "meter": "total_tokens", "window": "day"}
    hard = server.admin("POST", "/limits", {**daily, "amount": 24})
    soft = server.admin(
        "POST", "/limits",
        {**daily, "meter": "output_tokens", "amount": 10, "mode": "soft", "thresholds": [90, 150]},
    )  # fmt: skip
    shadow = server.admin("POST", "/limits", {**daily, "meter": "requests", "amount": 1, "mode": "shadow"})
    # 3 input tokens count 1.5, rounded up; 4 output tokens count 10.
    assert complete(server, key).status_code == 200
    assert complete(server, key).status_code == 200
    spent = complete(server, key)
    assert (spent.status_code, spent.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "Limit 24" in spent.json()["error"]["message"]
    path = f"/limits/{hard['id']}/override"
    server.admin("POST", path, {"amount": 36, "for_s": 3_600, "reason": "one more"})
    assert complete(server, key).status_code == 200
    assert complete(server, key).status_code == 429
    server.admin("DELETE", path)
    assert complete(server, key).status_code == 429
    with server.http() as client:
        late = client.post(
            f"/admin/v1{path}", json={"amount": 36, "until": "2020-01-01T00:00:00Z", "reason": "r"}
        )
    assert (late.status_code, late.json()["error"]["param"]) == (400, "until")

    def noticed(limit: Any) -> list[tuple[str, int, int]]:
        events = server.admin("GET", f"/limits/{limit['id']}")["events"]
        return [(event["kind"], event["level"], event["count"]) for event in events]

    # Written off the hot path, within a second or so.
    deadline_s = time.monotonic() + 10
    while not (noticed(soft) and noticed(shadow)) or noticed(soft)[-1][1] < 150 or noticed(shadow)[0][2] < 2:
        assert time.monotonic() < deadline_s, (noticed(soft), noticed(shadow))
    assert [(kind, level) for kind, level, _ in noticed(soft)] == [("threshold", 90), ("threshold", 150)]
    assert noticed(shadow) == [("would_deny", 0, 2)]
    with server.http() as client:
        metrics = client.get("/metrics").text
    assert 'fairgate_limit_events_total{kind="would_deny"} 2.0' in metrics
    listed = server.admin("GET", "/limits?tenant=limits")["data"]
    assert command(server, "limit", "list", "--tenant", "limits") == listed
    assert command(server, "ledger", "verify")["problems"] == []


def test_bad_limits_and_prices_are_400_and_name_the_parameter(server: Server) -> None:
    server.tenant("bad")
    good = {"tenant": "bad", "meter": "total_tokens", "window": "day", "amount": 5}
    limit = server.admin("POST", "/limits", good)
    override = f"/limits/{limit['id']}/override"
    prices = {"model": MODEL, "input_nanousd": 1, "output_nanousd": 1}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/limits", {**good, "amount": -1}, "amount"),
        ("/limits", {**good, "meter": "bananas"}, "meter"),
        ("/limits", {**good, "tier": "gold"}, "tier"),
        ("/limits", {**good, "time_zone": "Mars/Olympus"}, "time_zone"),
        ("/limits", {**good, "time_zone": "Asia/Tokyo"}, "time_zone"),
        ("/limits", {**good, "mode": "soft", "thresholds": [0]}, "thresholds"),
        ("/limits", {**good, "thresholds": [80]}, "thresholds"),
        ("/limits", {"tenant": "bad", "meter": "gpu_ms", "rate_per_s": 1.0, "amount": 0}, "burst"),
        (override, {"amount": 9, "reason": "r"}, "until"),
        (override, {"amount": 9, "reason": "r", "until": "2031-01-01T00:00:00"}, "until"),
        (override, {"amount": 9, "reason": "r", "for_s": -1}, "for_s"),
        (override, {"amount": 9, "reason": "", "for_s": 9}, "reason"),
        (override, {"amount": 9, "for_s": 9}, "reason"),
        ("/prices", {**prices, "tier": "gold"}, "tier"),
        ("/prices", {**prices, "output_nanousd": -1}, "output_nanousd"),
        ("/prices", {**prices, "free": True}, "free"),
        ("/prices", {"model": "new", "output_nanousd": 1}, "input_nanousd"),
        ("/prices", {**prices, "reasoning_weight": 99_999}, "reasoning_weight"),
    ]
    with server.http() as client:
        for path, body, parameter in cases:
            refused = client.post(f"/admin/v1{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter), (path, body)
        missing = client.delete(f"/admin/v1{override}")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "override")
        assert client.get("/admin/v1/limits/lim_nothing").status_code == 404
        assert client.get("/admin/v1/prices/history?model=nothing").status_code == 404
    assert server.admin("GET", "/limits?tenant=bad")["data"][0]["amount"] == 5


def test_a_tenant_is_changed_over_http(server: Server) -> None:
    server.tenant("changing")
    changed = server.admin("PATCH", "/tenants/changing", {"on_low_budget": "truncate", "weight": 2.5})
    assert (changed["on_low_budget"], changed["weight"]) == ("truncate", 2.5)
    shown = server.admin("GET", "/tenants/changing")
    assert (shown["has_limits"], shown["limits"]) == (False, [])
    assert command(server, "tenant", "show", "changing") == shown
    with server.http() as client:
        refused = client.patch("/admin/v1/tenants/changing", json={"on_low_budget": "ignore"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "on_low_budget")
