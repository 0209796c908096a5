"""The search in the head of every page: a request, tenant, key, person or audit row.

Each kind is a bounded number of reads by index. Members find only what belongs to their tenants."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from litestar import Response

from gateway.console.access import own_tenants, page, visit_of
from gateway.console.pages.filters import asked_of
from gateway.console.pages.requests import ended
from gateway.console.pages.requests.request import found_request
from gateway.console.rendering import page_response, redirect
from gateway.domain.ids import SHOWN_PREFIXES, request_id_of
from gateway.errors import ApiError
from gateway.http.asgi import Request
from gateway.routes.context import admin_of, gateway_of
from tenants.directory.keys import PREFIX
from tenants.errors import NotFound
from tenants.people import rows
from tenants.people.person import folded
from tenants.people.roles import Act
from tenants.resources.keys import KEYS
from tenants.resources.reading import read_one, read_page
from tenants.resources.records.audit import AUDIT, AuditQuery
from tenants.storage.tables import people

PATH = "/console/search"
MOST_OF_A_KIND = 20
MOST_CHARACTERS = 200


@dataclass(frozen=True)
class Hit:
    kind: str
    text: str
    href: str
    is_exact: bool = True


@page(PATH)
async def search_page(request: Request) -> Response[str]:
    """Leads to the only exact hit, or to the only one at all."""
    wanted = asked_of(request, "q")["q"][:MOST_CHARACTERS]
    if wanted.startswith(PREFIX):  # perhaps a whole key: its secret is not repeated
        wanted = PREFIX + wanted.removeprefix(PREFIX).partition("_")[0]
    hits = []
    if wanted and wanted.isprintable():
        for find in (_requests, _tenants, _keys, _people, _acts):
            hits += await find(request, wanted)
    exact = [hit for hit in hits if hit.is_exact]
    best = exact if len(exact) == 1 else hits
    if len(best) == 1:
        return redirect(best[0].href)
    kinds = {hit.kind: [each for each in hits if each.kind == hit.kind] for hit in hits}
    return page_response("search.html", visit_of(request), searched=wanted, kinds=kinds, most=MOST_OF_A_KIND)


async def _requests(request: Request, wanted: str) -> list[Hit]:
    """By its id, or that of its answer."""
    if not wanted.startswith(SHOWN_PREFIXES):
        return []
    request_id = request_id_of(wanted)
    try:
        await found_request(request, visit_of(request).person, request_id)
    except NotFound:
        return []
    except ApiError:
        pass  # its gateway does not answer, as its page says
    return [Hit("Requests", request_id, f"{ended.PATH}/{quote(request_id, safe='')}")]


async def _tenants(request: Request, wanted: str) -> list[Hit]:
    """By id, or any part of the name."""
    own, part = own_tenants(visit_of(request).person), wanted.lower()
    hits = [
        Hit(
            "Tenants",
            tenant.name,
            f"/console/tenants/{quote(tenant.name, safe='')}",
            part == tenant.name.lower() or wanted == tenant.tenant_id,
        )
        for tenant in gateway_of(request).deps.directory.tenants()
        if own is None or tenant.tenant_id in own
        if part in tenant.name.lower() or wanted == tenant.tenant_id
    ]
    return sorted(hits, key=lambda hit: (not hit.is_exact, hit.text))[:MOST_OF_A_KIND]


async def _keys(request: Request, wanted: str) -> list[Hit]:
    """By id, or the visible prefix."""
    if not wanted.startswith((PREFIX, "key_")):
        return []
    try:
        key = (await read_one(admin_of(request), KEYS, wanted)).key
    except NotFound:
        return []
    if not visit_of(request).person.may(Act.READ_TENANT, key.tenant_id):
        return []
    return [Hit("Keys", key.name or key.prefix, f"/console/tenants/{key.tenant_id}/keys/{quote(key.key_id)}")]


async def _people(request: Request, wanted: str) -> list[Hit]:
    """By id, or any part of the name."""
    if not visit_of(request).person.may(Act.READ_PEOPLE):
        return []
    is_wanted = (people.c.id == wanted) | people.c.name.contains(folded(wanted), autoescape=True)
    found = await gateway_of(request).deps.database.read(
        lambda one: rows.people_where(one, is_wanted, limit=MOST_OF_A_KIND)
    )
    return [
        Hit(
            "People",
            person.name,
            f"/console/people/{quote(person.person_id)}",
            wanted == person.person_id or folded(wanted) == person.name,
        )
        for person in found
    ]


async def _acts(request: Request, wanted: str) -> list[Hit]:
    """An audit row by its number; or those of what has this id or name."""
    if not visit_of(request).person.may(Act.READ_PLATFORM):
        return []
    number = wanted.removeprefix("#")
    if number.isascii() and number.isdigit() and len(number) <= 18:
        found = await read_page(admin_of(request), AUDIT, AuditQuery(seq=number), limit=1)
        return [Hit("Audit", f"Row {number}", f"/console/audit?seq={number}") for _ in found.rows]
    if ":" in wanted:
        return []
    found = await read_page(admin_of(request), AUDIT, AuditQuery(subject=wanted), limit=1)
    address = f"/console/audit?subject={quote(wanted, safe='')}"
    return [Hit("Audit", f"What was done to {wanted}", address, is_exact=False) for _ in found.rows]


HANDLERS = [search_page]
