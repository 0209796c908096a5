"""A change that names the state it was made for is made to that state or not at all, in any gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from tenants.storage.database import create_sql_engine
from tests.support.gateway_app import gateway_app

ROUNDS = 5


@pytest.fixture
async def client(database_url: str, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway_app(database_url, tmp_path / "one") as made:
        yield made


async def call(
    client: httpx.AsyncClient, method: str, path: str, body: object = None, if_match: str | None = None
) -> httpx.Response:
    headers = {} if if_match is None else {"if-match": if_match}
    return await client.request(method, f"/admin/v1{path}", json=body, headers=headers)


async def made(client: httpx.AsyncClient, path: str, body: object) -> dict[str, Any]:
    answer = await call(client, "POST", path, body)
    assert answer.is_success, answer.text
    shown: dict[str, Any] = answer.json()
    return shown | {"etag": answer.headers["etag"]}


async def acts(client: httpx.AsyncClient) -> int:
    return len((await call(client, "GET", "/audit?limit=1000")).json()["data"])


async def test_of_two_edits_at_once_through_two_gateways_one_wins(database_url: str, tmp_path: Path) -> None:
    async with (
        gateway_app(database_url, tmp_path / "one") as one,
        gateway_app(database_url, tmp_path / "other") as other,
    ):
        limit = await made(
            one, "/limits", {"tenant": "t1", "meter": "requests", "window": "day", "amount": 7}
        )
        for weight in range(2, 2 + ROUNDS):
            before = (await call(one, "GET", "/tenants/t1")).headers["etag"]
            assert before == (await call(other, "GET", "/tenants/t1")).headers["etag"]
            both = await asyncio.gather(
                call(one, "PATCH", "/tenants/t1", {"weight": weight}, before),
                call(other, "PATCH", "/tenants/t1", {"weight": weight + 0.5}, before),
            )
            answers = sorted(both, key=lambda each: each.status_code)
            assert [each.status_code for each in answers] == [200, 412]
            won, lost = answers
            error = lost.json()["error"]
            assert (error["code"], error["param"]) == ("precondition_failed", "If-Match")
            assert error["current"] == won.json()
            assert lost.headers["etag"] == won.headers["etag"] != before
            assert (await call(other, "GET", "/tenants/t1")).headers["etag"] == won.headers["etag"]
        # Of a limit that the other gateway removed meanwhile there is nothing to change.
        assert (await call(other, "DELETE", f"/limits/{limit['id']}", None, limit["etag"])).is_success
        gone = await call(one, "POST", f"/limits/{limit['id']}/override", OVERRIDE, limit["etag"])
        assert gone.status_code == 404


OVERRIDE = {"amount": 9, "reason": "launch", "for_s": 60}


async def test_a_key_has_a_name_and_a_default_tier_that_can_be_taken_away(client: httpx.AsyncClient) -> None:
    key = await made(client, "/keys", {"tenant": "t1", "name": "robot", "default_tier": "batch"})
    shown = (await call(client, "GET", f"/keys/{key['id']}")).json()
    assert (shown["name"], shown["default_tier"], shown["status"]) == ("robot", "batch", "active")
    assert shown["last_used_at"] is None
    assert "key" not in shown
    assert (await call(client, "GET", f"/keys/{key['prefix']}")).json() == shown
    path = f"/keys/{key['id']}"
    changed = (await call(client, "PATCH", path, {"name": "", "default_tier": ""})).json()
    assert (changed["name"], changed["default_tier"]) == ("", None)
    wrong = await call(client, "PATCH", path, {"default_tier": "interactive"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "default_tier")
    wrong = await call(client, "PATCH", path, {"name": "key_looks_like_an_id"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "name")


async def test_a_change_leaves_the_tags_of_other_objects_as_they_are(client: httpx.AsyncClient) -> None:
    first = await made(client, "/keys", {"tenant": "t1"})
    second = await made(client, "/keys", {"tenant": "t1"})
    await call(client, "PATCH", f"/keys/{first['id']}", {"name": "robot"})
    assert (await call(client, "GET", f"/keys/{second['id']}")).headers["etag"] == second["etag"]
    assert (await call(client, "GET", f"/keys/{first['id']}")).headers["etag"] != first["etag"]


async def test_what_is_no_tag_is_refused(client: httpx.AsyncClient) -> None:
    for given in ("0123456789abcdef", '"a" "b"', '"', "*, *", '"a",', '"' + "a" * 1_000 + '"'):
        answer = await call(client, "PATCH", "/tenants/t1", {"weight": 2}, given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "If-Match"), given
        assert "such as" in answer.json()["error"]["message"], given


async def test_any_state_will_do_where_the_object_is_there(client: httpx.AsyncClient) -> None:
    assert (await call(client, "PATCH", "/tenants/t1", {"weight": 2}, " * ")).status_code == 200
    assert (await call(client, "PATCH", "/tenants/none", {"weight": 2}, "*")).status_code == 404


async def test_a_lost_database_is_said_and_nothing_is_half_done(
    client: httpx.AsyncClient, database_url: str
) -> None:
    etag = (await call(client, "GET", "/tenants/t1")).headers["etag"]
    count = await acts(client)
    engine = create_sql_engine(database_url, writing=True)
    for name, other in (("audit", "lost"), ("lost", "audit")):
        with engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE {name} RENAME TO {other}"))
        if other == "lost":  # the change would come before its row in the audit
            answers = [
                await call(client, "PATCH", "/tenants/t1", {"weight": 7}, etag),
                await call(client, "GET", "/audit"),
            ]
            assert [each.status_code for each in answers] == [503, 503]
            assert {each.json()["error"]["code"] for each in answers} == {"database_unavailable"}
    engine.dispose()
    after = await call(client, "GET", "/tenants/t1")
    assert (after.headers["etag"], await acts(client)) == (etag, count)


async def test_what_no_name_has_is_a_callers_mistake(client: httpx.AsyncClient) -> None:
    for path, status in (
        ("/tenants/a%00", 404),
        ("/projects/prj_%00", 404),
        ("/projects/a?tenant=t1%00", 404),
        ("/keys/a%00", 404),
        ("/limits/a%00", 404),
        ("/slos/a%00", 404),
        ("/prices?model=a%00", 400),
        ("/prices/history?model=a%00", 400),
        ("/slo/misses?cause=a%00", 400),
        ("/requests/ended?model=a%00", 400),
        ("/requests?key=a%00", 404),
        ("/audit?actor=a%00", 400),
    ):
        assert (await call(client, "GET", path)).status_code == status, path
