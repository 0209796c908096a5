"""A tenant and an operator can learn why a request took as long as it did."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tests.support.commands import answer_of
from tests.support.server_process import MODEL, Server, until


@pytest.fixture(scope="module")
def keys(server: Server) -> dict[str, str]:
    return {"acme": server.tenant("explained"), "other": server.tenant("curious")}


def _completion(server: Server, key: str, **fields: Any) -> str:
    """Its request id."""
    body = {"model": MODEL, "prompt": "why so slow", "max_tokens": 6, "ignore_eos": True} | fields
    with server.http(key) as client:
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


def test_a_tenant_sees_its_requests_timeline_and_nobody_elses(server: Server, keys: dict[str, str]) -> None:
    request_id = _completion(server, keys["acme"])
    with server.http(keys["acme"]) as client:
        shown = client.get(f"/v1/requests/{request_id}").json()
    with server.http(keys["other"]) as client:
        foreign = client.get(f"/v1/requests/{request_id}")
        unknown = client.get("/v1/requests/req_nothing")

    assert shown["status"] == "ended"
    assert shown["outcome"] == "completed"
    kinds = [each["event"] for each in shown["timeline"]]
    for kind in (
        "received",
        "reserved",
        "queued",
        "dispatched",
        "admitted",
        "prefilled",
        "first_token",
        "last_token",
    ):
        assert kind in kinds, kinds
    assert kinds[-2:] == ["ended", "settled"]
    assert shown["timeline"][-1]["charged_output_tokens"] == 6
    instants = [each["at_s"] for each in shown["timeline"]]
    assert instants == sorted(instants)
    assert any("tokens came in" in sentence for sentence in shown["explanation"])
    received, read = shown["timeline"][0], shown["stages"][0]
    assert (read["name"], read["end_s"]) == ("read", 0.0)
    assert received["read_us"] == round(-read["start_s"] * 1e6) > 0
    queued_s = next(each["at_s"] for each in shown["timeline"] if each["event"] == "queued")
    waits = shown["waits"]
    assert waits["before_line_s"] == pytest.approx(received["read_us"] / 1e6 + queued_s - waits["limits_s"])
    assert shown["misses"] == []
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.json()["error"]["code"] == unknown.json()["error"]["code"]


def test_a_reservation_for_a_tier_is_for_its_requests_alone(server: Server) -> None:
    key = server.tenant("reserving", tiers=["interactive", "standard"], reserved_tokens_per_s=1e6)
    shown = server.admin("PATCH", "/tenants/reserving", {"reserved_tier": "standard"})
    assert (shown["reserved_tokens_per_s"], shown["reserved_tier"]) == (1e6, "standard")

    def went_by_reservation(tier: str) -> bool:
        with server.http(key) as client:
            request_id = _completion(server, key, service_tier=tier)
            events = client.get(f"/v1/requests/{request_id}").json()["timeline"]
        (dispatched,) = (each for each in events if each["event"] == "dispatched")
        return bool(dispatched["by_reservation"])

    until(lambda: went_by_reservation("default"))
    assert not went_by_reservation("priority")
    with server.http() as client:
        ended = {"reserved_tokens_per_s": 0, "reserved_tier": "standard"}
        answer = client.patch("/admin/v1/tenants/reserving", json=ended)
    assert answer.status_code == 400
    assert "reserved_tokens_per_s above 0" in answer.json()["error"]["message"]


def test_a_missed_target_is_counted_explained_and_reported(server: Server, keys: dict[str, str]) -> None:
    made = server.admin(
        "POST",
        "/slos",
        {"tier": "standard", "metric": "ttft", "target_s": 0.0001, "tenant": "explained"},
    )
    try:
        request_id = _completion(server, keys["acme"])
        until(lambda: server.admin("GET", "/slo/misses?tenant=explained")["data"])
        shown = server.admin("GET", f"/requests/{request_id}")
        by_cli = answer_of(server, "request", "show", request_id)
        until(lambda: answer_of(server, "slo", "report", "--tenant", "explained"))
        (report,) = answer_of(server, "slo", "report", "--tenant", "explained")
    finally:
        server.admin("DELETE", f"/slos/{made['id']}")

    (miss,) = shown["misses"]
    assert miss["metric"] == "ttft"
    assert miss["cause"] == "request", "nothing computes a prompt in a tenth of a millisecond"
    assert miss["evidence"]["alone_s"] > 0.0001
    assert by_cli == shown
    assert (report["requests"], report["missed"], report["causes"]) == (1, 1, {"request": 1})
    with server.http() as client:
        page = client.get("/metrics").text
    assert 'fairgate_slo_misses_total{cause="request",metric="ttft",tier="standard"}' in page


def test_an_account_says_how_its_tokens_came_and_names_others_to_operators_only(server: Server) -> None:
    names = ("turns-one", "turns-two")
    keys = [server.tenant(name) for name in names]
    ids = {each["name"]: each["id"] for each in server.admin("GET", "/tenants?limit=1000")["data"]}
    tokens = 300

    def answered(key: str, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": "mine, then yours", "max_tokens": tokens, "ignore_eos": True}
        with server.http(key) as client:
            return client.post("/v1/completions", json=body | fields).json()["fairgate"]

    server.admin("POST", "/policy", {"policy": "hybrid", "options": {"slots": 1}})
    try:
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(answered, keys))
        until(server.is_idle)
        alone = answered(keys[0], n=2)
    finally:
        server.admin("POST", "/policy", {"from_settings": True})

    for account in both:
        came = account["decode"]
        assert came["floor_tokens"] + came["turn_tokens"] == tokens
        assert came["turn_tokens"] > tokens / 2
        assert came["sat_out"]["share"] > tokens / 3
        assert (came["sat_out"]["own"], came["sat_out"]["tier"]) == (0, 0)
    assert alone["decode"]["sat_out"]["own"] > tokens / 2
    assert alone["decode"]["sat_out"]["share"] == 0

    request_id, steps = both[0]["request_id"], both[0]["decode"]["sat_out"]["share"]
    shown = server.admin("GET", f"/requests/{request_id}")
    assert shown["sat_out_for"] == [{"tenant_id": ids[names[1]], "tenant": names[1], "steps": steps}]
    assert server.admin("GET", f"/requests/{alone['request_id']}")["sat_out_for"] == []
    with server.http(keys[0]) as client:
        own_view = client.get(f"/v1/requests/{request_id}")
    for told in (json.dumps(both[0]), own_view.text):
        assert names[1] not in told
        assert ids[names[1]] not in told
    assert "sat_out_for" not in own_view.json()
    text = CliRunner().invoke(cli, ["request", "show", request_id, "--data-dir", str(server.data_dir)]).output
    assert f"steps sat out: {steps:,} for the share of other tenants" in text
    assert f"- steps sat out while others had the turns: {names[1]} {steps:,}" in text


def test_an_operator_asks_what_if_of_what_was_served(server: Server) -> None:
    key = server.tenant("replayed")
    for output_tokens in (4, 6):
        _completion(server, key, max_tokens=output_tokens)

    found: list[Any] = []

    def is_written() -> bool:
        asked = ("--last", "1h", "--tenant", "replayed", "--gpu", "cpu", "--model", "1b", "--policy", "vtc")
        try:
            found.append(answer_of(server, "whatif", *asked))
        except AssertionError:
            return False  # timelines are written within a second
        return bool(found[-1]["recorded"]["requests"] == 2)

    until(is_written)
    report = found[-1]
    assert report["recorded"]["policy"] == "as it was"
    assert report["recorded"]["ttft_s"]["p50"] > 0
    # Before it a baseline, unless an earlier test has changed the server meanwhile.
    simulated = report["policies"][-1]
    assert (simulated["policy"], simulated["requests"]) == ("vtc", 2)
    assert simulated["output_tokens_per_s"] * simulated["span_s"] == pytest.approx(10)
