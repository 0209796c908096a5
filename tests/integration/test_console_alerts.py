"""The console's pages of alerts and webhooks: who sees and changes what."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from tenants.nouns.tenant import TenantCreate
from tenants.outbox import incidents, kinds
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
    assert "is none" in error_of(wrong, "subjects")
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
    assert "Nothing fires" in (await owner.get(PAGE)).text
    made = await owner.send(PAGE, FORM, url=URL, tenant="", subjects="")
    assert "whsec_" in made.text
    [webhook] = await house.admin.webhooks.all()
    assert (webhook.tenant_id, webhook.by) == ("", "person:ada")
