"""Pages of requests, refusals, targets and quotes on a running server: what they show is what the ledger, the
timelines and the records of refusals say."""

from __future__ import annotations

import asyncio
import html
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.console.formats import exact_dollars, percent
from gateway.console.pages.requests.quotes import FEWEST, KeptFigure, kept_figure
from gateway.domain.timeline import unpack
from gateway.domain.told import kept_figures
from tenants.counts.calibration import KeptCount
from tests.e2e.test_refusals import complete, refuse_in_many_ways
from tests.support.console import Browser
from tests.support.server_process import MODEL, Server, until

ENDLESS = {"model": MODEL, "prompt": "on and on", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def person(server: Server, name: str, role: str, tenants: tuple[str, ...] = ()) -> httpx.Client:
    """The browser of a new person who is logged in."""
    body: dict[str, Any] = {"name": name, "role": role} | ({"tenants": list(tenants)} if tenants else {})
    token = server.admin("POST", "/people", body)["link"].partition("token=")[2]

    async def log_in() -> dict[str, str]:
        async with Browser(server.url) as browser:
            assert (await browser.redeem(token)).status_code == 303
            return browser.cookies

    return httpx.Client(base_url=server.url, cookies=asyncio.run(log_in()), timeout=60)


@pytest.fixture(scope="module")
def ada(server: Server) -> Iterator[httpx.Client]:
    with person(server, "ada-of-requests", "owner") as client:
        yield client


def text_of(page: httpx.Response) -> str:
    """What a person reads."""
    assert page.status_code == 200, page.text
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.text)))


def test_a_requests_page_shows_what_the_ledger_says_and_to_members_of_its_tenant_alone(
    server: Server, ada: httpx.Client
) -> None:
    key = server.tenant("on-pages")
    server.tenant("not-on-pages")
    request_id = complete(server, key).headers["x-request-id"]
    until(lambda: server.admin("GET", f"/requests/{request_id}")["timeline"])
    shown = text_of(ada.get(f"/console/requests/{request_id}"))
    api = server.admin("GET", f"/requests/{request_id}")
    for sentence in api["explanation"]:
        assert sentence[:1].upper() + sentence[1:] in shown
    for event in api["timeline"]:
        assert event["event"].replace("_", " ") in shown
    for row in server.admin("GET", f"/ledger/{request_id}")["rows"]:
        amounts = (row["input_tokens"], row["output_tokens"], exact_dollars(row["cost_nanousd"]))
        assert " ".join(map(str, amounts)) in shown
        assert row["gateway_id"] in shown
    assert "Estimate and actual" in shown
    with person(server, "bo-of-requests", "member", ("on-pages",)) as own:
        to_its_tenant = own.get(f"/console/requests/{request_id}")
        assert row["gateway_id"] not in to_its_tenant.text
        assert "Estimate and actual" in to_its_tenant.text
        assert request_id in own.get("/console/requests").text
    with person(server, "cy-of-requests", "member", ("not-on-pages",)) as other:
        assert other.get(f"/console/requests/{request_id}").status_code == 404
        assert request_id not in other.get("/console/requests").text


def test_a_running_requests_page_says_how_it_stands(server: Server, ada: httpx.Client) -> None:
    key = server.tenant("live-on-pages")
    with (
        server.http(key) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS) as response,
    ):
        request_id = response.headers["x-request-id"]
        shown = text_of(ada.get(f"/console/requests/{request_id}"))
        assert "It is running." in shown
        assert "Nothing was ahead of it when it joined the queue." in shown
        assert "reserve" in shown, "its ledger row"
        with person(server, "di-of-requests", "member", ("not-on-pages",)) as other:
            assert other.get(f"/console/requests/{request_id}").status_code == 404
        server.admin("DELETE", f"/requests/{request_id}")
        for _ in response.iter_lines():
            pass
    until(server.is_idle)
    assert "cancelled" in text_of(ada.get(f"/console/requests/{request_id}"))


def test_each_refusal_is_on_its_page_by_request_and_by_tenant(server: Server, ada: httpx.Client) -> None:
    key = server.tenant("refused-on-pages", tier="standard", tiers=["standard", "batch"])
    limit_id = server.limit("refused-on-pages", "output_tokens", 10, window="day")
    answers = refuse_in_many_ways(server, key)
    codes = {request_id: each.json()["error"]["code"] for request_id, each in answers.items()}
    # Of no tenant: they are refused before a key is looked at.
    of_tenant = {
        each: code for each, code in codes.items() if code not in ("not_found", "method_not_allowed")
    }
    until(lambda: len(server.admin("GET", "/refusals?tenant=refused-on-pages")["data"]) == len(of_tenant))
    for request_id, code in codes.items():
        found = ada.get("/console/refusals", params={"request_id": request_id})
        assert f"<code>{code}</code>" in found.text
        assert f"/console/requests/{request_id}" in found.text
    by_tenant = ada.get("/console/refusals", params={"tenant": "refused-on-pages"}).text
    assert all(f"/console/requests/{request_id}" in by_tenant for request_id in of_tenant)
    counted = re.findall(r"<code>(\w+)</code></a></td><td class=\"number\">([\d,]+)</td>", by_tenant)
    listed = list(of_tenant.values())
    assert {code: int(count) for code, count in counted} == {code: listed.count(code) for code in listed}
    denied = next(each for each, code in of_tenant.items() if code == "insufficient_quota")
    with person(server, "ed-of-requests", "member", ("refused-on-pages",)) as own:
        for reader in (ada, own):
            shown = text_of(reader.get(f"/console/requests/{denied}"))
            assert f"Limit {limit_id} Wanted 11 Available 10" in shown
            assert "The budget is spent" in shown
            assert limit_id in reader.get("/console/refusals", params={"code": "insufficient_quota"}).text


def test_the_quotes_page_equals_a_recount_of_the_timelines(server: Server, ada: httpx.Client) -> None:
    key = server.tenant("quoted-on-pages", tier="standard", tiers=["standard"])
    for _ in range(FEWEST):
        complete(server, key, max_tokens=1)

    def recounted() -> dict[str, KeptCount]:
        """Of the wait, by kind."""
        query = (
            "SELECT packed, ended_us, model FROM timelines JOIN ledger USING (request_id)"
            " WHERE kind = 'settle' AND ledger.tier = 'standard'"
        )
        with sqlite3.connect(server.data_dir / "fairgate.db") as connection:
            rows = connection.execute(query).fetchall()
        found: dict[str, KeptCount] = {}
        for packed, ended_us, model in rows:
            for each, kept in kept_figures(unpack(packed), model, ended_us).items():
                if (each.figure, each.model, each.tier) == ("wait", MODEL, "standard"):
                    found[each.kind] = found.get(each.kind, KeptCount(0, 0, 0)).plus(kept)
        return found

    def shown() -> str:
        return text_of(ada.get("/console/quotes", params={"tier": "standard", "model": MODEL}))

    def in_words(kind: str, figure: KeptFigure) -> str:
        words = [f"{MODEL}, standard", kind, f"{figure.requests:,}"]
        for each in (figure.p50, figure.p90):
            low, high = each.interval
            is_enough = each.requests >= FEWEST
            interval = f"({percent(low)} to {percent(high)})"
            words.append(f"{percent(each.share)} {interval}" if is_enough else "too few")
        return " ".join(words)

    def agrees() -> bool:
        page = shown()
        return all(in_words(kind, kept_figure(each._asdict())) in page for kind, each in recounted().items())

    until(lambda: recounted()["plain"].requests >= FEWEST and agrees())
