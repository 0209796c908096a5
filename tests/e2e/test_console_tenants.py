"""The pages of tenants on a running server: every number is the ledger's, and a browser makes a key."""

from __future__ import annotations

import html
import re
from typing import Any

from tests.support.console import Browser
from tests.support.server_process import MODEL, Server


def said(text: str) -> str:
    """The text of a page, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def busy_tenant(server: Server, name: str) -> str:
    """A tenant with a limit of each kind and some requests; returns its key."""
    key = server.tenant(name)
    server.limit(name, "total_tokens", 400, window="day")
    server.limit(name, "cost_nanousd", 5_000_000_000, window="month")
    server.limit(name, "requests", 500, rate_per_s=100.0)
    limit = server.limit(name, "concurrency", 50)
    server.admin("POST", f"/limits/{limit}/override", {"amount": 80, "for_s": 3_600, "reason": "launch"})
    with server.http(key) as client:
        for number in range(3):
            body = {"model": MODEL, "prompt": f"say {number}", "max_tokens": 3 + number, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
    return key


async def test_every_number_is_the_ledgers(server: Server) -> None:
    key = busy_tenant(server, "page-numbers")
    person = {"name": "page-member", "role": "member", "tenants": ["page-numbers"]}
    token = server.admin("POST", "/people", person)["link"].partition("token=")[2]
    with server.http(key) as client:
        usage: Any = client.get("/v1/usage").json()["data"][0]
        limits = client.get("/v1/limits").json()
    async with Browser(server.url) as browser:
        assert (await browser.redeem(token)).status_code == 303
        page = await browser.get("/console/tenants/page-numbers")
        keys = await browser.get("/console/tenants/page-numbers/keys")
    assert page.status_code == 200
    text = said(page.text)
    assert usage["ended_requests"] == 3
    assert (
        f"Requests 3 Input tokens {usage['input_tokens']:,} Output tokens {usage['output_tokens']:,}" in text
    )
    assert f"{MODEL} 3 {usage['input_tokens']:,} {usage['output_tokens']:,}" in text
    day = next(each for each in limits["data"] if each["window"] == "day")
    assert day["usage"]["used"] == usage["input_tokens"] + usage["output_tokens"]
    assert day["usage"]["binds_first"]
    assert (
        f"Binds first: 400 tokens a day (UTC) on tenant page-numbers; {day['usage']['used']} of 400 used"
        in text
    )
    assert "80 override instead of 50" in text
    assert "launch" not in text, "why is for operators"
    assert "tenant: 400 tokens a day (UTC)" in said(keys.text)
    assert key not in keys.text
