"""Admin acts are checked, atomic, audited and confined to one tenant."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from ops.serving.processes import first_start
from tenants.admin import limits
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.transaction import Transactions
from tenants.directory import queries
from tenants.directory.directory import Directory
from tenants.errors import AlreadyExists, Invalid, NotFound, PepperMismatch
from tenants.nouns.key import MAX_SECRETS_PER_KEY, ApiKey, KeyChange, KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.storage import tables
from tenants.storage.database import Database
from tenants.types import LimitMode, Meter, Principal, SubjectKind, Tier, Window
from tests.support.audited import audited
from tests.support.limits import limits_of
from tests.support.quota import Clock

ACTOR = Actor("cli:tester", "cli")


async def revision(database: Database) -> int:
    return await database.read(queries.revision)


async def test_every_act_is_audited_in_its_own_transaction(admin: Admin, database: Database) -> None:
    tenant = await admin.tenants.create(ACTOR, TenantCreate(name="acme", weight=2))
    await admin.tenants.update(ACTOR, "acme", TenantChange(weight=3))
    project = await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="blue"))
    key, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", project="blue"))
    rotated, second = await admin.keys.rotate(ACTOR, key.key_id)
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=5))
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=7))
    await admin.limits.remove(ACTOR, limit.limit_id)
    await admin.projects.suspend(ACTOR, "blue", "acme")
    await admin.projects.resume(ACTOR, project.project_id)
    await admin.keys.revoke(ACTOR, key.key_id)
    await admin.tenants.suspend(ACTOR, "acme")
    await admin.tenants.resume(Actor("key:fg_live_x", "10.0.0.1"), "acme")
    rows = await audited(admin, tenant="acme")
    assert [(row.action, row.target) for row in rows] == [
        ("tenant.create", tenant.tenant_id),
        ("tenant.update", tenant.tenant_id),
        ("project.create", project.project_id),
        ("key.create", key.key_id),
        ("key.rotate", key.key_id),
        ("limit.set", limit.limit_id),
        ("limit.set", limit.limit_id),
        ("limit.remove", limit.limit_id),
        ("project.suspend", project.project_id),
        ("project.resume", project.project_id),
        ("key.revoke", key.key_id),
        ("tenant.suspend", tenant.tenant_id),
        ("tenant.resume", tenant.tenant_id),
    ]
    assert await revision(database) == len(rows)
    assert {(row.actor, row.origin) for row in rows[:-1]} == {("cli:tester", "cli")}
    assert (rows[-1].actor, rows[-1].origin) == ("key:fg_live_x", "10.0.0.1")
    assert (rows[0].before, rows[0].after) == (None, tenant.as_json())
    update = rows[1]
    assert update.before is not None
    assert update.after is not None
    assert (update.before["weight"], update.after["weight"]) == (2.0, 3.0)
    assert rows[7].after is None
    assert rows[4].after == rotated.as_json()
    dumped = json.dumps([row.as_json() for row in rows])
    for text_of_key in (secret, second):
        assert text_of_key not in dumped
        assert text_of_key.rpartition("_")[2] not in dumped


async def test_a_refused_act_leaves_no_trace(admin: Admin, database: Database) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    before = await revision(database)
    refusals: list[tuple[type[Exception], Any]] = [
        (AlreadyExists, admin.tenants.create(ACTOR, TenantCreate(name="acme"))),
        (AlreadyExists, admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="default"))),
        (NotFound, admin.projects.create(ACTOR, ProjectCreate(tenant="nobody", name="p"))),
        (NotFound, admin.keys.create(ACTOR, KeyCreate(tenant="acme", project="nowhere"))),
        (NotFound, admin.keys.revoke(ACTOR, "key_unknown")),
        (NotFound, admin.limits.remove(ACTOR, "lim_unknown")),
        (Invalid, admin.tenants.update(ACTOR, "acme", TenantChange(weight=-1))),
        (Invalid, admin.tenants.update(ACTOR, "acme", TenantChange(labels={"team": []}))),
        (Invalid, admin.keys.create(ACTOR, KeyCreate(tenant="acme", allow_from=["10.0.0.1/8"]))),
        (NotFound, admin.keys.update(ACTOR, "key_unknown", KeyChange(allow_from=[]))),
        (Invalid, admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", amount=1))),
    ]
    for error, act in refusals:
        with pytest.raises(error):
            await act
    assert await revision(database) == before
    assert len(await audited(admin)) == 1


async def test_the_networks_of_a_key_and_the_labels_of_a_tenant_are_kept_and_audited(admin: Admin) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    bound = KeyCreate(tenant="acme", allow_from=["10.0.0.0/8", "2001:db8::/32"])
    key, _ = await admin.keys.create(ACTOR, bound)
    rotated, _ = await admin.keys.rotate(ACTOR, key.key_id)
    assert key.allow_from == rotated.allow_from != ()
    moved = await admin.keys.update(ACTOR, key.prefix, KeyChange(allow_from=["192.0.2.7"]), "acme")
    assert await admin.keys.update(ACTOR, key.key_id, KeyChange()) == moved
    anywhere = await admin.keys.update(ACTOR, key.key_id, KeyChange(allow_from=[]))
    assert await admin.keys.show(key.key_id) == anywhere
    for labels in ({"team": ["search", "ads"]}, {"env": ["prod"]}, {"team": []}):
        shown = await admin.tenants.update(ACTOR, "acme", TenantChange(labels=labels))
    assert (await admin.tenants.show("acme")).tenant == shown

    def seen(action: str, name: str) -> list[Any]:
        return [
            ((row.before or {}).get(name), (row.after or {}).get(name))
            for row in rows
            if row.action == action
        ]

    rows = await audited(admin)
    both, one = ["10.0.0.0/8", "2001:db8::/32"], ["192.0.2.7/32"]
    assert seen("key.create", "allow_from") == [(None, both)]
    assert seen("key.update", "allow_from") == [(both, one), (one, one), (one, [])]
    team, env = {"team": ["ads", "search"]}, {"env": ["prod"]}
    assert seen("tenant.update", "labels") == [({}, team), (team, team | env), (team | env, env)]


async def test_what_a_key_may_do_is_changed_within_its_tenants(
    admin: Admin, database: Database, pepper: bytes
) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme", tiers=["standard", "batch"]), ["m", "n"])
    made = KeyCreate(tenant="acme", tiers=["standard", "batch"], default_tier="standard", models=["n"])
    key, secret = await admin.keys.create(ACTOR, made)

    async def principal() -> Principal:
        directory = Directory(database, pepper)
        await directory.refresh()
        return directory.authenticate(secret, Clock().now_s)

    async def changed(**fields: Any) -> ApiKey:
        return await admin.keys.update(ACTOR, key.key_id, KeyChange(**fields))

    narrow = await changed(scopes=["quote"], models=["m"], tiers=["batch"], default_tier="batch")
    assert narrow == await admin.keys.show(key.key_id)
    now = await principal()
    assert (now.scopes, now.models, now.tiers) == (
        frozenset({"quote"}),
        frozenset({"m"}),
        frozenset({Tier.BATCH}),
    )
    assert now.default_tier is Tier.BATCH
    wide = await changed(models=[], tiers=[], default_tier="")
    assert (wide.models, wide.tiers, wide.default_tier, wide.scopes) == (
        *(None, None, None),
        frozenset({"quote"}),
    )
    now = await principal()
    assert (now.models, now.tiers) == (frozenset({"m", "n"}), frozenset({Tier.STANDARD, Tier.BATCH}))
    for fields, param in (
        ({"scopes": []}, "scopes"),
        ({"models": ["o"]}, "models"),
        ({"tiers": ["interactive"]}, "tiers"),
        ({"default_tier": "interactive"}, "default_tier"),
        ({"expires": "2001-01-01T00:00:00Z"}, "expires"),
        ({"expires": "tomorrow"}, "expires"),
        ({"expires": "2024-01-01T00:00:00Z", "expires_in_s": 9.0}, "expires"),
        ({"expires_in_s": 0.5}, "expires_in_s"),
    ):
        with pytest.raises(Invalid) as refused:
            await changed(**fields)
        assert refused.value.field == param
    assert await admin.keys.show(key.key_id) == wide
    # The tenant narrowed: what the key has beyond that stays, and hinders no other change.
    await changed(tiers=["standard", "batch"], models=["n"], default_tier="standard")
    await admin.tenants.update(ACTOR, "acme", TenantChange(tier="batch", tiers=["batch"], models=["m"]))
    assert (await changed(name="robot")).tiers == frozenset({Tier.STANDARD, Tier.BATCH})
    with pytest.raises(Invalid, match="not among the key's tiers"):
        await changed(tiers=["batch"])


async def test_the_end_of_a_key_is_moved_and_taken_away(admin: Admin) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", expires_in_s=60))
    at = datetime.fromtimestamp(Clock().now_s, UTC) + timedelta(days=1, microseconds=1)
    moved = await admin.keys.update(ACTOR, key.key_id, KeyChange(expires=at.isoformat()))
    assert moved.expires_at == at
    soon = await admin.keys.update(ACTOR, key.key_id, KeyChange(expires_in_s=60))
    assert soon.expires_at == key.expires_at
    assert (await admin.keys.update(ACTOR, key.key_id, KeyChange(expires=""))).expires_at is None
    assert (await admin.keys.show(key.key_id)).expires_at is None


async def test_only_a_keyed_hash_of_a_key_is_stored(admin: Admin, database: Database) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))

    def everything(connection: Connection) -> str:
        return repr([connection.execute(select(table)).all() for table in tables.metadata.sorted_tables])

    stored = await database.read(everything)
    assert secret[len("fg_live_") : len("fg_live_") + 12] in stored
    assert secret.rpartition("_")[2] not in stored


async def test_a_tenant_uses_its_tier_and_the_ones_served_after_it(admin: Admin) -> None:
    plain = await admin.tenants.create(ACTOR, TenantCreate(name="plain"))
    first = await admin.tenants.create(ACTOR, TenantCreate(name="first", tier="interactive"))
    own = await admin.tenants.create(
        ACTOR, TenantCreate(name="own", tier="batch", tiers=["batch", "interactive"])
    )
    assert plain.tiers == {Tier.STANDARD, Tier.BATCH}
    assert first.tiers == set(Tier)
    assert own.tiers == {Tier.BATCH, Tier.INTERACTIVE}
    with pytest.raises(Invalid, match="tiers"):
        await admin.keys.create(ACTOR, KeyCreate(tenant="plain", tiers=["interactive"]))
    with pytest.raises(Invalid, match="default_tier"):
        await admin.keys.create(ACTOR, KeyCreate(tenant="plain", default_tier="interactive"))
    with pytest.raises(Invalid, match="tiers"):
        await admin.tenants.create(ACTOR, TenantCreate(name="odd", tier="standard", tiers=["batch"]))


async def test_setting_a_limit_again_replaces_it(admin: Admin) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    first = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="total_tokens", window="minute", amount=10)
    )
    second = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="total_tokens", window="minute", amount=20, mode="soft")
    )
    assert second.limit_id == first.limit_id
    assert await limits_of(admin, "acme") == [second]
    assert (second.amount, second.mode) == (20, LimitMode.SOFT)
    for tier in ("batch", "standard"):
        await admin.limits.set(
            ACTOR, LimitSet(tenant="acme", meter="total_tokens", window="minute", amount=1, tier=tier)
        )
    bucket = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="total_tokens", rate_per_s=0.5, amount=10)
    )
    assert (bucket.rate_per_s, bucket.amount, bucket.window, bucket.is_bucket) == (0.5, 10, None, True)
    running = await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="concurrency", amount=3))
    assert (running.meter, running.window, running.is_bucket) == (Meter.CONCURRENCY, None, False)
    assert len(await limits_of(admin, "acme")) == 5
    assert len(await limits_of(admin)) == 5


async def test_limits_bind_tenants_projects_and_keys(admin: Admin) -> None:
    tenant = await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    project = await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="blue"))
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", project="blue"))
    subjects = [
        (limit.kind, limit.subject_id)
        for limit in [
            await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=3)),
            await admin.limits.set(
                ACTOR, LimitSet(tenant="acme", project="blue", meter="requests", window="day", amount=2)
            ),
            await admin.limits.set(
                ACTOR, LimitSet(tenant="acme", key=key.prefix, meter="requests", window="day", amount=1)
            ),
        ]
    ]
    assert subjects == [
        (SubjectKind.TENANT, tenant.tenant_id),
        (SubjectKind.PROJECT, project.project_id),
        (SubjectKind.KEY, key.key_id),
    ]


async def test_nothing_of_one_tenant_is_found_through_another(admin: Admin) -> None:
    for name in ("acme", "globex"):
        await admin.tenants.create(ACTOR, TenantCreate(name=name))
    project = await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="blue"))
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", project="blue"))
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=1))
    daily: dict[str, Any] = {"meter": "requests", "window": "day", "amount": 1}
    for act in (
        admin.keys.create(ACTOR, KeyCreate(tenant="globex", project=project.project_id)),
        admin.projects.suspend(ACTOR, project.project_id, "globex"),
        admin.limits.set(ACTOR, LimitSet(tenant="globex", project=project.project_id, **daily)),
        admin.limits.set(ACTOR, LimitSet(tenant="globex", key=key.key_id, **daily)),
        admin.keys.revoke(ACTOR, key.key_id, tenant="globex"),
        admin.keys.rotate(ACTOR, key.key_id, tenant="globex"),
        admin.limits.remove(ACTOR, limit.limit_id, tenant="globex"),
    ):
        with pytest.raises(NotFound):
            await act
    other = await admin.tenants.show("globex")
    assert (len(other.projects), other.keys, other.limits) == (1, (), ())
    assert await audited(admin, tenant="globex") == [
        row for row in await audited(admin) if row.target == other.tenant.tenant_id
    ]
    mine = await admin.tenants.show("acme")
    assert (mine.keys, mine.limits) == ((key,), (limit,))


async def test_another_pepper_is_refused_before_it_makes_useless_keys(
    admin: Admin, database: Database
) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    stranger = Admin(Transactions(database, b"another pepper, also long enough"))
    with pytest.raises(PepperMismatch):
        await stranger.keys.create(ACTOR, KeyCreate(tenant="acme"))


async def test_a_rotated_key_has_a_bounded_number_of_live_secrets(admin: Admin, database: Database) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    for _ in range(MAX_SECRETS_PER_KEY - 1):
        await admin.keys.rotate(ACTOR, key.key_id, grace_s=60)
    with pytest.raises(Invalid, match="secrets"):
        await admin.keys.rotate(ACTOR, key.key_id, grace_s=60)
    later = Admin(Transactions(database, b"a pepper for tests, 32 bytes.....", Clock(Clock().now_s + 61)))
    await later.keys.rotate(ACTOR, key.key_id, grace_s=0)
    assert len(await database.read(lambda connection: queries.secrets_of(connection, [key.key_id]))) == 2
    await admin.keys.revoke(ACTOR, key.key_id)
    with pytest.raises(Invalid, match="revoked"):
        await admin.keys.rotate(ACTOR, key.key_id)


async def test_counts_are_bounded(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    monkeypatch.setattr("tenants.admin.tenants.MAX_TENANTS", 1)
    monkeypatch.setattr("tenants.admin.tenants.MAX_PROJECTS_PER_TENANT", 2)
    monkeypatch.setattr("tenants.admin.keys.MAX_KEYS_PER_TENANT", 1)
    monkeypatch.setattr(limits, "MAX_LIMITS_PER_SUBJECT", 1)
    await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="second"))
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=1))
    for act in (
        admin.tenants.create(ACTOR, TenantCreate(name="globex")),
        admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="third")),
        admin.keys.create(ACTOR, KeyCreate(tenant="acme")),
        admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="hour", amount=1)),
    ):
        with pytest.raises(Invalid, match=r"(most|limit of 1)"):
            await act
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=2))
    await admin.keys.revoke(ACTOR, key.key_id)
    await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))


async def test_acts_at_once_are_each_counted(admin: Admin, database: Database) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await asyncio.gather(
        *(admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name=f"p{index}")) for index in range(20))
    )
    results = await asyncio.gather(
        *(admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="same")) for _ in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, AlreadyExists) for result in results) == 4
    assert await revision(database) == 22
    assert len(await audited(admin)) == 22


async def test_foreign_keys_are_enforced(database: Database) -> None:
    orphan = tables.projects.insert().values(
        id="prj_x", tenant_id="ten_unknown", name="x", status="active", created_us=1
    )
    with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
        await database.write(lambda connection: connection.execute(orphan).rowcount)


async def test_windows_of_every_kind_can_be_set(admin: Admin) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    for window in Window:
        limit = await admin.limits.set(
            ACTOR, LimitSet(tenant="acme", meter="cost_nanousd", window=window.value, amount=10**15)
        )
        assert limit.window is window


async def test_gateways_that_start_together_for_the_first_time_make_one_owner(admin: Admin) -> None:
    made = await asyncio.gather(*(first_start._owner_key(admin) for _ in range(2)))
    assert len([secret for secret in made if secret is not None]) == 1
    assert await first_start._owner_key(admin) is None
