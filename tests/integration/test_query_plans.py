"""No GET route and no page reads a large table from end to end, and each costs as many statements as ever.

The routes come from the application, their parameters from its OpenAPI document: a new one is checked without
being named here. Pages have questions of their own (`console_questions.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
from litestar import Litestar
from sqlalchemy import text

from gateway.console import csv_file
from migrations import runner
from tenants.admin.lists.scans import MOST_SCANNED
from tenants.storage.database import create_sql_engine
from tests.support.console_questions import AskedPage, ask_pages, in_pages
from tests.support.gateway_app import gateway_and_app
from tests.support.many_requests import Sizes, fill, fold_all
from tests.support.query_plans import Recorder, Statement, recorder, visited, whole_scans
from tests.support.route_questions import questions

FEW = Sizes(requests=10, tenants=2, keys=2)
MANY = Sizes(requests=20_000, tenants=200, keys=1_000)
VERY_MANY = Sizes(requests=990_000, tenants=1_000, keys=10_000)
"""Of one tenant there is less than one page in each."""
MOST_VISITED = {MANY: MOST_SCANNED * 2 + 500, VERY_MANY: MOST_SCANNED * 4}
"""Rows of large tables that one statement may look at. Of a value that a third of the rows have, PostgreSQL
may read three along another index for each that it wants; misses by key are looked up in the ledger."""


@dataclass
class Asked:
    """One question, with how it was answered."""

    question: str
    status: int
    has_rows: bool
    """Not of an empty list, of which no names are looked up."""
    statements: list[Statement]


async def ask_all(client: httpx.AsyncClient, app: Litestar, heard: Recorder, now_us: int) -> list[Asked]:
    """Every question, and after each page the next one."""
    asked: list[Asked] = []
    for question in questions(now_us):
        following = ""
        # A file of a very large table takes longer than keys are trusted without a look at the database.
        await app.state.gateway.deps.directory.refresh()
        for page in ("", "&next page"):
            heard.start()
            answer = await client.get(question + following)
            statements = heard.stop()
            assert answer.status_code < 500 or answer.status_code == 503, f"{question}: {answer.text}"
            said = answer.json() if answer.text.startswith("{") else {}
            asked.append(Asked(question + page, answer.status_code, said.get("data") != [], statements))
            cursor = said.get("next_cursor")
            if not cursor:
                break
            following = "&" + urlencode({"cursor": cursor})
    return asked


async def check(url: str, small_url: str, tmp_path: Path, sizes: Sizes) -> list[Asked]:
    """Asks everything of a small and of a large database, and looks at what was done. Returns the latter."""
    now_us = round(time.time() * 1e6)
    found: dict[Sizes, list[Asked]] = {}
    pages: dict[Sizes, list[AskedPage]] = {}
    with recorder() as heard:
        for size, its_url in ((FEW, small_url), (sizes, url)):
            engine = create_sql_engine(its_url, writing=True)
            with engine.begin() as connection:
                fill(connection, size, now_us)
                if connection.dialect.name == "postgresql":  # as its autovacuum does
                    connection.execute(text("ANALYZE"))
            fold_all(engine)
            engine.dispose()
            data_dir = tmp_path / f"data-{size.requests}"
            async with gateway_and_app(its_url, data_dir, follows=False) as (client, app):
                found[size] = await ask_all(client, app, heard, now_us)
                pages[size] = await ask_pages(client, heard)
    few = {(each.question, each.status, each.has_rows): len(each.statements) for each in found[FEW]}
    for each in found[sizes]:
        now, then = len(each.statements), few.get((each.question, each.status, each.has_rows))
        is_file = "/usage/export?" in each.question  # of all pages
        assert is_file or then in (None, now), (
            f"{each.question}: {then} statements with few rows, {now} with many"
        )
    counted = {each.path: len(each.statements) for each in pages[FEW] if each.is_first}
    now_counted = {each.path: len(each.statements) for each in pages[sizes] if each.is_first}
    assert now_counted == counted | in_pages(sizes.keys)
    engine = create_sql_engine(url, writing=False)
    with engine.connect() as connection:
        for page in pages[sizes]:
            for statement in page.statements:
                assert not statement.is_read or whole_scans(connection, statement) == [], (
                    f"{page.path}: {statement.text}"
                )
        for each in found[sizes]:
            for statement in each.statements:
                if not statement.is_read:
                    continue
                assert whole_scans(connection, statement) == [], f"{each.question}: {statement.text}"
                if connection.dialect.name == "postgresql":
                    seen = visited(connection, statement)
                    assert seen <= MOST_VISITED[sizes], f"{each.question}: {seen} rows: {statement.text}"
    engine.dispose()
    return found[sizes]


@pytest.fixture(autouse=True)
def _short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a list of `MANY` is longer than a file."""
    monkeypatch.setattr(csv_file, "FILE_PAGES", 3)


@pytest.fixture
def two_urls(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> tuple[str, str]:
    """The large database and the small one, of one kind, with their tables."""
    small = f"sqlite:///{tmp_path / 'small.db'}"
    if database_url.startswith("postgresql"):
        small = request.getfixturevalue("empty_postgres_url")
    runner.upgrade(small)
    return database_url, small


async def test_no_route_reads_a_large_table_whole(two_urls: tuple[str, str], tmp_path: Path) -> None:
    asked = await check(*two_urls, tmp_path, MANY)
    answered = {each.question for each in asked if each.status == 200}
    for each in (
        "/admin/v1/requests/ended?",
        "/admin/v1/requests/ended?&next page",
        "/admin/v1/requests/ended?outcome=failed",
        "/admin/v1/requests/ended?cause=capacity",
        "/admin/v1/audit?subject=limit%3Alim_1",
        "/admin/v1/keys?tenant=t1",
        "/admin/v1/refusals?code=insufficient_quota",
        "/admin/v1/refusals?tier=batch&next page",
        "/admin/v1/refusals/counts?",
        "/admin/v1/calibration?",
        "/admin/v1/policy/moves?knob=batch_cap&next page",
        "/admin/v1/policy/moves?made=true&next page",
        "/v1/refusals?limit_id=lim_1",
        "/admin/v1/tenants/t1?",
        "/v1/limits?",
        "/admin/v1/tenants/t1/sessions?session=run-1",
    ):
        assert each in answered, sorted(answered)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_no_route_reads_a_very_large_table_whole(two_urls: tuple[str, str], tmp_path: Path) -> None:
    await check(*two_urls, tmp_path, VERY_MANY)
