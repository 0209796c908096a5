"""The first steps on a new server, and the line that sends a first request."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.console.pages.tenant_parts.curl_line import curl_line
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.resources.keys import KEYS, KeyQuery
from tenants.resources.people import PEOPLE, PersonQuery
from tenants.resources.reading import read_page
from tenants.resources.records.ended import ENDED, EndedQuery

PLACEHOLDER = "YOUR_KEY"


@dataclass(frozen=True, slots=True)
class FirstSteps:
    steps: tuple[tuple[str, str, bool], ...]
    """Words, link, whether it is done."""
    curl: str


async def first_steps(request: Request) -> FirstSteps | None:
    """None: tenants, limits, keys and requests are there."""
    gateway = gateway_of(request)
    deps = gateway.deps
    directory, admin = deps.directory, deps.admin
    tenants = directory.tenants()
    limits = directory.limits(deps.wall_clock())
    keys = (await read_page(admin, KEYS, KeyQuery(), limit=1)).rows
    ended = (await read_page(admin, ENDED, EndedQuery(), limit=1)).rows
    if tenants and limits and keys and ended:
        return None
    people = (await read_page(admin, PEOPLE, PersonQuery(), limit=2)).rows
    listed = "/console/tenants"
    of_first = f"{listed}/{tenants[0].name}" if tenants else listed
    limits_page, keys_page = (f"{of_first}/{each}" if tenants else listed for each in ("limits", "keys"))
    steps = (
        ("Create a tenant: a team, a customer or a program", listed, bool(tenants)),
        ("Set its limit, such as 1,000,000 tokens a day", limits_page, bool(limits)),
        ("Create a key and copy it", keys_page, bool(keys)),
        ("Send a first request with the line below", "/console/requests", bool(ended)),
        ("Invite a colleague", "/console/people", len(people) > 1),
    )
    return FirstSteps(steps, curl_line(request, PLACEHOLDER))
