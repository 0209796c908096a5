"""A real engine process for tests."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from engine.client.client import EngineClient
from engine.client.stream import EngineStream
from engine.messages import SamplingParams, Submit
from engine.process.options import EngineOptions
from tests.support.warm_engine import WarmEngine

NUM_BLOCKS = 1024
BLOCK_TOKENS = 16
START_S = 60.0
DEADLINE_S = 20.0

_numbers = itertools.count(1)


def engine_options(model_dir: Path, data_dir: Path, **changes: Any) -> EngineOptions:
    """Options of a small engine on one thread."""
    values: dict[str, Any] = {
        "model_dir": model_dir, "address": f"ipc://{data_dir}/engine.sock", "data_dir": data_dir,
        "num_blocks": NUM_BLOCKS, "block_tokens": BLOCK_TOKENS, "threads": 1,
    }  # fmt: skip
    return EngineOptions(**{**values, **changes})


@contextmanager
def running_engine(options: EngineOptions) -> Iterator[WarmEngine]:
    """An engine process, stopped at the end; it must then end by itself and without an error."""
    process = WarmEngine(options, options.data_dir / "stderr")
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, (options.data_dir / "stderr").read_text()
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def connected(
    address: str, gateway_id: str = "gateway-a", **options: Any
) -> AsyncIterator[EngineClient]:
    """A client that is up; it leaves nothing unsettled behind."""
    client = EngineClient(address, gateway_id, **options)
    try:
        await client.connect(START_S)
        yield client
        if client.is_up:
            inventory = await client.collect(adopt=True)
            client.acknowledge([outcome.sequence_id for outcome in inventory.outcomes])
            await client.collect()
    finally:
        await client.close()


def sequence(max_tokens: int = 20, *, prompt_tokens: int = 10, **fields: Any) -> Submit:
    """A greedy sequence of exactly `max_tokens` tokens, under an id of its own."""
    number = next(_numbers)
    values: dict[str, Any] = {
        "sequence_id": f"sequence-{number}",
        "request_id": f"request-{number}",
        "tenant_id": "acme",
        "prompt_token_ids": [1 + (number * 7 + index) % 200 for index in range(prompt_tokens)],
        "max_tokens": max_tokens,
        "lease_tokens": max_tokens,
        "sampling": SamplingParams(temperature=0.0, ignore_eos=True),
    }
    return Submit(**{**values, **fields})


async def tokens_of(stream: EngineStream) -> list[int]:
    """Every token of a stream, with the check that token k came once and in its place."""
    tokens: list[int] = []
    async for delta in stream:
        if delta.token_ids:
            assert delta.first_index == len(tokens)
        tokens += delta.token_ids
    return tokens


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Waits for something that other processes bring about."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 (another process changes it: no event of ours tells)
            await asyncio.sleep(0.005)
