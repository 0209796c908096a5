"""Pages of usage and recovery on a running server: every number is the ledger's, members see their own."""

from __future__ import annotations

import csv
import html
import io
import re
from typing import Any

import httpx
import pytest

from gateway.console.formats import money, number
from tests.support.people import logged_in
from tests.support.server_process import MODEL, Server

PRICE_IN, PRICE_OUT = 100, 300
"""Nano-dollars a token, of the suite's server."""


def ask(server: Server, key: str, most: int, **more: Any) -> None:
    body = {"model": MODEL, "prompt": "say it", "max_tokens": most, "ignore_eos": True} | more
    with server.http(key) as client:
        client.post("/v1/completions", json=body).raise_for_status()


def rows_of(answer: httpx.Response) -> list[dict[str, str]]:
    assert answer.headers["content-type"].startswith("text/csv"), answer.text
    return list(csv.DictReader(io.StringIO(answer.text)))


def told(server: Server, **asked: str) -> list[dict[str, Any]]:
    with server.http() as client:
        answer = client.get("/admin/v1/usage", params=asked)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


def cell(page: httpx.Response, label: str) -> list[str]:
    """The texts of a table's cells with this label."""
    cells = re.findall(rf'<td data-label="{label}"[^>]*>(.*?)</td>', page.text, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", each)).strip() for each in cells]


@pytest.fixture(scope="module")
def charged(server: Server) -> dict[str, str]:
    """Keys of two tenants with requests: three of one, with labels, and one of the other."""
    one, other = server.tenant("money-one"), server.tenant("money-two")
    server.admin("PATCH", "/tenants/money-one", {"labels": {"team": ["search", "ads"]}})
    for most, team in ((3, "search"), (5, "ads"), (7, "search")):
        ask(server, one, most, metadata={"team": team})
    ask(server, other, 11)
    return {"money-one": one, "money-two": other}


async def test_the_page_says_what_the_ledger_says_by_any_two_groups(
    server: Server, charged: dict[str, str]
) -> None:
    async with logged_in(server, "auditor") as browser:
        page = await browser.get("/console/usage?tenant=money-one&group=tenant&then=label:team&window=day")
        assert page.status_code == 200, page.text
        sums = told(server, tenant="money-one", group_by="tenant,label:team")
        by_team = {row["label:team"]: row for row in sums}
        assert {team: row["output_tokens"] for team, row in by_team.items()} == {"ads": 5, "search": 10}
        assert cell(page, "label team") == ["search", "ads"]  # the dearest first
        for label, name, shown in (
            ("Output tokens", "output_tokens", number),
            ("Input tokens", "input_tokens", number),
            ("Requests", "ended_requests", number),
            ("Charged", "cost_nanousd", money),
        ):
            expected = [shown(by_team[team][name]) for team in ("search", "ads")]
            assert cell(page, label) == expected, label
        assert cell(page, "Change") == ["new", "new"]
        # By the day: a column for each pair, exact for the chart.
        [*_, today] = re.findall(r'<tr><td data-value="\d+">(.*?)</tr>', page.text, re.DOTALL)[:1]
        assert re.findall(r'class="number" data-value="([\d.]+)"', today) == [
            f"{by_team[team]['cost_nanousd'] / 1e9:.9f}".rstrip("0") for team in ("search", "ads")
        ]
        # The charge of a request is its tokens at their prices.
        ads = by_team["ads"]
        assert ads["cost_nanousd"] == ads["input_tokens"] * PRICE_IN + ads["output_tokens"] * PRICE_OUT
        page = await browser.get("/console/usage?tenant=money-one&group=model&window=total&show=output")
        [one] = told(server, tenant="money-one", group_by="model")
        assert cell(page, "Output tokens") == [number(one["output_tokens"])] == ["15"]
        assert "/console/requests?tenant=money-one&amp;model=tiny&amp;from=" in page.text
        page = await browser.get("/console/usage?tenant=money-one&from=2001-01-01&to=2001-02-01")
        assert "Nothing was charged here" in page.text


async def test_files_are_exact_and_the_same_for_machines(server: Server, charged: dict[str, str]) -> None:
    async with logged_in(server) as browser:
        asked = "tenant=money-one&group=key&then=label:team&window=day"
        rows = rows_of(await browser.get(f"/console/usage/csv?{asked}"))
        same = (await browser.get(f"/console/usage/json?{asked}")).json()
        api = told(server, tenant="money-one", group_by="key,label:team", window="day")
        assert same["data"] == api
        assert len(rows) == len(api) == 2
        for row, one in zip(rows, api, strict=True):
            assert {name: row[name] for name in one if name != "key_name"} == {
                name: "" if value is None else str(value) for name, value in one.items() if name != "key_name"
            }
            assert round(float(row["charged_usd"]) * 1e9) == one["cost_nanousd"]


async def test_a_member_sees_the_own_tenants_alone(server: Server, charged: dict[str, str]) -> None:
    async with logged_in(server, "member", "money-two") as browser:
        page = await browser.get("/console/usage?group=tenant&window=total")
        assert cell(page, "tenant") == ["money-two"]
        assert "money-one" not in page.text
        assert "/console/usage/recovery" not in page.text
        assert {row["tenant"] for row in rows_of(await browser.get("/console/usage/csv?group=tenant"))} == {
            "money-two"
        }
        theirs = server.admin("GET", "/keys?tenant=money-one")["data"][0]["id"]
        project = server.admin("GET", "/projects?tenant=money-one")["data"][0]["id"]
        for path in ("/console/usage", "/console/usage/csv", "/console/usage/json"):
            for foreign in ("tenant=money-one", "tenant=none-such", f"key={theirs}", f"project={project}"):
                page = await browser.get(f"{path}?{foreign}")
                assert page.status_code == 400, f"{path}?{foreign}: {page.text}"
                assert f'id="error-{foreign.partition("=")[0]}"' in page.text
                assert "prj_" not in page.text.replace(project, "")


async def test_what_cannot_be_asked_is_said_beside_its_field(server: Server) -> None:
    async with logged_in(server) as browser:
        for asked, field in (
            ("from=2016-01-01&to=2026-01-01", "from"),
            ("from=yesterday", "from"),
            ("window=fortnight", "window"),
            ("time_zone=Mars/Olympus", "time_zone"),
            ("group=colour", "group"),
            ("tier=golden", "tier"),
            ("label=team", "label"),
            ("tenant=none-such", "tenant"),
        ):
            page = await browser.get(f"/console/usage?{asked}")
            assert page.status_code == 400, page.text
            assert f'id="error-{field}"' in page.text, page.text
            name, _, value = asked.partition("&")[0].partition("=")
            assert value in page.text, name  # what was typed is there again


async def test_the_check_says_whether_the_sums_are_the_ledgers(
    server: Server, charged: dict[str, str]
) -> None:
    async with logged_in(server, "auditor") as browser:
        page = await browser.get("/console/usage/check?run=1")
        assert "Equal to the ledger, to the token" in page.text
        page = await browser.get("/console/usage")
        assert "The sums were equal to the ledger, to the token" in page.text


async def test_recovery_parts_the_cost_of_engines_and_finds_the_break_even(server: Server) -> None:
    async with logged_in(server, "operator") as browser:
        page = await browser.get("/console/usage/recovery")
        assert "No price of an engine-hour is known" in page.text
        assert "gateway.engine_hour_usd" in page.text
        for wrong in ("price=much", "price=-1", "price=NaN", "hours=1"):
            page = await browser.get(f"/console/usage/recovery?{wrong}")
            assert page.status_code == 400, page.text
            assert f'id="error-{wrong.partition("=")[0]}"' in page.text
        page = await browser.get("/console/usage/recovery?price=2.50&hours=24")
        assert page.status_code == 200
    async with logged_in(server, "member", "money-two") as browser:
        assert (await browser.get("/console/usage/recovery")).status_code == 403
        assert (await browser.get("/console/usage/check")).status_code == 403
