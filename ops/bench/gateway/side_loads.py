"""Loads beside the clients while our gateway is measured: open pages of the console, traces, a scraper."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Callable

import httpx

from ops.bench.common.load import admin_call
from ops.sandbox.server import LocalServer, ServerFailed, until

TRACE_RATIO = 0.01
OVERVIEW = "/console/live"
OPEN_S = 60.0
FORM_TOKEN = re.compile(r'name="form_token" value="([^"]+)"')
EVENT_END = b"\n\n"
SCRAPE_EVERY_S = 1.0
METRICS = "/metrics"
METRICS_HEADERS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
AT_REST = 50
"""Scrapes in a row whose processor time is compared with that of as long a rest."""


class Watchers:
    def __init__(self, count: int) -> None:
        self.events = [0] * count
        self.ended: str | None = None
        """Why one of them ended; None: all are open."""

    @property
    def fewest(self) -> int:
        return min(self.events)

    async def watch(self, number: int, client: httpx.AsyncClient) -> None:
        try:
            async with client.stream("GET", OVERVIEW, headers={"accept": "text/event-stream"}) as answer:
                if answer.status_code != 200:
                    self.ended = f"status {answer.status_code}"
                    return
                tail = b""
                async for data in answer.aiter_raw():
                    self.events[number] += (tail + data).count(EVENT_END)
                    tail = data[-1:]
            self.ended = "the gateway ended it"
        except httpx.HTTPError as error:
            self.ended = f"{type(error).__name__}: {error}"


@contextlib.asynccontextmanager
async def watching(server: LocalServer, count: int) -> AsyncIterator[Watchers]:
    """`count` open overviews of one person, each of which has had an event. Raises `ServerFailed`."""
    watchers = Watchers(count)
    limits = httpx.Limits(max_connections=count + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=OPEN_S, limits=limits) as client:
        await _log_in(server, client)
        tasks = [asyncio.create_task(watchers.watch(number, client)) for number in range(count)]

        async def are_open() -> bool:
            return watchers.fewest > 0 or watchers.ended is not None

        try:
            if not await until(are_open, OPEN_S) or watchers.ended is not None:
                raise ServerFailed(f"an open overview has no event: {watchers.ended or 'none came'}")
            yield watchers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _log_in(server: LocalServer, client: httpx.AsyncClient) -> None:
    async with server.operator() as operator:
        link = (await admin_call(operator, "POST", "people", {"name": "watcher", "role": "auditor"}))["link"]
    page = await client.get(link)
    form_token = FORM_TOKEN.search(page.text)
    if form_token is None:
        raise ServerFailed(f"the set-up link answers {page.status_code} without a form")
    password = secrets.token_urlsafe()
    fields = {"token": httpx.URL(link).params["token"], "password": password, "repeat": password}
    answer = await client.post("/console/set-up", data=fields | {"form_token": form_token[1]})
    if answer.status_code != 303:
        raise ServerFailed(f"the set-up link was not taken: {answer.status_code}")


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """URL of a collector of spans that reads each export and keeps nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


class Scraper:
    """Asks for the metrics as Prometheus does, for OpenMetrics, but more often than that would."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.page_bytes = 0

    async def scrape(self) -> None:
        """One scrape. Raises `ServerFailed`."""
        try:
            answer = await self._client.get(METRICS, headers=METRICS_HEADERS)
        except httpx.HTTPError as error:
            raise ServerFailed(f"the metrics page does not answer: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise ServerFailed(f"the metrics page answers {answer.status_code}")
        self.page_bytes = len(answer.content)

    async def forever(self) -> None:
        while True:
            await self.scrape()
            await asyncio.sleep(SCRAPE_EVERY_S)

    async def cost_s(self, cpu_s: Callable[[], float]) -> float:
        """Processor seconds of one scrape of a gateway at rest. `cpu_s`: what it has used so far."""
        loop = asyncio.get_running_loop()
        before_s, began_s = cpu_s(), loop.time()
        for _ in range(AT_REST):
            await self.scrape()
        used_s, took_s = cpu_s() - before_s, loop.time() - began_s
        before_s, began_s = cpu_s(), loop.time()
        await asyncio.sleep(took_s)
        at_rest_s = (cpu_s() - before_s) * took_s / (loop.time() - began_s)
        return max(0.0, used_s - at_rest_s) / AT_REST


@contextlib.asynccontextmanager
async def scraping(url: str) -> AsyncIterator[Scraper]:
    """A scraper that has had a page. Raises `ServerFailed`."""
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        scraper = Scraper(client)
        await scraper.scrape()
        task = asyncio.create_task(scraper.forever())
        try:
            yield scraper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
