"""Forms of the console: what becomes of one whose session has ended, and of what is typed to do harm."""

from __future__ import annotations

import html
import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from litestar import Litestar

from gateway.console.form_errors import CHANGED_MEANWHILE
from gateway.console.pages.tenant_parts.acts import tag_of
from tenants.instants import from_us
from tenants.nouns.key import ApiKey, KeyCreate
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.types import Tier
from tests.integration.test_console import ACTOR, House, error_of, house_on
from tests.support.console import PASSWORD


@pytest.fixture
async def house(sqlite_url: str, pepper: bytes) -> AsyncIterator[House]:
    async with house_on(sqlite_url, pepper) as made:
        yield made


def hidden(page: httpx.Response) -> dict[str, str]:
    """The hidden fields of the last form of a page, as a browser sends them."""
    form = page.text.rpartition("<form")[2]
    return {
        name: html.unescape(value)
        for name, value in re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', form)
    }


def forms_of(app: Litestar) -> list[str]:
    """The paths of all forms that need a session, but the log-out, with names that nothing has."""
    found = {
        re.sub(r"\{\w+:?\w*\}", "acme", route.path)
        for route in app.routes
        for handler in getattr(route, "route_handlers", ())
        if "POST" in handler.http_methods and route.path.startswith("/console/") and handler.opt["act"]
    }
    return sorted(found - {"/console/log-out"})


async def test_an_ended_session_leads_to_the_log_in_and_back_to_what_was_typed(house: House) -> None:
    """Any form: it is shown to who logs in, who then sends it; what is secret is asked for again."""
    await house.person("ada")
    forms = forms_of(house.here)
    assert len(forms) >= 24, forms
    for path in forms:
        browser = house.browser()
        typed = {"name": "bob<b>&'\"ü", "act": "role", "password": PASSWORD, "session_password": PASSWORD}
        page = await browser.http.post(path, data={"form_token": "of a session before"} | typed)
        assert page.status_code == 401, path
        assert "what you typed is kept" in page.text
        if path == forms[0]:  # and through a wrong password
            wrong = hidden(page) | {"name": "ada", "password": "x"}
            page = await browser.http.post("/console/log-in", data=wrong)
            assert page.status_code == 403
        answers = hidden(page) | {"name": "ada", "password": PASSWORD}
        asked = await browser.http.post("/console/log-in", data=answers)
        assert (asked.status_code, "Send it now?" in asked.text) == (200, True), asked.text
        assert PASSWORD not in page.text + asked.text
        assert f'<form method="post" action="{path}">' in asked.text
        assert "<b>" not in asked.text
        kept = hidden(asked)
        assert kept | {"form_token": ""} == {"form_token": "", "name": typed["name"], "act": "role"}
        for name in ("password", "session_password"):
            assert f'name="{name}" type="password" value=""' in asked.text
        sent = await browser.http.post(path, data=kept)
        assert sent.status_code < 500, sent.text
        assert "This form was not accepted" not in sent.text
        assert sent.headers.get("location", "").partition("?")[0] != "/console/log-in"
    assert await house.admin.tenants.all() == []


async def test_a_form_of_an_ended_session_is_sent_by_its_person_alone(house: House) -> None:
    await house.person("ada")
    browser = await house.logged_in("ada")
    token = await browser.token("/console/tenants")
    await house.admin.people.end_sessions(ACTOR, "ada")
    fields = {"name": "acme", "weight": "2", "default_tier": "standard", "tier_standard": "yes"}
    fields |= {"on_low_budget": "refuse", "reserved_tokens_per_s": "0", "reserved_tier": "all"}
    page = await browser.http.post("/console/tenants", data={"form_token": token} | fields)
    foreign = {"sec-fetch-site": "cross-site"}
    refused = await browser.http.post("/console/tenants", data=fields, headers=foreign)
    assert (refused.status_code, "acme" in refused.text) == (403, False)
    answers = hidden(page) | {"name": "ada", "password": PASSWORD}
    forged = json.dumps({"path": "https://evil.example/console", "values": {}, "secrets": []})
    away = await house.browser().send("/console/log-in", **answers | {"form_token": "x", "unsent": forged})
    assert away.status_code == 403
    away = await house.browser().log_in("ada", unsent=forged)
    assert (away.status_code, away.headers["location"]) == (303, "/console")
    asked = await browser.http.post("/console/log-in", data=answers)
    assert await house.admin.tenants.all() == []
    made = await browser.http.post("/console/tenants", data=hidden(asked))
    assert (made.status_code, made.headers["location"]) == (303, "/console/tenants/acme?done=made")
    assert (await house.admin.tenants.show("acme")).tenant.weight == 2.0
    long = {"form_token": "", "name": "é" * 10_700}
    too_long = await house.browser().http.post("/console/tenants", data=long)
    assert (too_long.status_code, "too long to be kept" in too_long.text) == (401, True)


TAG = re.compile(r'name="etag" value="([^"]+)"')


async def with_key(house: House, **wanted: Any) -> ApiKey:
    """A tenant with a key, and a person of each role."""
    await house.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await house.admin.tenants.create(ACTOR, TenantCreate(name="other"))
    for role in ("owner", "operator", "auditor"):
        await house.person(role, role)
    await house.person("member", "member", ["acme"])
    made, _ = await house.admin.keys.create(ACTOR, KeyCreate(tenant="acme", **wanted))
    return made


async def test_of_two_edits_of_a_key_one_wins_and_the_other_sees_both_states(house: House) -> None:
    made = await with_key(house, name="backend")
    form = f"/console/tenants/acme/keys/{made.key_id}/change"
    here, there = await house.logged_in("operator"), await house.logged_in("member", app=house.there)
    [tag] = TAG.findall((await here.get(form)).text)
    day = (from_us(round(house.clock() * 1e6)) + timedelta(days=30)).date().isoformat()
    fields = {"name": "web", "models": "m, n", "scope_inference": "yes", "scope_usage_read": "yes"}
    fields |= {"tier_batch": "yes", "default_tier": "batch", "ends": day, "allow_from": "10.0.0.0/8"}
    won = await here.send(form, etag=tag, **fields)
    assert won.status_code == 303, won.text
    page = await here.get(won.headers["location"])
    assert "The change is stored." in page.text
    stored = await house.admin.keys.show(made.key_id)
    assert (stored.name, stored.models, stored.default_tier) == ("web", frozenset({"m", "n"}), Tier.BATCH)
    assert (stored.scopes, stored.tiers) == (frozenset({"inference", "usage:read"}), frozenset({Tier.BATCH}))
    assert stored.as_json()["expires_at"] == f"{day}T00:00:00+00:00"
    assert [str(each) for each in stored.allow_from] == ["10.0.0.0/8"]

    lost = await there.send(form, etag=tag, name="mine", scope_inference="yes", ends="never")
    assert (lost.status_code, "is not" in lost.text, stored.name) == (422, False, "web")
    assert "with a time zone" in error_of(lost, "ends")
    lost = await there.send(form, etag=tag, name="mine", scope_inference="yes")
    assert (lost.status_code, CHANGED_MEANWHILE in lost.text) == (412, True)
    assert re.search(r"<td>Name</td><td[^>]*>web</td><td[^>]*>mine</td>", lost.text)
    assert 'value="mine"' in lost.text
    assert await house.admin.keys.show(made.key_id) == stored
    [now] = set(TAG.findall(lost.text))
    again = await there.send(form, etag=now, name="mine", scope_inference="yes")
    assert again.status_code == 303
    after = await house.admin.keys.show(made.key_id)
    assert (after.name, after.models, after.tiers, after.expires_at) == ("mine", None, None, None)
    # Sent as it is it changes nothing, also where the tenant has narrowed since what the key may do.
    page = await here.get(form)
    boxes = dict.fromkeys(re.findall(r'name="(\w+)" value="yes" checked', page.text), "yes")
    typed = dict(re.findall(r'name="(name|models|ends|allow_from)" type="text" value="([^"]*)"', page.text))
    same = await here.send(form, etag=TAG.findall(page.text)[0], default_tier="", **typed, **boxes)
    assert (same.status_code, await house.admin.keys.show(made.key_id)) == (303, after)


async def test_nobody_becomes_an_owner_by_the_form_of_a_key(house: House) -> None:
    made = await with_key(house)
    strong, _ = await house.admin.keys.create(ACTOR, KeyCreate(tenant="acme", scopes=["admin:read"]))
    foreign, _ = await house.admin.keys.create(ACTOR, KeyCreate(tenant="other"))
    for name in ("member", "operator"):
        person = await house.logged_in(name)
        form = f"/console/tenants/acme/keys/{made.key_id}/change"
        page = await person.get(form)
        assert "admin:" not in page.text
        [tag] = TAG.findall(page.text)
        for scope in ("admin:read", "admin:write"):
            box = {f"scope_{scope.replace(':', '_')}": "yes", "scope_inference": "yes"}
            refused = await person.send(form, etag=tag, **box)
            assert (refused.status_code, "Only an owner may change" in refused.text) == (422, True)
        theirs = f"/console/tenants/acme/keys/{strong.key_id}/change"
        assert (await person.get(theirs)).status_code == 403
        fields = {"etag": tag_of(strong.as_json()), "scope_inference": "yes"}
        assert (await person.send(form, theirs, **fields)).status_code == 403
    other = f"/console/tenants/other/keys/{foreign.key_id}/change"
    member, auditor = await house.logged_in("member"), await house.logged_in("auditor")
    assert (await member.get(other)).status_code == 404
    assert (await member.get(other.replace("other", "acme"))).status_code == 404
    assert (await auditor.get(form)).status_code == 403
    for key in (made, strong, foreign):
        assert await house.admin.keys.show(key.key_id) == key


async def test_labels_of_a_tenant_are_lines_and_kept_where_they_are_not_touched(house: House) -> None:
    await with_key(house)
    await house.admin.tenants.update(
        ACTOR, "acme", TenantChange(labels={"team": ["a, b", "c=d"], "old": ["x"]})
    )
    operator, form = await house.logged_in("operator"), "/console/tenants/acme/change"
    page = await operator.get(form)
    assert "old=x\nteam=a, b\nteam=c=d</textarea>" in page.text
    fields = {"weight": "1", "default_tier": "standard", "tier_standard": "yes", "on_low_budget": "refuse"}
    fields |= {"reserved_tokens_per_s": "0", "reserved_tier": "all", "models": ""}
    lines = "team=a, b\r\n\r\n env=prod \r\nenv=<b>"
    wrong = await operator.send(form, etag=TAG.findall(page.text)[0], labels="team=a\nno label", **fields)
    assert "Line 2: &#39;no label&#39; is not LABEL=VALUE." in error_of(wrong, "labels")
    assert "team=a\nno label</textarea>" in wrong.text
    assert (await house.admin.tenants.show("acme")).tenant.labels == {"team": ("a, b", "c=d"), "old": ("x",)}
    done = await operator.send(form, etag=TAG.findall(page.text)[0], labels=lines, **fields)
    assert done.status_code == 303, done.text
    stored = (await house.admin.tenants.show("acme")).tenant
    assert stored.labels == {"team": ("a, b",), "env": ("<b>", "prod")}


async def test_a_role_that_is_saved_as_it_was_ends_no_session(house: House) -> None:
    await with_key(house)
    owner, member = await house.logged_in("owner"), await house.logged_in("member")
    bo = await house.admin.people.show("member")
    page = f"/console/people/{bo.person_id}"
    [tag] = TAG.findall((await owner.get(page)).text)
    fields = {"act": "role", "role": "member", "etag": tag, "password": PASSWORD}
    same = await owner.send(page, **fields, tenants="acme")
    assert (same.status_code, same.headers["location"]) == (303, f"{page}?done=unchanged")
    assert "no session has ended" in (await owner.get(same.headers["location"])).text
    assert (await house.is_in(member), await house.admin.people.show("member")) == (True, bo)
    other = await owner.send(page, **fields, tenants="acme, other")
    assert other.headers["location"] == f"{page}?done=role"
    assert not await house.is_in(member)
