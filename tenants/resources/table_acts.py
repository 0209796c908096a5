"""Acts without code of their own: they set or remove a row of a noun's table, or answer with a record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.cursor import SortKey
from tenants.admin.table_noun import TableNoun
from tenants.nouns.columns import Record
from tenants.resources.reading import read_rows
from tenants.resources.resource import ActCall, ActDone, PageRequest, Reader

R = TypeVar("R")
Run = Callable[[Admin, ActCall], Awaitable[ActDone]]


def reading(noun: TableNoun[R], *indexes: str) -> Reader[R]:
    """In the order of the noun; `indexes`: as of `read_rows`."""

    def read(connection: Connection, request: PageRequest) -> tuple[list[R], SortKey | None]:
        return read_rows(connection, request, noun.rows, noun.order, indexes, newest_first=False)

    return read


def setting(noun: TableNoun[Any]) -> Run:
    async def run(admin: Admin, call: ActCall) -> ActDone:
        made = await noun.set(admin.transactions, call.actor, call.command, call.if_match)
        return ActDone(noun.as_json(made), noun.as_json(made))

    return run


def removing(noun: TableNoun[Any]) -> Run:
    async def run(admin: Admin, call: ActCall) -> ActDone:
        gone = await noun.remove(admin.transactions, call.actor, call.reference, call.if_match)
        return ActDone(noun.as_json(gone), None)

    return run


def answering(act: Callable[[Admin, ActCall], Awaitable[Record]]) -> Run:
    """The record that the act returns is answered, and stored so."""

    async def run(admin: Admin, call: ActCall) -> ActDone:
        record = await act(admin, call)
        return ActDone(record.as_json(), record.as_json())

    return run
