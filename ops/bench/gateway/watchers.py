"""Browsers that have the console's overview open while a gateway is measured.

They read its live stream in the benchmark's own process, which does nothing else meanwhile: the process's
time is theirs. What a browser does with an event is not part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator

import httpx

from ops.bench.common.load import admin_call
from ops.sandbox.server import LocalServer, ServerFailed, until

OVERVIEW = "/console/overview/live"
OPEN_S = 60.0
FORM_TOKEN = re.compile(r'name="form_token" value="([^"]+)"')
EVENT_END = b"\n\n"


class Watchers:
    """Open streams, and how many events each has had."""

    def __init__(self, count: int) -> None:
        self.events = [0] * count
        self.ended: str | None = None
        """Why one of them ended; None: all are open."""

    @property
    def fewest(self) -> int:
        """Events of the one that has had the fewest."""
        return min(self.events)

    async def watch(self, number: int, client: httpx.AsyncClient) -> None:
        """Reads one stream until it is cancelled."""
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
    found = Watchers(count)
    limits = httpx.Limits(max_connections=count + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=OPEN_S, limits=limits) as client:
        await _log_in(server, client)
        tasks = [asyncio.create_task(found.watch(number, client)) for number in range(count)]

        async def are_open() -> bool:
            return found.fewest > 0 or found.ended is not None

        try:
            if not await until(are_open, OPEN_S) or found.ended is not None:
                raise ServerFailed(f"an open overview has no event: {found.ended or 'none came'}")
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _log_in(server: LocalServer, client: httpx.AsyncClient) -> None:
    """The client gets the session of a new person who may read the overview."""
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
