"""Aliases that are set in the console of one gateway, and are in force at all."""

from __future__ import annotations

import re
from html import unescape

from tests.e2e.test_console_live import person, plain
from tests.e2e.test_fleet import gateways
from tests.support.console import Browser
from tests.support.server_process import MODEL, Server

__all__ = ["gateways"]
PATH = "/console/aliases"


def asked(gateway: Server, key: str, model: str) -> tuple[int, str]:
    """The status of a chat completion, and its model or the code of the error."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with gateway.http(key) as client:
        answer = client.post("/v1/chat/completions", json=body)
        found = answer.json()
    return answer.status_code, found["error"]["code"] if "error" in found else found["model"]


async def put(browser: Browser, name: str, means: str, max_price: str = "1") -> tuple[int, str]:
    answer = await browser.send(f"{PATH}/set", name=name, means=means, max_price=max_price)
    return answer.status_code, unescape(plain(answer.text))


async def test_an_alias_is_in_force_at_all_gateways_until_it_is_removed(gateways: list[Server]) -> None:
    one, other = gateways
    key = one.tenant("stored-aliases")
    only = one.key("stored-aliases", models=["big"])
    one.admin("POST", "/prices", {"model": "big", "free": True})
    async with person(one, "stored-aliases-owner", "owner") as browser:
        status, said = await put(browser, MODEL, "other")
        assert (status, f"'{MODEL}' is the name of a model: give the alias another one" in said) == (
            422,
            True,
        )
        assert (await put(browser, "big", f"{MODEL} > {MODEL}"))[0] == 422
        assert asked(other, only, "big") == (404, "model_not_found")
        assert (await put(browser, "big", MODEL))[0] == 303
        assert asked(one, key, "big") == asked(other, only, "big") == (200, "big")
        with other.http(only) as client:
            assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["big"]
        status, said = await put(browser, "huge", f"big > {MODEL}")
        assert (status, "'big' is an alias, and so it could go in a circle: name models" in said) == (
            422,
            True,
        )
        assert (await put(browser, "away", f"{MODEL} = 1, elsewhere = 3"))[0] == 303
        upstreams = unescape(plain((await browser.get("/console/upstreams")).text))
        assert f"left out: 'away' means 'elsewhere', which is no model here; there are {MODEL}" in upstreams
        assert asked(one, key, "away") == (404, "model_not_found")
        for alias in re.findall(rf"{PATH}/(\w+)/remove", (await browser.get(PATH)).text):
            remove = f"{PATH}/{alias}/remove"
            [tag] = re.findall(r'name="etag" value="([^"]+)"', (await browser.get(remove)).text)
            assert (await browser.send(remove, etag=tag)).status_code == 303
        assert asked(one, key, "big") == asked(other, only, "big") == (404, "model_not_found")
