"""Quotes that are bought while the server is idle and redeemed at one moment earn no credits."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from tests.support.server_process import MODEL, Server, until

pytestmark = pytest.mark.attack

BODY = {"model": MODEL, "prompt": "count to ten", "max_tokens": 8}
RUN = BODY | {"ignore_eos": True}
FARMED = 48


def learn(server: Server) -> None:
    """Serves until quotes bind: until enough answers were compared with their forecasts."""

    def is_learned() -> bool:
        # Each asks for one quote only: a second one would be of those that may be redeemed together.
        with clients_of(server, f"learner-{secrets.token_hex(4)}", 1) as [client]:
            for _ in range(20):
                assert client.post("/v1/completions", json=BODY).status_code == 200
            [only] = client.post("/v1/quotes", json=BODY | {"service_tier": "default"}).json()["quotes"]
            return bool(only.get("binding", True))

    until(is_learned)


def buy(clients: list[httpx.Client], wanted: int) -> list[tuple[httpx.Client, str]]:
    """Quotes of the tier standard, in turn by each key; waits where the server says so."""
    bought: list[tuple[httpx.Client, str]] = []
    deadline_s = time.monotonic() + 30.0
    while len(bought) < wanted:
        assert time.monotonic() < deadline_s
        client = clients[len(bought) % len(clients)]
        answer = client.post("/v1/quotes", json=BODY | {"service_tier": "default"})
        if answer.status_code == 429:
            time.sleep(float(answer.headers["retry-after-ms"]) / 1000)
            continue
        bought.append((client, answer.json()["quotes"][0]["token"]))
    return bought


def complete_at_once(server: Server, requests: list[tuple[httpx.Client, str | None]]) -> list[dict[str, Any]]:
    """Sends a request for each key and quote at one moment; returns their accounts. Those without a quote are
    long: the engine is busy with them for as long as the others are on their way."""

    async def all_of_them() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=len(requests))
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:

            async def complete(owner: httpx.Client, token: str | None) -> dict[str, Any]:
                headers, body = {"authorization": owner.headers["authorization"]}, RUN | {"max_tokens": 96}
                if token is not None:
                    headers["X-Fairgate-Quote"], body = token, RUN
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()["fairgate"]  # type: ignore[no-any-return]

            return await asyncio.gather(*(complete(owner, token) for owner, token in requests))

    return asyncio.run(all_of_them())


@contextmanager
def clients_of(server: Server, tenant: str, keys: int) -> Iterator[list[httpx.Client]]:
    """A tenant with `keys` keys, and a client for each."""
    server.tenant(tenant, tier="standard", tiers=["standard"])
    with ExitStack() as stack:
        yield [stack.enter_context(server.http(server.key(tenant))) for _ in range(keys)]


def test_quotes_redeemed_in_a_burst_earn_next_to_nothing(server: Server) -> None:
    learn(server)
    with clients_of(server, "farmer", 6) as clients:
        accounts = complete_at_once(server, buy(clients, FARMED)[::-1])
    bill = sum(each["actual"]["cost_nanousd"] for each in accounts)
    credited = sum(each["quote"]["credit_nanousd"] for each in accounts)
    assert bill > 0
    assert credited < 0.05 * bill
    # The first quote counted no other one: what it waited behind the others is its own tenant's doing.
    first = accounts[-1]["quote"]
    assert first["binding"]
    assert first["own_s"]["ttft"] > 0
    until(server.is_idle)
    assert server.verify()["ok"]


def test_a_quote_redeemed_in_its_own_tenants_flood_earns_nothing(server: Server) -> None:
    learn(server)
    with clients_of(server, "flooder", 1) as [client]:
        [(_, token)] = buy([client], 1)
        flood = [(client, None)] * (FARMED // 2)
        account = complete_at_once(server, [*flood, (client, token), *flood])[len(flood)]
    told, quote = account["estimate"], account["quote"]
    late_s = {part: account["actual"][f"{part}_s"] - told[f"{part}_s"]["p90"] for part in ("ttft", "e2e")}
    assert late_s["ttft"] > 0, "it was late"
    assert quote["own_s"]["ttft"] > 0.75 * account["actual"]["ttft_s"], "by its own tenant's flood"
    # A credit is for what is left without the flood: a stall of the machine, if any. Of the whole answer
    # rests are left out as well, which the account does not name.
    assert ("ttft" in quote["missed"]) is (late_s["ttft"] > quote["own_s"]["ttft"])
    assert "e2e" not in quote["missed"] or late_s["e2e"] > quote["own_s"]["e2e"]
    assert quote["kept"] is not bool(quote["missed"])
    assert quote["credit_nanousd"] == 0 or not quote["kept"]


def test_more_keys_buy_no_more_quotes(server: Server) -> None:
    with clients_of(server, "many-keys", 4) as clients:
        begun_s = time.monotonic()
        answers = [client.post("/v1/quotes", json=BODY) for client in clients for _ in range(10)]
        took_s = time.monotonic() - begun_s
    made = sum(answer.status_code == 200 for answer in answers)
    refused = [answer.json()["error"] for answer in answers if answer.status_code == 429]
    assert made <= 11 + 5 * took_s, "ten at once and five a second, whatever its keys"
    assert refused
    assert "tenant" in refused[0]["message"]
