"""Lists of money and of acts that do not fit into one answer: in pages and files, all of them, once each."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.people.person import PersonInvite
from tenants.storage.database import create_sql_engine, open_database
from tenants.storage.tables import audit
from tests.support.console import Browser
from tests.support.gateway_app import PEPPER, gateway_app
from tests.support.many_requests import Sizes, fill, fold_all

SIZES = Sizes(requests=15_000, tenants=200, keys=400)
BY_KEY_AND_DAY = "/console/usage?group=tenant&then=key&window=day"
"""More sums than fit into one answer: groups come in pages, with totals beside them."""


@asynccontextmanager
async def owner_on(url: str, data_dir: Path) -> AsyncIterator[Browser]:
    """An owner's browser at a gateway on many rows."""
    engine = create_sql_engine(url, writing=True)
    with engine.begin() as connection:
        fill(connection, SIZES, round(time.time() * 1e6))
    fold_all(engine)
    engine.dispose()
    async with gateway_app(url, data_dir, follows=False) as client:
        database = open_database(url)
        _, token = await Admin(Transactions(database, PEPPER)).people.invite(
            "test", PersonInvite(name="ada", role="owner")
        )
        await database.close()
        app = client._transport.app  # type: ignore[attr-defined]
        async with Browser(app) as browser:
            assert (await browser.redeem(token)).status_code == 303
            yield browser


async def test_groups_come_in_pages_and_acts_in_files_all_of_them_once(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with owner_on(sqlite_url, tmp_path / "data") as browser:
        await _usage_in_pages(browser)
        await _audit_in_parts(browser, sqlite_url)


async def _usage_in_pages(browser: Browser) -> None:
    """More groups than one answer holds: the total is that of all, and pages have each group once."""
    page = await browser.get(BY_KEY_AND_DAY)
    assert "There are more than a thousand sums" in page.text
    requests = re.search(r">Requests</div>\s*<div class=\"h1\"><a [^>]*>([\d,]+)<", page.text)
    [told] = (await browser.get("/console/usage/json?group=&window=total")).json()["data"]
    assert requests is not None
    assert int(requests[1].replace(",", "")) == told["ended_requests"]
    shown: list[tuple[str, ...]] = []
    while True:
        cells = r'<td data-label="tenant"><a [^>]*>([^<]*)</a>.*\s*<td data-label="key">([^<]*)<'
        rows = re.findall(cells, page.text)
        shown += rows
        following = re.search(r'href="([^"]+)">More groups', page.text)
        if following is None:
            break
        page = await browser.get(following[1].replace("&amp;", "&"))
        assert page.status_code == 200, page.text
    file = await browser.get("/console/usage/csv?group=tenant&then=key&window=total")
    everything = csv.DictReader(io.StringIO(file.text))
    tenants = [row["tenant"] for row in everything]
    assert len(tenants) > 200
    assert [tenant for tenant, _ in shown] == tenants


async def _audit_in_parts(browser: Browser, url: str) -> None:
    """A file holds 10,000 rows at most, and says where the next one is; all parts are all rows, once each."""
    ids: list[int] = []
    path, parts = "/console/audit.csv?order=oldest", 0
    while path:
        answer = await browser.get(path)
        rows = list(csv.reader(io.StringIO(answer.text)))[1:]
        parts += 1
        path = ""
        if "link" in answer.headers:
            path = answer.headers["link"].partition("<")[2].partition(">")[0]
            assert rows.pop() == [f"more rows: {path}"]
            assert len(rows) == 10_000
        ids += [int(row[0]) for row in rows]
    engine = create_sql_engine(url, writing=False)
    with engine.connect() as connection:
        stored = list(connection.execute(select(audit.c.seq).order_by(audit.c.seq)).scalars())
    engine.dispose()
    assert parts > 1
    assert ids == stored
