"""After requests of every kind, the sums on all pages of a running server equal its ledger."""

from __future__ import annotations

import csv
import io
import itertools
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import add
from typing import Any

import httpx
from sqlalchemy import select

from ops.sandbox.page_check import page_sums
from ops.sandbox.page_reader import PageCell, logged_in_reader
from ops.sandbox.usage_check import DAY_US, charges
from tenants.storage.database import create_sql_engine
from tenants.storage.tables import ledger
from tests.support.server_process import MODEL, Server, until

Totals = tuple[int, ...]
"""Requests, input tokens, output tokens, nano-dollars."""
NO_TOTALS: Totals = (0, 0, 0, 0)
TIERS = ["interactive", "standard", "batch"]
PROMPT = "one and the same beginning, long enough for whole blocks of the cache " * 4
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}


def complete(server: Server, key: str, **more: Any) -> httpx.Response:
    with server.http(key) as client:
        return client.post("/v1/completions", json=BODY | more)


def cancel(server: Server, key: str) -> None:
    """A stream whose client goes after the first bytes: the rest of its hold is given back."""
    endless = BODY | {"max_tokens": 8_000, "stream": True}
    with server.http(key) as client, client.stream("POST", "/v1/completions", json=endless) as stream:
        next(stream.iter_bytes())


def credit(server: Server, request_id: str) -> None:
    """A credit of a request, as a gateway writes it for a quote that it did not keep."""
    engine = create_sql_engine(f"sqlite:///{server.data_dir / 'fairgate.db'}", writing=True)
    of_it = (ledger.c.request_id == request_id, ledger.c.kind == "settle")
    with engine.begin() as connection:
        settled = dict(connection.execute(select(ledger).where(*of_it)).mappings().one())
        amounts = {"cost_nanousd": -(settled.pop("cost_nanousd") // 2), "id": None, "kind": "credit"}
        nothing = dict.fromkeys(("requests", "input_tokens", "output_tokens", "gpu_ms"), 0)
        connection.execute(ledger.insert(), [settled | nothing | amounts])
    engine.dispose()


def summed(rows: Iterable[Mapping[str, PageCell]], cost: str) -> Totals:
    names = ("Requests", "Input tokens", "Output tokens", cost)
    return tuple(sum(row[name].amount or 0 for row in rows) for name in names)


def totals_of(row: Mapping[str, Any]) -> Totals:
    return (int(row["kind"] == "settle"), row["input_tokens"], row["output_tokens"], row["cost_nanousd"])


def add_totals(one: Totals, other: Totals) -> Totals:
    return tuple(map(add, one, other))


async def test_pages_show_what_the_ledger_has_after_a_mixed_load(server: Server) -> None:
    one = server.tenant("summed-one", tier="standard", tiers=TIERS)
    other = server.tenant("summed-two", tier="interactive", tiers=TIERS)
    server.admin("POST", "/projects", {"tenant": "summed-one", "name": "second"})
    second = server.key("summed-one", project="second", name="second")
    for number, key in enumerate((one, second, other)):
        for tier in ("priority", "default", "flex"):
            answer = complete(server, key, service_tier=tier, max_tokens=3 + number)
            assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    credit(server, answer.headers["x-request-id"])
    cancel(server, second)
    server.limit("summed-two", "output_tokens", 1, window="day")
    assert complete(server, other).status_code == 429
    until(server.is_idle)
    headers = {"authorization": f"Bearer {server.owner_key}"}
    async with (
        httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as operator,
        httpx.AsyncClient(base_url=server.url, timeout=60) as visitor,
    ):
        database_url = f"sqlite:///{server.data_dir / 'fairgate.db'}"
        found = await page_sums(operator, visitor, database_url, ["summed-one", "summed-two"])
    assert found.differences == []
    # Groups, measures, quotes, tenants, the overview; two tenants with projects, keys and what they lead to.
    assert found.pages >= 5 + 5 + 1 + 1 + 1 + 2 + 3 + 2 + 3


async def test_each_page_is_of_one_instant_while_requests_end(server: Server) -> None:
    """Its cards and tables agree, and are what the ledger had after one of its rows; so is a file."""
    first = server.tenant("summed-live")
    keys = [first, server.key("summed-live", name="second")]
    tenant_id = server.admin("GET", "/tenants/summed-live")["id"]
    is_over = threading.Event()

    def send(key: str) -> None:
        while not is_over.is_set():
            complete(server, key)

    headers = {"authorization": f"Bearer {server.owner_key}"}
    shown: list[Totals] = []
    charged: list[int] = []
    async with (
        httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as operator,
        httpx.AsyncClient(base_url=server.url, timeout=60) as visitor,
        logged_in_reader(operator, visitor) as reader,
    ):
        with ThreadPoolExecutor(2) as threads:
            sending = [threads.submit(send, key) for key in keys]
            try:
                for _ in range(20):
                    tenant = await reader.get("/console/tenants/summed-live")
                    by_key, by_model = (
                        summed(tenant.rows(f"Usage by {group}"), "Cost") for group in ("key", "model")
                    )
                    usage = await reader.get("/console/usage?tenant=summed-live&group=key")
                    of_usage = summed(usage.rows("Usage by key"), "Charged")
                    assert summed([tenant.figures], "Cost") == by_key == by_model
                    assert summed([usage.figures], "Charged") == of_usage
                    file = await visitor.get("/console/usage/csv?tenant=summed-live&group=key")
                    rows = list(csv.DictReader(io.StringIO(file.text)))
                    names = ("ended_requests", "input_tokens", "output_tokens", "cost_nanousd")
                    of_file = tuple(sum(int(row[name]) for row in rows) for name in names)
                    shown += [by_key, of_usage, of_file]
                    overview = await reader.get("/console")
                    charged.append(overview.figures["Spend today"].amount or 0)
            finally:
                is_over.set()
        for each in sending:
            each.result()
    engine = create_sql_engine(f"sqlite:///{server.data_dir / 'fairgate.db'}", writing=False)
    with engine.connect() as connection:
        of_all = sorted(charges(connection), key=lambda row: row["id"])
    engine.dispose()
    of_tenant = [row for row in of_all if row["tenant_id"] == tenant_id]
    states = set(itertools.accumulate(map(totals_of, of_tenant), add_totals, initial=NO_TOTALS))
    assert set(shown) <= states, "each is what the ledger had at some instant"
    assert shown == sorted(shown), "and no page goes back"
    assert len(set(shown)) > 5, "requests ended meanwhile"
    # The overview keeps what it has read for ten seconds; what it charged today is without credits.
    midnight_us = of_all[-1]["at_us"] // DAY_US * DAY_US
    costs = [row["cost_nanousd"] for row in of_all if row["kind"] != "credit" and row["at_us"] >= midnight_us]
    assert set(charged) <= set(itertools.accumulate(costs, initial=0))
