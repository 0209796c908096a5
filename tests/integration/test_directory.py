"""A running directory authenticates keys and follows every change in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from sqlalchemy import Connection, text

from migrations import runner
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.directory import queries
from tenants.directory.directory import LOOK_AGAIN_EVERY_S, POLL_INTERVAL_S, Directory
from tenants.directory.keys import new_secret
from tenants.errors import DatabaseUnavailable, KeyRejected, PepperMismatch, SchemaMissing
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.storage import tables
from tenants.storage.database import Database, open_database
from tenants.types import Principal, RequestTraits, Tier
from tests.support import services
from tests.support.quota import NOON_S, Clock

ACTOR = "cli:tester"


def reason(directory: Directory, secret: str, now_s: float = NOON_S) -> str:
    with pytest.raises(KeyRejected) as caught:
        directory.authenticate(secret, now_s)
    return caught.value.reason


async def test_a_principal_is_everything_on_the_keys_path(admin: Admin, directory: Directory) -> None:
    tenant = await admin.tenants.create(
        ACTOR, TenantCreate(name="acme", weight=2.5, tier="interactive"), models=["small", "large"]
    )
    await admin.tenants.create(ACTOR, TenantCreate(name="globex"))
    blue = await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="blue"))
    red = await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="red"))
    key, secret = await admin.keys.create(
        ACTOR,
        KeyCreate(
            tenant="acme", project="blue", scopes=["inference"], models=["small"], tiers=["batch", "standard"]
        ),
    )
    other, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", project="red"))
    on_tenant = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=1)
    )
    on_project = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", project="blue", meter="requests", window="day", amount=1)
    )
    on_key = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", key=key.key_id, meter="requests", window="day", amount=1, tier="batch")
    )
    await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", project=red.project_id, meter="requests", window="day", amount=1)
    )
    await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", key=other.key_id, meter="requests", window="day", amount=1)
    )
    await admin.limits.set(ACTOR, LimitSet(tenant="globex", meter="requests", window="day", amount=1))
    await directory.refresh()
    principal = directory.authenticate(secret, NOON_S)
    assert principal == Principal(
        tenant_id=tenant.tenant_id,
        tenant_name="acme",
        project_id=blue.project_id,
        key_id=key.key_id,
        key_prefix=key.prefix,
        weight=2.5,
        scopes=frozenset({"inference"}),
        # The tenant's default is not among the key's tiers: the one that takes nothing from others.
        default_tier=Tier.BATCH,
        tiers=frozenset({Tier.STANDARD, Tier.BATCH}),
        models=frozenset({"small"}),
        limits=(on_key, on_project, on_tenant),
    )
    assert principal.limits_for(RequestTraits(Tier.STANDARD, "m", 1), NOON_S) == (on_project, on_tenant)
    assert len(directory.limits(NOON_S)) == 6
    assert len(directory.limits(NOON_S, tenant.tenant_id)) == 5
    assert [each.name for each in directory.tenants()] == ["acme", "globex"]
    assert directory.tenant(tenant.tenant_id) == tenant


async def test_what_a_tenant_may_not_do_its_keys_may_not_do(admin: Admin, directory: Directory) -> None:
    await admin.tenants.create(
        ACTOR, TenantCreate(name="acme", tier="interactive"), models=["small", "large"]
    )
    _, secret = await admin.keys.create(
        ACTOR, KeyCreate(tenant="acme", models=["large"], tiers=["interactive", "batch"])
    )
    _, free = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    await admin.tenants.update(ACTOR, "acme", TenantChange(tier="standard", models=["small"]))
    await directory.refresh()
    assert directory.authenticate(secret, NOON_S).tiers == {Tier.BATCH}
    assert directory.authenticate(secret, NOON_S).models == frozenset()
    assert directory.authenticate(free, NOON_S).models == {"small"}
    assert directory.authenticate(free, NOON_S).default_tier is Tier.STANDARD
    await admin.tenants.update(ACTOR, "acme", TenantChange(tiers=["standard"]))
    await directory.refresh()
    assert reason(directory, secret) == "no_tier"


async def test_each_reason_for_a_refusal(admin: Admin, directory: Directory, pepper: bytes) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="blue"))
    key, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", project="blue", expires_in_s=60))
    await directory.refresh()
    assert reason(directory, "sk-123") == "malformed"
    assert reason(directory, new_secret(pepper).text) == "unknown"
    wrong = secret[:-1] + ("a" if secret[-1] != "a" else "b")
    assert reason(directory, wrong) == "unknown"
    assert directory.authenticate(secret, NOON_S + 59.999)
    assert reason(directory, secret, NOON_S + 60) == "expired"
    for suspended, suspend, resume in (
        ("tenant", admin.tenants.suspend(ACTOR, "acme"), admin.tenants.resume(ACTOR, "acme")),
        (
            "project",
            admin.projects.suspend(ACTOR, "blue", "acme"),
            admin.projects.resume(ACTOR, "blue", "acme"),
        ),
    ):
        await suspend
        await directory.refresh()
        assert reason(directory, secret) == f"{suspended}_suspended"
        # Who does not know the whole secret learns nothing about the key.
        assert reason(directory, wrong) == "unknown"
        await resume
        await directory.refresh()
        assert directory.authenticate(secret, NOON_S)
    await admin.keys.revoke(ACTOR, key.key_id)
    await directory.refresh()
    assert reason(directory, secret) == "revoked"
    assert reason(directory, wrong) == "unknown"


async def test_a_rotated_key_keeps_its_identity_and_its_old_secret_for_the_grace(
    admin: Admin, directory: Directory
) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    key, old = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    limit = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", key=key.key_id, meter="requests", window="day", amount=1)
    )
    rotated, new = await admin.keys.rotate(ACTOR, key.prefix, grace_s=30)
    await directory.refresh()
    assert (rotated.key_id, rotated.prefix != key.prefix) == (key.key_id, True)
    assert directory.authenticate(old, NOON_S + 29).key_id == key.key_id
    assert directory.authenticate(new, NOON_S + 29).limits == (limit,)
    assert reason(directory, old, NOON_S + 30) == "expired"
    assert directory.authenticate(new, NOON_S + 10_000)
    await admin.keys.revoke(ACTOR, rotated.prefix)
    await directory.refresh()
    assert (reason(directory, old), reason(directory, new)) == ("revoked", "revoked")


async def test_a_change_made_elsewhere_arrives_by_itself(
    directory: Directory, database_url: str, pepper: bytes
) -> None:
    # Another process: another connection and another Admin. Two looks, four a second: within a second.
    assert POLL_INTERVAL_S == 0.25
    elsewhere = open_database(database_url)
    other = Admin(Transactions(elsewhere, pepper))
    await other.tenants.create(ACTOR, TenantCreate(name="acme", weight=2))
    key, secret = await other.keys.create(ACTOR, KeyCreate(tenant="acme"))

    async def two_looks_after(change: Awaitable[object]) -> Principal:
        await change
        await directory.next_poll()
        await directory.next_poll()
        return directory.authenticate(secret, NOON_S)

    assert (await two_looks_after(asyncio.sleep(0))).weight == 2
    assert (await two_looks_after(other.tenants.update(ACTOR, "acme", TenantChange(weight=7)))).weight == 7
    limit = other.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=1))
    assert len((await two_looks_after(limit)).limits) == 1
    with pytest.raises(KeyRejected):
        await two_looks_after(other.keys.revoke(ACTOR, key.key_id))
    await elsewhere.close()


async def test_only_tenants_that_changed_are_loaded_again(
    admin: Admin, directory: Directory, database: Database
) -> None:
    secrets = {}
    for name in ("acme", "globex"):
        await admin.tenants.create(ACTOR, TenantCreate(name=name))
        secrets[name] = (await admin.keys.create(ACTOR, KeyCreate(tenant=name)))[1]
    await directory.refresh()
    before = {name: directory.authenticate(secret, NOON_S) for name, secret in secrets.items()}
    await admin.tenants.update(ACTOR, "acme", TenantChange(weight=5))
    await directory.refresh()
    after = {name: directory.authenticate(secret, NOON_S) for name, secret in secrets.items()}
    assert after["acme"].weight == 5
    assert after["globex"] is before["globex"]


async def test_a_key_that_was_just_made_is_found_and_guessers_make_nobody_look_often(
    admin: Admin, database: Database, pepper: bytes
) -> None:
    clock = Clock(100)
    directory = Directory(database, pepper, poll_interval_s=3_600, monotonic=clock)
    await directory.start()
    assert not await directory.look_again()
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    key, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    assert not await directory.look_again(), "it was looked for a moment ago"
    clock.advance(LOOK_AGAIN_EVERY_S)
    assert all(await asyncio.gather(*(directory.look_again() for _ in range(8)))), (
        "all hear of what one found"
    )
    assert directory.authenticate(secret, NOON_S).key_id == key.key_id
    clock.advance(LOOK_AGAIN_EVERY_S)
    assert not await directory.look_again()
    await directory.close()


async def test_a_look_without_a_database_finds_nothing_and_is_not_repeated_at_once(pepper: bytes) -> None:
    server = services.start_postgres()
    try:
        url = services.create_database(server.url)
        runner.upgrade(url)
        database, clock = open_database(url), Clock(100)
        await Admin(Transactions(database, pepper)).tenants.create(ACTOR, TenantCreate(name="acme"))
        directory = Directory(database, pepper, poll_interval_s=3_600, monotonic=clock)
        await directory.start()
        server.kill()
        assert not any(await asyncio.gather(*(directory.look_again() for _ in range(8))))
        server.start()
        database_again = open_database(url)
        _, secret = await Admin(Transactions(database_again, pepper)).keys.create(
            ACTOR, KeyCreate(tenant="acme")
        )
        await database_again.close()
        assert not await directory.look_again(), "it failed a moment ago"
        clock.advance(LOOK_AGAIN_EVERY_S)
        while not await directory.look_again():
            clock.advance(LOOK_AGAIN_EVERY_S)
        assert directory.authenticate(secret, NOON_S)
        await directory.close()
        await database.close()
    finally:
        server.stop()


async def test_the_hot_path_asks_no_database(admin: Admin, directory: Directory, database: Database) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    await directory.refresh()
    await directory.close()
    await database.close()
    assert directory.authenticate(secret, NOON_S).tenant_name == "acme"


async def test_a_directory_that_cannot_be_refreshed_serves_for_a_while_and_then_fails_closed(
    pepper: bytes,
) -> None:
    server = services.start_postgres()
    try:
        url = services.create_database(server.url)
        runner.upgrade(url)
        database, clock = open_database(url), Clock(0)
        admin = Admin(Transactions(database, pepper))
        await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
        _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
        directory = Directory(database, pepper, max_stale_s=60, poll_interval_s=0.02, monotonic=clock)
        await directory.start()
        server.kill()
        clock.advance(60)
        assert directory.authenticate(secret, NOON_S).tenant_name == "acme"
        clock.advance(0.1)
        with pytest.raises(DatabaseUnavailable, match="could not be refreshed"):
            directory.authenticate(secret, NOON_S)
        server.start()
        while directory.stale_s > 60:
            await directory.next_poll()
        assert directory.authenticate(secret, NOON_S).tenant_name == "acme"
        await directory.close()
        await database.close()
    finally:
        server.stop()


async def test_the_wrong_pepper_and_a_missing_schema_stop_the_start(
    admin: Admin, database: Database, empty_postgres_url: str
) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    with pytest.raises(PepperMismatch):
        await Directory(database, b"another pepper, also long enough").start()
    empty = open_database(empty_postgres_url)
    with pytest.raises(SchemaMissing):
        await Directory(empty, b"another pepper, also long enough").start()
    await empty.close()


async def test_a_restored_older_database_replaces_everything(
    admin: Admin, directory: Directory, database: Database
) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    await directory.refresh()
    assert directory.authenticate(secret, NOON_S)

    def restore(connection: Connection) -> None:
        for table in (tables.key_secrets, tables.api_keys, tables.projects, tables.tenants):
            connection.execute(table.delete())
        connection.execute(text("UPDATE directory_revision SET revision = 1"))

    await database.write(restore)
    await directory.refresh()
    assert reason(directory, secret) == "unknown"
    assert directory.tenants() == []
    assert directory.revision == 1 == await database.read(queries.revision)
