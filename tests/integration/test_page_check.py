"""The sums on all pages equal the ledger, also on lists of many pages; a wrong one is named."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
from sqlalchemy import text

from ops.sandbox.page_check import page_sums
from tenants.ledger.batch_insert import insert_rows
from tenants.storage.database import create_sql_engine
from tests.support.gateway_app import gateway_app
from tests.support.many_requests import Sizes, fill, fold_all
from tests.support.usage import row

SIZES = Sizes(requests=600, tenants=51, keys=102)
READ = ("t9", "t51")
"""Tenants whose own pages are read; one is on the second page of tenants."""
ONE_MORE = """UPDATE usage_sums SET output_tokens = output_tokens + 1
    WHERE rowid = (SELECT min(rowid) FROM usage_sums WHERE tenant_id = 'ten_9' AND grain = 'day')"""


async def test_pages_equal_the_ledger_and_a_wrong_sum_is_named(sqlite_url: str, tmp_path: Path) -> None:
    now_us = round(time.time() * 1e6)
    one = {"tenant_id": "ten_9", "project_id": "prj_9", "key_id": "key_9", "at_us": now_us}
    nothing = {"requests": 0, "input_tokens": 0, "output_tokens": 0, "gpu_ms": 0}
    engine = create_sql_engine(sqlite_url, writing=True)
    with engine.begin() as connection:
        fill(connection, SIZES, now_us)
        more = [
            row("cached", cost_nanousd=1_234_567_891, detail='{"cached_tokens": 7}', **one),
            row("cached", "credit", number=1, cost_nanousd=-617_283_946, **(one | nothing)),
            row("mended", "adjust", cost_nanousd=11, **(one | {"model": "rare", "tier": "batch"})),
        ]
        assert insert_rows(connection, more) == len(more)
    fold_all(engine)
    async with gateway_app(sqlite_url, tmp_path / "data") as operator:
        visitor = httpx.AsyncClient(transport=operator._transport, base_url="http://test")
        async with visitor:
            found = await page_sums(operator, visitor, sqlite_url, READ)
            assert found.differences == []
            assert found.pages >= 5 + 5 + 4 + 4 * len(READ)
            with engine.begin() as connection:
                assert connection.execute(text(ONE_MORE)).rowcount == 1
            found = await page_sums(operator, visitor, sqlite_url, READ)
            assert found.differences[0].startswith("/console/usage?group=tenant: figures: the page says ")
            assert any(each.startswith("/console/usage?group=tenant: ten_9:") for each in found.differences)
    engine.dispose()
