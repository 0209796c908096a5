"""The guard of every page: the session behind a request, what its person may do, and the form's token.

API keys open no page. Forms must be ours, by `Sec-Fetch-Site` and by a token of session or cookie."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import litestar
from litestar import get, post
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler

from gateway.console import cookies
from gateway.console.forms import TOKEN_FIELD, read_form
from gateway.gateway import Gateway
from gateway.http.accesses import REFUSED, origin_and_ids, route_of
from gateway.http.asgi import Request, headers_of
from gateway.http.client_address import client_of
from gateway.routes.context import gateway_of
from gateway.routes.one_worker import by_one_worker
from tenants.admin.audit import LINK, Actor
from tenants.directory import queries
from tenants.errors import NotFound
from tenants.nouns.tenant import Tenant
from tenants.people.person import Person
from tenants.people.roles import Act
from tenants.people.sessions import Session, csrf_token_of
from tenants.resources.resource import Resource

FILES = ("csv", "json", "report")
"""Suffixes of pages that answer with files."""


class SignInNeeded(Exception):
    """A session is required. `next_path`: where to go after the log-in; empty: keep the submitted form."""

    def __init__(self, next_path: str) -> None:
        super().__init__(next_path)
        self.next_path = next_path


class NotForThisRole(Exception):
    """The person's role does not allow it."""


class FormRefused(Exception):
    """The form does not come from a page of ours, or from one of another session."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What is known about a request for a page."""

    session: Session | None
    is_https: bool
    address: str
    """Of the client; empty: unknown."""
    form: Mapping[str, str]
    form_cookie: str
    """Binds forms submitted before a log-in."""
    is_new_form_cookie: bool
    stranger: Actor
    """Actor of requests without a session, which have only a link."""
    resources: tuple[Resource[Any], ...] = ()
    """Whose pages there are."""
    firing: int = 0
    """Alerts that fire, of those that the person may see, as this gateway last read them."""

    @property
    def person(self) -> Person:
        """The signed-in person. Only call on pages that require a session."""
        assert self.session is not None
        return self.session.person

    @property
    def actor(self) -> Actor:
        """The person, for the audit. An act fails if the person was changed in the meantime."""
        person = self.person
        return replace(self.stranger, name=person.actor_name, person=(person.person_id, person.revision))


def page(
    path: str, act: Act | None = Act.OWN_ACCOUNT, *, of_one: bool = False
) -> Callable[..., HTTPRouteHandler]:
    """Decorator: a page for people who may do `act` on some tenant (see `tenant_shown`); None: for anyone.
    `of_one`: of what a process has of its own."""
    return get(
        path,
        guards=[require_access],
        opt={"act": act},
        include_in_schema=False,
        before_request=by_one_worker if of_one else None,
    )


def form(
    path: str, act: Act | None = Act.OWN_ACCOUNT, *, lines: Collection[str] = (), of_one: bool = False
) -> Callable[..., HTTPRouteHandler]:
    """Decorator: takes a form from people who may do `act`; None: from anyone. If the session has ended, what
    was typed is kept through the log-in. `lines`: multi-line fields."""
    opt = {"act": act, "lines": lines}
    return post(
        path,
        status_code=200,
        guards=[require_access],
        opt=opt,
        include_in_schema=False,
        before_request=by_one_worker if of_one else None,
    )


async def require_access(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard. Raises `SignInNeeded`, `NotForThisRole`, `FormRefused`, `ApiError`, `DatabaseUnavailable`."""
    assert isinstance(connection, litestar.Request)
    gateway = gateway_of(connection)
    visit = await visit_to(connection, gateway, handler.opt.get("lines", ()))
    connection.scope["state"]["visit"] = visit
    if visit.session is not None:
        connection.scope["state"]["is_signed_in"] = True
    is_form = connection.method == "POST"
    if is_form and headers_of(connection.scope).get("sec-fetch-site", "same-origin") != "same-origin":
        raise FormRefused
    act: Act | None = handler.opt["act"]
    if act is not None:
        if visit.session is None:
            raise SignInNeeded(_where_it_was(connection))
        if not visit.person.may_somewhere(act):
            raise NotForThisRole
    if is_form and not hmac.compare_digest(
        visit.form.get(TOKEN_FIELD, "").encode(), token_of(visit, before_log_in=act is None).encode()
    ):
        raise FormRefused
    if visit.session is not None and is_file(connection.scope["path"]):
        gateway.accesses.note("access.export", visit.actor, route_of(connection.scope))


def is_file(path: str) -> bool:
    return path.endswith(FILES)


def own_tenants(person: Person) -> frozenset[str] | None:
    """Ids of the tenants that the person sees; None: all."""
    return None if person.may(Act.READ_PLATFORM) else person.tenants


async def tenant_shown(request: Request, wanted: str, act: Act = Act.READ_TENANT) -> Tenant:
    """The tenant by name or id. Raises `NotFound` (also if the person may not see it), `NotForThisRole`."""
    person = visit_of(request).person
    database = gateway_of(request).deps.database
    owner = await database.read(lambda connection: queries.find_tenant(connection, wanted))
    if not person.may(Act.READ_TENANT, owner.tenant_id):
        raise NotFound("tenant", wanted)
    if not person.may(act, owner.tenant_id):
        raise NotForThisRole
    return owner


def note_refused(request: Request, gateway: Gateway, status: int) -> None:
    """Audits a refused form of a signed-in person."""
    visit: Visit | None = request.scope["state"].get("visit")
    if request.method == "POST" and status in REFUSED and visit is not None and visit.session is not None:
        gateway.accesses.note("access.refuse", visit.actor, route_of(request.scope), f"status {status}")


async def visit_to(request: Request, gateway: Gateway, lines: Collection[str] = ()) -> Visit:
    """Raises what `read_form` raises, `DatabaseUnavailable`."""
    deps, config = gateway.deps, gateway.deps.config
    secure = cookies.is_https(request.scope, config.trusted_proxies)
    address = client_of(request.scope, config.trusted_proxies)
    is_form = request.method == "POST"
    values = await read_form(request, config.body_timeout_s, lines) if is_form else {}
    cookie = cookies.read(request.scope, cookies.SESSION, secure=secure)
    form_cookie = cookies.read(request.scope, cookies.FORM, secure=secure)
    session = await deps.people.session(cookie) if cookie else None
    return Visit(
        session,
        secure,
        "" if address is None else str(address),
        values,
        form_cookie or secrets.token_urlsafe(32),
        not form_cookie,
        Actor(LINK, *origin_and_ids(request.scope, gateway)),
        deps.resources,
        0 if session is None else gateway.alerts.firing_of(own_tenants(session.person)),
    )


def _where_it_was(request: Request) -> str:
    """The requested page; empty for a form."""
    if request.method == "POST":
        return ""
    path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def token_of(visit: Visit, *, before_log_in: bool) -> str:
    if before_log_in or visit.session is None:
        return csrf_token_of(visit.form_cookie)
    return visit.session.csrf_token


def visit_of(request: Request) -> Visit:
    visit: Visit = request.scope["state"]["visit"]
    return visit
