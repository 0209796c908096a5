"""What a client is told, and what it may bound, before its request runs.

A real server whose engine runs one sequence at a time, so that there is a line to stand in.
"""

from __future__ import annotations

import re
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.waiting_streams import ENDLESS, SHORT, events, full

PATIENCE_S = 20_000
PLAIN = {"model": MODEL, "prompt": "short", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
"""The SDK's arguments of `SHORT`."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "1", "--gateway-long-tokens", "8100"]
    arguments += ["--gateway-ttl-standard", str(PATIENCE_S), "--gateway-tell-after-s", "0.2"]
    with server_process(tmp_path_factory.mktemp("told"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def keys(narrow: Server) -> dict[str, str]:
    every = ["interactive", "standard", "batch"]
    return {
        "crowd": narrow.tenant("crowd", tier="interactive", tiers=every),
        "acme": narrow.tenant("acme", tier="standard", tiers=every),
    }


def rows(server: Server) -> list[tuple[str, str]]:
    """(request, kind) of all rows of the ledger."""
    with sqlite3.connect(f"file:{server.data_dir / 'fairgate.db'}?mode=ro", uri=True) as database:
        return database.execute("SELECT request_id, kind FROM ledger ORDER BY id").fetchall()


def rows_of(server: Server, request_id: str) -> list[str]:
    return [kind for each, kind in rows(server) if each == request_id]


def status_of(server: Server, key: str, request_id: str) -> Any:
    with server.http(key) as client:
        return client.get(f"/v1/requests/{request_id}").json()["status"]


@pytest.mark.parametrize("foreseen", [True, False])
def test_an_sdk_stream_has_its_headers_when_it_holds_its_budget_and_before_its_turn(
    narrow: Server, keys: dict[str, str], foreseen: bool
) -> None:
    """Without estimates no wait is foreseen: headers go out because it has waited."""
    if not foreseen:
        switch_estimates(narrow)
    try:
        with (
            full(narrow, keys["crowd"]) as crowd,
            OpenAI(api_key=keys["acme"], base_url=f"{narrow.url}/v1", max_retries=0) as client,
        ):
            if foreseen:
                until(lambda: expected_wait_s(narrow, keys["acme"]) > 0.2)
            raw = client.completions.with_raw_response.create(**PLAIN, stream=True)
            request_id = raw.headers["x-request-id"]
            assert status_of(narrow, keys["acme"], request_id) == "waiting"
            assert rows_of(narrow, request_id) == ["reserve"]
            assert ("x-fairgate-estimate" in raw.headers) == foreseen
            with narrow.http(keys["crowd"]) as http:
                for each in crowd:
                    http.delete(f"/v1/requests/{each}")
            chunks = [each.model_dump() for each in raw.parse()]
            assert rows_of(narrow, request_id) == ["reserve", "settle"]
    finally:
        if not foreseen:
            switch_estimates(narrow)
    assert sum(len(chunk["choices"][0]["text"]) > 0 for chunk in chunks) > 0
    estimate = chunks[-1]["fairgate"]["estimate"]
    if not foreseen:
        assert estimate is None
        return
    assert estimate["wait_s"]["p50"] > 0.2
    told = raw.headers["x-fairgate-estimate"]
    figures = dict(part.split("=") for part in told.split(",")[0].split(";")[1:])
    assert {name: float(value) for name, value in figures.items()} == pytest.approx(
        estimate["wait_s"], abs=1e-3
    ), "rounded to milliseconds"


def expected_wait_s(server: Server, key: str) -> float:
    """The median that a request which is refused for its cost is told."""
    with server.http(key) as client:
        answer = client.post("/v1/completions", json=SHORT, headers={"X-Fairgate-Max-Cost-Usd": "0"})
    assert answer.status_code == 409, answer.text
    return float(answer.headers["x-fairgate-estimate"].removeprefix("wait;p50=").split(";")[0])


def switch_estimates(server: Server) -> None:
    """Off, or on again; seen by a quote."""
    assert server.process is not None
    key = server.key("acme")

    def quoted() -> int:
        with server.http(key) as client:
            return client.post("/v1/quotes", json={"model": MODEL, "prompt": "x"}).status_code

    before = quoted()
    server.process.send_signal(signal.SIGUSR2)
    until(lambda: quoted() == (400 if before == 200 else 200))


def test_who_wants_a_clean_status_has_no_headers_while_it_waits(narrow: Server, keys: dict[str, str]) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with narrow.http(keys["acme"]) as client:
            body = SHORT | {"stream": True}
            answers.append(client.post("/v1/completions", json=body, headers={"x-fairgate-progress": "0"}))

    with full(narrow, keys["crowd"]), narrow.http(keys["acme"]) as client:
        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: len(client.get("/v1/requests").json()["data"]) == 1)
        (first,) = client.get("/v1/requests").json()["data"]
        with client.stream("POST", "/v1/completions", json=SHORT | {"stream": True}) as later:
            assert later.status_code == 200, "one that came later has its headers"
            client.delete(f"/v1/requests/{later.headers['x-request-id']}")
        assert status_of(narrow, keys["acme"], first["id"]) == "waiting"
        client.delete(f"/v1/requests/{first['id']}")
        asking.join()
    assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [
        (499, "request_cancelled")
    ]


def test_a_refusal_after_the_headers_is_an_event_and_repeats_the_estimate(
    narrow: Server, keys: dict[str, str]
) -> None:
    with (
        full(narrow, keys["crowd"]),
        narrow.http(keys["acme"]) as client,
        client.stream("POST", "/v1/completions", json=SHORT | {"stream": True}) as response,
    ):
        with narrow.http(keys["acme"]) as other:
            other.delete(f"/v1/requests/{response.headers['x-request-id']}")
        heard = list(events(response.iter_lines()))
    assert heard[0][0] == "comment"
    kind, said = heard[-1]
    assert (kind, said["error"]["code"]) == ("error", "request_cancelled")
    told = re.match(r"wait;p50=([\d.]+);", response.headers["x-fairgate-estimate"])
    assert told is not None
    # One has four decimals, the other three: both are rounded.
    assert float(told[1]) == pytest.approx(said["fairgate"]["estimate"]["wait_s"]["p50"], abs=0.0006)


# ---------------------------------------------------------------- bounds of the client


def refused(answer: httpx.Response, header: str) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "estimate_exceeds", header), error
    assert answer.headers["x-should-retry"] == "false"
    return error


def test_a_wait_longer_than_allowed_is_refused_with_every_tiers_quote_and_nothing_held(
    narrow: Server, keys: dict[str, str]
) -> None:
    narrow.limit("acme", "total_tokens", 1_000_000, window="day")
    with full(narrow, keys["crowd"]), narrow.http(keys["acme"]) as client:
        until(lambda: expected_wait_s(narrow, keys["acme"]) > 0.2)
        before = rows(narrow)
        answer = client.post("/v1/completions", json=SHORT, headers={"X-Fairgate-Max-Wait-S": "0.1"})
        error = refused(answer, "X-Fairgate-Max-Wait-S")
        assert "allows 0.1 s. Nothing was held or charged" in error["message"]
        assert [each["tier"] for each in error["quotes"]] == ["interactive", "standard", "batch"]
        assert float(answer.headers["x-fairgate-estimate"].split("p90=")[1].split(",")[0]) > 0.1
        assert rows(narrow) == before
        assert narrow.limit_state("acme", "total_tokens")["held"] == 0
        counted: list[int] = []
        http = httpx.Client(event_hooks={"response": [lambda seen: counted.append(seen.status_code)]})
        with (
            OpenAI(api_key=keys["acme"], base_url=f"{narrow.url}/v1", http_client=http) as sdk,
            pytest.raises(openai.ConflictError) as raised,
        ):
            sdk.completions.create(**PLAIN, extra_headers={"X-Fairgate-Max-Wait-S": "0"}, stream=True)
        assert counted == [409], "SDKs repeat a 409 unless they are told not to"
        assert {each["service_tier"] for each in raised.value.body["quotes"]} == {
            "priority",
            "default",
            "flex",
        }  # type: ignore[index]


def test_what_could_cost_more_than_allowed_is_refused_and_its_quotes_can_be_redeemed(
    narrow: Server, keys: dict[str, str]
) -> None:
    """5 tokens at 100 and 4 at 300 nano-dollars: 1,700."""
    with narrow.http(keys["acme"]) as client:
        before = rows(narrow)
        answer = client.post(
            "/v1/completions", json=SHORT, headers={"X-Fairgate-Max-Cost-Usd": "0.0000016999"}
        )
        error = refused(answer, "X-Fairgate-Max-Cost-Usd")
        assert error["message"].startswith(
            "The request may cost 0.0000017 USD, but 'X-Fairgate-Max-Cost-Usd' allows"
        )
        assert rows(narrow) == before
        flex = error["quotes"][2]
        assert flex["cost_nanousd"]["max"] == 850
        bounds = {"X-Fairgate-Max-Cost-Usd": "0.00000085", "X-Fairgate-Quote": flex["token"]}
        served = client.post("/v1/completions", json=SHORT, headers=bounds)
        assert served.is_success, served.text
        assert served.json()["service_tier"] == "flex"
        assert client.post(
            "/v1/completions", json=SHORT, headers={"X-Fairgate-Max-Cost-Usd": "0.0000017"}
        ).is_success
        only_runs = narrow.key("acme", scopes=["inference"])
    with narrow.http(only_runs) as client:
        answer = client.post("/v1/completions", json=SHORT, headers={"X-Fairgate-Max-Cost-Usd": "0"})
        assert {each["token"] for each in refused(answer, "X-Fairgate-Max-Cost-Usd")["quotes"]} == {None}


@pytest.mark.parametrize("name", ["X-Fairgate-Max-Wait-S", "X-Fairgate-Max-Cost-Usd"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan", "", "1,5"])
def test_a_bound_that_is_no_number_is_refused_by_its_headers_name(
    narrow: Server, keys: dict[str, str], name: str, value: str
) -> None:
    with narrow.http(keys["acme"]) as client:
        answer = client.post("/v1/completions", json=SHORT, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_a_long_request_that_would_be_late_is_shown_what_batch_would_take(
    narrow: Server, keys: dict[str, str]
) -> None:
    with full(narrow, keys["crowd"]), narrow.http(keys["acme"]) as client:
        until(lambda: expected_wait_s(narrow, keys["acme"]) > 0.2)
        late = {"X-Fairgate-Timeout-S": "0.05"}
        answer = client.post("/v1/completions", json=ENDLESS | {"max_tokens": 8150}, headers=late)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_unreachable")
        assert [each["service_tier"] for each in answer.json()["error"]["quotes"]] == ["flex"]
        short = client.post("/v1/completions", json=SHORT, headers=late)
        assert short.json()["error"]["code"] == "deadline_unreachable"
        assert "quotes" not in short.json()["error"]


def test_everything_was_settled(narrow: Server) -> None:
    until(narrow.is_idle)
    report = narrow.verify()
    assert report["ok"], report
