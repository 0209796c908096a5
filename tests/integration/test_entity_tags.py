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
from tests.support.gateway_app import MODEL, gateway_app

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
PRICE = {"model": MODEL, "tier": "batch", "input_nanousd": 1, "output_nanousd": 2}


async def test_every_kind_of_object_has_a_tag_and_every_change_of_it_a_condition(
    client: httpx.AsyncClient,
) -> None:
    project = await made(client, "/projects", {"tenant": "t1", "name": "blue"})
    key = await made(
        client, "/keys", {"tenant": "t1", "project": "blue", "name": "robot", "default_tier": "batch"}
    )
    limit_body = {"tenant": "t1", "key": key["id"], "meter": "requests", "window": "day", "amount": 7}
    limit = await made(client, "/limits", limit_body)
    slo_body = {"tier": "batch", "metric": "ttft", "target_s": 2.0}
    slo = await made(client, "/slos", slo_body)
    tenant, suspend = "/tenants/t1", {"now": False}
    at: dict[str, list[tuple[str, str, object]]] = {
        tenant: [
            ("PATCH", tenant, {"weight": 3}),
            ("POST", f"{tenant}/suspend", suspend),
            ("POST", f"{tenant}/resume", None),
        ],
        f"/projects/{project['id']}": [
            ("POST", f"/projects/{project['id']}/suspend", suspend),
            ("POST", f"/projects/{project['id']}/resume", None),
        ],
        f"/keys/{key['id']}": [
            ("PATCH", f"/keys/{key['id']}", {"name": "android", "default_tier": ""}),
            ("PATCH", f"/keys/{key['id']}", {"allow_from": ["10.0.0.0/8"]}),
            ("PATCH", f"/keys/{key['id']}", {"scopes": ["quote"], "expires_in_s": 60}),
            ("POST", f"/keys/{key['id']}/rotate", {"grace_s": 60}),
            ("DELETE", f"/keys/{key['id']}", None),
        ],
        f"/limits/{limit['id']}": [
            ("POST", "/limits", limit_body | {"amount": 8}),
            ("POST", f"/limits/{limit['id']}/override", OVERRIDE),
            ("DELETE", f"/limits/{limit['id']}/override", None),
            ("DELETE", f"/limits/{limit['id']}", None),
        ],
        f"/slos/{slo['id']}": [
            ("POST", "/slos", slo_body | {"target_s": 3.0}),
            ("DELETE", f"/slos/{slo['id']}", None),
        ],
        f"/prices?model={MODEL}": [("POST", "/prices", PRICE)],
        "/policy": [("POST", "/policy", {"policy": "fcfs"}), ("POST", "/policy", {"from_settings": True})],
    }
    for shown, changes in at.items():
        for method, path, body in changes:
            etag = (await call(client, "GET", shown)).headers["etag"]
            count = await acts(client)
            stale = await call(client, method, path, body, '"0000000000000000", W/' + etag)
            assert stale.status_code == 412, f"{method} {path}: {stale.text}"
            assert stale.json()["error"]["current"] is not None
            assert stale.headers["etag"] == etag
            assert await acts(client) == count, f"{method} {path} left something behind"
            if path.endswith("/suspend") and path.startswith(tenant):
                continue  # it would end the caller's own key
            done = await call(client, method, path, body, f'"0000000000000000", {etag}')
            assert done.is_success, f"{method} {path}: {done.text}"
            after = await call(client, "GET", shown)
            if method == "DELETE" and not path.endswith("/override") and after.status_code == 404:
                assert "etag" not in done.headers
            else:
                assert done.headers["etag"] == after.headers["etag"], f"{method} {path}"
    # A replica may have no drain.
    drained = "/upstreams/away"
    none = await call(client, "POST", f"{drained}/drain", {}, "*")
    assert (none.status_code, none.json()["error"]["current"]) == (412, None)
    assert (await call(client, "GET", f"{drained}/drain")).status_code == 404
    first = await made(client, f"{drained}/drain", {"reason": "driver"})
    assert (await call(client, "GET", f"{drained}/drain")).headers["etag"] == first["etag"]
    second = await call(client, "POST", f"{drained}/drain", {"reason": "disk"}, first["etag"])
    assert (second.status_code, second.json()["reason"]) == (200, "disk")
    for act in ("drain", "resume"):
        stale = await call(client, "POST", f"{drained}/{act}", None, first["etag"])
        assert (stale.status_code, stale.json()["error"]["current"]) == (412, second.json())
        assert stale.headers["etag"] == second.headers["etag"]
    ended = await call(client, "POST", f"{drained}/resume", None, second.headers["etag"])
    assert (ended.status_code, ended.json()) == (200, second.json())
    # A brake is of a tier, of which there may be none.
    brake = {"tier": "batch", "share": 0.5, "for_s": 60}
    none = await call(client, "PUT", "/brake", brake, "*")
    assert (none.status_code, none.json()["error"]["current"]) == (412, None)
    first = await call(client, "PUT", "/brake", brake)
    assert (await call(client, "PUT", "/brake", brake | {"share": 0.2}, '"1"')).status_code == 412
    assert (await call(client, "DELETE", "/brake?tier=batch", None, first.headers["etag"])).is_success


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
        ("/prices?model=a%00", 200),
        ("/prices/history?model=a%00", 400),
        ("/slo/misses?cause=a%00", 400),
        ("/requests/ended?model=a%00", 400),
        ("/requests?key=a%00", 404),
        ("/audit?actor=a%00", 400),
    ):
        assert (await call(client, "GET", path)).status_code == status, path
