"""People of a running server, logged in with the plain browser."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.console import Browser
from tests.support.server_process import Server

_NUMBERS = itertools.count()


@asynccontextmanager
async def logged_in(server: Server, role: str = "owner", *tenants: str) -> AsyncIterator[Browser]:
    """A browser of a new person, of these tenants where the role is member."""
    number = f"{next(_NUMBERS)}-{server.url.rpartition(':')[2]}"
    body: dict[str, Any] = {"name": f"pages-{role}-{number}", "role": role}
    if tenants:
        body["tenants"] = list(tenants)
    token = server.admin("POST", "/people", body)["link"].partition("token=")[2]
    async with Browser(server.url) as browser:
        assert (await browser.redeem(token)).status_code == 303
        yield browser
