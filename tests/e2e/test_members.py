"""Engines that run elsewhere join a running server, leave it, and come back under another address."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import answer_of
from tests.support.engine_process import START_S, engine_options, running_engine
from tests.support.server_process import MODEL, Server, server_process, until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 4, "ignore_eos": True}


def states(server: Server) -> dict[str, str]:
    listed = answer_of(server, "engine", "list")["data"]
    return {row["name"]: row["state"] for row in listed}


def readiness(server: Server) -> tuple[int, Any]:
    answer = httpx.get(f"{server.url}/readyz")
    return answer.status_code, answer.json()


def test_a_server_starts_without_engines_names_who_is_missing_and_serves_who_comes(
    tmp_path: Path, chat_model: Path
) -> None:
    engines = [
        engine_options(chat_model, tmp_path / f"engine-{number}", engine_id=f"engine-{number}")
        for number in (1, 2)
    ]
    config = tmp_path / "fairgate.toml"
    config.write_text(
        "".join(f'[[engines]]\nname = "{each.engine_id}"\naddress = "{each.address}"\n' for each in engines)
    )
    with server_process(tmp_path / "data", chat_model, "--config", str(config)) as server, ExitStack() as up:
        status, shown = readiness(server)
        assert (status, shown["missing"]) == (503, ["engine-1", "engine-2"])
        assert shown["checks"]["engine"].endswith("missing are engine-1, engine-2")
        key = server.tenant("acme")
        with server.http(key) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 503
            with running_engine(engines[0]):
                until(lambda: states(server) == {"engine-1": "serving", "engine-2": "away"}, START_S)
                assert client.post("/v1/completions", json=BODY).status_code == 200
                assert readiness(server)[1]["missing"] == ["engine-2"]
                up.enter_context(running_engine(engines[1]))
                until(lambda: set(states(server).values()) == {"serving"}, START_S)
            until(lambda: states(server)["engine-1"] == "away")
            assert client.post("/v1/completions", json=BODY).status_code == 200
        assert server.verify()["ok"]
