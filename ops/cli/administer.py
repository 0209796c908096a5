"""Runs one admin act straight on the database.

A server need not run. After a change it waits until every running gateway serves by it.
"""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ops.cli.base import LATE_KEY, Failure, nearest, settings_now
from tenants.admin.audit import Actor

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from tenants.admin.admin import Admin

T = TypeVar("T")


def actor() -> Actor:
    try:
        return Actor(f"cli:{getpass.getuser()}"[:128], "cli")
    except (KeyError, OSError):  # no name for this user id
        return Actor("cli", "cli")


def administer(act: Callable[[Admin], Awaitable[T]]) -> T:
    """Runs one admin act; an error becomes one line on stderr and exit code 1. After a change it waits for
    every running gateway; `answer` names those that have not confirmed it."""
    from ops.serving import datadir
    from ops.settings.administration import open_admin
    from tenants.directory import queries
    from tenants.directory.gateways import GatewayRegistry
    from tenants.errors import NotFound, TenancyError
    from tenants.storage.database import open_database

    settings = settings_now()
    server = datadir.running_server(settings.data_dir)  # the console answers where the admin API does

    async def run() -> T:
        database = open_database(settings.resolved_database_url)
        try:
            console_url = server.url_of_admin if server else ""
            admin = open_admin(settings, pepper, database, console_url)
            if await admin.keys.is_own_pepper():  # else only acts that make no key go on
                datadir.keep_pepper(settings, pepper)
            before = await database.read(queries.revision)
            try:
                done = await act(admin)
            except NotFound as error:
                near = nearest(error.reference, await database.read(partial(_names, error.what)))
                raise Failure(f"{error}.{near}" if near else str(error)) from None
            if await database.read(queries.revision) != before:
                late = await GatewayRegistry(database).not_serving(settings.gateway.gateway_stale_s)
                click.get_current_context().meta[LATE_KEY] = [gateway.gateway_id for gateway in late]
            return done
        finally:
            await database.close()

    if not settings.database_url and not (settings.data_dir / "fairgate.db").exists():
        raise Failure(
            f"no database in {settings.data_dir}: run `fairgate serve` once, or `fairgate db upgrade`, "
            "or name the right --data-dir"
        )
    try:
        pepper = datadir.pepper(settings)
        return asyncio.run(run())
    except (TenancyError, datadir.DataDirRefused) as error:
        raise Failure(str(error)) from None


def _names(what: str, connection: Connection) -> list[str]:
    """Of things of this kind."""
    from sqlalchemy import select

    from tenants.storage.tables import api_keys, people, prices, projects, tenants

    columns = {
        "tenant": tenants.c.name,
        "project": projects.c.name,
        "key": api_keys.c.name,
        "person": people.c.name,
        "price": prices.c.model,
    }
    if what not in columns:
        return []
    return [name for name in connection.scalars(select(columns[what]).distinct()) if name]


def named_list(
    act: Callable[[Admin], Awaitable[Sequence[T]]], as_json: Callable[[T], Mapping[str, Any]]
) -> tuple[Sequence[T], list[dict[str, Any]]]:
    """The rows of an act, and the same for `--json`, with names beside ids."""

    async def both(admin: Admin) -> tuple[Sequence[T], list[dict[str, Any]]]:
        rows = await act(admin)
        return rows, await admin.with_names(as_json(row) for row in rows)

    return administer(both)


def named_one(
    act: Callable[[Admin], Awaitable[T]], as_json: Callable[[T], Mapping[str, Any]]
) -> tuple[T, dict[str, Any]]:
    async def listed(admin: Admin) -> list[T]:
        return [await act(admin)]

    [found], [shown] = named_list(listed, as_json)
    return found, shown
