"""Routes of resources: list, one, its tenant's own list, and acts, each from the resource's declaration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.handlers import delete as delete_route
from litestar.handlers import patch as patch_route
from litestar.handlers import post as post_route
from litestar.handlers import put as put_route
from litestar.params import FromPath

from gateway import errors
from gateway.domain.ids import request_id_of
from gateway.http.asgi import Request
from gateway.http.authentication import principal_of
from gateway.routes.admin.common import CHANGE, actor, changed, if_match, named, paged, tagged
from gateway.routes.context import admin_of, asked, asked_or_not, gateway_of, json_response
from gateway.routes.views.resource_rows import json_of, json_of_page
from tenants.admin.cursor import DEFAULT_PAGE, Page
from tenants.resources.query import Kind, ListQuery, filters_of
from tenants.resources.reading import query_of, read_one, read_page
from tenants.resources.resource import ActCall, Resource, ResourceAct

_METHODS = {"POST": post_route, "PATCH": patch_route, "DELETE": delete_route, "PUT": put_route}
PAGE_PARAMETERS = ("cursor", "limit")
Q = TypeVar("Q", bound=ListQuery)


def handlers(resources: Iterable[Resource[Any]]) -> list[HTTPRouteHandler]:
    made: list[HTTPRouteHandler] = []
    for resource in resources:
        made.append(_list(resource))
        if resource.own is not None:
            made.append(_own_list(resource))
        if resource.find is not None:
            made.append(_one(resource))
        made += [_act(resource, act) for act in resource.acts]
    return made


def given_in(values: Mapping[str, str], query: type[ListQuery]) -> dict[str, str]:
    """The fields of a query from the parameters of an address."""
    return {
        one.field: request_id_of(values[one.name]) if one.filter.kind is Kind.REQUEST else values[one.name]
        for one in filters_of(query)
        if one.name in values
    }


def query_in(request: Request, query: type[Q], *, is_own: bool = False, is_whole: bool = False) -> Q:
    """The query that the address asks; `is_own`: by a tenant, of itself; `is_whole`: without pages. Raises
    `ApiError`, `Invalid`."""
    values: dict[str, str] = dict(request.query_params.items())
    filters = filters_of(query)
    known = [one.name for one in filters if not (is_own and one.filter.kind is Kind.TENANT)]
    known += [] if is_whole else PAGE_PARAMETERS
    for name in values:
        if name not in known:
            raise errors.bad_request(
                f"Unknown parameter: '{name[:64]}'. Known parameters: {', '.join(known)}.",
                name[:64],
                code="unknown_parameter",
            )
    given: dict[str, Any] = given_in(values, query)
    for one in filters:
        if one.filter.kind is Kind.SEVERAL:
            given[one.field] = tuple(request.query_params.getall(one.name, []))
    return query_of(query, given)


def cursor_and_limit(request: Request) -> tuple[str | None, int]:
    """Raises `ApiError`."""
    text = request.query_params.get("limit", str(DEFAULT_PAGE))
    try:
        limit = int(text)
    except ValueError:
        raise errors.bad_request(f"Invalid 'limit': '{text[:64]}' is not a whole number.", "limit") from None
    return request.query_params.get("cursor"), limit


async def _listed(request: Request, resource: Resource[Any], of_tenant: str | None = None) -> Response[bytes]:
    query = query_in(request, resource.query, is_own=of_tenant is not None)
    cursor, limit = cursor_and_limit(request)
    page = await read_page(
        admin_of(request), resource, query, cursor=cursor, limit=limit, of_tenant=of_tenant
    )
    shown = await json_of_page(gateway_of(request), resource, query, page.rows)
    answer = await paged(request, Page(shown, page.next_cursor), dict)
    is_whole = cursor is None and page.next_cursor is None
    stored = resource.stored_list(query, page.rows) if is_whole and resource.stored_list is not None else None
    return answer if stored is None else tagged(answer, stored)


def _list(resource: Resource[Any]) -> HTTPRouteHandler:
    async def listed(request: Request) -> Response[bytes]:
        return await _listed(request, resource)

    listed.__name__ = f"list_{resource.plural}"
    return get(
        resource.path,
        opt={"scope": resource.scope, "query": resource.query},
        summary=resource.summary,
        description=resource.description or None,
    )(listed)


def _own_list(resource: Resource[Any]) -> HTTPRouteHandler:
    own = resource.own
    assert own is not None

    async def listed(request: Request) -> Response[bytes]:
        return await _listed(request, resource, principal_of(request).tenant_id)

    listed.__name__ = f"list_own_{resource.plural}"
    return get(
        own.path,
        opt={"scope": own.scope, "query": resource.query, "is_own": True},
        summary=own.summary,
        description=own.description or None,
    )(listed)


def _one(resource: Resource[Any]) -> HTTPRouteHandler:
    async def shown(request: Request, reference: str) -> Response[bytes]:
        tenant = request.query_params.get("tenant") if resource.is_named_in_tenant else None
        row = await read_one(admin_of(request), resource, reference, tenant)
        return tagged(json_response(await named(request, json_of(resource, row))), resource.stored_of(row))

    shown.__name__ = f"show_{resource.name}"
    return get(
        f"{resource.path}/{{{resource.name}:str}}",
        opt={"scope": resource.scope, "in_tenant": resource.is_named_in_tenant},
        summary=f"Show {resource.article} {resource.noun or resource.name}",
        description=resource.one_description or None,
    )(_of_one(resource.name, shown))


def _of_one(name: str, answer: Callable[[Request, str], Awaitable[Response[bytes]]]) -> Any:
    """A handler whose path parameter has the noun's name, which the framework reads off its signature."""

    async def handler(request: Request, **path: str) -> Response[bytes]:
        return await answer(request, path[name])

    handler.__name__ = answer.__name__
    types: dict[str, Any] = {"request": Request, name: FromPath[str]}
    handler.__annotations__ = types | {"return": Response[bytes]}
    parameters = [Parameter(one, Parameter.KEYWORD_ONLY, annotation=kind) for one, kind in types.items()]
    handler.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return handler


def _act(resource: Resource[Any], act: ResourceAct) -> HTTPRouteHandler:
    opt: dict[str, Any] = dict(CHANGE if act.takes_condition else {}) | {
        "scope": act.scope,
        "in_tenant": act.is_on_one and resource.is_named_in_tenant,
    }
    if act.command is not None:
        opt |= {"body": act.command, "body_is_optional": act.is_body_optional}

    async def done(request: Request, reference: str = "") -> Response[bytes]:
        tenant = request.query_params.get("tenant") if opt["in_tenant"] else None
        command = None
        if act.command is not None:
            read = asked_or_not if act.is_body_optional else asked
            command = await read(request, act.command)
        condition = if_match(request) if act.takes_condition else None
        call = ActCall(actor(request), reference, command, condition, tenant)
        made = await act.run(admin_of(request), call)
        return await changed(request, await named(request, made.shown), act.status, stored=made.stored)

    async def done_to_all(request: Request) -> Response[bytes]:
        return await done(request)

    done.__name__ = done_to_all.__name__ = f"{act.verb}_{resource.name}"
    return _METHODS[act.method](
        resource.path + act.path.replace("{reference}", f"{{{resource.name}:str}}"),
        status_code=act.status,
        opt=opt,
        summary=act.summary,
        description=act.description or None,
    )(_of_one(resource.name, done) if act.is_on_one else done_to_all)
