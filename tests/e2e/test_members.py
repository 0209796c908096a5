"""Engines that run elsewhere join a running server, leave it, and come back under another address."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from tenants.directory.placed_engines import PlacedEngines
from tenants.storage.database import open_database
from tests.support.commands import answer_of
from tests.support.engine_process import START_S, engine_options, running_engine
from tests.support.server_process import MODEL, Server, server_process, until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 4, "ignore_eos": True}


def states(server: Server) -> dict[str, str]:
    listed = answer_of(server, "engine", "list")["data"]
    return {row["name"]: row["state"] for row in listed}


def place(server: Server, name: str, address: str | None) -> None:
    """As a placer does; None: it has taken the engine away."""

    async def write() -> None:
        database = open_database(f"sqlite:///{server.data_dir / 'fairgate.db'}")
        placed = PlacedEngines(database)
        if address is None:
            await placed.forget(name)
        else:
            await placed.write(name, address, 60.0, placed_by="test", place="here")
        await database.close()

    asyncio.run(write())


def readiness(server: Server) -> tuple[int, Any]:
    answer = httpx.get(f"{server.url}/readyz")
    return answer.status_code, answer.json()


def test_engines_join_a_running_server_leave_it_and_come_back_elsewhere(
    tmp_path: Path, chat_model: Path
) -> None:
    """One is named by the settings, the other by a row of a placer."""
    one = engine_options(chat_model, tmp_path / "one", engine_id="one")
    two = engine_options(chat_model, tmp_path / "two", engine_id="two")
    config = tmp_path / "fairgate.toml"
    config.write_text(f'[[engines]]\nname = "one"\naddress = "{one.address}"\n[engine]\ndiscover = "sql"\n')
    with server_process(tmp_path / "data", chat_model, "--config", str(config)) as server, ExitStack() as up:
        status, shown = readiness(server)
        assert (status, shown["missing"]) == (503, ["one"])
        assert shown["checks"]["engine"] == "nothing that runs a model is ready: missing are one"
        key = server.tenant("acme")
        with server.http(key) as client:

            def answers() -> bool:
                return client.post("/v1/completions", json=BODY).status_code == 200

            assert not answers()
            with running_engine(one):
                until(lambda: states(server) == {"one": "serving"}, START_S)
                assert answers()
            with running_engine(two):
                place(server, "two", two.address)
                until(lambda: states(server) == {"one": "away", "two": "serving"}, START_S)
                assert answers()
                assert readiness(server) == (200, readiness(server)[1] | {"missing": ["one"]})
            moved = replace(two, address=f"ipc://{tmp_path}/moved.sock")
            up.enter_context(running_engine(moved))
            place(server, "two", moved.address)
            until(lambda: states(server)["two"] == "serving", START_S)
            assert answers()
            place(server, "two", None)
            until(lambda: states(server)["two"] == "leaving")
            assert not answers()
        assert server.verify()["ok"]
