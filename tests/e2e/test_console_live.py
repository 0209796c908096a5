"""The live pages on a running server: overview and waiting requests, their streams, and acts on what waits.

A server whose engine runs one sequence at a time, so that there is a line to stand in.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import httpx
import pytest

from ops.bench.gateway.side_loads import watching
from ops.sandbox.server import LocalServer, until
from tests.support.console import Browser
from tests.support.server_process import Server, server_process
from tests.support.waiting_streams import full, waiting

PATIENCE_S = 20_000
EVENTS = {"accept": "text/html, text/event-stream"}
OVERVIEW, WAITING = "/console", "/console/waiting"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "1", "--gateway-long-tokens", "8192"]
    arguments += ["--gateway-ttl-standard", str(PATIENCE_S), "--gateway-ttl-batch", str(PATIENCE_S)]
    with server_process(tmp_path_factory.mktemp("live"), chat_model, *arguments) as running:
        yield running


EVERY = ["interactive", "standard", "batch"]


@pytest.fixture(scope="module")
def keys(server: Server) -> dict[str, str]:
    return {
        "crowd": server.tenant("crowd", tier="interactive", tiers=EVERY),
        "acme": server.tenant("acme", tier="standard", tiers=EVERY),
        "other": server.tenant("other", tier="standard", tiers=["standard"]),
    }


@contextlib.asynccontextmanager
async def person(
    server: Server, name: str, role: str, tenants: list[str] | None = None
) -> AsyncIterator[Browser]:
    asked: dict[str, Any] = {"name": name, "role": role} | ({"tenants": tenants} if tenants else {})
    token = server.admin("POST", "/people", asked)["link"].partition("token=")[2]
    async with Browser(server.url) as browser:
        assert (await browser.redeem(token)).status_code == 303
        yield browser


@contextlib.asynccontextmanager
async def stream(browser: Browser, path: str) -> AsyncIterator[AsyncIterator[str]]:
    """A live region's events, without their `data: `."""
    async with browser.http.stream("GET", f"{path}", headers=EVENTS) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "connect-src 'self'" in response.headers["content-security-policy"]
        yield _events(response)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line:
            lines.append(line.removeprefix("data: "))
        elif lines:
            yield "\n".join(lines)
            lines = []


async def snapshots(browser: Browser) -> float:
    text = (await browser.get("/metrics")).text
    return float(re.findall(r"^fairgate_console_snapshots_total (\S+)$", text, re.MULTILINE)[0])


def plain(page: str) -> str:
    """The words of a page."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


async def test_the_overview_shows_who_waits_and_its_figures_are_those_of_the_api(
    server: Server, keys: dict[str, str]
) -> None:
    async with person(server, "live-auditor", "auditor") as browser:
        with full(server, keys["crowd"]), waiting(server, keys["acme"]):
            page = (await browser.get(OVERVIEW)).text
            status = server.status()
            words = plain(page)
            assert "1 of 1 gateways answer" in words
            for name in ("acme", "crowd"):
                tenant_id = server.admin("GET", f"/tenants/{name}")["id"]
                assert f"/console/tenants/{tenant_id}" in page
            [acme] = [each for each in status["tenants"] if each["name"] == "acme"]
            assert acme["queued"]["standard"] == 1
            assert f"/console/waiting?tenant={acme['tenant_id']}&amp;tier=standard" in page
            assert f"{status['engines'][0]['replica_id']}</a>" in page
        async with stream(browser, f"{OVERVIEW}/live") as events:
            assert "Who gets what" in await anext(events)
        used = server.admin("GET", "/usage?window=total&group_by=")["data"][0]
        assert used["cost_nanousd"] > 0


async def test_twenty_open_overviews_take_one_snapshot_a_tick(
    server: Server,
) -> None:
    async with person(server, "live-fifty", "owner") as browser:
        before = await snapshots(browser)
        async with contextlib.AsyncExitStack() as open_streams:
            limits = httpx.Limits(max_connections=60)
            many = await open_streams.enter_async_context(
                httpx.AsyncClient(base_url=server.url, timeout=60.0, limits=limits, cookies=browser.cookies)
            )
            browser.http, single = many, browser.http
            streams = [
                await open_streams.enter_async_context(stream(browser, f"{OVERVIEW}/live")) for _ in range(10)
            ]
            tabs = urlencode({f"tab{number}": f"{OVERVIEW}/live" for number in range(10)})
            shared = await open_streams.enter_async_context(stream(browser, f"/console/streams?{tabs}"))
            assert "Who gets what" in await anext(shared)
            for each in streams:
                for _ in range(3):
                    assert "Who gets what" in await anext(each)
            assert "fairgate_console_watchers 20.0" in (await browser.get("/metrics")).text
            browser.http = single
            made = await snapshots(browser) - before
        # Each of them had three, and all together took no more than the seconds that this took.
        assert 3 <= made < 50


async def test_watchers_of_the_benchmark_have_the_overview_open_and_see_it_end(server: Server) -> None:
    local = LocalServer(
        server.url, "", "tiny", server.data_dir, None, control_token=server.owner_key, process=cast(Any, None)
    )
    async with Browser(server.url) as browser, watching(local, 3) as watchers:
        assert "fairgate_console_watchers 3.0" in (await browser.get("/metrics")).text
        assert watchers.fewest >= 1
        assert watchers.ended is None
        server.admin("POST", "/people/watcher/suspend")

        async def is_told() -> bool:
            return watchers.ended is not None

        assert await until(is_told, 30)
        assert watchers.ended == "the gateway ended it"


async def test_a_stream_ends_with_its_session_and_says_so(server: Server) -> None:
    async with person(server, "live-leaver", "operator") as browser:
        found = browser.copy_to
        async with Browser(server.url) as same:
            found(same)
            async with stream(browser, f"{OVERVIEW}/live") as events:
                assert "Who gets what" in await anext(events)
                out = await same.send("/console/sessions", "/console/log-out")
                assert out.status_code == 303
                rest = [each async for each in events]
        assert rest[-1].startswith("event: ended\nYour session has ended.")
        # And one that is opened afterwards says so immediately, instead of a page that no stream can hold.
        # Each region leads back to its own page.
        tabs = urlencode({"one": f"{OVERVIEW}/live", "two": f"{WAITING}/live?tier=batch"})
        async with stream(browser, f"/console/streams?{tabs}") as events:
            rest = sorted([each async for each in events])
        backs = ("", "?next=%2Fconsole%2Fwaiting%3Ftier%3Dbatch")
        for each, name, back in zip(rest, ("one", "two"), backs, strict=True):
            assert each.startswith(f"id: {name}\nevent: ended\nYour session has ended.")
            assert f'href="/console/log-in{back}"' in each


async def test_a_member_sees_the_own_tenants_requests_alone_also_in_the_stream(
    server: Server, keys: dict[str, str]
) -> None:
    async with person(server, "live-member", "member", ["acme"]) as browser:
        with (
            full(server, keys["crowd"]),
            waiting(server, keys["acme"]) as (mine, _),
            waiting(server, keys["other"]) as (foreign, _),
        ):
            async with person(server, "live-owner", "owner") as owner:
                whole = (await owner.get(WAITING)).text
                assert mine in whole and foreign in whole  # noqa: PT018
            page = (await browser.get(WAITING)).text
            async with stream(browser, f"{WAITING}/live") as events:
                live = await anext(events)
            # Beside one that there is not, and what is no region.
            tabs = urlencode({"b": f"{WAITING}/live", "c": "/console/x/live", "d": WAITING})
            async with stream(browser, f"/console/streams?{tabs}") as events:
                shared = {(each := await anext(events)).partition("\n")[0]: each for _ in range(2)}
            assert shared["id: c"].startswith("id: c\nevent: stopped\nThis part of the page cannot be shown.")
            for text in (page, live, shared["id: b"]):
                assert mine in text
                assert foreign not in text
                assert "other" not in re.findall(r'data-label="Tenant"><a [^>]*>([^<]*)', text)
            for path in (f"{WAITING}?tenant=other", f"{WAITING}/live?tenant=other"):
                assert (await browser.get(path)).status_code == 404
            for act in ("cancel", "move"):
                assert "No such request" in (await browser.get(f"{WAITING}/{foreign}/{act}")).text
                answer = await browser.send(WAITING, f"{WAITING}/{foreign}/{act}", tier="interactive")
                assert "No such request" in answer.text
            with server.http(keys["other"]) as client:
                assert client.get(f"/v1/requests/{foreign}").json()["status"] == "waiting"
        for text in ((await browser.get(OVERVIEW)).text, (await browser.get(f"{OVERVIEW}/live")).text):
            assert "Closest limit" in text
            assert ">acme</a>" in text
            assert "crowd" not in text
            assert "other</a>" not in text
        assert (await browser.get("/console/overview")).headers["location"] == OVERVIEW


async def test_a_move_shows_its_price_first_and_both_acts_are_in_the_audit(
    server: Server, keys: dict[str, str]
) -> None:
    async with person(server, "live-operator", "operator") as browser:
        with (
            full(server, keys["crowd"]),
            waiting(server, keys["other"]),
            waiting(server, keys["acme"]) as (request_id, _),
        ):
            offers = (await browser.get(f"{WAITING}/{request_id}/move")).text
            offered = server.admin(
                "POST", f"/requests/{request_id}/tier", {"service_tier": "interactive", "preview": True}
            )
            assert offered["displaces"]["passes"] > 0
            assert [each["tenant"] for each in (await _named(server, offered))] == ["other"]
            assert f"Passes other ({offered['displaces']['passes']:,} tokens)." in plain(offers)
            assert re.search(r"To interactive: .{,40}, 2x the price", plain(offers))
            nowhere = await browser.send(f"{WAITING}/{request_id}/move", tier="gold")
            assert (nowhere.status_code, "cannot go to this tier" in nowhere.text) == (422, True)
            moved = await browser.send(f"{WAITING}/{request_id}/move", tier="interactive")
            assert (moved.status_code, moved.headers["location"]) == (303, f"{WAITING}?done=moved")
            assert server.admin("GET", f"/requests/{request_id}")["tier"] == "interactive"
            asked = (await browser.get(f"{WAITING}/{request_id}/cancel")).text
            assert "499" in asked
            done = await browser.send(f"{WAITING}/{request_id}/cancel")
            assert done.headers["location"] == f"{WAITING}?done=cancelled"

            async def has_finished() -> bool:
                page = await browser.get(f"{WAITING}/{request_id}/cancel")
                return "This request has already finished" in page.text

            assert await until(has_finished, 30)
            for act in ("cancel", "move"):
                late = (await browser.get(f"{WAITING}/{request_id}/{act}")).text
                assert "This request has already finished" in late
                assert "<form" not in late.partition("<main")[2]
        rows = server.admin("GET", "/audit?act=request&limit=2")["data"]
        assert [(each["action"], each["actor"]) for each in rows] == [
            ("request.cancel", "person:live-operator"),
            ("request.move", "person:live-operator"),
        ]
        assert "is cancelled" in (await browser.get(f"{WAITING}?done=cancelled")).text
        assert (await browser.get(f"{WAITING}?tier=gold")).status_code == 400


async def _named(server: Server, offered: dict[str, Any]) -> list[dict[str, Any]]:
    names = {each["id"]: each["name"] for each in server.admin("GET", "/tenants")["data"]}
    return [{"tenant": names[each["tenant_id"]]} for each in offered["passed"]]


async def test_a_member_moves_only_to_tiers_that_the_key_may_use(
    server: Server, keys: dict[str, str]
) -> None:
    async with person(server, "live-other", "member", ["other"]) as browser:
        with full(server, keys["crowd"]), waiting(server, keys["other"]) as (request_id, _):
            page = (await browser.get(f"{WAITING}/{request_id}/move")).text
            assert "Its key may use no other tier" in page
            answer = await browser.send(WAITING, f"{WAITING}/{request_id}/move", tier="interactive")
            assert answer.status_code == 422
            assert server.admin("GET", f"/requests/{request_id}")["tier"] == "standard"


async def test_a_tenant_of_10_connections_beside_one_of_100_shows_its_time_before_the_line(
    server: Server,
) -> None:
    small, large = server.tenant("ten"), server.tenant("hundred")
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1, "ignore_eos": True}

    async def send(client: httpx.AsyncClient, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        await client.post("/v1/completions", json=body, headers=headers)

    limits = httpx.Limits(max_connections=110)
    async with (
        person(server, "live-bursts", "auditor") as browser,
        httpx.AsyncClient(base_url=server.url, timeout=300.0, limits=limits) as client,
    ):
        await asyncio.gather(*(send(client, key) for key in [small] * 10 + [large] * 100))
        told = before_line((await browser.get(OVERVIEW)).text)
    for name in ("ten", "hundred"):
        assert re.fullmatch(r"[\d.]+ (ms|s)", told[name])
        assert told[name] != "0 ms"


def before_line(text: str) -> dict[str, str]:
    """Of each tenant that lined up lately, what stands under `Before queue`."""
    rows = re.findall(
        r'data-label="Tenant"><a [^>]*>([^<]*)</a>.*?data-label="Before queue" class="number">([^<]*)<',
        text,
        re.DOTALL,
    )
    return {name: value for name, value in rows if value != "–"}
