"""The outbox, its senders and the evaluation of alerts, towards a real receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import insert, select, update

from gateway.alerts.evaluator import AlertEvaluator, Look
from gateway.alerts.sender import WebhookSender
from tenants.admin import webhooks
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.errors import Invalid, NotFound, PepperMismatch
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.outbox import incidents, kinds, outbox
from tenants.outbox.outbox import MAX_BODY_BYTES, MAX_PENDING, Delivery, OutboxEvent, retry_after_s
from tenants.outbox.signing import NONCE_BYTES, SECRET_BYTES, seal
from tenants.outbox.transitions import Condition
from tenants.outbox.webhook import DeliveryAgain, Webhook, WebhookAdd
from tenants.storage.database import Database, open_database
from tenants.storage.tables import audit_checkpoints
from tenants.storage.tables import outbox as rows
from tenants.storage.tables import webhooks as webhook_rows
from tests.support.audited import audited
from tests.support.builders import site
from tests.support.database_fixtures import PEPPER
from tests.support.quota import Clock
from tests.support.webhook_receiver import Receiver, receiving

WHO = "cli:tester"
DOWN = Condition(kinds.LEDGER_DRIFT, "usage", "it drifts")
S = 1_000_000
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""What the kind of database makes no difference to."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def clock() -> Clock:
    """In step with that of the reference library, which refuses what is five minutes off."""
    return Clock(time.time())


@pytest.fixture
def admin(database: Database, clock: Clock) -> Admin:
    return Admin(Transactions(database, PEPPER, clock, webhook_private=True))


def sender(
    database: Database,
    admin: Admin,
    clock: Clock,
    name: str = "one",
    *,
    allows_private: bool = True,
    timeout_s: float = 5.0,
) -> WebhookSender:
    settings = {"webhook_timeout_s": timeout_s, "webhook_private": allows_private}
    return WebhookSender(site(database, clock, gateway_id=name, **settings), admin.webhooks.secret)


def evaluator(database: Database, look: Look, clock: Clock, name: str = "one") -> AlertEvaluator:
    console_url = "https://console.example"
    return AlertEvaluator(site(database, clock, gateway_id=name, console_url=console_url), look)


async def add(admin: Admin, receiver: Receiver, **more: object) -> Webhook:
    made, receiver.secret = await admin.webhooks.add(WHO, WebhookAdd(url=receiver.url, **more))  # type: ignore[arg-type]
    return made


async def put(database: Database, clock: Clock, *tenants: str, subject: str = "slo.burn") -> list[Delivery]:
    events = [OutboxEvent(subject, tenant, {"number": at}) for at, tenant in enumerate(tenants)]
    return await database.write(lambda one: outbox.put(one, events, round(clock() * 1e6)))


async def round_of(*senders: WebhookSender) -> None:
    """All that is due now is tried once, in its order."""
    for _ in range(50):
        await asyncio.gather(*(each.flush() for each in senders))
        if not sum([await each.sent() for each in senders]):
            return
    raise AssertionError("there is always something to send")


async def test_an_event_arrives_signed_once_and_in_order(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    await add(admin, receiver)
    await put(database, clock, "ten_1", "ten_1", "ten_1")
    work = sender(database, admin, clock)
    await round_of(work)
    assert [each["data"]["number"] for each in receiver.taken] == [0, 1, 2]
    assert len(receiver.attempts) == 3
    await round_of(work)
    assert len(receiver.attempts) == 3
    await work.close()


async def test_a_failure_holds_back_its_tenant_alone_and_is_tried_again_under_its_id(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    webhook = await add(admin, receiver)
    await put(database, clock, "ten_1", "ten_1", "ten_2")
    receiver.fails = [b'"number":0']
    work = sender(database, admin, clock)
    await round_of(work)
    assert [each["data"]["number"] for each in receiver.taken] == [2]
    [waiting, held_back] = await admin.webhooks.deliveries(webhook.webhook_id, state="pending")
    assert (held_back.attempts, held_back.error) == (1, "it answered 503")
    assert (waiting.attempts, waiting.error, waiting.next_us) == (0, "", held_back.next_us)
    clock.now_s += retry_after_s(1)
    await round_of(work)
    assert [each["data"]["number"] for each in receiver.taken] == [2, 0, 1]
    assert receiver.attempts.count(receiver.taken[1]["id"]) == 2
    assert len(receiver.attempts) == 4
    await work.close()


async def test_two_senders_send_each_event_once(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    await add(admin, receiver)
    await put(database, clock, *(f"ten_{number % 7}" for number in range(40)))
    other = open_database(database.url)
    try:
        both = sender(database, admin, clock), sender(other, admin, clock, "two")
        await round_of(*both)
        for each in both:
            await each.close()
    finally:
        await other.close()
    assert len(receiver.attempts) == len(set(receiver.attempts)) == 40
    of_tenant: dict[int, list[int]] = {}
    for each in receiver.taken:
        number = each["data"]["number"]
        of_tenant.setdefault(number % 7, []).append(number)
    assert all(numbers == sorted(numbers) for numbers in of_tenant.values())


async def test_what_a_killed_sender_had_claimed_is_sent_by_another_after_its_claim(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    await add(admin, receiver)
    await put(database, clock, "ten_1", "ten_1")
    now_us = round(clock() * 1e6)
    [claimed] = await database.write(lambda one: outbox.claim(one, "dead", now_us, 30 * S, 10))
    work = sender(database, admin, clock)
    await round_of(work)
    assert receiver.attempts == [], "the claimed one is the other's, and the next one waits for it"
    clock.now_s += 30.0
    await round_of(work)
    assert [each["data"]["number"] for each in receiver.taken] == [0, 1]
    # The one that was only slow says nothing any more.
    said = await database.write(lambda one: outbox.ended(one, claimed, "dead", "too late", now_us))
    assert said == ""
    await work.close()


@ON_SQLITE
async def test_a_restarted_sender_takes_up_its_own_claims_at_once(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    await add(admin, receiver)
    await put(database, clock, "ten_1")
    now_us = round(clock() * 1e6)
    assert await database.write(lambda one: outbox.claim(one, "one", now_us, 30 * S, 10))
    work = sender(database, admin, clock)
    await round_of(work)
    assert len(receiver.taken) == 1
    await work.close()


@ON_SQLITE
async def test_a_test_and_a_resend_do_not_wait_for_the_next_attempt(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    webhook = await add(admin, receiver)
    await put(database, clock, "", "")
    receiver.fails = [b'"number":0'] * 2
    work = sender(database, admin, clock)
    await round_of(work)
    await round_of(work)
    assert receiver.taken == []
    await admin.webhooks.test(WHO, webhook.webhook_id)
    await round_of(work)
    assert len(receiver.attempts) == 2, "tried at once, and failed"
    await admin.webhooks.resend(WHO, webhook.webhook_id, DeliveryAgain())
    await round_of(work)
    assert [each["type"] for each in receiver.taken] == ["slo.burn", "slo.burn", "webhook.test"]
    await work.close()


@ON_SQLITE
async def test_an_event_is_given_up_after_a_day_and_can_be_sent_again(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    webhook = await add(admin, receiver)
    await put(database, clock, "ten_1")
    receiver.stop()
    work = sender(database, admin, clock)
    for _ in range(25):
        clock.now_s += 3_600.0
        await round_of(work)
    [dead] = await admin.webhooks.deliveries(webhook.webhook_id, state="dead")
    assert dead.attempts == 24
    assert dead.error == "it could not be reached: ConnectError"
    receiver.start()
    assert await admin.webhooks.resend(WHO, webhook.webhook_id, DeliveryAgain()) == 1
    clock.now_s -= 25 * 3_600.0
    await database.write(lambda one: one.execute(update(rows).values(next_us=0)))
    await round_of(work)
    assert [each["id"] for each in receiver.taken] == [dead.event_id]
    with pytest.raises(NotFound, match="dead letter"):
        await admin.webhooks.resend(WHO, webhook.webhook_id, DeliveryAgain(seq=dead.seq))
    await work.close()


@ON_SQLITE
async def test_a_redirect_is_not_followed_and_a_silent_receiver_is_left(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    webhook = await add(admin, receiver)
    await put(database, clock, "ten_1")
    receiver.answers = [302]
    work = sender(database, admin, clock)
    await round_of(work)
    assert len(receiver.attempts) == 1
    [row] = await admin.webhooks.deliveries(webhook.webhook_id)
    assert row.error == "it answered 302: redirects are not followed"
    receiver.stop()
    await work.close()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(never, "127.0.0.1", receiver.port)
    work = sender(database, admin, clock, timeout_s=0.5)
    clock.now_s += 3_600.0
    await round_of(work)
    [row] = await admin.webhooks.deliveries(webhook.webhook_id)
    assert row.error == "no answer within 0.5 s"
    await work.close()
    silent.close()
    await silent.wait_closed()


@ON_SQLITE
async def test_a_private_address_is_refused_when_it_is_added_and_when_it_is_sent_to(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    strict = Admin(Transactions(database, PEPPER, clock))
    for url in (
        "https://127.0.0.1/",
        "https://localhost:8443/",
        "https://[::1]/",
        "https://169.254.169.254/",
    ):
        with pytest.raises(Invalid, match="private address"):
            await strict.webhooks.add(WHO, WebhookAdd(url=url))
    with pytest.raises(Invalid, match="is not known"):
        await strict.webhooks.add(WHO, WebhookAdd(url="https://no-such-host.invalid/"))
    # A name that stood for a public address when it was added.
    webhook = await add(admin, receiver)
    url = f"https://localhost:{receiver.port}/"
    sealed = seal(PEPPER, webhook.webhook_id, url, bytes(SECRET_BYTES), bytes(NONCE_BYTES))
    await database.write(lambda one: one.execute(update(webhook_rows).values(sealed=sealed)))
    await put(database, clock, "ten_1")
    work = sender(database, admin, clock, allows_private=False)
    await round_of(work)
    [row] = await admin.webhooks.deliveries(webhook.webhook_id)
    assert "private address" in row.error
    assert receiver.attempts == []
    await work.close()


@ON_SQLITE
async def test_who_is_told_of_what(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    owner = await admin.tenants.create(WHO, TenantCreate(name="acme"))
    of_all = await add(admin, receiver)
    some = await add(admin, receiver, subjects=["limit.soft", "audit.checkpoint"])
    of_tenant = await add(admin, receiver, tenant="acme")
    with pytest.raises(Invalid, match=r"subjects: 'replica\.down' is not one of"):
        await add(admin, receiver, tenant="acme", subjects=["replica.down"])
    with pytest.raises(Invalid, match="is not one of"):
        await add(admin, receiver, subjects=["nothing"])

    async def told(subject: str, tenant_id: str) -> set[str]:
        return {each.webhook_id for each in await put(database, clock, tenant_id, subject=subject)}

    assert await told("limit.soft", owner.tenant_id) == {
        of_all.webhook_id, some.webhook_id, of_tenant.webhook_id,
    }  # fmt: skip
    assert await told("slo.burn", owner.tenant_id) == {of_all.webhook_id, of_tenant.webhook_id}
    assert await told("limit.soft", "ten_other") == {of_all.webhook_id, some.webhook_id}
    assert await told("audit.checkpoint", "") == {of_all.webhook_id, some.webhook_id}
    members = {owner.tenant_id}
    assert await admin.webhooks.all(members) == [of_tenant]
    for act in (admin.webhooks.show, admin.webhooks.deliveries):
        with pytest.raises(NotFound):
            await act(of_all.webhook_id, whose=members)
    with pytest.raises(NotFound):
        await admin.webhooks.remove(WHO, of_all.webhook_id, members)
    for _ in range(webhooks.MAX_OF_A_TENANT - 1):
        await add(admin, receiver, tenant="acme")
    with pytest.raises(Invalid, match=r"tenant acme has 5, the limit"):
        await add(admin, receiver, tenant="acme")


@ON_SQLITE
async def test_each_act_leaves_a_row_without_secrets_and_the_database_has_none(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    webhook = await add(admin, receiver)
    await admin.webhooks.test(WHO, webhook.webhook_id)
    await admin.webhooks.resend(WHO, webhook.webhook_id, DeliveryAgain())
    work = sender(database, admin, clock)
    await round_of(work)
    await work.close()
    assert receiver.of("webhook.test", webhook=webhook.webhook_id)
    await admin.webhooks.remove(WHO, webhook.webhook_id)
    found = await audited(admin, act="webhook")
    assert [each.action for each in found] == [
        "webhook.add", "webhook.test", "webhook.resend", "webhook.remove",
    ]  # fmt: skip
    assert all(each.target == webhook.webhook_id for each in found)
    assert "hook?from" not in str(found)
    made, secret = await admin.webhooks.add(WHO, WebhookAdd(url=receiver.url))
    stored = await database.read(lambda one: one.execute(select(webhook_rows)).all())
    assert secret not in str(stored)
    assert (await admin.webhooks.secret(made.webhook_id))[0] == receiver.url
    await admin.tenants.create(WHO, TenantCreate(name="acme"))
    other = Admin(Transactions(database, PEPPER[::-1], clock, webhook_private=True))
    with pytest.raises(Invalid, match="another pepper"):
        await other.webhooks.secret(made.webhook_id)


@ON_SQLITE
async def test_a_webhook_is_not_sealed_with_a_strange_pepper(database: Database, admin: Admin) -> None:
    await admin.tenants.create(WHO, TenantCreate(name="acme"))
    await admin.keys.create(WHO, KeyCreate(tenant="acme"))
    other = Admin(Transactions(database, PEPPER[::-1], webhook_private=True))
    with pytest.raises(PepperMismatch):
        await other.webhooks.add(WHO, WebhookAdd(url="http://127.0.0.1:9/"))


@ON_SQLITE
async def test_the_line_of_a_webhook_and_the_size_of_an_event_are_bounded(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    webhook = await add(admin, receiver)
    await put(database, clock, *(["ten_1"] * (MAX_PENDING + 2)))
    counts = (await admin.webhooks.count_deliveries([webhook.webhook_id]))[webhook.webhook_id]
    assert counts == {"pending": MAX_PENDING, "dead": 2}
    with pytest.raises(Invalid, match="the limit"):
        await admin.webhooks.test(WHO, webhook.webhook_id)
    with pytest.raises(Invalid, match="the limit"):
        await admin.webhooks.resend(WHO, webhook.webhook_id, DeliveryAgain())
    large = OutboxEvent("slo.burn", "ten_1", {"summary": "s", "evidence": {"x": "y" * MAX_BODY_BYTES}})
    [row] = await database.write(lambda one: outbox.put(one, [large], 0, only=webhook.webhook_id))
    assert len(row.body) < MAX_BODY_BYTES
    assert '"evidence":{}' in row.body
    much_later_us = round((clock() + 31 * 86_400) * 1e6)
    await database.write(lambda one: outbox.purge(one, much_later_us))
    assert (await admin.webhooks.count_deliveries([webhook.webhook_id]))[webhook.webhook_id] == {
        "pending": MAX_PENDING
    }


# ------------------------------------------------------------ alerts


async def test_an_incident_is_told_once_when_it_fires_and_once_when_it_is_over(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    await add(admin, receiver)
    here: list[Condition] = [DOWN]

    async def look(now_us: int) -> tuple[list[Condition], set[str]]:
        return list(here), {DOWN.kind.subject}

    one, two = evaluator(database, look, clock), evaluator(database, look, clock, "two")
    work = sender(database, admin, clock)
    for each in (one, two, one):
        await each.flush()
    # A process that was killed begins anew, as does the other one once the lease has run out.
    clock.now_s += 91.0
    restarted = evaluator(database, look, clock, "two")
    await restarted.flush()
    await round_of(work)
    [firing] = await admin.webhooks.alerts(fires=True)
    assert receiver.of("ledger.drift", state="firing", incident=firing.incident_id)
    assert receiver.taken[0]["data"]["link"] == f"https://console.example{DOWN.page}"
    assert receiver.taken[0]["data"]["runbook"] == "https://console.example/runbooks/ledger.drift"
    here[:] = [replace(DOWN, summary="it got worse", evidence={"problems": 9})]
    await restarted.flush()
    [renewed] = await admin.webhooks.alerts(fires=True)
    assert (renewed.summary, renewed.evidence) == ("it got worse", {"problems": 9})
    assert (renewed.incident_id, renewed.fired_us) == (firing.incident_id, firing.fired_us)
    here.clear()
    for each in (one, restarted, one, restarted):
        await each.flush()
    await round_of(work)
    assert [each["data"]["state"] for each in receiver.taken] == ["firing", "resolved"]
    assert len({each["data"]["incident"] for each in receiver.taken}) == 1
    assert await admin.webhooks.alerts(fires=True) == []
    here.append(DOWN)
    await restarted.flush()
    await round_of(work)
    assert [each["data"]["state"] for each in receiver.taken] == ["firing", "resolved", "firing"]
    assert len({each["data"]["incident"] for each in receiver.taken}) == 2
    for each in (one, restarted, work):
        await each.close()


async def test_the_lease_is_one_gateways_until_it_runs_out_or_is_given_up(database: Database) -> None:
    async def takes(name: str, now_us: int) -> bool:
        return await database.write(lambda one: incidents.take_lease(one, name, now_us, 10))

    assert await takes("one", 0)
    assert not await takes("two", 9)
    assert await takes("one", 9)
    assert not await takes("two", 18)
    assert await takes("two", 19)
    assert not await takes("one", 20)
    # One that stood still writes nothing.
    stale = await database.write(
        lambda one: incidents.evaluate(one, "one", [DOWN], {DOWN.kind.subject}, 20, 10)
    )
    assert stale is None
    assert await database.read(incidents.firing) == []
    await database.write(lambda one: incidents.give_up_lease(one, "one"))
    assert not await takes("one", 21)
    await database.write(lambda one: incidents.give_up_lease(one, "two"))
    assert await takes("one", 22)


async def test_checkpoints_of_the_audit_are_told_once_by_any_process(
    database: Database, admin: Admin, clock: Clock, receiver: Receiver
) -> None:
    await add(admin, receiver, subjects=["audit.checkpoint"])

    async def sign(size: int) -> None:
        row = {"size": size, "note": f"a note of {size}\n", "at_us": 1}
        await database.write(lambda one: one.execute(insert(audit_checkpoints).values(row)))

    async def nothing(now_us: int) -> tuple[list[Condition], set[str]]:
        return [], set()

    one, work = evaluator(database, nothing, clock), sender(database, admin, clock)
    for sizes in ((1, 2), (), (5,)):
        for size in sizes:
            await sign(size)
        await one.flush()
    await round_of(work)
    assert [each["data"]["size"] for each in receiver.of("audit.checkpoint")] == [1, 2, 5]
    assert receiver.taken[2]["data"]["checkpoint"] == "a note of 5\n"
    for each in (one, work):
        await each.close()


@ON_SQLITE
async def test_alerts_are_bounded_and_old_ones_are_deleted(database: Database, admin: Admin) -> None:
    many = [replace(DOWN, about=f"usage {number}") for number in range(incidents.MAX_FIRING + 3)]
    subjects = {DOWN.kind.subject}
    evaluated = await database.write(lambda one: incidents.evaluate(one, "one", many, subjects, 0, S))
    assert evaluated is not None
    assert (len(evaluated.fired), evaluated.left_out) == (incidents.MAX_FIRING, 3)
    evaluated = await database.write(lambda one: incidents.evaluate(one, "one", [], subjects, 1, S))
    assert evaluated is not None
    assert len(evaluated.resolved) == incidents.MAX_FIRING
    await database.write(lambda one: incidents.purge(one, incidents.KEPT_US + 1))
    assert len(await admin.webhooks.alerts()) == webhooks.MOST_SHOWN
    await database.write(lambda one: incidents.purge(one, incidents.KEPT_US + 2))
    assert await admin.webhooks.alerts() == []
