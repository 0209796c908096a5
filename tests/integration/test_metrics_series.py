"""The number of series on the metrics page follows from the settings, not from clients and tenants."""

from __future__ import annotations

import random
import string
import time
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection

from gateway.workers.metrics_sum import LARGEST, MEAN, SUMMED, families_of
from tenants.directory.keys import new_secret
from tenants.storage.database import open_database
from tenants.storage.tables.directory import key_secrets
from tests.support.gateway_app import MODEL, PEPPER, gateway_and_app, gateway_app
from tests.support.many_requests import Sizes, fill
from tests.support.prometheus import Series, lint, series, value

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["a"]},
}
DURATION = "gen_ai_server_request_duration_seconds_count"


async def page(client: httpx.AsyncClient) -> str:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return answer.text


async def one_of_each(client: httpx.AsyncClient) -> None:
    """Each refusal that the random requests below can meet."""
    wrong_key = {"authorization": "Bearer fg_wrong"}
    for route, body in BODIES.items():
        for model in (MODEL, "unknown"):
            await client.post(route, json=body | {"model": model})
        await client.post(route, json=body | {"model": ""})
        await client.post(route, json=body | {"model": "unknown"}, headers=wrong_key)
    await client.get("/nothing")


async def test_what_clients_send_adds_no_series(sqlite_url: str, tmp_path: Path) -> None:
    random_ = random.Random(35)

    def word() -> str:
        return "".join(random_.choices(string.ascii_letters + '/-_."\\\u00e4', k=random_.randrange(1, 60)))

    async with gateway_app(sqlite_url, tmp_path / "data") as client:
        await one_of_each(client)
        before = await page(client)
        refused = value(before, "fairgate_refusals_total")
        assert refused is not None
        for _ in range(1_000):
            headers = {
                "x-test": word().encode(),
                "user-agent": word().encode(),
                "traceparent": word().encode(),
            }
            route = random_.choice(list(BODIES))
            body = BODIES[route] | {"model": random_.choice([MODEL, word(), word()])}
            match random_.randrange(4):
                case 0:
                    headers["authorization"] = f"Bearer {word()}".encode()
                    answer = await client.post(route, json=body, headers=headers)
                case 1:
                    answer = await client.get(f"/{word().lstrip('/')}", headers=headers)
                case _:
                    answer = await client.post(route, json=body, headers=headers)
            assert answer.status_code >= 400
        after = await page(client)
    assert value(after, "fairgate_refusals_total") == refused + 1_000
    assert series(after) - series(before) == set()
    unknown = value(after, DURATION, gen_ai_request_model="_OTHER", error_type="model_not_found")
    assert unknown is not None
    assert unknown > 100
    assert lint(after, is_open_metrics=False) == ""


async def test_every_gauge_has_a_rule_by_which_workers_are_merged(sqlite_url: str, tmp_path: Path) -> None:
    async with gateway_and_app(sqlite_url, tmp_path / "data") as (_, app):
        families = families_of(app.state.gateway.metrics.registry)
    by_rule = [*SUMMED, *MEAN, *LARGEST]
    assert len(by_rule) == len(set(by_rule))
    assert {family.name for family in families if family.type == "gauge"} <= set(by_rule)
    without_tracer = {"fairgate_traces_waiting"}
    assert set(by_rule) - {family.name for family in families} == without_tracer, "a name that is no more"


def with_keys(connection: Connection, number: int) -> list[str]:
    """So many tenants, each with a key, in an empty database: an act for each would take long."""
    fill(connection, Sizes(requests=10, tenants=number, keys=number), now_us=time.time_ns() // 1000)
    made = [new_secret(PEPPER) for _ in range(number)]
    rows = [
        {"public_id": each.public_id, "key_id": f"key_{i}", "digest": each.digest, "created_us": 0}
        for i, each in enumerate(made, 1)
    ]
    connection.execute(key_secrets.insert(), rows)
    return [each.text for each in made]


async def test_a_thousand_tenants_have_the_series_of_ten(sqlite_url: str, tmp_path: Path) -> None:
    database = open_database(sqlite_url)
    try:
        keys = await database.write(lambda connection: with_keys(connection, 1_000))
    finally:
        await database.close()

    async with gateway_app(sqlite_url, tmp_path / "data") as client:

        async def ask(secrets: list[str]) -> set[Series]:
            for secret in secrets:
                headers = {"authorization": f"Bearer {secret}"}
                answer = await client.post(CHAT, json=BODIES[CHAT] | {"model": MODEL}, headers=headers)
                assert answer.status_code == 503, answer.text
            return series(await page(client))

        assert await ask(keys[:10]) == await ask(keys[10:])
