"""`serve --engines 2`: streams of every kind outlive an engine that is drained, or killed and replaced."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from ops.bench.budgets.survive import ENGINES, Bed, chosen, survived
from ops.bench.budgets.testbed import Gateways
from ops.bench.common.http_client import LoadHttpClient
from ops.sandbox.server import LocalServer
from ops.serving.datadir import read_server_file
from tests.support.server_fixtures import MODEL_DIR
from tests.support.server_process import Server, server_process, until

CORES = os.sched_getaffinity(0)
INSTANTS = {"survive-drain": 3, "survive-kill": 1}


@pytest.mark.skipif(len(CORES) < ENGINES, reason="each engine needs a core")
def test_streams_go_on_at_another_engine_token_for_token_and_are_charged_once(tmp_path: Path) -> None:
    flags = ("--engine-count", str(ENGINES), "--engine-device", "cpu")
    with server_process(tmp_path / "data", MODEL_DIR, *flags) as server:
        until(lambda: all(engine["is_up"] for engine in server.status()["engines"]))
        engines = [server.engine(number) for number in range(ENGINES)]
        assert [len(engine.cpu_affinity()) for engine in engines] == [len(CORES) // ENGINES] * ENGINES
        rows = asyncio.run(rows_of(server))
        assert sum(row.pop("moves") for row in rows) > 0
        for row in rows:
            # An instant may come when nothing runs there.
            assert set(row["broken"]) <= {"no stream moved"}, row["broken"]
        now = {server.engine(number).pid for number in range(ENGINES)}
        assert len(now & {engine.pid for engine in engines}) == ENGINES - 1, "one was killed, and replaced"


async def rows_of(server: Server) -> list[dict[str, Any]]:
    """The benchmark's figures of a few instants."""
    named = read_server_file(server.data_dir)
    assert named is not None
    process: Any = None  # it is not killed here
    local = LocalServer(server.url, "", "tiny", server.data_dir, None, named.control_token, process)
    client = LoadHttpClient(timeout_s=60.0)
    bed = Bed(Gateways(server.data_dir, servers=[local]), f"sqlite:///{server.data_dir}/fairgate.db", client)
    try:
        return [
            await survived(bed, scenario, count, lambda *_: None)
            for name, count in INSTANTS.items()
            for scenario in chosen([name])
        ]
    finally:
        client.close()
