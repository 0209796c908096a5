"""Refused requests are found by id and by tenant, with the limit; what was told is counted against what
happened; the last use of a key is kept."""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Any

import httpx
import pytest

from gateway.domain.timeline import unpack
from gateway.domain.told import kept_figures
from tenants.counts.calibration import CalibrationKey, KeptCount
from tests.support.server_process import MODEL, Server, until

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
OTHER_LIMITS = {"requests": 1, "output_tokens": 10}


def complete(server: Server, key: str, **fields: Any) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/completions", json={**BODY, **fields})


def refusals_of(server: Server, **query: str) -> list[dict[str, Any]]:
    with server.http() as client:
        answer = client.get("/admin/v1/refusals", params=query)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def one_refusal(server: Server, answer: httpx.Response) -> dict[str, Any]:
    """The record of one refused request, once it is written."""
    assert answer.is_error, answer.text
    request_id = answer.headers["x-request-id"]
    until(lambda: refusals_of(server, request_id=request_id))
    [row] = refusals_of(server, request_id=request_id)
    return row


def columns(server: Server, query: str) -> list[Any]:
    with sqlite3.connect(server.data_dir / "fairgate.db") as connection:
        return connection.execute(query).fetchall()


def refuse_in_many_ways(server: Server, key: str, post: dict[str, Any] = BODY) -> dict[str, httpx.Response]:
    """One refused request of each code that a tenant can bring about by itself; by code."""
    ways = [
        complete(server, key, max_tokens=11),
        complete(server, key, model="no-such-model"),
        complete(server, key, prompt=[5] * 8_000, max_tokens=8_000),
        complete(server, key, temperature=99),
        complete(server, key, nonsense=1),
        complete(server, key, service_tier="priority"),
        complete(server, key, stream=True, max_tokens=11, service_tier="flex"),
    ]
    with server.http(key) as client:
        ways += [
            client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}),
            client.post("/v1/completions", content=b"a", headers={"content-type": "text/plain"}),
            client.post("/v1/completions", json=post, headers={"X-Fairgate-Quote": "no quote"}),
            client.post("/v1/completions", json=post, headers={"X-Fairgate-Max-Wait-S": "x"}),
            client.post(
                "/v1/completions", json=post | {"max_tokens": 11}, headers={"Idempotency-Key": "refused-once"}
            ),
            client.get("/v1/requests/req_unknown"),
            client.get("/v1/no-such-path"),
            client.put("/v1/completions"),
            client.get("/admin/v1/tenants"),
        ]
    return {answer.headers["x-request-id"]: answer for answer in ways}


def test_each_refusal_is_found_by_its_request_and_by_its_tenant(server: Server) -> None:
    before = Counter(server.status()["refusals"])
    key = server.tenant("refused", tier="standard", tiers=["standard", "batch"])
    limit_id = server.limit("refused", "output_tokens", 10, window="day")
    answers = refuse_in_many_ways(server, key)
    assert [each.text for each in answers.values() if not each.is_error] == []
    # 404 of no route and 405 are said before a key is looked at.
    anonymous = {"not_found", "method_not_allowed"}
    codes = {request_id: each.json()["error"]["code"] for request_id, each in answers.items()}
    assert len(set(codes.values())) >= 12, codes
    for answer in answers.values():
        one_refusal(server, answer)
    rows = {row["request_id"]: row for row in refusals_of(server, tenant="refused")}
    assert {each: row["code"] for each, row in rows.items()} == {
        each: code for each, code in codes.items() if code not in anonymous
    }
    assert all(row["key_id"] and row["project"] == "default" for row in rows.values())
    denied = [row for row in rows.values() if row["code"] == "insufficient_quota"]
    assert len(denied) == 3, "one stands in a stream, one has an idempotency key"
    for row in denied:
        assert (row["limit_id"], row["wanted"], row["available"]) == (limit_id, 11, 10)
        assert row["model"] == MODEL
    assert Counter(row["tier"] for row in denied) == {"standard": 2, "batch": 1}
    [unknown_model] = [row for row in rows.values() if row["code"] == "model_not_found"]
    assert (unknown_model["model"], unknown_model["tier"]) == ("no-such-model", "standard")
    [kept_out] = [row for row in rows.values() if row["code"] == "service_tier_not_allowed"]
    assert kept_out["tier"] == "interactive"
    # Counted exactly as the metric counts them.
    with server.http() as client:
        counted = client.get("/admin/v1/refusals/counts", params={"tenant": "refused", "group_by": "code"})
    by_code = Counter({row["code"]: row["count"] for row in counted.json()["data"]})
    assert by_code == Counter(code for code in codes.values() if code not in anonymous)
    assert all(Counter(server.status()["refusals"])[code] - before[code] >= n for code, n in by_code.items())


def test_a_tenant_learns_why_its_request_was_refused_and_nobody_elses(server: Server) -> None:
    key, other = server.tenant("told-why"), server.tenant("curious-why")
    server.limit("told-why", "output_tokens", 3, window="day")
    refused = complete(server, key)
    request_id = refused.headers["x-request-id"]
    with server.http(key) as client:
        shown = client.get(f"/v1/requests/{request_id}")  # at once: it need not be written yet
    assert shown.status_code == 200, shown.text
    assert (shown.json()["status"], shown.json()["outcome"]) == ("refused", "refused")
    why = shown.json()["refusal"]
    assert (why["code"], why["wanted"], why["available"]) == ("insufficient_quota", 4, 3)
    assert "tenant_id" not in shown.json()
    with server.http(other) as client:
        assert client.get(f"/v1/requests/{request_id}").status_code == 404
        assert client.get("/v1/refusals", params={"request_id": request_id}).json()["data"] == []
    one_refusal(server, refused)
    with server.http(key) as client:
        listed = client.get("/v1/refusals", params={"code": "insufficient_quota"}).json()["data"]
        assert [row["request_id"] for row in listed] == [request_id]
        wrong = client.get("/v1/refusals", params={"tier": "gold"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tier")
    assert server.admin("GET", f"/requests/{request_id}")["tenant"] == "told-why"


def test_a_limit_on_all_tenants_is_named_to_operators_alone(server: Server) -> None:
    key = server.tenant("of-all")
    limit = server.admin(
        "POST", "/limits", {"platform": True, "meter": "output_tokens", "amount": 1, "window": "day"}
    )
    try:
        refused = complete(server, key)
    finally:
        server.admin("DELETE", f"/limits/{limit['id']}")
    row = one_refusal(server, refused)
    assert (row["limit_id"], row["wanted"], row["of_platform"]) == (limit["id"], 4, True)
    with server.http(key) as client:
        [own] = client.get("/v1/refusals").json()["data"]
    assert (own["limit_id"], own["wanted"], own["available"], own["of_platform"]) == (None, None, None, True)


def test_keys_that_are_known_and_kept_out_have_their_tenant(server: Server) -> None:
    key = server.tenant("kept-out")
    server.admin("POST", "/tenants/kept-out/suspend")
    assert one_refusal(server, complete(server, key))["tenant"] == "kept-out"
    unknown = complete(server, "fg_live_0000000000000000_0000")
    row = one_refusal(server, unknown)
    assert (row["code"], row["tenant_id"], row["key_id"]) == ("invalid_api_key", None, None)


def test_counts_of_kept_figures_equal_a_recount_of_the_timelines(server: Server) -> None:
    key = server.tenant("calibrated", tier="standard", tiers=["standard", "batch"])
    for number in range(6):
        complete(server, key, service_tier="flex" if number % 2 else "default")
    with server.http(key) as client:
        [quote] = client.post(
            "/v1/quotes",
            json={"model": MODEL, "prompt": "one", "service_tier": "default", "max_tokens": 4},
        ).json()["quotes"]
        redeemed = client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "one", "max_tokens": 4},
            headers={"X-Fairgate-Quote": quote["token"]},
        )
    assert redeemed.status_code == 200, redeemed.text

    def recounted() -> dict[CalibrationKey, KeptCount]:
        found: dict[CalibrationKey, KeptCount] = {}
        for packed, ended_us, model in columns(
            server,
            "SELECT packed, ended_us, model FROM timelines JOIN ledger USING (request_id)"
            " WHERE kind = 'settle'",
        ):
            for each, kept in kept_figures(unpack(packed), model, ended_us).items():
                found[each] = found.get(each, KeptCount(0, 0, 0)).plus(kept)
        return found

    def counted() -> dict[CalibrationKey, KeptCount]:
        rows = columns(
            server,
            "SELECT hour_s, model, tier, figure, wait_bucket, kind, requests, within_p50, within_p90"
            " FROM calibration_counts",
        )
        return {CalibrationKey(*row[:6]): KeptCount(*row[6:]) for row in rows}

    def own_tiers() -> list[str]:
        timelines = "timelines JOIN ledger USING (request_id) JOIN tenants ON tenants.id = ledger.tenant_id"
        query = f"SELECT tier FROM {timelines} WHERE kind = 'settle' AND tenants.name = 'calibrated'"
        return sorted(tier for (tier,) in columns(server, query))

    until(lambda: own_tiers() == ["batch"] * 3 + ["standard"] * 4 and recounted() == counted())
    waits: Counter[str] = Counter()
    for counted_key, kept in counted().items():
        waits[counted_key.kind] += kept.requests * (counted_key.figure == "wait")
    assert waits >= Counter(plain=6, binding=1)
    shown = server.admin("GET", "/calibration?group_by=figure,tier&figure=e2e")["data"]
    assert {row["tier"] for row in shown} >= {"standard", "batch"}
    of_all = Counter({row["tier"]: row["requests"] for row in shown})
    for tier, requests in of_all.items():
        assert requests == sum(
            each.requests for key, each in counted().items() if (key.figure, key.tier) == ("e2e", tier)
        )


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/refusals?from=2026", "from"),
        ("/refusals?cursor=abc", "cursor"),
        ("/refusals?limit=0", "limit"),
        ("/refusals/counts?window=year", "window"),
        ("/refusals/counts?from=2016-01-01T00:00:00Z", "from"),
        ("/calibration?group_by=colour", "group_by"),
        ("/calibration?kind=guess", "kind"),
    ],
)
def test_bad_parameters_are_named(server: Server, path: str, param: str) -> None:
    with server.http() as client:
        answer = client.get(f"/admin/v1{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
