"""The audit log is found by actor, subject, act, tenant and time, page by page, and shows no secret."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.pricing.price_row import PriceSet
from tenants.resources.reading import read_page
from tenants.resources.records.audit import AUDIT, AuditQuery
from tests.support.audited import audited
from tests.support.quota import Clock

ROOT, KEY = Actor("cli:root", "cli"), Actor("key:fg_live_abc", "10.0.0.1")


async def acts(admin: Admin, clock: Clock) -> tuple[str, str]:
    """Two tenants with a project and a key each, one act a second. Returns acme's key id and its prefix."""
    made = []
    for name in ("acme", "globex"):
        await admin.tenants.create(ROOT, TenantCreate(name=name))
        clock.now_s += 1
        await admin.projects.create(KEY, ProjectCreate(tenant=name, name="blue"))
        clock.now_s += 1
        wanted = KeyCreate(tenant=name, project="blue", name="robot")
        made.append((await admin.keys.create(KEY, wanted))[0])
        clock.now_s += 1
    await admin.tenants.update(ROOT, "acme", TenantChange(weight=3))
    clock.now_s += 1
    await admin.prices.set(ROOT, PriceSet(model="small", free=True))
    return made[0].key_id, made[0].prefix


async def found(admin: Admin, **wanted: Any) -> list[str]:
    return [f"{row.action} {row.target_name}".strip() for row in await audited(admin, **wanted)]


async def test_an_act_is_found_by_actor_subject_act_tenant_and_time(admin: Admin, clock: Clock) -> None:
    started_s = clock.now_s
    key_id, prefix = await acts(admin, clock)

    def at(seconds: float) -> str:
        return from_us(round((started_s + seconds) * 1e6)).isoformat()

    assert await found(admin, actor="key") == await found(admin, actor="key:fg_live_abc")
    assert await found(admin, actor="cli:root") == [
        *("tenant.create acme", "tenant.create globex", "tenant.update acme", "price.set")
    ]
    assert await found(admin, actor="cli:roo") == []
    assert await found(admin, act="tenant.create") == ["tenant.create acme", "tenant.create globex"]
    assert await found(admin, act="tenant", subject="acme") == ["tenant.create acme", "tenant.update acme"]
    assert await found(admin, subject="tenant:acme", act="tenant.update") == ["tenant.update acme"]
    assert await found(admin, subject="blue") == ["project.create blue"] * 2
    assert await found(admin, subject="project:blue", tenant="globex") == ["project.create blue"]
    assert await found(admin, subject="price:small") == ["price.set"]
    for subject in (key_id, prefix, f"key:{key_id}", f"key:{prefix}"):
        assert await found(admin, subject=subject) == ["key.create robot"]
    assert await found(admin, subject="robot") == ["key.create robot"] * 2
    assert await found(admin, tenant="acme") == [
        *("tenant.create acme", "project.create blue", "key.create robot", "tenant.update acme")
    ]
    assert await found(admin, since=at(5), until=at(7)) == ["key.create robot", "tenant.update acme"]
    assert await found(admin, since=at(100)) == []
    # A percent sign and an underscore are letters like any other.
    assert await found(admin, actor="%") == await found(admin, actor="cl_") == []


async def test_pages_in_both_orders_show_every_row_once(admin: Admin, clock: Clock) -> None:
    await acts(admin, clock)
    whole = [row.seq for row in await audited(admin)]
    for query, wanted in ((AuditQuery(), whole[::-1]), (AuditQuery(order="oldest"), whole)):
        seen: list[int] = []
        cursor = None
        while True:
            page = await read_page(admin, AUDIT, query, cursor=cursor, limit=3)
            assert len(page.rows) <= 3
            seen += [row.seq for row in page.rows]
            cursor = page.next_cursor
            if cursor is None:
                break
            # What is written meanwhile moves nothing of the newest first.
            await admin.transactions.note(ROOT, "request.cancel", "req_1")
        assert seen[: len(wanted)] == wanted
        assert len(set(seen)) == len(seen)


async def test_a_filter_that_makes_no_sense_names_its_field(admin: Admin, clock: Clock) -> None:
    await acts(admin, clock)
    wrong: dict[str, dict[str, str]] = {
        "act": {"act": "tennant.create"},
        "subject": {"subject": "tennant:acme"},
        "since": {"since": "yesterday"},
        "until": {"until": "2026-01-31T18:00:00"},
        "actor": {"actor": "x\0"},
    }
    for field, wanted in wrong.items():
        with pytest.raises(Invalid) as caught:
            await read_page(admin, AUDIT, AuditQuery(**wanted))  # type: ignore[arg-type]
        assert caught.value.field == field
    for wanted in ({"tenant": "nobody"}, {"subject": "tenant:nobody"}, {"subject": "project:red"}):
        with pytest.raises(NotFound):
            await read_page(admin, AUDIT, AuditQuery(**wanted))  # type: ignore[arg-type]
    for limit in (0, 1_001):
        with pytest.raises(Invalid, match="limit"):
            await read_page(admin, AUDIT, AuditQuery(), limit=limit)
    page = await read_page(admin, AUDIT, AuditQuery(act="tenant"), limit=1)
    with pytest.raises(Invalid, match="act=tenant, and this one is asked with no filter"):
        await read_page(admin, AUDIT, AuditQuery(), cursor=page.next_cursor)


async def test_rows_show_names_and_no_secret(admin: Admin, clock: Clock) -> None:
    await acts(admin, clock)
    _, secret = await admin.keys.create(ROOT, KeyCreate(tenant="acme"))
    shown = await admin.with_names([row.as_json() for row in await audited(admin)])
    assert {row["tenant"] for row in shown} == {"acme", "globex", None}
    assert secret.rpartition("_")[2] not in json.dumps(shown)


async def test_names_stand_beside_ids(admin: Admin, clock: Clock) -> None:
    key_id, _ = await acts(admin, clock)
    limit = await admin.limits.set(
        ROOT, LimitSet(tenant="acme", key=key_id, meter="requests", window="day", amount=5)
    )
    item = {"tenant_id": limit.tenant_id, "kind": "key", "subject_id": key_id, "key_id": key_id}
    gone: dict[str, Any] = {"tenant_id": "ten_gone", "project_id": None}
    assert await admin.with_names([item, gone]) == [
        {
            "tenant_id": limit.tenant_id,
            "tenant": "acme",
            "kind": "key",
            "subject_id": key_id,
            "subject": "robot",
            "key_id": key_id,
            "key_name": "robot",
        },
        {"tenant_id": "ten_gone", "tenant": None, "project_id": None, "project": None},
    ]
    assert list((await admin.with_names([item]))[0])[:2] == ["tenant_id", "tenant"]
