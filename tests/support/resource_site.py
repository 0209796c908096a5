"""A gateway in this process on a database with rows in every list, and those who ask it."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
from litestar import Litestar
from sqlalchemy import Engine, select, text

from tenants.instants import from_us
from tenants.storage import tables
from tenants.storage.database import create_sql_engine
from tests.support.console import Browser
from tests.support.every_list import fill_counts
from tests.support.gateway_app import gateway_and_app
from tests.support.many_requests import BEYOND_LOG, SPAN_US, Sizes, fill, fold_all
from tests.support.resource_table import ALL, DAILY

KEYS = {"reader": "admin:read", "writer": "admin:write", "own": "usage:read", "runner": "inference"}
"""Callers, and the one scope that each has; `own of t2`: the key of that tenant."""
PEOPLE = {**{role: (role, "t1") for role in ALL}, "stranger": ("member", "t2"), "leaver": ("owner", "")}
"""Roles, and the tenant of members."""


@dataclass
class ResourceSite:
    """The gateway, and its database."""

    client: httpx.AsyncClient
    engine: Engine
    then: str
    """The middle of the time in which the requests of the database ended."""
    keys: dict[str, str] = field(default_factory=dict)
    people: dict[str, Browser] = field(default_factory=dict)

    async def call(
        self, call: str, body: object = None, caller: str = "", if_match: str = ""
    ) -> httpx.Response:
        """A method and a path below `/admin/v1`, or below `/v1`; without a caller, of one with all scopes."""
        method, _, path = call.partition(" ")
        headers = {"authorization": f"Bearer {self.keys[caller]}"} if caller else {}
        headers |= {"if-match": if_match} if if_match else {}
        where = path if path.startswith("/v1") else f"/admin/v1{path}"
        return await self.client.request(method, where, json=body, headers=headers)

    async def ask(self, path: str, caller: str = "", /, **more: object) -> httpx.Response:
        """A list, with these parameters beside those of the path."""
        return await self.call(f"GET {with_query(path, **more)}", None, caller)

    async def page(
        self, path: str, caller: str = "", /, **more: object
    ) -> tuple[list[dict[str, Any]], str | None]:
        """The rows of a list, and its next cursor."""
        answer = await self.ask(path, caller, **more)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        rows = [{name: value for name, value in row.items() if name != "usage"} for row in content["data"]]
        return rows, content.get("next_cursor")  # what is used of a limit changes with the time

    async def rows(self, path: str, caller: str = "", /, **more: object) -> list[dict[str, Any]]:
        """The rows of a list, as many as an answer can have."""
        return (await self.page(path, caller, limit=1_000, **more))[0]

    def acts(self) -> list[tuple[str, str]]:
        """Act and actor of each row of the audit that is in the log, the oldest first."""
        query = select(tables.audit).where(tables.audit.c.seq < BEYOND_LOG).order_by(tables.audit.c.seq)
        with self.engine.connect() as connection:
            return [(row.action, row.actor) for row in connection.execute(query)]

    def execute(self, statement: str, **values: object) -> list[Any]:
        """Rows, or none of a change, which is committed."""
        with self.engine.begin() as connection:
            done = connection.execute(text(statement), values)
            return list(done.scalars()) if done.returns_rows else []


def with_query(path: str, **more: object) -> str:
    query = "&".join(f"{name}={quote(str(value))}" for name, value in more.items())
    return f"{path}{'&' if '?' in path else '?'}{query}"


def tenants_in(shown: str) -> set[str]:
    """The tenants whose ids, or whose objects' ids, are in a text."""
    numbers = {int(number) for number in re.findall(r"\b(?:ten|prj)_([123])\b", shown)}
    numbers |= {(int(number) - 1) % 3 + 1 for number in re.findall(r"\b(?:key|lim)_([1234])\b", shown)}
    return {f"t{number}" for number in numbers}


@asynccontextmanager
async def resource_site(template: Path, directory: Path, requests: int) -> AsyncIterator[ResourceSite]:
    """On a copy of a migrated database."""
    url, now_us = (
        f"sqlite:///{shutil.copyfile(template, directory / 'fairgate.db')}",
        round(time.time() * 1e6),
    )
    engine = create_sql_engine(url, writing=True)
    with engine.begin() as connection:
        fill(connection, Sizes(requests=requests, tenants=3, keys=4, rare=7), now_us)
        fill_counts(connection, now_us)
    fold_all(engine)
    async with gateway_and_app(url, directory / "data", webhook_private="yes") as (client, app):
        made = ResourceSite(client, engine, from_us(now_us - SPAN_US // 2).isoformat())
        for tenant, (name, scope) in itertools.product(("t1", "t2"), KEYS.items()):
            answer = await made.call("POST /keys", {"tenant": tenant, "scopes": [scope]})
            made.keys[f"{name} of {tenant}"] = answer.json()["key"]
        for tenant in ("t1", "t2"):
            assert (await made.call("POST /limits", {"tenant": tenant} | DAILY)).is_success
        price = {"model": "model-1", "input_nanousd": 1, "output_nanousd": 2}
        assert (await made.call("POST /prices", price)).is_success
        for name, (role, tenant) in PEOPLE.items():
            body = {"name": name, "role": role} | ({"tenants": [tenant]} if role == "member" else {})
            link = (await made.call("POST /people", body)).json()["link"]
            made.people[name] = Browser(cast(Litestar, app))
            assert (await made.people[name].redeem(link.partition("token=")[2])).status_code == 303
        yield made
        for browser in made.people.values():
            await browser.http.aclose()
    engine.dispose()
