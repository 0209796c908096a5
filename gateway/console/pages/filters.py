"""Filters of lists: read from the address, checked, shown again and kept in links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.console.access import own_tenants, tenant_shown, visit_of
from gateway.console.form_errors import WHOLE_FORM, FormProblem
from gateway.console.forms import typed_fields
from gateway.console.names import tenant_names
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.directory import queries
from tenants.directory.directory import Directory
from tenants.errors import Invalid, NotFound
from tenants.people.person import Person
from tenants.people.roles import Act
from tenants.storage import tables

MOST_SUGGESTED = 500
FILTER_ERRORS = (Invalid, NotFound)
SHARED = ("tenant", "project", "key", "model", "tier", "from", "to")
PAGE_NAMES = {"since": "from", "until": "to", "group_by": "group"}
"""What pages call fields that are checked under another name."""


@dataclass(frozen=True)
class Filters:
    path: str
    values: Mapping[str, str]
    cursor: str | None = None

    def get(self, name: str) -> str | None:
        """None: any."""
        return self.values.get(name) or None

    def instant(self, name: str) -> str | None:
        """Without a time zone it is UTC."""
        value = self.get(name)
        try:
            at = datetime.fromisoformat(value or "")
        except ValueError:
            return value  # which is refused where it is used
        return value if at.tzinfo is not None else at.replace(tzinfo=UTC).isoformat()

    def link(self, path: str = "", **changes: str) -> str:
        """This or another page with the same filters, some of them changed."""
        return with_query(path or self.path, {**self.values, **changes})

    def shared(self, path: str) -> str:
        """Another list of requests, with the filters that all of them have."""
        return with_query(path, {name: self.values.get(name, "") for name in SHARED})

    def problem(self, error: Invalid | NotFound) -> FormProblem:
        where = error.what if isinstance(error, NotFound) else error.field
        where = PAGE_NAMES.get(where, where)
        is_field = where in self.values
        text = error.message if isinstance(error, Invalid) and is_field else str(error)
        sentence = text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
        return FormProblem(400, {where if is_field else WHOLE_FORM: sentence})


def filters_of(request: Request, path: str, names: Sequence[str]) -> Filters:
    return Filters(path, asked_of(request, *names), cursor_of(request))


def asked_of(request: Request, *names: str) -> dict[str, str]:
    """As typed."""
    return typed_fields({name: request.query_params.get(name, "").strip() for name in names}, *names)


def cursor_of(request: Request) -> str | None:
    return request.query_params.get("cursor") or None


def checked(name: str, value: str | None, known: Sequence[str]) -> str | None:
    """One of the known words. Raises `Invalid`."""
    if value is not None and value not in tuple(known):
        raise Invalid(name, f"{value[:40]!r} is not one of {', '.join(known)}")
    return value


@dataclass(frozen=True)
class TenantScope:
    """Whose rows a page shows. A member sees one tenant at a time, which an index serves."""

    wanted: str | None
    """Id of a member's tenant, else what was typed; None: all tenants."""
    name: str
    choices: tuple[str, ...]
    """Names of a member's tenants; empty: the person may type any."""

    @property
    def of_tenant(self) -> str | None:
        """Id of the tenant whose view it is; None: the view of those who see all."""
        return self.wanted if self.choices else None


async def known_values(request: Request, scope: TenantScope) -> dict[str, list[Any]]:
    """What fields of filters suggest: tenants, models, and keys (id and name) of the tenant that is shown."""
    gateway, person = gateway_of(request), visit_of(request).person
    tenants = gateway.deps.directory.tenants() if person.may(Act.READ_PLATFORM) else []
    wanted = (scope.wanted or "", scope.name)
    of_keys = [one.tenant_id for one in tenants if one.name in wanted or one.tenant_id in wanted]
    of_keys += [scope.wanted] if scope.choices and scope.wanted else []
    keys = []
    if of_keys:
        is_its = tables.api_keys.c.tenant_id.in_(of_keys)
        keys = await gateway.deps.database.read(
            lambda one: queries.keys_where(one, is_its, most=MOST_SUGGESTED)
        )
    return {
        "tenant": [one.name for one in tenants[:MOST_SUGGESTED]],
        "model": list(gateway.pools),
        "key": [(key.key_id, key.name or key.prefix) for key in keys],
    }


async def tenant_scope(request: Request, wanted: str | None) -> TenantScope:
    """The requested tenant, or a member's first. Raises `NotFound` if the member may not see it."""
    person = visit_of(request).person
    if own_tenants(person) is None:
        return TenantScope(wanted, wanted or "", ())
    names = choices(gateway_of(request).deps.directory, person)
    tenant = await tenant_shown(request, wanted or names[0])
    return TenantScope(tenant.tenant_id, tenant.name, names)


def choices(directory: Directory, person: Person) -> tuple[str, ...]:
    """A member's tenants; those that still exist first."""
    names = tenant_names(directory, person)
    return tuple(sorted(names, key=lambda name: (name in person.tenants, name)))
