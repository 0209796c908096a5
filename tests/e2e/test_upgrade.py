"""Two releases side by side on one PostgreSQL: no request fails, and the books are exact.

This code, and this code with one more migration and a version of its own.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from openai import AsyncOpenAI

from ops.bench.budgets import testbed, upgrade
from ops.bench.common.load import admin_call
from ops.sandbox.server import ROOT
from ops.settings.settings import SHIPPED_MODEL
from tests.support import services, warm_command
from tests.support.engine_process import engine_options, running_engine

BETWEEN_STEPS = 10
LONG_TOKENS = 300
"""Of streams that are still under way when their gateway gets SIGTERM."""


async def used_tokens(client: AsyncOpenAI, model: str, **fields: Any) -> int:
    """What one whole answer says that it has used."""
    messages: Any = [{"role": "user", "content": "Hello"}]
    asked: Any = {"model": model, "messages": messages, "extra_body": {"ignore_eos": True}} | fields
    if "stream" not in fields:
        answer = await client.chat.completions.create(**asked)
        assert answer.usage.completion_tokens == fields["max_tokens"]
        return int(answer.usage.total_tokens)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == fields["max_tokens"]
    return int(chunks[-1].usage.total_tokens)


async def test_gateways_are_replaced_under_load_and_no_request_fails(tmp_path: Path) -> None:
    new = tmp_path / "new"
    upgrade.next_release(new)
    newer = warm_command.program(new)
    with ExitStack() as closing:
        postgres, redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(redis.stop)
        older = warm_command.program()
        bed = testbed.Testbed(tmp_path, upgrade.SERVES, older, postgres=postgres, redis=redis)
        options = engine_options(SHIPPED_MODEL, tmp_path / "engine", address=bed.engine_address)
        closing.enter_context(running_engine(options))
        try:
            await bed.start_gateways(2)
            await bed.ready()
            await replaced(bed, newer)
        finally:
            await bed.close()


async def replaced(bed: testbed.Testbed, newer: tuple[str, ...]) -> None:
    tenant = await bed.tenant("upgraded")
    await bed.known(tenant)
    balancer = upgrade.Balancer([server.url for server in bed.servers])
    used: list[int] = []
    is_over = False

    async def ask(client: AsyncOpenAI, **fields: Any) -> None:
        while not is_over:
            used.append(await used_tokens(client, bed.model, **fields))

    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        balancer.open() as url,
        AsyncOpenAI(api_key=tenant.key, base_url=f"{url}/v1", max_retries=0, timeout=60) as client,
        asyncio.TaskGroup() as clients,
    ):
        for fields in (
            {"max_tokens": 5},
            streamed | {"max_tokens": 9},
            streamed | {"max_tokens": LONG_TOKENS},
        ):
            clients.create_task(ask(client, **fields))
        try:
            await upgrade.replace_all(bed, balancer, newer, lambda: len(used), BETWEEN_STEPS)
        finally:
            is_over = True
    async with bed.living().operator() as operator:
        assert (await admin_call(operator, "POST", "ledger/verify"))["ok"]
    with psycopg.connect(bed.postgres.url) as connection:
        query = "SELECT kind, count(*), sum(input_tokens + output_tokens) FROM ledger GROUP BY kind"
        rows = {kind: (count, total) for kind, count, total in connection.execute(query)}
        assert rows["settle"] == (len(used), sum(used))
        assert rows["reserve"][0] == len(used)
        columns = "SELECT column_name FROM information_schema.columns WHERE column_name LIKE 'drill_%'"
        assert connection.execute(columns).fetchall() == [("drill_new",)]


@pytest.mark.long
async def test_none_of_2000_requests_fails() -> None:
    row = await upgrade.run(ROOT, lambda what, done, total: None)
    assert row["ok"], row
    assert row["requests"] >= 2_000
    assert row["streams"] > row["requests"] / 3
    assert (row["failed"], row["drift_tokens"], row["leaked_holds"]) == (0, 0, 0)
