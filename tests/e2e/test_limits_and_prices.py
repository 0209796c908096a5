"""Limits, overrides and prices changed over HTTP and on the command line act on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.commands import answer_of
from tests.support.server_process import MODEL, Server, server_process

PLAIN = dict.fromkeys(("input_weight", "cached_input_weight", "output_weight"), 1_000)
BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server whose settings price another model than the one it serves."""
    data_dir = tmp_path_factory.mktemp("limits-and-prices")
    with server_process(
        data_dir, chat_model, "--prices", "other=1/2", "--gateway-max-end-users", "2"
    ) as running:
        yield running


def complete(server: Server, key: str, **fields: Any) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/completions", json={**BODY, **fields})


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
    answer_of(server, "price", "set", MODEL, "--free")
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
    assert answer_of(server, "price", "list") == server.admin("GET", "/prices")["data"]
    history = server.admin("GET", f"/prices/history?model={MODEL}&limit=3")["data"]
    assert answer_of(server, "price", "history", MODEL, "--most", "3") == history
    assert server.admin("GET", "/status")["tenants"]
    report = answer_of(server, "ledger", "verify")
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
    told = answer_of(server, "limit", "list", "--tenant", "limits")
    assert all(each["usage"].pop("reset_s") > 0 for each in [*told, *listed])
    assert told == listed
    assert answer_of(server, "ledger", "verify")["problems"] == []


def mine(server: Server, key: str, **query: str) -> Any:
    """What a key reads of its limits."""
    with server.http(key) as client:
        return client.get("/v1/limits", params=query).json()


def test_limits_of_end_users_count_each_for_itself_and_only_so_many(server: Server) -> None:
    server.admin("POST", "/prices", {"model": MODEL, "free": True, **PLAIN})
    key = server.tenant("crowd")
    shape = {"tenant": "crowd", "meter": "requests", "window": "lifetime"}
    each = server.admin("POST", "/limits", {**shape, "each_end_user": True, "amount": 2})
    server.admin("POST", "/limits", {**shape, "end_user": "bob", "amount": 1})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        for name in ("amy", "amy"):
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=2,
                safety_identifier=name,
            )
        with pytest.raises(openai.RateLimitError, match="the end user's limit of requests over its lifetime"):
            client.completions.create(model=MODEL, prompt="hi", max_tokens=2, user="amy")
    assert complete(server, key, user="bob").status_code == 200
    assert complete(server, key, user="bob").status_code == 429
    unknown = complete(server, key, user="cid")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (429, "too_many_end_users")
    assert "'cid'" in unknown.json()["error"]["message"]
    assert unknown.headers["x-should-retry"] == "false"
    # Who names nobody is bound by other limits only.
    assert complete(server, key).status_code == 200
    too_long = complete(server, key, user="x" * 65)
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "user")
    [default] = mine(server, key)["data"]
    assert (default["id"], default["usage"]) == (each["id"], None)
    for name, used in (("amy", 2), ("bob", 1), ("cid", 0)):
        [own] = mine(server, key, end_user=name)["data"]
        assert (own["usage"]["used"], own["usage"]["remaining"] > 0) == (used, name == "cid")
    shown = server.admin("GET", f"/limits/{each['id']}")
    assert shown["usage"] == {"end_users": 2, "most_end_users": 2}
    assert server.admin("GET", f"/limits/{each['id']}?end_user=amy")["usage"]["used"] == 2
    assert answer_of(server, "limit", "show", each["id"], "--end-user", "amy")["usage"]["used"] == 2
    assert answer_of(server, "ledger", "verify")["problems"] == []


def test_of_the_platforms_limit_a_tenant_reads_only_that_it_binds(server: Server) -> None:
    server.admin("POST", "/prices", {"model": MODEL, "free": True, **PLAIN})
    keys = [server.tenant(name) for name in ("first", "second")]
    own = server.admin(
        "POST", "/limits", {"tenant": "first", "meter": "total_tokens", "window": "day", "amount": 1_000}
    )
    shared = {"platform": True, "meter": "output_tokens", "window": "lifetime", "model": MODEL}
    limit = server.admin("POST", "/limits", {**shared, "amount": 15, "above_tokens": 6})
    try:
        for key in (keys[0], keys[1], keys[0]):
            assert complete(server, key).status_code == 200
        for key in keys:
            denied = complete(server, key)
            assert (denied.status_code, denied.json()["error"]["code"]) == (429, "insufficient_quota")
            assert "all tenants together" in denied.json()["error"]["message"]
            assert "15" not in denied.text
        # A short request is not bound.
        assert complete(server, keys[1], max_tokens=3).status_code == 200
        found = mine(server, keys[0])
        assert [(each["id"], each["usage"]["used"]) for each in found["data"]] == [(own["id"], 14)]
        assert found["data"][0]["usage"]["binds_first"]
        assert found["binds_first"]["id"] == own["id"]
        assert set(found["binds_first"]["projected_exhaustion"]) == {"p50", "p90", "basis"}
        assert found["platform"] == {"binds": False, "reset_s": None}
        assert complete(server, keys[1], max_tokens=4, prompt=[5, 6, 7]).status_code == 429
        server.admin("POST", "/limits", {**shared, "amount": 12, "above_tokens": 6})
        found = mine(server, keys[0])
        assert found["platform"] == {"binds": True, "reset_s": None}
        assert not found["data"][0]["usage"]["binds_first"]
        assert found["binds_first"] is None
        listed = {each["id"]: each["usage"] for each in answer_of(server, "limit", "list")}
        use = {
            "used": 12,
            "held": 0,
            "remaining": 0,
            "reset_s": None,
            "binds_first": True,
            "refill_per_s": None,
        }
        assert listed[limit["id"]] == use
        assert server.status()["platform_limits"][0]["used"] == 12
        assert answer_of(server, "ledger", "verify")["problems"] == []
        # What was used outlives the process: the counters are filled in from the ledger.
        server.stop()
        server.start()
        assert complete(server, keys[1]).status_code == 429
        assert server.admin("GET", f"/limits/{limit['id']}")["usage"] == use
        assert answer_of(server, "ledger", "verify")["problems"] == []
    finally:
        server.admin("DELETE", f"/limits/{limit['id']}")
    assert complete(server, keys[1]).status_code == 200


def test_bad_limits_are_400_and_name_the_parameter(server: Server) -> None:
    server.tenant("bad")
    good = {"tenant": "bad", "meter": "total_tokens", "window": "day", "amount": 5}
    limit = server.admin("POST", "/limits", good)
    override = f"/limits/{limit['id']}/override"
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
    assert answer_of(server, "tenant", "show", "changing") == shown
    with server.http() as client:
        refused = client.patch("/admin/v1/tenants/changing", json={"on_low_budget": "ignore"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "on_low_budget")
