"""Pages of requests, refusals, targets and quotes on a database with many of them, of each kind."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from sqlalchemy import select

from gateway import errors
from gateway.console import resource_pages
from gateway.console.pages.requests.ways_out import WAYS_OUT
from gateway.domain.ids import new_request_id
from gateway.errors import Lacked
from gateway.metrics.registry import Metrics
from gateway.records.refusal_recorder import RefusalRecorder
from ops.sandbox.page_reader import ConsolePage, parse_page
from tenants.admin.lists import scans
from tenants.counts import calibration
from tenants.counts import refusal_store as refusals
from tenants.counts.calibration import CalibrationKey, KeptCount
from tenants.counts.refusal_store import RefusalKey
from tenants.instants import from_us
from tenants.slo import store as slo
from tenants.slo.slo import Missed, SloTally
from tenants.slo.store import CountKey
from tenants.storage.database import create_sql_engine, open_database
from tenants.storage.flushes import Flush
from tenants.storage.tables import ledger
from tests.support.builders import site
from tests.support.console import PASSWORD, TOKEN
from tests.support.gateway_app import gateway_app
from tests.support.many_requests import Sizes, fill

SIZES = Sizes(requests=120, tenants=2, keys=2)
HOUR_S = 3_600
TRACES = "https://traces.example.com/?id={request_id}"


async def add_counts(url: str, now_s: float) -> None:
    """What gateways count beside the rows: of targets, of refusals, of told figures."""
    database = open_database(url)
    key = CountKey("ten_1", "standard", "e2e")
    missed = Missed(
        "req_25",
        "ten_1",
        "standard",
        "ttft",
        "scheduling",
        500_000,
        None,
        round(now_s * 1e6),
        {"alone_s": 0.1, "fair_s": 0.2, "fair_without_own_s": None, "stalled_s": 0.5},
    )
    hour_s = int(now_s) // HOUR_S * HOUR_S
    wait = CalibrationKey(hour_s, "model-1", "standard", "wait", 3, "plain")
    try:
        await slo.add(database, {key: SloTally(200, 30)}, [missed], now_s)
        counted = {
            RefusalKey(int(now_s) // 60 * 60, "ten_1", "insufficient_quota", "lim_1"): 41,
            RefusalKey(int(now_s) // 60 * 60, "ten_2", "insufficient_quota", "lim_2"): 1_000,
        }
        await refusals.add(database, counted, [], Flush("gw refusals", 1), now_s)
        told = {
            wait: KeptCount(200, 90, 170),
            wait._replace(figure="e2e", hour_s=hour_s - 24 * HOUR_S): KeptCount(60, 31, 55),
            wait._replace(figure="ttft", kind="binding"): KeptCount(12, 6, 11),
        }
        await calibration.add(database, told, Flush("gw calibration", 1), now_s)
    finally:
        await database.close()


class Pages:
    """The pages as persons of several roles get them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.cookies: dict[str, str] = {}

    async def invite(self, name: str, role: str, tenants: tuple[str, ...] = ()) -> None:
        body: dict[str, Any] = {"name": name, "role": role} | ({"tenants": tenants} if tenants else {})
        made = await self.client.post("/admin/v1/people", json=body)
        token = made.json()["link"].partition("token=")[2]
        form = await self.client.get(f"/console/set-up?token={token}")
        fields = {"form_token": TOKEN.findall(form.text)[-1], "token": token}
        await self.client.post("/console/set-up", data=fields | {"password": PASSWORD, "repeat": PASSWORD})
        self.cookies[name] = self.client.cookies["fairgate_session"]
        self.client.cookies.clear()

    async def get(self, path: str, name: str = "ada", status: int = 200) -> str:
        answer = await self.client.get(path, headers={"cookie": f"fairgate_session={self.cookies[name]}"})
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text}"
        return answer.text


@asynccontextmanager
async def opened(url: str, data_dir: Path) -> AsyncIterator[Pages]:
    now_s = time.time()
    engine = create_sql_engine(url, writing=True)
    with engine.begin() as connection:
        fill(connection, SIZES, round(now_s * 1e6))
    engine.dispose()
    await add_counts(url, now_s)
    async with gateway_app(url, data_dir, follows=False, trace_url=TRACES) as client:
        pages = Pages(client)
        await pages.invite("ada", "owner")
        yield pages


@pytest.fixture
async def pages(sqlite_url: str, tmp_path: Path) -> AsyncIterator[Pages]:
    async with opened(sqlite_url, tmp_path / "data") as each:
        yield each


def cells(page: str) -> str:
    """The page's text without tags, for reading."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


async def test_ended_requests_are_listed_in_pages_with_their_filters(pages: Pages) -> None:
    first = await pages.get("/console/requests")
    ids = re.findall(r'href="/console/requests/(req_\d+)"', first)
    assert ids == [f"req_{number}" for number in range(120, 70, -1)], "the newest first"
    older = re.search(r'<a href="(/console/requests\?[^"]*cursor=[^"]+)">Older ones', first)
    assert older is not None
    second = await pages.get(older[1].replace("&amp;", "&"))
    assert re.findall(r'href="/console/requests/(req_\d+)"', second)[0] == "req_70"
    assert "data-new" not in second
    of_one = await pages.get("/console/requests?tenant=t1&cause=scheduling")
    assert "req_25#miss-ttft" in of_one
    assert "ttft: scheduling" in of_one
    nonsense = await pages.get("/console/requests?cursor=nonsense", status=400)
    assert "Cursor: does not belong to this list" in cells(nonsense)
    none = await pages.get("/console/requests?from=2031-01-01")
    assert "No request has ended" in none


async def test_the_page_says_how_many_are_new(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await pages.get("/console/requests?tenant=t1")
    newer = re.search(r'data-new="([^"]+)"', first)
    assert newer is not None
    path = newer[1].replace("&amp;", "&")
    assert await pages.get(path) == ""
    assert await pages.get("/console/requests/new?tenant=t1&tier=batch") == "18 new"
    with monkeypatch.context() as patch:
        patch.setattr(resource_pages, "MOST_NEW", 7)
        assert await pages.get("/console/requests/new") == "More than 7 new"
    today = datetime.now(UTC).date()
    since, until = today - timedelta(days=60), today + timedelta(days=2)
    for path, route, filters in (
        ("/console/refusals", "/admin/v1/refusals", f"code=insufficient_quota&from={since}"),
        ("/console/slo/misses", "/admin/v1/slo/misses", f"cause=scheduling&from={since}"),
        ("/console/audit", "/admin/v1/audit", "act=person"),
    ):
        page = await pages.get(f"{path}?{filters}")
        newer = re.search(r'data-new="([^"]+)"', page)
        assert newer is not None, path
        assert await pages.get(newer[1].replace("&amp;", "&")) == "", path
        asked = filters.replace(f"{since}", f"{since}T00:00:00Z")
        rows = (await pages.client.get(f"{route}?{asked}&limit=1000")).json()["data"]
        assert 0 < len(rows) <= 100
        assert await pages.get(f"{path}/new?{filters}") == f"{len(rows)} new", path
        assert "data-new" not in await pages.get(f"{path}?{filters}&to={until}"), path


async def test_a_filter_that_cannot_be_is_refused_beside_its_field(pages: Pages) -> None:
    for path, field, words in (
        ("/console/requests?tier=gold", "tier", "gold"),
        ("/console/requests?outcome=odd", "outcome", "odd"),
        ("/console/requests?from=yesterday", "from", "yesterday"),
        ("/console/requests?tenant=nowhere", "tenant", "No such tenant"),
        ("/console/refusals?key=nothing", "key", "No such key"),
        ("/console/slo?tier=gold", "tier", "gold"),
        ("/console/slo/misses?cause=weather", "cause", "weather"),
        ("/console/quotes?figure=luck", "figure", "luck"),
        ("/console/quotes?from=2026-01-02&to=2026-01-01", "from", "before"),
    ):
        page = await pages.get(path, status=400)
        said = re.search(rf'<p class="error" id="error-{field}">([^<]+)</p>', page)
        assert said is not None, page
        assert words in said[1]


async def test_members_see_their_tenants_alone(pages: Pages) -> None:
    await pages.invite("bo", "member", ("t1", "t2"))
    await pages.invite("cy", "member", ("t2",))
    own = await pages.get("/console/requests", "bo")
    assert "Requests of t1" in own
    assert '<option value="t2">' in own
    theirs = set(re.findall(r'href="/console/requests/(req_\d+)"', own))
    others = set(
        re.findall(r'href="/console/requests/(req_\d+)"', await pages.get("/console/requests", "cy"))
    )
    assert len(theirs) == len(others) == 50
    assert theirs.isdisjoint(others)
    for path in ("requests?tenant=t1", "requests/new?tenant=t1", "refusals?tenant=t1", "slo?tenant=t1",
                 "slo/misses?tenant=ten_1", "requests?tenant=nowhere"):  # fmt: skip
        assert "Page not found" in await pages.get(f"/console/{path}", "cy", 404)
    mine, foreign = sorted(others)[0], sorted(theirs)[0]
    assert mine in await pages.get(f"/console/requests/{mine}", "cy")
    trace = f'href="https://traces.example.com/?id={mine}"'
    assert trace in await pages.get(f"/console/requests/{mine}", "ada")
    assert trace not in await pages.get(f"/console/requests/{mine}", "cy")
    refused = await pages.get(f"/console/requests/{foreign}", "cy", 404)
    unknown = await pages.get("/console/requests/req_none", "cy", 404)
    strip = re.compile(r"req_\w+")
    assert strip.sub("", refused) == strip.sub("", unknown)
    assert "1,000" in await pages.get("/console/refusals", "cy")
    assert "41" in await pages.get("/console/refusals", "bo")
    assert "1,000" not in await pages.get("/console/refusals", "bo")
    assert "Your role does not allow this" in await pages.get("/console/quotes", "cy", 403)


async def test_the_search_leads_to_what_a_person_may_see(pages: Pages) -> None:
    await pages.invite("cy", "member", ("t2",))
    directory = pages.client._transport.app.state.gateway.deps.directory  # type: ignore[attr-defined]
    await directory.refresh()

    async def leads_to(asked: str, name: str = "ada") -> str:
        cookie = {"cookie": f"fairgate_session={pages.cookies[name]}"}
        answer = await pages.client.get("/console/search", params={"q": asked}, headers=cookie)
        assert answer.status_code in (200, 303)
        return answer.headers.get("location") or cells(answer.text)

    owned = re.findall(r'"/console/requests/(req_\d+)"', await pages.get("/console/requests", "cy"))[0]
    foreign = re.findall(r'"/console/requests/(req_\d+)"', await pages.get("/console/requests?tenant=t1"))[0]
    page = f"/console/requests/{owned}"
    number = owned.removeprefix("req_")
    for each in (
        owned,
        f" {owned} ",
        f"chatcmpl-{number}",
        f"cmpl-{number}",
        f"resp_{number}",
        f"msg_{number}",
    ):
        assert await leads_to(each) == await leads_to(each, "cy") == page
    for asked, where in (
        ("t1", "/console/tenants/t1"),
        ("ten_1", "/console/tenants/t1"),
        ("key_1", "/console/tenants/ten_1/keys/key_1"),
        ("fg_live_public1", "/console/tenants/ten_1/keys/key_1"),
        ("fg_live_public1_secret", "/console/tenants/ten_1/keys/key_1"),
        (foreign, f"/console/requests/{foreign}"),
    ):
        assert await leads_to(asked) == where
        assert "Nothing found" in await leads_to(asked, "cy"), asked
    assert "fg_live_none_secret" not in await leads_to("fg_live_none_secret")
    several = await leads_to("t")
    assert ("t1" in several, "t2" in several, "Tenants" in several) == (True, True, True)
    assert await leads_to("t", "cy") == "/console/tenants/t2", "the only one that a member sees"
    acts = (await pages.client.get("/admin/v1/audit?act=person.invite&limit=1")).json()["data"]
    assert await leads_to(f"#{acts[0]['seq']}") == f"/console/audit?seq={acts[0]['seq']}"
    assert "Nothing found" in await leads_to(f"#{acts[0]['seq']}", "cy")
    assert (await leads_to("ADA")).startswith("/console/people/psn_")
    assert "Nothing found" in await leads_to("ada", "cy")
    assert "You can search for" in await leads_to("")


async def test_the_slowest_come_first_among_those_that_a_page_looks_at(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, took = time.time(), (0.2, 9.0, 0.5, 3.0, 0.1, 7.0)
    ids = [new_request_id(now_s - 60 * number - seconds) for number, seconds in enumerate(took)]
    async with opened(database_url, tmp_path / "data") as pages:
        engine = create_sql_engine(database_url, writing=True)
        with engine.begin() as connection:
            row = dict(
                connection.execute(select(ledger).where(ledger.c.kind == "settle").limit(1)).mappings().one()
            )
            del row["id"]
            for number, request_id in enumerate(ids):
                at_us = round((now_s - 60 * number) * 1e6)
                connection.execute(ledger.insert().values(row | {"request_id": request_id, "at_us": at_us}))
        engine.dispose()

        async def listed(asked: str) -> tuple[list[float], str | None]:
            answer = (await pages.client.get(f"/admin/v1/requests/ended?{asked}")).json()
            return [round(each["duration_s"] or 0, 1) for each in answer["data"]], answer["next_cursor"]

        slowest, _ = await listed("sort=slowest&limit=3")
        assert slowest == [9.0, 7.0, 3.0]
        since = quote(from_us(round((now_s - 150) * 1e6)).isoformat())
        assert (await listed(f"sort=slowest&from={since}"))[0][:2] == [9.0, 0.5]
        long, cursor = await listed("min_duration_s=3&limit=2")
        assert long == [9.0, 3.0], "the newest first"
        assert (await listed(f"min_duration_s=3&limit=2&cursor={cursor}"))[0] == [7.0]
        answer = await pages.client.get("/admin/v1/requests/ended?min_duration_s=long")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_duration_s")
        page = await pages.get("/console/requests?sort=slowest&min_duration_s=3")
        assert re.findall(r'"/console/requests/(req_\w+)"', page) == [ids[1], ids[5], ids[3]]
        assert "The slowest of all that match" in page
        assert "9.0 s" in cells(page), "without a timeline, too"
        monkeypatch.setattr(scans, "MOST_SCANNED", 4)
        first, cursor = await listed("sort=slowest&limit=2")
        assert first == [9.0, 0.5], "of the newest four"
        assert (await listed(f"sort=slowest&limit=2&cursor={cursor}"))[0] == [7.0, 3.0]


async def test_filters_go_along_from_state_to_state(pages: Pages) -> None:
    asked = f"tenant=t2&key=key_2&model=model-1&from={datetime.now(UTC).date() - timedelta(days=30)}"
    rows: dict[str, int] = {}
    for path in ("requests", "slo/misses", "refusals"):
        page = await pages.get(f"/console/{path}?{asked}&tier=")
        for other in ("requests", "slo/misses", "refusals", "waiting"):
            assert f'href="/console/{other}?{asked.replace("&", "&amp;")}"' in page, path
        rows[path] = len(re.findall(r'data-label="Request', page))
    every = (await pages.client.get("/admin/v1/slo/misses?key=key_2&limit=100")).json()["data"]
    of_model = (await pages.client.get("/admin/v1/slo/misses?key=key_2&model=model-1&limit=100")).json()[
        "data"
    ]
    assert 0 < len(of_model) == rows["slo/misses"] < len(every)


async def test_each_code_is_found_by_request_and_by_tenant_with_limit_wanted_and_available(
    sqlite_url: str, pages: Pages
) -> None:
    database, begun_s = open_database(sqlite_url), time.time() - 1
    recorder = RefusalRecorder(site(database), Metrics())
    for number, code in enumerate(sorted(WAYS_OUT)):
        error = errors.rate_limited("no", "tokens", 1.5)
        error.code, error.lacked = code, Lacked(f"lim_of_{code}", 1_000 + number, number)
        recorder.note(error, f"req_{code}", ("ten_1", "prj_1", "key_1"), tier="batch")
    await recorder.flush()
    await database.close()

    def shown(page: ConsolePage) -> dict[str, tuple[object, ...]]:
        return {
            row["Request"].link.rpartition("/req_")[2]: (
                row["Why, and the way out"].text,
                row["Limit"].of_link("limit_id"),
                row["Wanted"].amount,
                row["Available"].amount,
            )
            for row in page.rows("Refusals")
        }

    expected = {
        code: (code + WAYS_OUT[code], f"lim_of_{code}", 1_000 + number, number)
        for number, code in enumerate(sorted(WAYS_OUT))
    }
    found: dict[str, tuple[object, ...]] = {}
    for code in expected:
        path = f"/console/refusals?request_id=req_{code}"
        found |= shown(parse_page(path, await pages.get(path)))
    assert found == expected
    path, listed = f"/console/refusals?tenant=t1&from={from_us(round(begun_s * 1e6)):%Y-%m-%dT%H:%M:%S}", {}
    while path:
        page = parse_page(path, await pages.get(path))
        listed |= shown(page)
        path = page.links.get("Older ones", "")
    assert listed == expected


async def test_a_refusal_of_the_platform_shows_a_member_no_numbers(pages: Pages) -> None:
    client = pages.client
    limit = {"platform": True, "meter": "requests", "amount": 1, "window": "day"}
    assert (await client.post("/admin/v1/limits", json=limit)).status_code == 201
    await pages.invite("bo", "member", ("t1",))
    page = await pages.get("/console/refusals?limit_id=lim_1", "bo")
    assert "insufficient_quota" in page
    assert re.search(r'<td [^>]*data-label="Wanted"[^>]*>50</td>', page)
    assert "raise the limit" in page


async def test_targets_and_misses_are_shown_with_causes_and_what_to_do(pages: Pages) -> None:
    page = cells(await pages.get("/console/slo?tenant=t1"))
    assert "95 % within 1.0 s" in page
    assert "85.0 %" in page, "200 requests, 30 missed"
    assert "-200.0 %" in page, "thirty misses of the ten that the budget allows"
    assert "scheduling 1" not in page, "of another metric, which has no target"
    assert "30 not judged yet" in page, "causes and these are all misses"
    assert "Misses by cause and day" in page
    listed = await pages.get("/console/slo/misses?tenant=t1&cause=scheduling")
    assert 'href="/console/requests/req_25#miss-ttft"' in listed
    assert "the policy here is to blame" in listed
    assert "never" in listed
    one = await pages.get("/console/requests/req_25")
    assert 'id="miss-ttft"' in one
    assert "it never got there" in cells(one)
    assert "fair share" in one


async def test_quotes_show_shares_with_intervals_and_too_few_below(pages: Pages) -> None:
    page = await pages.get("/console/quotes?figure=ttft")
    assert "too few" in page
    waits = cells(await pages.get("/console/quotes"))
    assert "45.0 % (38.3 % to 51.9 %)" in waits
    assert "85.0 % (79.4 % to 89.3 %)" in waits
    whole = await pages.get("/console/quotes?figure=e2e")
    assert "51.7 %" in whole
    assert 'data-value="51.67"' in whole
    assert "No estimates in this period" in await pages.get("/console/quotes?model=other")


HOSTILE = (
    "<script>alert(1)</script>{{7*7}}", "\u202eabc", "x" * 10_000, "NaN", "-1", "9" * 400, "0001-01-01",
    "2016-01-01", "2026-01-01T00:00:00+99:99", "Mars/Olympus", "ten_2", "\u0661",
)  # fmt: skip


async def test_what_is_typed_into_an_address_breaks_no_page_and_shows_no_other_tenant(pages: Pages) -> None:
    await pages.invite("bo", "member", ("t1",))
    paths = {
        "/console/requests": ("tenant", "from", "cursor"),
        "/console/requests.csv": ("tenant", "key"),
        "/console/refusals": ("tenant", "limit_id", "to"),
        "/console/refusals.csv": ("tenant", "cursor"),
        "/console/slo/misses": ("tenant", "to"),
        "/console/slo/misses.csv": ("tenant", "cursor"),
        "/console/tenants.csv": ("search", "cursor"),
        "/console/keys.csv": ("tenant", "finding"),
        "/console/usage": ("tenant", "time_zone", "from"),
        "/console/quotes": ("to", "model"),
    }
    for path, names in paths.items():
        for name in names:
            for value in HOSTILE:
                for who in ("bo",) if path != "/console/quotes" else ("ada",):
                    cookie = {"cookie": f"fairgate_session={pages.cookies[who]}"}
                    answer = await pages.client.get(f"{path}?{name}={quote(value)}", headers=cookie)
                    told = f"{path} {name}={value[:40]}: {answer.status_code}"
                    assert answer.status_code < 500, told
                    assert "<script>alert" not in answer.text, told
                    if who == "bo" and answer.headers["content-type"].startswith("text/csv"):
                        assert "t2" not in answer.text, told
                        assert "ten_2" not in answer.text, told
