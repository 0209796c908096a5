"""Pages of resources: a list with filters, the same as a file, newer rows, and a form for each act."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from litestar import Response
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from gateway.console.access import form, page, visit_of
from gateway.console.csv_file import FILE_ROWS, csv_list
from gateway.console.form_errors import FORM_ERRORS, FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.filters import (
    FILTER_ERRORS,
    Filters,
    TenantScope,
    asked_of,
    filters_of,
    known_values,
    tenant_scope,
)
from gateway.console.pages.new_rows import MOST_NEW, NEW, new_rows, newer_than
from gateway.console.pages.page_parts import PageParts
from gateway.console.pages.periods import period_links
from gateway.console.pages.tenant_parts.acts import done, if_match, said, tag_of
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from gateway.routes.resource_routes import given_in
from gateway.routes.views.resource_rows import json_of
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.errors import PreconditionFailed
from tenants.fields import as_typed, command_of, fields_of
from tenants.instants import to_us
from tenants.resources import query as declared
from tenants.resources.query import Kind
from tenants.resources.reading import query_of, read_one, read_page
from tenants.resources.resource import ActCall, Resource, ResourceAct
from tenants.resources.shown import Form, Json

SHOWN = 50


def handlers(resources: Iterable[Resource[Any]], parts: Mapping[str, PageParts]) -> list[HTTPRouteHandler]:
    """`parts`: by a resource's plural."""
    made: list[HTTPRouteHandler] = []
    for resource in resources:
        if resource.has_page:
            made += ResourcePages(resource, parts.get(resource.plural, PageParts())).handlers()
            made += forms(resource)
    return made


def forms(resource: Resource[Any]) -> list[HTTPRouteHandler]:
    """Of its acts, also where its list is a page of its own making."""
    return [handler for act in resource.acts for handler in ActPages(resource, act).handlers()]


def links_of(resource: Resource[Any], acts: Iterable[ResourceAct], row: Json) -> list[tuple[str, str]]:
    """From a row as shown to the forms that change it: text and address."""
    links = []
    for act in acts:
        if act.is_on_one:
            reference = quote(str(row["id"]), safe="")
            links.append((act.button, f"{resource.page_path}/{reference}/{act.verb}"))
        elif act.changes_rows and act.command is not None:
            filled = {one.name: as_typed(one, row.get(one.name)) for one in fields_of(act.command)}
            links.append(("Change", with_query(f"{resource.page_path}/{act.verb}", filled)))
    return links


@dataclass(frozen=True)
class ResourcePages:
    resource: Resource[Any]
    parts: PageParts

    def handlers(self) -> list[HTTPRouteHandler]:
        path, act = self.resource.page_path, self.resource.act
        file = f"{path}.csv"

        @page(path, act=act)
        async def listed(request: Request) -> Response[str]:
            filters, scope = await self._asked(request)
            try:
                rows = await self._read(request, filters, scope, filters.cursor, SHOWN)
                summary = await self.parts.summary(admin_of(request), filters, scope)
            except FILTER_ERRORS as error:
                return await self._response(request, filters, scope, filters.problem(error))
            return await self._response(request, filters, scope, None, rows, summary)

        @page(f"{path}/{NEW}", act=act)
        async def newer(request: Request) -> Response[str]:
            filters, scope = await self._asked(request)
            return new_rows(await self._read(request, filters, scope, None, MOST_NEW))

        @page(file, act=act)
        async def as_file(request: Request) -> Response[str]:
            filters, scope = await self._asked(request)

            async def read(cursor: str | None) -> Page[dict[str, object]]:
                rows = await self._read(request, filters, scope, cursor, MAX_PAGE)
                return Page(await self._shown(request, rows), rows.next_cursor)

            try:
                return await csv_list(
                    path.rpartition("/")[2],
                    self.resource.file,
                    read,
                    filters.cursor,
                    lambda cursor: filters.link(file, cursor=cursor),
                )
            except FILTER_ERRORS as error:
                return await self._response(request, filters, scope, filters.problem(error))

        return [listed, *([newer] if self._has_times else []), *([as_file] if self.resource.file else [])]

    @property
    def _has_times(self) -> bool:
        return any(one.filter.kind is Kind.SINCE for one in declared.filters_of(self.resource.query))

    async def _asked(self, request: Request) -> tuple[Filters, TenantScope]:
        known = declared.filters_of(self.resource.query)
        filters = filters_of(request, self.resource.page_path, [one.page_name for one in known])
        if not any(one.filter.kind is Kind.TENANT for one in known):
            return filters, TenantScope(None, "", ())
        return filters, await tenant_scope(request, filters.get("tenant"))

    async def _read(
        self, request: Request, filters: Filters, scope: TenantScope, cursor: str | None, limit: int
    ) -> Page[Any]:
        typed = {name: value for name, value in filters.values.items() if value}
        given: dict[str, Any] = given_in(typed, self.resource.query)
        for one in declared.filters_of(self.resource.query):
            if one.filter.kind in (Kind.SINCE, Kind.UNTIL):
                given[one.field] = filters.instant(one.page_name)
            elif one.filter.kind is Kind.TENANT:
                given[one.field] = scope.wanted
        # A member's tenant is not a filter where the tenant has a view of its own.
        of_tenant = scope.of_tenant if self.resource.own is not None else None
        if of_tenant is not None:
            given.pop("tenant")
        query = query_of(self.resource.query, given)
        return await read_page(
            admin_of(request), self.resource, query, cursor=cursor, limit=limit, of_tenant=of_tenant
        )

    async def _shown(self, request: Request, rows: Page[Any]) -> list[Json]:
        shown = [self.parts.row(row, json_of(self.resource, row)) for row in rows.rows]
        return await admin_of(request).with_names(shown)

    async def _response(
        self,
        request: Request,
        filters: Filters,
        scope: TenantScope,
        problem: FormProblem | None,
        page: Page[Any] | None = None,
        summary: Json | None = None,
    ) -> Response[str]:
        resource, path, newer = self.resource, self.resource.page_path, ""
        rows = [] if page is None else await self._shown(request, page)
        if page is not None and self._has_times:
            newest_us = _at_us(resource, rows[0]) if rows else None
            newer = newer_than(path, filters.values, newest_us, is_first=filters.cursor is None)
        visit, has_times = visit_of(request), self._has_times
        acts = [act for act in resource.acts if visit.person.may_somewhere(act.act)]
        return page_response(
            self.parts.template,
            visit,
            problem=problem,
            resource=resource,
            known=declared.filters_of(resource.query),
            rows=rows,
            filters=filters,
            has_times=has_times,
            period_links=period_links(filters, gateway_of(request).deps.wall_clock()) if has_times else [],
            known_values=await known_values(request, scope),
            scope=scope,
            newer=newer,
            next_page=filters.link(cursor=page.next_cursor) if page and page.next_cursor else "",
            file=filters.link(f"{path}.csv") if resource.file else "",
            file_rows=FILE_ROWS,
            acts=[act for act in acts if not act.is_on_one],
            row_links=[links_of(resource, acts, row) for row in rows],
            done=said(
                request, {act.verb: act.done or f"Done: {act.summary.lower()}." for act in resource.acts}
            ),
            **self.parts.words | (summary or {}),
        )


def _at_us(resource: Resource[Any], row: Json) -> int:
    """Of a row as shown: its first instant."""
    at = row[next(part.name for part in resource.shown if part.form is Form.INSTANT)]
    return at if isinstance(at, int) else to_us(datetime.fromisoformat(at))


@dataclass(frozen=True)
class ActPages:
    """The form of an act, or its confirmation. The second of two changes at once gets 412."""

    resource: Resource[Any]
    act: ResourceAct

    def handlers(self) -> list[HTTPRouteHandler]:
        path, may = f"{self.resource.page_path}/{self.act.verb}", self.act.act
        if not self.act.is_on_one:

            @page(path, act=may)
            async def asking(request: Request) -> Response[str]:
                names = () if self.act.command is None else fields_of(self.act.command)
                return await self._response(request, "", asked_of(request, *(one.name for one in names)))

            @form(path, act=may)
            async def acting(request: Request) -> Response[str]:
                return await self._done(request, "")

            return [asking, acting]
        path = f"{self.resource.page_path}/{{reference:str}}/{self.act.verb}"

        @page(path, act=may)
        async def asking_of_one(request: Request, reference: FromPath[str]) -> Response[str]:
            stored = await self._stored(request, reference)
            return await self._response(request, reference, {}, stored=stored)

        @form(path, act=may)
        async def acting_on_one(request: Request, reference: FromPath[str]) -> Response[str]:
            return await self._done(request, reference)

        return [asking_of_one, acting_on_one]

    async def _stored(self, request: Request, reference: str) -> Json:
        return self.resource.stored_of(await read_one(admin_of(request), self.resource, reference))

    async def _done(self, request: Request, reference: str) -> Response[str]:
        visit = visit_of(request)
        names = [] if self.act.command is None else [one.name for one in fields_of(self.act.command)]
        typed = typed_fields(visit.form, *names)
        condition = if_match(visit.form) if reference else None
        try:
            command = None if self.act.command is None else command_of(self.act.command, typed)
            await self.act.run(admin_of(request), ActCall(visit.actor, reference, command, condition))
        except FORM_ERRORS as error:
            problem = problem_of(error, fields=tuple(names))
            # After a conflict the form refers to the new state: submitted again it overwrites that.
            tag = "" if isinstance(error, PreconditionFailed) else visit.form.get("etag", "")
            stored = await self._stored(request, reference) if reference else None
            return await self._response(request, reference, typed, problem, stored, tag)
        return await done(request, self.resource.page_path, self.act.verb)

    async def _response(
        self,
        request: Request,
        reference: str,
        typed: Mapping[str, str],
        problem: FormProblem | None = None,
        stored: Json | None = None,
        tag: str = "",
    ) -> Response[str]:
        known = () if self.act.command is None else fields_of(self.act.command)
        filled = {one.name: as_typed(one, (stored or {}).get(one.name, one.default)) for one in known}
        return page_response(
            "resource_act.html",
            visit_of(request),
            problem=problem,
            resource=self.resource,
            act=self.act,
            reference=reference,
            known=known,
            typed=filled
            | (dict(typed) if problem is not None else {name: text for name, text in typed.items() if text}),
            stored=stored if problem is not None and problem.status == 412 else None,
            tag=tag or (tag_of(stored) if stored else ""),
        )
