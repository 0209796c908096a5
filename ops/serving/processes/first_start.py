"""What a server does once it is up: keeps its pepper, makes owner key and set-up link, says where it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ops.serving import datadir
from ops.serving.listeners import Door
from ops.settings.settings import Settings
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.errors import AlreadyExists
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.people.person import link_path
from tenants.types import SCOPES, Tier

FIRST_START = Actor("system", "first start")
OWNER = "owner"
"""Tenant of the admin key that the first start makes."""


@dataclass(frozen=True)
class Started:
    url: str
    docs_url: str
    model: str
    data_dir: Path
    owner_key: str | None
    """The admin key, at the first start only."""
    admin_url: str | None = None
    """Of the admin listener; None: there is none."""
    console_url: str = ""
    set_up_link: str | None = None
    """Makes the first owner of the console, as long as there is none."""
    workers: int = 1


Announce = Callable[[Started], None]


@contextlib.asynccontextmanager
async def announced(
    settings: Settings,
    pepper: bytes,
    control_token: str,
    admin: Admin,
    door: Door,
    in_force: Callable[[], Awaitable[object]],
    announce: Announce,
) -> AsyncIterator[None]:
    """The server serves, and others may find it. `in_force`: waits until it serves by what was written."""
    # Only once everything works: a refused start leaves no new pepper, and the key is shown once.
    datadir.keep_pepper(settings, pepper)
    owner_key = await _owner_key(admin)
    set_up_token = await admin.people.make_set_up_link(FIRST_START)
    await in_force()
    # The console answers where the admin API does.
    console_url = settings.gateway.console_url or door.admin_url or door.url
    started = Started(
        door.url,
        f"{door.url}/docs",
        settings.served_model_name,
        settings.data_dir,
        owner_key,
        door.admin_url,
        f"{console_url}/console",
        None if set_up_token is None else console_url + link_path(set_up_token),
        settings.workers,
    )
    server_file = datadir.ServerFile(door.url, os.getpid(), control_token, door.admin_url or "")
    try:
        datadir.write_server_file(settings.data_dir, server_file)
        announce(started)
        yield
    finally:
        datadir.remove_server_file(settings.data_dir)


async def _owner_key(admin: Admin) -> str | None:
    """Makes the owner's tenant and admin key at the first start; None at later ones."""
    if any(tenant.name == OWNER for tenant in await admin.tenants.all()):
        return None
    try:
        await admin.tenants.create(
            FIRST_START, TenantCreate(name=OWNER, tier=Tier.STANDARD, tiers=list(Tier))
        )
    except AlreadyExists:
        return None  # another gateway starts for the first time, too
    wanted = KeyCreate(tenant=OWNER, scopes=list(SCOPES), name="owner")
    _, secret = await admin.keys.create(FIRST_START, wanted)
    return secret
