"""Every page of the console, with its filters, as asked of a database of `many_requests`."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import httpx
from litestar import Litestar

from gateway.console import csv_file
from gateway.console.assets import address
from gateway.console.handlers import handlers
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.scans import MOST_SCANNED
from tenants.resources.all import RESOURCES
from tests.support.console import Browser
from tests.support.query_plans import Recorder, Statement

TENANT = "/console/tenants/{tenant}"
OBJECTS = {
    "tenant": "t1",
    "project": "prj_1",
    "key": "key_1",
    "limit": "lim_1",
    "request_id": "req_2",
    "person": "ada",
    "replica": "away",
    "run": "none",
    "reference": "none",
    "webhook": "whk_1",
    "name": address("icon.svg").rpartition("/")[2],
}
"""What the names in a path stand for."""
QUESTIONS: dict[str, tuple[str, ...]] = {
    "/console": ("",),
    "/console/search": ("", "?q=t", "?q=req_none", "?q=key_none", "?q=999999", "?q=lim_1"),
    "/console/set-up": ("?token=none",),
    "/console/log-in": ("",),
    "/console/password": ("",),
    "/console/sessions": ("",),
    "/console/live": ("", "?tenant=t1", "?all=yes"),
    "/console/streams": ("",),
    "/console/overview": ("",),
    "/console/waiting": ("", "?tenant=t1&tier=batch"),
    "/console/waiting/live": ("",),
    "/console/waiting/{request_id}/cancel": ("",),
    "/console/waiting/{request_id}/move": ("?tier=batch",),
    "/console/people": ("",),
    "/console/people/{person}": ("",),
    "/console/tenants": ("", "?search=t", "?sort=refused"),
    "/console/tenants.csv": ("",),
    TENANT: ("",),
    f"{TENANT}/change": ("",),
    f"{TENANT}/suspend": ("", "?now=yes"),
    f"{TENANT}/projects": ("",),
    f"{TENANT}/projects/{{project}}/suspend": ("",),
    f"{TENANT}/keys": ("",),
    f"{TENANT}/keys/{{key}}": ("",),
    f"{TENANT}/keys/{{key}}/change": ("",),
    f"{TENANT}/keys/{{key}}/revoke": ("",),
    f"{TENANT}/limits": ("",),
    f"{TENANT}/limits/{{limit}}": ("",),
    f"{TENANT}/limits/{{limit}}/remove": ("",),
    "/console/keys": ("", "?tenant=t1", "?finding=no_limit", "?finding=never_used"),
    "/console/keys.csv": ("", "?tenant=t1"),
    "/console/requests": (
        "", "?tenant=t1", "?outcome=completed&tenant=t1&tier=standard", "?cause=capacity", "?key=key_1",
        "?model=model-1", "?sort=slowest&tenant=t1", "?min_duration_s=1&cause=capacity",
    ),
    "/console/requests/new": ("", "?tenant=t1"),
    "/console/requests.csv": ("", "?tenant=t1"),
    "/console/requests/{request_id}": ("",),
    "/console/refusals": (
        "", "?request_id=ref_1", "?code=insufficient_quota&tenant=t1", "?limit_id=lim_1", "?tier=standard",
    ),
    "/console/slo": ("", "?tenant=t1&tier=standard"),
    "/console/refusals/new": ("", "?tenant=t1"),
    "/console/refusals.csv": ("", "?tenant=t1"),
    "/console/slo/misses": ("", "?cause=capacity", "?tenant=t1", "?from=2026-01-01&tenant=t1"),
    "/console/slo/misses/new": ("",),
    "/console/slo/misses.csv": ("", "?tenant=t1"),
    "/console/alerts": ("",),
    "/console/alerts/webhooks/{webhook}": ("",),
    "/console/alerts/webhooks/{webhook}/remove": ("",),
    "/console/quotes": ("", "?figure=e2e&tier=standard&kind=plain"),
    "/console/usage": (
        "", "?group=model&then=tier", "?group=model&window=total", "?tenant=t1&group=key&window=month",
        "?group=project&model=model-1", "?group=&window=day&outcome=completed",
    ),
    "/console/usage/json": ("?group=model",),
    "/console/usage/csv": ("?group=model",),
    "/console/usage/check": ("",),
    "/console/usage/recovery": ("?price=2&hours=24",),
    "/console/upstreams": ("",),
    "/console/upstreams/{replica}/drain": ("",),
    "/console/aliases": ("",),
    "/console/aliases/set": ("",),
    "/console/aliases/{reference}/remove": ("",),
    "/console/audit": ("", "?tenant=t1", "?act=limit&actor=cli"),
    "/console/audit/new": ("",),
    "/console/audit.csv": ("?tenant=t1",),
    "/console/settings": ("",),
    "/console/policy": ("",),
    "/console/policy/brake": ("",),
    "/console/policy/brake/set": ("?tier=batch",),
    "/console/policy/brake/{reference}/end": ("",),
    "/console/slo/targets": ("", "?tenant=t1"),
    "/console/slo/targets/set": ("",),
    "/console/slo/targets/{reference}/remove": ("",),
    "/console/prices": ("", "?model=model-1"),
    "/console/prices/set": ("",),
    "/console/prices/history": ("?model=model-1",),
    "/console/limits": ("",),
    "/console/limits/{limit}": ("",),
    "/console/limits/{limit}/remove": ("",),
    "/console/audit/verify": ("",),
    **{f"/console/alerts/{{reference}}/{act}": ("",) for act in ("acknowledge", "silence", "unsilence")},
    "/console/policy/what-if/{run}": ("",),
    "/console/policy/what-if/{run}/report": ("",),
    "/console/assets/{name}": ("",),
}  # fmt: skip
"""By route: what is asked of it. A new route without questions fails."""
STATUS = {
    "/console/policy/brake/{reference}/end": 404,
    "/console/slo/targets/{reference}/remove": 404,
    "/console/aliases/{reference}/remove": 404,
    "/console/limits/{limit}": 404,
    "/console/limits/{limit}/remove": 404,
    **{f"/console/alerts/{{reference}}/{act}": 404 for act in ("acknowledge", "silence", "unsilence")},
    "/console/log-in": 303,
    "/console/overview": 303,
    "/console/search?q=lim_1": 303,
    "/console/set-up": 404,
    "/console/policy/what-if/{run}": 404,
    "/console/policy/what-if/{run}/report": 404,
}
"""Who is logged in is sent on, as by the only hit of a search; of links, what-ifs, brakes, targets, aliases
and limits on all tenants there are none. All others: 200."""


def in_pages(keys: int) -> dict[str, int]:
    """By path, the statements where there is more than fits into one page, among so many keys.

    Sums by tenant or project and day fit into one answer where there are few. Where there are many, groups
    come in pages, with totals and the days of all together beside them: for so many statements. A file has
    the first pages of a list, up to a number that is the same for all, and each page costs the same. A page
    that reached its bound of rows before it found one looks up no names."""
    pages_of_keys = min(csv_file.FILE_PAGES, keys // MAX_PAGE + 1)  # one key more is the caller's
    return {
        "/console/usage": 15,
        "/console/usage?group=project&model=model-1": 17,  # with the tenants of the projects
        "/console/keys?finding=no_limit": 7 if keys < MOST_SCANNED else 4,
        "/console/keys.csv": 1 + 5 * pages_of_keys,
        "/console/requests.csv": 1 + 7 * csv_file.FILE_PAGES,
        "/console/refusals.csv": 1 + 4 * csv_file.FILE_PAGES,
        "/console/slo/misses.csv": 1 + 2 * csv_file.FILE_PAGES,
    }


_CURSOR = re.compile(r'href="(/console/[^"]*\bcursor=[^"]+)"')


@dataclass(frozen=True)
class AskedPage:
    """A page that was asked for, with the statements that it cost."""

    path: str
    statements: list[Statement]
    is_first: bool
    """Of a list: not a later page of it."""


def routes() -> set[str]:
    """Of all pages and parts of pages, from the application."""
    paths = (path for each in handlers(RESOURCES) if "GET" in each.http_methods for path in each.paths)
    return {re.sub(r":\w+(?=\})", "", path) for path in paths}


async def ask_pages(client: httpx.AsyncClient, heard: Recorder) -> list[AskedPage]:
    """Asks everything as an owner, and of each list the next page, too. `client` has the admin scopes."""
    assert routes() == set(QUESTIONS)
    made = (await client.post("/admin/v1/people", json={"name": "ada", "role": "owner"})).raise_for_status()
    app: Litestar = client._transport.app  # type: ignore[attr-defined]
    asked: list[AskedPage] = []
    async with Browser(app) as browser:
        assert (await browser.redeem(made.json()["link"].partition("token=")[2])).status_code == 303
        for route, queries in QUESTIONS.items():
            for query in queries:
                path = route.format(**OBJECTS) + query
                heard.start()
                # A stream has no end; asked for its head, it reads what a page does before it begins.
                page = await browser.http.request("HEAD" if route.endswith("/live") else "GET", path)
                asked.append(AskedPage(path, heard.stop(), True))
                assert page.status_code == STATUS.get(route + query, STATUS.get(route, 200)), (
                    f"{path}: {page.text}"
                )
                if following := _CURSOR.search(page.text):
                    heard.start()
                    path = html.unescape(following[1])
                    assert (await browser.get(path)).status_code == 200, path
                    asked.append(AskedPage(path, heard.stop(), False))
    return asked
