"""A page of records, newest first, with filters and the same list as a file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from litestar import Response
from litestar.handlers import HTTPRouteHandler

from gateway.console.access import page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FormProblem
from gateway.console.pages.filters import (
    FILTER_ERRORS,
    Filters,
    TenantScope,
    filters_of,
    tenant_scope,
)
from gateway.console.pages.new_rows import MOST_NEW, NEW, new_rows, newer_than
from gateway.console.rendering import page_response
from gateway.http.asgi import Request
from gateway.routes.context import admin_of
from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.people.roles import Act
from tenants.types import Tier

R = TypeVar("R")
Record = dict[str, Any]
SHOWN = 50


async def nothing(admin: Admin, filters: Filters, scope: TenantScope) -> Record:
    return {}


@dataclass(frozen=True)
class RecordList(Generic[R]):
    path: str
    template: str
    file_name: str
    filter_names: tuple[str, ...]
    columns: tuple[str, ...]
    """Of the file."""
    read: Callable[[Admin, Filters, TenantScope, str | None, int], Awaitable[Page[R]]]
    """A page of at most so many rows after a cursor. Raises `Invalid`, `NotFound`."""
    at_us: Callable[[R], int]
    row_of: Callable[[R], Record]
    file_row_of: Callable[[R], Record]
    choices: Record = field(default_factory=dict)
    """Further values for the template."""
    summary: Callable[[Admin, Filters, TenantScope], Awaitable[Record]] = nothing
    """Figures beside the list. Raises as `read`."""

    def handlers(self) -> list[HTTPRouteHandler]:
        file = f"{self.path}.csv"

        @page(self.path, act=Act.READ_TENANT)
        async def listed(request: Request) -> Response[str]:
            admin = admin_of(request)
            filters, scope = await self._asked(request)
            try:
                records = await self.read(admin, filters, scope, filters.cursor, SHOWN)
                summary = await self.summary(admin, filters, scope)
            except FILTER_ERRORS as error:
                return await self._response(request, filters, scope, filters.problem(error))
            return await self._response(request, filters, scope, None, records, summary)

        @page(f"{self.path}/{NEW}", act=Act.READ_TENANT)
        async def newer(request: Request) -> Response[str]:
            filters, scope = await self._asked(request)
            return new_rows(await self.read(admin_of(request), filters, scope, None, MOST_NEW))

        @page(file, act=Act.READ_TENANT)
        async def as_file(request: Request) -> Response[str]:
            admin = admin_of(request)
            filters, scope = await self._asked(request)

            async def read(cursor: str | None) -> Page[dict[str, object]]:
                records = await self.read(admin, filters, scope, cursor, MAX_PAGE)
                return Page(await admin.with_names(map(self.file_row_of, records.rows)), records.next_cursor)

            try:
                return await csv_list(
                    self.file_name,
                    self.columns,
                    read,
                    filters.cursor,
                    lambda cursor: filters.link(file, cursor=cursor),
                )
            except FILTER_ERRORS as error:
                return await self._response(request, filters, scope, filters.problem(error))

        return [listed, newer, as_file]

    async def _asked(self, request: Request) -> tuple[Filters, TenantScope]:
        filters = filters_of(request, self.path, self.filter_names)
        return filters, await tenant_scope(request, filters.get("tenant"))

    async def _response(
        self,
        request: Request,
        filters: Filters,
        scope: TenantScope,
        problem: FormProblem | None,
        records: Page[R] | None = None,
        summary: Record | None = None,
    ) -> Response[str]:
        rows = records.rows if records else []
        newest_us, is_first = next(map(self.at_us, rows), None), filters.cursor is None
        return page_response(
            self.template,
            visit_of(request),
            problem=problem,
            rows=await admin_of(request).with_names(map(self.row_of, rows)),
            filters=filters,
            scope=scope,
            newer=newer_than(self.path, filters.values, newest_us, is_first=is_first) if records else "",
            next_page=filters.link(cursor=records.next_cursor) if records and records.next_cursor else "",
            file=filters.link(f"{self.path}.csv"),
            file_rows=FILE_ROWS,
            tiers=list(Tier),
            **self.choices | (summary or {}),
        )
