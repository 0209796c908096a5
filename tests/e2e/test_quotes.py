"""Quotes bind over HTTP; those that do not are refused with the reason."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from tests.support.server_process import MODEL, Server, server_process, until

BODY = {"model": MODEL, "prompt": "count to ten", "max_tokens": 6}
RUN = BODY | {"ignore_eos": True}


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    return server.tenant("quoted", tier="standard", tiers=["interactive", "standard", "batch"])


def quote(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post("/v1/quotes", json=BODY | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def token(client: httpx.Client, tier: str = "standard", **changes: Any) -> str:
    offers = {each["tier"]: each["token"] for each in quote(client, **changes)["quotes"]}
    return offers[tier]  # type: ignore[no-any-return]


def run(client: httpx.Client, given: str, **changes: Any) -> httpx.Response:
    return client.post("/v1/completions", json=RUN | changes, headers={"X-Fairgate-Quote": given})


def refused(answer: httpx.Response, status: int, code: str) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, "X-Fairgate-Quote")
    assert answer.headers["x-should-retry"] == "false"
    return str(error["message"])


def test_a_quote_names_what_the_jump_costs_and_its_own_end(server: Server, key: str) -> None:
    with server.http(key) as client:
        offer = quote(client)
        assert [each["tier"] for each in offer["quotes"]] == ["interactive", "standard", "batch"]
        assert offer["expires_at"] > offer["created"]
        assert all(set(each["displaces"]) == {"passes", "pauses"} for each in offer["quotes"])
        [only] = quote(client, service_tier="flex")["quotes"]
        assert only["tier"] == "batch"


def test_a_redeemed_quote_decides_tier_and_price_and_stands_in_the_account(server: Server, key: str) -> None:
    with server.http(key) as client:
        offers = {each["tier"]: each for each in quote(client)["quotes"]}
        answer = run(client, offers["batch"]["token"])
        assert answer.status_code == 200, answer.text
        account = answer.json()["fairgate"]
        assert account["tier"] == "batch"
        assert answer.headers["x-fairgate-tier"] == "batch"
        told = offers["batch"]
        assert account["estimate"]["cost_nanousd"] == told["cost_nanousd"]
        assert account["actual"]["cost_nanousd"] <= told["cost_nanousd"]["max"]
        shown = {"id", "kept", "missed", "credit_nanousd", "credit_capped", "binding", "own_s"}
        assert set(account["quote"]) == shown
        assert account["quote"]["binding"] == told["binding"]
        plain = client.post("/v1/completions", json=RUN).json()["fairgate"]
        assert "quote" not in plain
    until(server.is_idle)
    assert server.verify()["ok"]


def test_what_was_not_quoted_is_refused(server: Server, key: str) -> None:
    with server.http(key) as client:
        good = token(client)
        assert "altered" in refused(run(client, good[:-6] + "AAAAAA"), 400, "quote_invalid")
        assert "not a quote" in refused(run(client, "nonsense"), 400, "quote_invalid")
        assert "another prompt" in refused(run(client, good, prompt="count to two"), 400, "quote_mismatch")
        assert "max_tokens 6" in refused(run(client, good, max_tokens=7), 400, "quote_mismatch")
        assert "service_tier" in refused(run(client, good, service_tier="priority"), 400, "quote_mismatch")
        other = server.tenant("stranger", tier="standard", tiers=["standard"])
        with server.http(other) as stranger:
            assert "another API key" in refused(run(stranger, good), 400, "quote_mismatch")
        assert run(client, good).status_code == 200, "no refusal used it up"
        assert "redeemed" in refused(run(client, good), 409, "quote_redeemed")


def test_a_refusal_by_a_limit_uses_no_quote_up(server: Server) -> None:
    poor = server.tenant("poor-quoter", tier="standard", tiers=["standard"])
    server.limit("poor-quoter", "requests", 1, window="lifetime")
    with server.http(poor) as client:
        given = token(client)
        assert client.post("/v1/completions", json=RUN).status_code == 200
        for _ in range(2):
            answer = run(client, given)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")


def test_with_an_idempotency_key_it_is_redeemed_once_and_the_answer_repeated(
    server: Server, key: str
) -> None:
    with server.http(key) as client:
        headers = {"X-Fairgate-Quote": token(client), "Idempotency-Key": "quoted-once"}
        first = client.post("/v1/completions", json=RUN, headers=headers)
        again = client.post("/v1/completions", json=RUN, headers=headers)
        assert first.status_code == again.status_code == 200
        assert again.headers["x-fairgate-idempotent-replay"] == "true"
        assert first.json() == again.json()


def test_a_stream_has_what_came_of_its_quote_in_its_last_chunk(server: Server, key: str) -> None:
    with server.http(key) as client:
        given = token(client, messages=[{"role": "user", "content": "hi"}], prompt=None)
        answer = client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6,
                  "stream": True},
            headers={"X-Fairgate-Quote": given},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        assert '"quote":{"id":' in answer.text


def test_the_command_asks_for_a_quote_and_says_what_is_wrong(server: Server, key: str) -> None:
    def fairgate(*arguments: str) -> Any:
        options = ["--api-key", key, "--url", server.url]
        return CliRunner().invoke(cli, ["quote", *options, *arguments])

    offer = json.loads(fairgate("count to ten", "--max-tokens", "6", "--json").output)
    assert [each["tier"] for each in offer["quotes"]] == ["interactive", "standard", "batch"]
    with server.http(key) as client:
        assert run(client, offer["quotes"][1]["token"]).status_code == 200
    shown = fairgate("--prompt-tokens", "20", "--tier", "flex").output
    assert "batch: fgq1." in shown
    assert "standard: fgq1." not in shown
    assert fairgate().exit_code == 2
    wrong = fairgate("hello", "--max-tokens", "999999999")
    assert wrong.exit_code == 1
    assert "999999999" in wrong.output


def test_metrics_tell_how_often_estimates_held(server: Server, key: str) -> None:
    with server.http(server.tenant("quoted-once", tier="standard", tiers=["standard"])) as client:
        assert run(client, token(client)).status_code == 200
        # A second one, as the first one's successor is outstanding.
        tokens = [token(client), token(client)]
        assert run(client, tokens[1]).status_code == 200
        text = client.get("/metrics").text
    assert 'fairgate_estimate_coverage{figure="ttft",kind="binding",' in text
    assert 'fairgate_estimate_coverage{figure="ttft",kind="together",' in text
    assert 'fairgate_estimates_judged_total{figure="e2e",kind="plain",' in text


def test_a_server_that_makes_no_estimates_serves_and_says_why_it_quotes_nothing(
    tmp_path: Path, chat_model: Path
) -> None:
    config = tmp_path / "fairgate.toml"
    config.write_text('[gateway]\nestimates = "no"\n', encoding="utf-8")
    with server_process(tmp_path / "data", chat_model, "--config", str(config)) as silent:
        key = silent.tenant("told-nothing")
        with silent.http(key) as client:
            assert "gateway.estimates" in refused_quote(client.post("/v1/quotes", json=BODY))
            answer = client.post("/v1/completions", json=RUN)
            assert answer.status_code == 200, answer.text
            assert answer.json()["fairgate"]["estimate"] is None
            assert not [name for name in answer.headers if name.startswith("x-fairgate-estimate")]
        until(silent.is_idle)
        assert silent.verify()["ok"]


def test_a_signal_switches_estimates_off_and_on_again(tmp_path: Path, chat_model: Path) -> None:
    with server_process(tmp_path / "data", chat_model) as server:
        key = server.tenant("now-and-then-told")
        with server.http(key) as client:

            def is_told() -> bool:
                answer = client.post("/v1/completions", json=RUN)
                in_header = "x-fairgate-estimate" in answer.headers
                assert in_header == (answer.json()["fairgate"]["estimate"] is not None)
                return in_header

            assert server.process is not None
            assert is_told()
            server.process.send_signal(signal.SIGUSR2)
            until(lambda: not is_told())
            assert "SIGUSR2" in refused_quote(client.post("/v1/quotes", json=BODY))
            server.process.send_signal(signal.SIGUSR2)
            until(is_told)
            assert client.post("/v1/quotes", json=BODY).status_code == 200
        until(server.is_idle)
        assert server.verify()["ok"]


def refused_quote(answer: httpx.Response) -> str:
    """Why nothing was quoted."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "estimates_off")
    return str(answer.json()["error"]["message"])


def test_while_requests_wait_a_p90_is_that_of_sampled_futures(server: Server, key: str) -> None:
    """A process of the server's own replays them."""
    long = BODY | {"max_tokens": 60, "ignore_eos": True}
    is_seen = threading.Event()
    with server.http(key) as client, ThreadPoolExecutor(60) as pool:

        def ask() -> None:
            while not is_seen.is_set():
                assert client.post("/v1/completions", json=long).status_code == 200

        asked = [pool.submit(ask) for _ in range(60)]

        def is_sampled() -> bool:
            answer = client.post("/v1/quotes", json=BODY | {"service_tier": "flex"})
            if answer.status_code == 429:
                return False
            assert answer.status_code == 200, answer.text
            [offer] = answer.json()["quotes"]
            if "sampled futures" not in offer["basis"]:
                return False
            assert offer["wait_s"]["p50"] < offer["wait_s"]["p90"], offer
            return True

        try:
            until(is_sampled)
        finally:
            is_seen.set()
        for each in asked:
            each.result()
