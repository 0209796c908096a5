"""A gateway's routes in this process, on a database, called without a network.

Built as `fairgate serve` builds it, with one server that is away; its tasks beside requests do not run.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
from litestar import Litestar

from ops.serving.composition import build
from ops.settings.settings import load
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.errors import AlreadyExists
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.pricing.price_row import PriceSet
from tenants.resources.all import RESOURCES
from tenants.resources.resource import Resource
from tenants.storage.database import open_database
from tenants.types import SCOPES
from tests.support import shared_routes as shared_routes  # before an application is made

PEPPER = b"a pepper for tests, 32 bytes....."
MODEL = "model-1"
OWNER = "t1"
"""The tenant of the caller's key; made where there is none."""


@asynccontextmanager
async def gateway_app(
    url: str,
    data_dir: Path,
    *,
    follows: bool = True,
    resources: tuple[Resource[Any], ...] = RESOURCES,
    **more: str,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the routes with a key with all scopes. Not `follows`: what it knows of tenants and keys
    stays as it is, and it asks the database nothing by itself. `more`: settings of the gateway."""
    async with gateway_and_app(url, data_dir, follows=follows, resources=resources, **more) as (client, _):
        yield client


@asynccontextmanager
async def gateway_and_app(
    url: str,
    data_dir: Path,
    *,
    follows: bool = True,
    resources: tuple[Resource[Any], ...] = RESOURCES,
    **more: str,
) -> AsyncIterator[tuple[httpx.AsyncClient, Litestar]]:
    """The same, and the application behind it."""
    os.makedirs(data_dir, exist_ok=True)
    server = {"name": "away", "url": "http://127.0.0.1:9/v1", "model": MODEL}
    flags = {"data_dir": str(data_dir), "database_url": url, "engine.serve": "no"}
    flags |= {f"gateway.{name}": value for name, value in more.items()}
    settings = load(flags | {"upstreams": json.dumps([server])})
    database = open_database(url)
    try:
        admin = Admin(Transactions(database, PEPPER))
        with suppress(AlreadyExists):
            await admin.tenants.create("test", TenantCreate(name=OWNER))
        await admin.prices.set("test", PriceSet(model=MODEL, free=True))
        _, secret = await admin.keys.create("test", KeyCreate(tenant=OWNER, scopes=sorted(SCOPES)))
    finally:
        await database.close()
    async with build(settings, PEPPER, resources) as running:
        if not follows:
            await running.directory.close()
        transport = httpx.ASGITransport(app=cast(Any, running.app))
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            yield client, running.app
