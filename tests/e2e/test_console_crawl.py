"""Every link of the console leads to a page, for each role; an auditor finds no form that changes a thing."""

from __future__ import annotations

import asyncio
import html
import re
from urllib.parse import urljoin, urlsplit

import pytest

from tests.support.console import Browser
from tests.support.server_process import MODEL, Server

MOST_PAGES = 150
LINK = re.compile(r'<a\b[^>]*?href="([^"]+)"')
FORM = re.compile(r'<form\b[^>]*?method="post"[^>]*?action="([^"]+)"')
OWN_FORMS = {"/console/log-out", "/console/sessions/end", "/console/password"}


def _shape(path: str) -> str:
    """A path without ids and values of its query: of pages that differ by these alone, one is opened."""
    parts = urlsplit(path)
    names = sorted(pair.partition("=")[0] for pair in parts.query.split("&") if pair)
    return re.sub(r"/(?:[a-z]+_[0-9a-z-]+|req_[^/]+)(?=/|$)", "/*", parts.path) + "?" + ",".join(names)


async def crawled(server: Server, name: str, role: str, tenants: list[str]) -> dict[str, str]:
    """Pages by path, from the start page on."""
    body = {"name": name, "role": role} | ({"tenants": tenants} if role == "member" else {})
    token = server.admin("POST", "/people", body)["link"].partition("token=")[2]
    async with Browser(server.url) as browser:
        assert (await browser.redeem(token)).status_code == 303
        found: dict[str, str] = {}
        shapes: set[str] = set()
        waiting = ["/console"]
        while waiting and len(found) < MOST_PAGES:
            path = waiting.pop(0)
            if _shape(path) in shapes:
                continue
            shapes.add(_shape(path))
            answer = await browser.get(path)
            assert answer.status_code == 200, (path, answer.status_code, answer.text[-2000:])
            if "text/html" not in answer.headers["content-type"]:
                continue
            found[path] = answer.text
            for link in LINK.findall(answer.text):
                target = urljoin(path, html.unescape(link)).partition("#")[0]
                assert target.startswith(("/console", "/runbooks/")), (path, link)
                waiting.append(target)
        return found


@pytest.mark.parametrize("role", ["owner", "operator", "auditor", "member"])
def test_every_link_leads_to_a_page(server: Server, role: str) -> None:
    tenant = f"crawled-{role}"
    key = server.tenant(tenant)
    server.limit(tenant, "output_tokens", 1_000, window="day")
    with server.http(key) as client:
        done = client.post("/v1/completions", json={"model": MODEL, "prompt": "one", "max_tokens": 4})
        refused = client.post("/v1/completions", json={"model": MODEL, "prompt": "one", "max_tokens": 2_000})
    assert (done.status_code, refused.is_error) == (200, True)
    pages = asyncio.run(crawled(server, f"crawler-{role}@example.org", role, [tenant]))
    assert set(pages) >= {"/console", "/console/sessions", "/console/password"}
    for path, text in pages.items():
        forms = {urljoin(path, html.unescape(action)).partition("?")[0] for action in FORM.findall(text)}
        if role == "auditor":
            assert forms <= OWN_FORMS, path
