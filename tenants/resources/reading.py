"""Reads a page of a resource: filters become conditions, and the cursor goes on where the last page ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection
from sqlalchemy.sql import ColumnElement

from tenants.admin.admin import Admin
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    MAX_PAGE,
    Number,
    Page,
    SortKey,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.lists.scans import between, end_of_scan
from tenants.directory import queries
from tenants.errors import Invalid
from tenants.instants import to_us
from tenants.nouns import checks
from tenants.resources.query import Kind, ListQuery, NamedFilter, filters_of
from tenants.resources.resource import PageRequest, Resource

R = TypeVar("R")
Q = TypeVar("Q", bound=ListQuery)
Conditions = dict[str, ColumnElement[bool]]
TIMES = {"since": "from", "until": "to"}
"""Names of the fields of time, as addresses and options have them."""
BOUNDED: dict[type, Any] = {int: Number, str: Text}
"""Of a cursor's values."""


async def read_page(
    admin: Admin,
    resource: Resource[R],
    query: ListQuery,
    *,
    cursor: str | None = None,
    limit: int = DEFAULT_PAGE,
    of_tenant: str | None = None,
    only: frozenset[str] | None = None,
) -> Page[R]:
    """`of_tenant`: the rows of the tenant with this id, as it may see them; `only`: of these tenants (ids). A
    page may be shorter than `limit` before the list ends.
    Raises `Invalid`, `NotFound`, `DatabaseUnavailable`."""
    filters, most = msgspec.to_builtins(query), checked_limit(limit)
    check_filters(query)
    name = resource.plural if of_tenant is None else f"{resource.plural} of {of_tenant}"
    key: Any = tuple[tuple(BOUNDED[one] for one in resource.key_types(query))]  # type: ignore[misc]
    after = None if cursor is None else decode_cursor(name, filters, cursor, key)
    request = PageRequest(query, after, most + 1, of_tenant, admin.transactions.now_us(), only)
    rows, end = await admin.transactions.read(lambda connection: resource.read(connection, request))
    page = page_of(rows, most, name, filters, resource.sort_key, scanned_to=end)
    if of_tenant is None or resource.own is None:
        return page
    return Page([resource.own.shown(row) for row in page.rows], page.next_cursor)


async def read_all(admin: Admin, resource: Resource[R], query: ListQuery) -> list[R]:
    """The rows of all pages."""
    rows, cursor = [], None
    while True:
        page = await read_page(admin, resource, query, cursor=cursor, limit=MAX_PAGE)
        rows += page.rows
        cursor = page.next_cursor
        if cursor is None:
            return rows


async def read_one(admin: Admin, resource: Resource[R], reference: str, tenant: str | None = None) -> R:
    """By id or name; `tenant`: whose it is, where it is named in its tenant. Raises `Invalid`, `NotFound`."""
    find = resource.find
    assert find is not None
    transactions = admin.transactions
    return await transactions.read(
        lambda connection: find(connection, reference, tenant, transactions.now_us())
    )


def query_of(query: type[Q], given: dict[str, Any]) -> Q:
    """The query from fields as given in words; None is left out. Raises `Invalid` for a flag that is none."""
    values: dict[str, Any] = {}
    for one in filters_of(query):
        value = given.get(one.field)
        if value is None or value == one.default:  # which is no part of a cursor
            continue
        values[one.field] = _flag(one, value) if one.filter.kind is Kind.FLAG else value
    return query(**values)


def _flag(one: NamedFilter, value: Any) -> bool:
    words = {"true": True, "false": False, True: True, False: False}
    if value not in words:
        raise Invalid(one.name, f"{str(value)[:40]!r} is not one of true, false")
    return words[value]


def check_filters(query: ListQuery) -> None:
    """Raises `Invalid`."""
    for one in filters_of(type(query)):
        _check(one, getattr(query, one.field))


def _check(one: NamedFilter, value: Any) -> None:
    """Raises `Invalid` for a value that the filter cannot have."""
    if value == one.default:
        return
    if one.filter.kind is Kind.CHOICE and value not in one.filter.choices:
        raise Invalid(one.name, f"{value[:40]!r} is not one of {', '.join(one.filter.choices)}")
    if one.filter.kind is Kind.WORDS:
        for word in filter(None, map(str.strip, value.split(","))):
            if word not in one.filter.choices:
                raise Invalid(one.name, f"{word[:40]!r} is not one of {', '.join(one.filter.choices)}")
    if one.filter.kind in (Kind.TEXT, Kind.TENANT, Kind.PROJECT, Kind.KEY, Kind.REQUEST):
        checks.plain_text(one.name, value, one.filter.most)


def conditions_of(connection: Connection, request: PageRequest) -> Conditions:
    """What the filters that have a column ask for, by field, but for the time; with `of_tenant` also that
    tenant's. Raises `Invalid`, `NotFound`."""
    filters = filters_of(request.query.__class__)
    of_tenant = next((one.field for one in filters if one.filter.kind is Kind.TENANT), None)
    whose = request.of_tenant or (of_tenant and getattr(request.query, of_tenant))
    tenant = None if whose is None else queries.find_tenant(connection, whose)
    conditions: Conditions = {}
    for one in filters:
        column, value = one.filter.column, getattr(request.query, one.field)
        if one.filter.kind is Kind.TENANT:
            value = whose
        if value is None or column is None or one.filter.kind in (Kind.SINCE, Kind.UNTIL):
            continue
        match one.filter.kind:
            case Kind.TENANT:
                assert tenant is not None
                value = tenant.tenant_id
            case Kind.PROJECT:
                value = queries.find_project(connection, value, tenant).project_id
            case Kind.KEY:
                value = queries.find_key(connection, value, tenant.tenant_id if tenant else None).key_id
            case _:
                pass
        conditions[one.field] = column == value
    return conditions


def times_of(query: ListQuery, column: ColumnElement[int] | None = None) -> list[ColumnElement[bool]]:
    """Conditions of the filters of time, on another column if one is given. Raises `Invalid`."""
    bounds = {one.filter.kind: one for one in filters_of(type(query)) if one.filter.kind in _TIMES}
    if not bounds:
        return []
    since, until = bounds[Kind.SINCE], bounds[Kind.UNTIL]
    compared: Any = since.filter.column if column is None else column
    return between(compared, getattr(query, since.field), getattr(query, until.field))


_TIMES = (Kind.SINCE, Kind.UNTIL)


def span_of(request: PageRequest, usual_us: int, longest_us: int) -> tuple[int, int]:
    """The first microsecond of the query's time and the one after the last. `usual_us`: how long it is where
    `since` is not given. Raises `Invalid`."""
    since, until = request.query.since, request.query.until
    until_us = request.now_us + 1 if until is None else to_us(checks.instant("to", until))
    since_us = until_us - usual_us if since is None else to_us(checks.instant("from", since))
    if since_us >= until_us:
        raise Invalid("from", "must be before 'to'")
    if until_us - since_us > longest_us + 1:
        hours = longest_us // 3_600_000_000
        most = f"{hours} hours" if hours <= 24 else f"{hours // 24} days"
        raise Invalid("from", f"lies more than {most} before 'to': ask for less at a time")
    return since_us, until_us


def read_rows(
    connection: Connection,
    request: PageRequest,
    rows: Callable[[Connection, Sequence[ColumnElement[bool]], int], list[R]],
    order: Sequence[ColumnElement[Any]],
    indexes: Sequence[str] = (),
    *,
    newest_first: bool = True,
    more: Sequence[ColumnElement[bool]] = (),
) -> tuple[list[R], SortKey | None]:
    """A page along an index, of a bounded number of rows. `rows`: reads those that meet all conditions, in
    `order`, up to the most that are wanted. `indexes`: fields of the query that an index serves together
    with the order, the most selective first: the first one given is read along, with the time; the others,
    and `more`, are checked row by row.
    Raises `Invalid`, `NotFound`."""
    named = conditions_of(connection, request)
    first = next((field for field in indexes if field in named), None)
    along = [] if first is None else [named.pop(first)]
    along += times_of(request.query)
    rest, end = [*named.values(), *more], None
    if request.after is not None:
        along.append(beyond(order, request.after, newest_first=newest_first))
    if rest:
        end = end_of_scan(connection, order, along, newest_first=newest_first)
    if end is not None:
        along.append(~beyond(order, end, newest_first=newest_first))
    return rows(connection, [*along, *rest], request.most), end
