"""After requests of every kind, the sums on all pages of a running server equal its ledger."""

from __future__ import annotations

from typing import Any

import httpx
from sqlalchemy import select

from ops.sandbox.page_check import page_sums
from tenants.storage.database import create_sql_engine
from tenants.storage.tables import ledger
from tests.support.server_process import MODEL, Server, until

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
