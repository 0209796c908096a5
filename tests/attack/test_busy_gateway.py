"""Attacks on a gateway's time: neither an event loop that is kept busy nor a process that does not run for
seconds loses its streams; after the engine's patience nothing is charged that did not reach the gateway."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from engine.client.client import EngineClient
from tests.e2e.test_crash import Stream, settlements, start_streams
from tests.support.engine_process import START_S, engine_options, running_engine, sequence
from tests.support.server_process import Server, server_process, until

pytestmark = pytest.mark.attack

STREAMS = 6


def begun(server: Server, tenant: str, max_tokens: int) -> list[Stream]:
    streams = start_streams(server, server.tenant(tenant), STREAMS, max_tokens)
    for stream in streams:
        assert stream.has_tokens.wait(60)
    return streams


def stand_still(server: Server, seconds: float) -> None:
    """The whole process: its event loop and its threads."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(seconds)
    server.process.send_signal(signal.SIGCONT)


async def test_a_busy_event_loop_keeps_its_streams(chat_model: Path, tmp_path: Path) -> None:
    options = engine_options(chat_model, tmp_path)
    with running_engine(options):
        client = EngineClient(options.address, "gateway-busy")
        try:
            await client.connect(START_S)
            streams = [client.submit(sequence(400, lease_tokens=100)) for _ in range(4)]
            for stream in streams:
                await anext(stream)
            time.sleep(4.0)  # noqa: ASYNC251 (what a large body does to it)
            for stream in streams:
                client.top_up(stream.sequence_id, 400)
                outcome = await stream.drain()
                assert outcome is not None
                assert (outcome.finish, stream.received_tokens) == ("length", 400)
                client.acknowledge([outcome.sequence_id])
        finally:
            await client.close()


def test_a_gateway_that_does_not_run_for_five_seconds_keeps_its_streams(server: Server) -> None:
    streams = begun(server, "patient", 1500)
    stand_still(server, 5.0)
    for stream in streams:
        stream.join(60)
        assert stream.saw_done
        (row,) = settlements(server, stream.request_id)
        assert (stream.delivered, row["output_tokens"], row["outcome"]) == (1500, 1500, "completed")
    until(server.is_idle)


@pytest.mark.long
def test_one_that_does_not_run_for_longer_is_charged_what_reached_it(
    chat_model: Path, tmp_path: Path
) -> None:
    with server_process(tmp_path / "data", chat_model, "--engine-max-sequences", "8") as server:
        streams = begun(server, "lost", 6000)
        stand_still(server, 15.0)
        for stream in streams:
            stream.join(60)
            assert stream.error is not None
            assert stream.error["code"] == "engine_lost"
            (row,) = settlements(server, stream.request_id)
            assert 0 < row["output_tokens"] == stream.delivered < 6000
            assert json.loads(row["detail"])["basis"] == "gateway"
        until(server.is_idle)
        assert server.verify()["ok"]
