"""Limits that one process keeps for the workers of a port, over its socket."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from gateway.budget.free_calls import QUOTES, FreeCalls
from gateway.cluster.kept_limits import kept_limits
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.workers.keeper import MAX_FRAME_BYTES, Keeper, serve_keeper
from tenants.people.throttle import BEGIN, FREE_BY_NAME, NOT_JUDGED, SUCCEEDED


async def taken(calls: list[FreeCalls], most: int) -> int:
    """Calls by turns, until one is refused."""
    for number in range(most):
        try:
            await calls[number % len(calls)].take("acme")
        except ApiError:
            return number
    return most


async def test_all_workers_count_as_one_and_each_for_itself_once_the_keeper_is_gone() -> None:
    now_s = 1_000.0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keeper.sock"
        server = await serve_keeper(path, kept_limits(GatewayConfig(quotes_per_s=5.0), lambda: now_s))
        workers = [Keeper(path), Keeper(path)]
        calls = [FreeCalls(QUOTES, 5.0, lambda: now_s, each.ask) for each in workers]
        assert await taken(calls, 30) == 10, "a burst of twice the rate, of both together"

        for number in range(FREE_BY_NAME):
            assert await workers[number % 2].ask(BEGIN, "ada", f"192.0.2.{number}") == 0
        assert await workers[1].ask(BEGIN, "ada", "192.0.2.9") == 1.0
        workers[0].tell(NOT_JUDGED, "ada", "192.0.2.0")
        assert await workers[0].ask(BEGIN, "ada", "192.0.2.10") == 0
        workers[0].tell(SUCCEEDED, "ada", "192.0.2.10")
        assert await workers[0].ask(BEGIN, "ada", "192.0.2.11") == 0

        # A client that sends another frame loses its connection; the others keep theirs.
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write((MAX_FRAME_BYTES + 1).to_bytes(2))
        assert await reader.read() == b""
        assert await workers[0].ask("what is this") is None
        writer.close()
        assert await workers[1].ask(BEGIN, "grace", "192.0.2.12") == 0

        server.close()
        for worker in workers:
            worker.close()
        path.unlink()
        assert await taken(calls, 30) == 20, "each by its own count"


async def test_a_keeper_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.workers.keeper.ANSWER_S", 0.05)
    with tempfile.TemporaryDirectory() as directory:
        path, ended = Path(directory) / "keeper.sock", asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        silent = await asyncio.start_unix_server(listen, path)
        keeper = Keeper(path)
        assert await keeper.ask(BEGIN, "ada", "192.0.2.1") is None
        keeper.close()
        await ended.wait()
        silent.close()
