"""An acting control loop refuses what would miss its target, only while that is so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import MODEL, Server, server_process, until


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("acting")
    with server_process(data_dir, chat_model, "--gateway-control", "acting") as running:
        yield running


def test_under_overload_it_refuses_what_would_be_late_and_says_when_to_try_again(acting: Server) -> None:
    key, other = acting.tenant("late"), acting.tenant("patient")
    # It cannot be kept: to the forecast that is an overload.
    target = {"tier": "standard", "metric": "ttft", "target_s": 0.0001, "tenant": "late"}
    made = acting.admin("POST", "/slos", target)
    body = {"model": MODEL, "prompt": "in time", "max_tokens": 2}
    refused: list[httpx.Response] = []

    def is_refused() -> bool:
        with acting.http(key) as client:
            answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            refused.append(answer)
        return bool(refused)

    until(is_refused)
    [answer] = refused
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "target_unreachable"
    assert "its target is 0.0001 s" in answer.json()["error"]["message"]
    assert float(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"
    control = acting.admin("GET", "/status")["models"]["pools"][MODEL]["control"]
    assert (control["mode"], control["knobs"]["admission"] > 0) == ("acting", True)
    assert "admission" in [move["knob"] for move in control["moves"] if move["is_made"]]
    with acting.http(other) as client:
        assert client.post("/v1/completions", json=body).status_code == 200, "nothing binds it"
    acting.admin("DELETE", f"/slos/{made['id']}")
    until(lambda: not _is_refused_again(acting, key, body))


def _is_refused_again(server: Server, key: str, body: dict[str, object]) -> bool:
    with server.http(key) as client:
        return client.post("/v1/completions", json=body).status_code == 503
