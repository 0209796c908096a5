"""A browser without scripts, for the pages of the console: cookies, form tokens, nothing else."""

from __future__ import annotations

import re
from types import TracebackType

import httpx
from argon2 import PasswordHasher
from litestar import Litestar

TOKEN = re.compile(r'name="form_token" value="([^"]+)"')
PASSWORD = "correct horse battery staple"
HASHER = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
HASH = HASHER.hash(PASSWORD)
"""Cheap, and checked as any other: the parameters stand in the hash."""


class Browser:
    """One browser: it keeps its cookies, and follows no redirect by itself."""

    def __init__(
        self, where: str | Litestar, *, headers: dict[str, str] | None = None, address: str = "192.0.2.1"
    ) -> None:
        """`where`: the URL of a server, or an application in this process that takes `address` for the
        browser's."""
        if isinstance(where, str):
            self.http = httpx.AsyncClient(base_url=where, headers=headers, timeout=60.0)
        else:
            transport = httpx.ASGITransport(where, client=(address, 50_000))
            self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)

    async def __aenter__(self) -> Browser:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """A page."""
        return await self.http.get(path)

    async def token(self, path: str) -> str:
        """The form token on a page: the one of its last form."""
        page = await self.get(path)
        found = TOKEN.findall(page.text)
        assert found, f"{path}: {page.status_code} {page.text}"
        return str(found[-1])

    async def send(self, page: str, path: str | None = None, **fields: str) -> httpx.Response:
        """Sends a form of a page, to the page itself or to another path."""
        fields = {"form_token": await self.token(page)} | fields
        return await self.http.post(path or page.partition("?")[0], data=fields)

    async def log_in(self, name: str, password: str = PASSWORD, **fields: str) -> httpx.Response:
        """The answer to a log-in."""
        return await self.send("/console/log-in", name=name, password=password, **fields)

    async def redeem(self, token: str, password: str = PASSWORD, **fields: str) -> httpx.Response:
        """The answer to a password chosen behind a link."""
        page = f"/console/set-up?token={token}"
        return await self.send(page, token=token, password=password, repeat=password, **fields)

    @property
    def cookies(self) -> dict[str, str]:
        """Cookies by name."""
        return {cookie.name: cookie.value or "" for cookie in self.http.cookies.jar}

    def copy_to(self, other: Browser) -> None:
        """The other one gets the cookies of this one, as if it had stolen them."""
        for name, value in self.cookies.items():
            other.http.cookies.set(name, value)
