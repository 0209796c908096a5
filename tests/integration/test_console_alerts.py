"""The console's pages of alerts and webhooks: who sees and changes what."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from tenants.nouns.tenant import TenantCreate
from tenants.outbox import incidents, kinds
from tenants.outbox.outbox import Delivery
from tenants.outbox.transitions import Condition
from tenants.outbox.webhook import WebhookAdd
from tests.integration.test_console import ACTOR, House, error_of, house_on
from tests.support.audited import audited

PAGE = "/console/alerts"
FORM = f"{PAGE}/webhooks"
URL = "https://1.1.1.1/a-path-that-is-a-secret"


@pytest.fixture
async def house(sqlite_url: str, pepper: bytes) -> AsyncIterator[House]:
    async with house_on(sqlite_url, pepper) as made:
        yield made


async def test_a_member_has_webhooks_of_the_own_tenant_and_sees_its_alerts_alone(house: House) -> None:
    own = await house.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    other = await house.admin.tenants.create(ACTOR, TenantCreate(name="other"))
    of_platform, _ = await house.admin.webhooks.add(ACTOR, WebhookAdd(url=URL))
    found = [
        Condition(kinds.KEY_EXPIRES, "key_1", "the key of acme expires", own.tenant_id),
        Condition(kinds.KEY_EXPIRES, "key_2", "the key of other expires", other.tenant_id),
        Condition(kinds.LEDGER_DRIFT, "usage", "it drifts"),
    ]
    subjects = {each.kind.subject for each in found}
    await house.deps.database.write(lambda one: incidents.evaluate(one, "x", found, subjects, 10**15, 1))
    for name, role, tenants in (
        ("ada", "owner", None),
        ("bo", "member", [own.tenant_id]),
        ("cy", "auditor", None),
    ):
        await house.person(name, role, tenants)

    member = await house.logged_in("bo")
    page = await member.get(PAGE)
    assert "the key of acme expires" in page.text
    assert "the key of other expires" not in page.text
    assert "it drifts" not in page.text
    assert of_platform.webhook_id not in page.text
    assert (await member.get(f"{FORM}/{of_platform.webhook_id}")).status_code == 404
    for tenant, status in (("other", 422), ("", 403)):
        refused = await member.send(PAGE, FORM, url=URL, tenant=tenant, subjects="")
        assert refused.status_code == status, refused.text
    wrong = await member.send(PAGE, FORM, url="https://127.0.0.1/", tenant="acme", subjects="")
    assert "private address" in error_of(wrong, "url")
    wrong = await member.send(PAGE, FORM, url=URL, tenant="acme", subjects="replica.down")
    assert "is not one of" in error_of(wrong, "subjects")
    made = await member.send(PAGE, FORM, url=URL, tenant="acme", subjects="limit.soft, key.expires")
    secret = re.search(r'value="(whsec_[^"]+)"', made.text)
    assert secret, made.text
    [webhook] = await house.admin.webhooks.all({own.tenant_id})
    assert webhook.subjects == ("limit.soft", "key.expires")

    one = f"{FORM}/{webhook.webhook_id}"
    sent = await member.send(one, act="test")
    assert sent.headers["location"] == f"{one}?done=test"
    shown = await member.get(sent.headers["location"])
    assert "webhook.test" in shown.text
    assert "A test event is on its way" in shown.text
    assert secret[1] not in shown.text
    assert "a-path-that-is-a-secret" not in shown.text
    assert (await member.send(one, act="resend", seq="999")).status_code == 422
    assert (await member.send(one, act="resend", seq="x")).status_code == 422
    auditor = await house.logged_in("cy")
    assert "Send a test event" not in (await auditor.get(one)).text
    token = await auditor.token("/console/password")
    assert (await auditor.http.post(one, data={"form_token": token, "act": "test"})).status_code == 403
    assert "the key of other expires" in (await auditor.get(PAGE)).text
    gone = await member.send(f"{one}/remove")
    assert gone.headers["location"] == f"{PAGE}?done=removed"
    assert await house.admin.webhooks.all({own.tenant_id}) == []
    rows = await audited(house.admin, act="webhook", actor="person")
    assert [each.action for each in rows] == ["webhook.add", "webhook.test", "webhook.remove"]


async def test_an_owner_adds_one_of_the_platform(house: House) -> None:
    await house.person("ada")
    owner = await house.logged_in("ada")
    assert "No alert is firing" in (await owner.get(PAGE)).text
    made = await owner.send(PAGE, FORM, url=URL, tenant="", subjects="")
    assert "whsec_" in made.text
    [webhook] = await house.admin.webhooks.all()
    assert (webhook.tenant_id, webhook.by) == ("", "person:ada")


async def test_an_alert_is_acknowledged_and_silenced(house: House) -> None:
    """Three windows of one target are one row; a silenced problem reaches no webhook until its end."""
    acme = await house.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await house.admin.webhooks.add(ACTOR, WebhookAdd(url=URL))
    subjects = {kinds.SLO_BURN.subject}
    now_us = house.admin.transactions.now_us()

    def burning(*windows: int) -> list[Condition]:
        about = f"{acme.tenant_id}:standard:ttft"
        return [
            Condition(kinds.SLO_BURN, f"{about}:{each}", f"it burns over {each} s", acme.tenant_id)
            for each in windows
        ]

    async def evaluated(found: list[Condition], later_s: int = 0) -> list[str]:
        at_us = now_us + later_s * 1_000_000
        await house.deps.database.write(
            lambda one: incidents.evaluate(one, "x", found, subjects, at_us, 10**15)
        )
        return [each.body for each in await sent()]

    async def sent() -> list[Delivery]:
        [webhook] = await house.admin.webhooks.all()
        return await house.admin.webhooks.deliveries(webhook.webhook_id)

    assert len(await evaluated(burning(3_600, 21_600))) == 2
    for name, role in (("ada", "owner"), ("bo", "member"), ("cy", "auditor")):
        await house.person(name, role, ["acme"] if role == "member" else None)
    owner = await house.logged_in("ada")
    page = (await owner.get(PAGE)).text
    assert page.count("Acknowledge</a>") == 1, "one row"
    assert "nobody yet" in page
    assert page.count('href="/runbooks/slo.burn"') == 1
    [one, _] = [row.incident_id for row in await house.admin.webhooks.alerts()]
    await owner.send(f"{PAGE}/{one}/acknowledge")
    assert all(row.acknowledged_by == "person:ada" for row in await house.admin.webhooks.alerts())
    wrong = await owner.send(f"{PAGE}/{one}/silence", for_s="forever", reason="x")
    assert "is not a number" in error_of(wrong, "for_s")
    await owner.send(f"{PAGE}/{one}/silence", for_s="1h", reason="replaced tonight")
    page = (await owner.get(PAGE)).text
    assert all(text in page for text in ("person:ada", "replaced tonight", "End silence"))
    for name in ("bo", "cy"):
        browser = await house.logged_in(name)
        assert "Silence</a>" not in (await browser.get(PAGE)).text
        assert (await browser.get(f"{PAGE}/{one}/silence")).status_code == 403
    every = burning(3_600, 21_600, 259_200)
    assert len(await evaluated(every, 60)) == 2, "no webhook hears of the third"
    assert len(await evaluated(every, 3_700)) == 5, "what still fires at the end is sent"
    await owner.send(f"{PAGE}/{one}/silence", for_s="1h", reason="again")
    await owner.send(f"{PAGE}/{one}/unsilence")
    assert len(await evaluated([], 3_800)) == 5
    assert len(await evaluated([], 5_000)) == 8, "resolved is heard of again"
    late = await owner.send(f"{PAGE}/{one}/acknowledge")
    assert (late.status_code, "resolved already" in late.text) == (422, True)
    acts = [row.action for row in await audited(house.admin, act="alert")]
    assert acts == ["alert.acknowledge", "alert.silence", "alert.silence", "alert.unsilence"]
