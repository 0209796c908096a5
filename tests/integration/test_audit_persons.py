"""Persons in the audit, in both databases: rows hold hashes, lists show names, and erasing leaves proofs."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, select, update

from tenants.admin.admin import Admin
from tenants.admin.audit import LINK, Actor
from tenants.admin.commands import BrakeSet
from tenants.admin.transaction import Transactions
from tenants.audit import store
from tenants.audit.accesses import Access, MergedAccess
from tenants.audit.log import AuditLog
from tenants.audit.note import SigningKey, open_checkpoint
from tenants.audit.persons import ALTERED, ERASED, ERASED_PERSON
from tenants.errors import Invalid, NotFound
from tenants.nouns.tenant import TenantCreate
from tenants.people.person import Person, PersonInvite
from tenants.storage import tables
from tenants.storage.database import Database
from tests.integration.test_audit_checkpoints import forge
from tests.support.audited import audited
from tests.support.console import HASH

ROOT = Actor("cli:root", "cli")
KEY = SigningKey("test.example/log", bytes(32))
ADDRESS = "198.51.100.23"


async def person(admin: Admin, name: str, role: str = "owner") -> Person:
    _, token = await admin.people.invite(ROOT, PersonInvite(name=name, role=role))
    return await admin.people.redeem_link(Actor(LINK, ADDRESS), token, HASH)


def acting(who: Person) -> Actor:
    return Actor(who.actor_name, ADDRESS, (who.person_id, who.revision), "req_1", "f" * 32)


async def stored(database: Database) -> str:
    """All that lies in the log."""

    def look(connection: Connection) -> str:
        rows = connection.execute(select(tables.audit)).mappings()
        return "\n".join(repr(dict(row)) for row in rows)

    return await database.read(look)


async def test_rows_hold_no_name_and_no_address_and_lists_show_both(
    database: Database, pepper: bytes
) -> None:
    admin = Admin(Transactions(database, pepper))
    ada, _ = await person(admin, "ada@example.org"), await person(admin, "bo@example.org")
    await admin.tenants.create(acting(ada), TenantCreate(name="acme"))
    await admin.brakes.set(acting(ada), BrakeSet(tier="batch", share=0.5, for_s=60.0))
    await admin.people.end_sessions(acting(ada), "bo@example.org")
    kept = await stored(database)
    for personal in ("ada@", "bo@", ADDRESS, "example.org"):
        assert personal not in kept
    rows = {row.action: row for row in await audited(admin)}
    made = rows["tenant.create"]
    assert (made.actor, made.origin) == ("person:ada@example.org", ADDRESS)
    assert (made.request_id, made.trace_id) == ("req_1", "f" * 32)
    assert rows["brake.set"].after is not None
    assert rows["brake.set"].after["by"] == "person:ada@example.org"
    assert rows["person.end_sessions"].target_name == "bo@example.org"
    assert rows["person.redeem"].origin == ADDRESS
    assert (rows["person.invite"].actor, rows["person.invite"].request_id) == ("cli:root", None)
    for asked in ("person:ada@example.org", "person:ADA@example.org", f"person:{ada.person_id}"):
        found = [row.action for row in await audited(admin, actor=asked)]
        assert found == ["tenant.create", "brake.set", "person.end_sessions"], asked
    assert len(await audited(admin, actor="person")) == 3
    assert await audited(admin, actor="person:bo@example.org") == []
    assert (await AuditLog(database, KEY).verify([KEY.public])).finding is None


async def test_an_erased_person_is_in_no_table_and_every_proof_holds(
    database: Database, pepper: bytes
) -> None:
    admin, log = Admin(Transactions(database, pepper)), AuditLog(database, KEY)
    ada, bo = await person(admin, "ada@example.org"), await person(admin, "bo@example.org")
    await admin.tenants.create(acting(bo), TenantCreate(name="acme"))
    await admin.brakes.set(acting(bo), BrakeSet(tier="batch", share=0.5, for_s=60.0))
    await admin.tenants.create(acting(ada), TenantCreate(name="other"))
    old = await log.make_checkpoint()
    proofs = [await log.prove(seq) for seq in range(old.size)]
    entries = [row.entry for row in await log.rows(0)]

    await admin.people.erase(ROOT, "bo@example.org")
    with pytest.raises(NotFound):
        await admin.people.show(bo.person_id)

    def all_rows(connection: Connection) -> list[str]:
        named = (tables.audit_persons, tables.people, tables.settings, tables.audit)
        return [repr(dict(row)) for table in named for row in connection.execute(select(table)).mappings()]

    assert not any("bo@example" in row for row in await database.read(all_rows))
    shown = await audited(admin)
    by_bo = [row for row in shown if row.actor == ERASED_PERSON]
    assert [(row.action, row.origin) for row in by_bo] == [("tenant.create", ERASED), ("brake.set", ERASED)]
    assert by_bo[1].after is not None
    assert by_bo[1].after["by"] == ERASED_PERSON
    [erased] = [row for row in shown if row.action == "person.erase"]
    assert (erased.target, erased.target_name) == (bo.person_id, ERASED_PERSON)
    assert [row.actor for row in shown if row.actor.startswith("person")] == ["person:ada@example.org"]
    assert await audited(admin, actor="person:bo@example.org") == []

    new = await log.make_checkpoint()
    verdict = await log.verify([KEY.public], [old.note])
    assert (verdict.finding, verdict.signed) == (None, new.size)
    assert [row.entry for row in await log.rows(0)][: len(entries)] == entries
    opened = open_checkpoint(old.note, [KEY.public])
    assert all(proof.entry is not None and proof.proves(proof.entry, opened) for proof in proofs)


async def test_a_log_in_that_is_written_after_the_erasure_brings_no_one_back(
    database: Database, pepper: bytes
) -> None:
    admin = Admin(Transactions(database, pepper))
    await person(admin, "ada@example.org")
    await person(admin, "bo@example.org")
    waits = MergedAccess(Access("session.open", "person:bo@example.org", ADDRESS), 1, 1, 2, 1)
    await admin.transactions.record_accesses([waits])
    [row] = await audited(admin, act="session.open")
    assert (row.actor, row.origin) == ("person:bo@example.org", ADDRESS)
    await admin.people.erase(ROOT, "bo@example.org")
    await admin.transactions.record_accesses([waits])
    erased, nameless = await audited(admin, act="session.open")
    assert (erased.actor, erased.origin) == (ERASED_PERSON, ERASED)
    assert nameless.actor.startswith("unknown:")
    assert "bo@example" not in await stored(database)
    again = await person(admin, "bo@example.org", "operator")
    await admin.tenants.create(acting(again), TenantCreate(name="acme"))
    assert [row.action for row in await audited(admin, actor="person:bo@example.org")] == ["tenant.create"]


async def test_the_last_owner_is_not_erased(database: Database, pepper: bytes) -> None:
    admin = Admin(Transactions(database, pepper))
    ada = await person(admin, "ada@example.org")
    with pytest.raises(Invalid, match="the last owner"):
        await admin.people.erase(ROOT, ada.person_id)
    await admin.tenants.create(acting(ada), TenantCreate(name="acme"))
    assert [row.actor for row in await audited(admin, act="tenant")] == ["person:ada@example.org"]


async def test_a_record_that_was_altered_is_not_shown_as_the_name(database: Database, pepper: bytes) -> None:
    admin = Admin(Transactions(database, pepper))
    ada = await person(admin, "ada@example.org")
    await admin.tenants.create(acting(ada), TenantCreate(name="acme"))
    table = tables.audit_persons
    forged = update(table).where(table.c.text == "ada@example.org").values(text="eve@example.org")
    await database.write(lambda connection: connection.execute(forged).rowcount)
    assert [row.actor for row in await audited(admin, act="tenant")] == [f"person:{ALTERED}"]


async def test_a_name_that_nobody_has_is_kept_as_a_hash_alone(database: Database, pepper: bytes) -> None:
    admin = Admin(Transactions(database, pepper))
    typed = "correct-horse-battery-staple"
    refused = MergedAccess(Access("session.refuse", f"person:{typed}", ADDRESS, why="password"), 1, 9, 9, 3)
    refused.reasons["password"] = 3
    await admin.transactions.record_accesses([refused, refused])
    rows = await audited(admin, act="session.refuse")
    assert len({row.actor for row in rows}) == 1
    assert rows[0].actor.startswith("unknown:")
    assert rows[0].origin == ADDRESS, "of no person that there is"
    assert rows[0].after is not None
    assert (rows[0].after["count"], rows[0].after["why"]) == (3, {"password": 3})
    assert typed not in await stored(database)
    records = select(tables.audit_persons.c.digest)
    assert await database.read(lambda connection: list(connection.execute(records).scalars())) == []


async def test_rows_of_older_versions_stay_valid_and_keep_their_names(
    database: Database, pepper: bytes
) -> None:
    old = store.LogEntry(1, "person:ada", ADDRESS, "tenant.create", "ten_1", "ten_1", None, {"name": "acme"})
    await database.write(lambda connection: store.append(connection, old))
    admin, log = Admin(Transactions(database, pepper)), AuditLog(database, KEY)
    [row] = await audited(admin, actor="person:ada")
    assert (row.actor, row.origin, row.request_id) == ("person:ada", ADDRESS, None)
    [entry] = await log.rows(0)
    assert b"request_id" not in entry.entry
    assert (await log.verify([KEY.public])).finding is None
    # A request id that is put beside a row which has none is found.
    await forge(database, "UPDATE audit SET request_id = 'req_9'")
    finding = (await log.verify([KEY.public])).finding
    assert finding is not None
    assert "request_id" in str(finding)
