"""A scraper of the metrics page while a gateway is measured, and what one scrape costs it.

It asks in the benchmark's own process as Prometheus does, for OpenMetrics, but more often than that would.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx

from ops.sandbox.server import ServerFailed

EVERY_S = 1.0
PATH = "/metrics"
HEADERS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
AT_REST = 50
"""Scrapes in a row whose processor time is compared with that of as long a rest."""


@dataclass
class Scraper:
    """Scrapes until it is stopped."""

    client: httpx.AsyncClient
    scrapes: int = 0
    page_bytes: int = 0
    """Of the last page."""

    async def once(self) -> None:
        """One scrape. Raises `ServerFailed`."""
        try:
            answer = await self.client.get(PATH, headers=HEADERS)
        except httpx.HTTPError as error:
            raise ServerFailed(f"the metrics page does not answer: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise ServerFailed(f"the metrics page answers {answer.status_code}")
        self.scrapes += 1
        self.page_bytes = len(answer.content)

    async def forever(self) -> None:
        """One scrape every `EVERY_S`."""
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def cost_s(self, cpu_s: Callable[[], float]) -> float:
        """Processor seconds of one scrape of a gateway at rest. `cpu_s`: what it has used so far."""
        loop = asyncio.get_running_loop()
        before_s, began_s = cpu_s(), loop.time()
        for _ in range(AT_REST):
            await self.once()
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
        await scraper.once()
        task = asyncio.create_task(scraper.forever())
        try:
            yield scraper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
