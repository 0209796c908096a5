"""Log-ins, refused attempts, reads and exports through a gateway: merged, counted, and in the audit."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Litestar
from prometheus_client import CollectorRegistry

from gateway.records.access_recorder import AccessRecorder
from tenants.admin.admin import Admin
from tenants.admin.audit import LINK, Actor, AuditRow
from tenants.admin.transaction import Transactions
from tenants.audit.accesses import Access, MergedAccess
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.people.person import PersonInvite
from tenants.people.way_in import LogIn
from tenants.storage.database import Database, open_database
from tenants.storage.flushes import Flush
from tests.support.audited import audited
from tests.support.builders import site
from tests.support.console import HASH, Browser
from tests.support.gateway_app import OWNER, PEPPER, gateway_and_app

ROOT = Actor("cli:root", "cli")
ADDRESS = "192.0.2.7"
PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


@dataclass
class Watched:
    """A gateway in this process, and what its audit says of accesses."""

    client: httpx.AsyncClient
    app: Litestar
    admin: Admin

    async def accesses(self, act: str) -> list[AuditRow]:
        """Rows of this act, with what waits to be written."""
        await self.app.state["gateway"].accesses.close()
        return await audited(self.admin, act=act)

    def browser(self, address: str = ADDRESS) -> Browser:
        return Browser(self.app, address=address)


@pytest.fixture
async def watched(sqlite_url: str, tmp_path: Path) -> AsyncIterator[Watched]:
    async with gateway_and_app(sqlite_url, tmp_path) as (client, app):
        database = open_database(sqlite_url)
        admin = Admin(Transactions(database, PEPPER))
        for name, role in (("ada", "owner"), ("ann", "auditor")):
            _, token = await admin.people.invite(ROOT, PersonInvite(name=name, role=role))
            await admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH)
        yield Watched(client, app, admin)
        await database.close()


def said(row: AuditRow) -> tuple[str, str, str, dict[str, Any]]:
    assert row.after is not None
    counts = {name: value for name, value in row.after.items() if name in ("count", "why")}
    return row.actor, row.origin, row.target, counts


def counted(rows: list[AuditRow]) -> dict[tuple[str, str], Counter[str]]:
    """Per actor and address, how often each reason was met: on the turn of a minute a row more begins."""
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts = said(row)[3]
        assert counts["count"] == sum(counts["why"].values())
        sums[row.actor, row.origin].update(counts["why"])
    return sums


async def test_log_ins_good_and_bad_are_rows_with_their_count_and_address(watched: Watched) -> None:
    async with watched.browser() as browser, watched.browser("192.0.2.8") as other:
        for _ in range(7):
            assert (await browser.log_in("Ada", "not the password")).status_code in (401, 403, 429)
        assert (await other.log_in("ada", "not the password")).status_code in (401, 403, 429)
        assert (await other.log_in("ann")).status_code == 303
        assert (await other.send("/console", "/console/log-out")).status_code == 303
    refused = await watched.accesses("session.refuse")
    counts = counted(refused)
    assert {who: why.total() for who, why in counts.items()} == {
        ("person:ada", ADDRESS): 7,
        ("person:ada", "192.0.2.8"): 1,
    }
    why = counts["person:ada", ADDRESS]
    assert set(why) <= {"password", "slowed"}
    assert why["password"] >= 5
    assert refused[0].request_id is not None
    [opened] = await watched.accesses("session.open")
    assert said(opened) == ("person:ann", "192.0.2.8", "console", {"count": 1})
    [closed] = await watched.accesses("session.close")
    assert closed.actor == "person:ann"


async def test_calls_of_the_admin_api_that_are_refused_or_read_are_rows(watched: Watched) -> None:
    client = watched.client
    answer = await client.post("/admin/v1/tenants", json={"name": "acme"}, headers=PARENT)
    [row] = await audited(watched.admin, act="tenant.create", subject="tenant:acme")
    assert (row.request_id, row.trace_id) == (answer.headers["x-request-id"], "a" * 32)
    weak, secret = await watched.admin.keys.create(ROOT, KeyCreate(tenant=OWNER, scopes=["inference"]))
    gone, old = await watched.admin.keys.create(ROOT, KeyCreate(tenant=OWNER, scopes=["admin:write"]))
    await watched.admin.keys.revoke(ROOT, gone.key_id)

    async def asks(authorization: str | None, status: int, times: int = 1) -> None:
        for _ in range(times):
            headers = PARENT | ({} if authorization is None else {"authorization": authorization})
            request = client.build_request("POST", "/admin/v1/tenants/acme/suspend", headers=headers)
            if authorization is None:
                del request.headers["authorization"]
            assert (await client.send(request)).status_code == status

    await asks(None, 401, 3)
    await asks("Bearer nonsense", 401)
    await asks(f"Bearer {secret}", 403, 2)
    await asks(f"Bearer {old}", 401)
    assert (await client.get("/v1/limits", headers={"authorization": "Bearer no"})).status_code == 401
    for _ in range(5):
        assert (await client.get("/admin/v1/tenants")).is_success
    assert (await client.get("/admin/v1/audit")).is_success
    assert (await client.get("/v1/limits")).is_success
    rows = await watched.accesses("access.refuse")
    assert {row.target for row in rows} == {"POST /admin/v1/tenants/{tenant}/suspend"}
    assert {actor: why for (actor, _), why in counted(rows).items()} == {
        f"key:{gone.key_id}": {"invalid_api_key": 1},
        f"key:{weak.prefix}": {"insufficient_permissions": 2},
        "unknown": {"invalid_api_key": 4},
    }
    assert {row.trace_id for row in rows} == {"a" * 32}
    assert all(row.request_id for row in rows)
    reads = await watched.accesses("access.read")
    assert sorted((row.target, said(row)[3]["count"]) for row in reads) == [
        ("GET /admin/v1/audit", 1),
        ("GET /admin/v1/tenants", 5),
    ]
    assert all(row.actor.startswith("key:") for row in reads)


async def test_forms_that_are_refused_passwords_that_are_wrong_and_files_are_rows(watched: Watched) -> None:
    async with watched.browser() as browser:
        assert (await browser.log_in("ann")).status_code == 303
        fields = {"current": "a guess", "password": "x", "repeat": "y"}
        assert (await browser.send("/console/password", **fields)).status_code == 403
        assert (await browser.get("/console/audit")).status_code == 200
        assert (await browser.get("/console/audit.csv")).status_code == 200
        assert (await browser.send("/console", "/console/tenants", name="x")).status_code == 403
        sent = await browser.http.post("/console/log-out", data={"form_token": "forged"})
        assert sent.status_code == 403
        assert (await browser.get("/console/policy/what-if/none")).status_code == 404
    async with watched.browser() as stranger:
        assert (await stranger.http.post("/console/tenants", data={"name": "x"})).status_code == 401
    rows = await watched.accesses("access.refuse")
    assert [(row.actor, row.target) for row in rows] == [
        ("person:ann", "POST /console/tenants"),
        ("person:ann", "POST /console/log-out"),
    ]
    [refused] = await watched.accesses("session.refuse")
    assert said(refused) == ("person:ann", ADDRESS, "console", {"count": 1, "why": {"password": 1}})
    [file] = await watched.accesses("access.export")
    assert (file.actor, file.target) == ("person:ann", "GET /console/audit.csv")


async def test_a_batch_is_written_once_however_often_it_is_repeated(
    database: Database, pepper: bytes
) -> None:
    admin = Admin(Transactions(database, pepper))
    rows = [MergedAccess(Access("access.refuse", "unknown", ADDRESS, "GET /x"), 1, 1, 2, 9)]
    for number in (1, 1, 2, 1):
        await admin.transactions.record_accesses(rows, Flush("test", number))
    assert len(await audited(admin, act="access.refuse")) == 2


async def test_a_flood_waits_in_memory_and_acts_go_on_beside_it(database: Database, pepper: bytes) -> None:
    admin, registry, now = Admin(Transactions(database, pepper)), CollectorRegistry(), [1_000.0]
    recorder = AccessRecorder(site(database, lambda: now[0], registry), admin.transactions)
    for number in range(3_000):
        recorder.log_in(LogIn(f"name-{number}", ADDRESS, "password"))
    await recorder.flush()
    assert await audited(admin) == [], "the minute is not over"
    now[0] += 60
    await asyncio.gather(
        recorder.flush(), *(admin.tenants.create(ROOT, TenantCreate(name=f"t{n}")) for n in range(20))
    )
    assert len(await audited(admin, act="tenant")) == 20
    await recorder.flush()
    rows = await audited(admin, act="session.refuse")
    assert len(rows) == 101
    assert said(rows[-1]) == ("others", "others", "others", {"count": 2_900, "why": {"password": 2_900}})
    recorder.of_server("server.stop", "gw-1")
    recorder.log_in(LogIn("ada", ADDRESS))
    await recorder.close()
    assert [row.action for row in (await audited(admin))[-2:]] == ["server.stop", "session.open"]
    key = SigningKey("test.example/log", bytes(32))
    assert (await AuditLog(database, key).verify([key.public])).finding is None
