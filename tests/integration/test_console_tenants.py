"""The console's pages of tenants, projects, keys and limits, through two gateways on one database."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import msgspec
import pytest

from gateway.console.form_errors import CHANGED_MEANWHILE
from tenants.admin.transaction import etag_of
from tenants.counts import refusal_store
from tenants.counts.refusal_store import RefusedRequest
from tenants.directory import queries
from tenants.instants import from_us
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitOverride, LimitSet, limit_as_json
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import TenantCreate
from tenants.quota.projection import HOUR_US, WEEK_HOURS
from tenants.resources.reading import read_page
from tenants.resources.records.audit import AUDIT, AuditQuery
from tenants.storage.flushes import Flush
from tenants.storage.tables import flow_minutes, key_uses, usage_sums
from tenants.types import PLATFORM, Meter
from tenants.usage.sums import AMOUNTS
from tests.integration.test_console import ACTOR, House, error_of, house_on
from tests.support.console import Browser
from tests.support.limits import limits_of
from tests.support.query_plans import recorder
from tests.support.usage import row, write

TENANT = {
    "weight": "2",
    "default_tier": "standard",
    "tier_standard": "yes",
    "tier_batch": "yes",
    "on_low_budget": "refuse",
    "reserved_tokens_per_s": "0",
    "reserved_tier": "all",
}
"""A tenant's form, filled in."""
LIMIT = {"on": "tenant", "meter": "total_tokens", "amount": "1,000,000", "window": "day", "mode": "hard"}
"""A limit's form, filled in."""
SECRET = re.compile(r"fg_live_[A-Za-z0-9]+_[A-Za-z0-9_-]+")


@pytest.fixture
async def house(database_url: str, pepper: bytes) -> AsyncIterator[House]:
    """Two gateways on each kind of database, with two tenants and a person of each role."""
    async with house_on(database_url, pepper) as made:
        for name in ("acme", "other"):
            await made.admin.tenants.create(ACTOR, TenantCreate(name=name))
        for role in ("owner", "operator", "auditor"):
            await made.person(role, role)
        await made.person("member", "member", ["acme"])
        yield made


def said(page: httpx.Response) -> str:
    """The text of a page, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.text)).split())


async def followed(browser: Browser, answer: httpx.Response) -> httpx.Response:
    """The page that an act leads to."""
    assert answer.status_code == 303, said(answer)
    page = await browser.get(answer.headers["location"])
    assert page.status_code == 200, said(page)
    return page


async def test_a_tenant_with_a_limit_and_a_key_is_made_by_forms(house: House) -> None:
    owner = await house.logged_in("owner")
    wrong = await owner.send("/console/tenants", name="<script>alert(1)</script>", **TENANT)
    assert wrong.status_code == 422
    assert "letters, digits" in error_of(wrong, "name")
    assert "<script>alert" not in wrong.text
    assert "&lt;script&gt;alert(1)" in wrong.text
    made = await followed(owner, await owner.send("/console/tenants", name="made", **TENANT))
    assert "The tenant is made." in said(made)
    assert "No limits" in said(made)
    taken = await owner.send("/console/tenants", name="made", **TENANT)
    assert (taken.status_code, "already" in error_of(taken, "name")) == (409, True)

    here = "/console/tenants/made"
    wrong = await owner.send(f"{here}/limits", **(LIMIT | {"amount": "many"}))
    assert (wrong.status_code, "whole number" in error_of(wrong, "amount")) == (422, True)
    assert 'value="many"' in wrong.text
    set_now = await followed(owner, await owner.send(f"{here}/limits", **LIMIT))
    assert "The limit is set." in said(set_now)
    assert "1,000,000 tokens a day (UTC)" in said(set_now)
    page = await owner.get(here)
    assert "Binds first: 1,000,000 tokens a day (UTC) on tenant made" in said(page)
    assert "too little history: 0 of 2 whole weeks" in said(page)

    late = await owner.send(f"{here}/keys", name="backend", scope_inference="yes", ends="2100-01-31")
    assert (late.status_code, "3660 days" in error_of(late, "ends")) == (422, True)
    assert 'value="2100-01-31"' in late.text
    end = from_us(round(house.clock() * 1e6)).date() + timedelta(days=90)
    key = await owner.send(f"{here}/keys", name="backend", scope_inference="yes", ends=end.isoformat())
    assert key.status_code == 200, said(key)
    [secret] = set(SECRET.findall(key.text))
    principal = house.deps.directory.authenticate(secret, house.clock())
    assert (principal.tenant_name, principal.scopes) == ("made", frozenset({"inference"}))
    listed = await owner.get(f"{here}/keys")
    assert secret not in listed.text
    assert "backend" in said(listed)
    assert "tenant: 1,000,000 tokens a day (UTC)" in said(listed)
    audit = (await read_page(house.admin, AUDIT, AuditQuery(act="key.create"))).rows
    assert audit[0].actor == "person:owner"
    assert secret not in repr(audit)


async def test_of_two_edits_through_two_gateways_one_wins_and_the_other_sees_both_states(
    house: House,
) -> None:
    here, there = await house.logged_in("owner"), await house.logged_in("operator", app=house.there)
    form = "/console/tenants/acme/change"
    tags = [
        re.findall(r'name="etag" value="([^"]+)"', (await browser.get(form)).text)
        for browser in (here, there)
    ]
    assert tags[0] == tags[1]
    [tag] = tags[0]
    won = await followed(here, await here.send(form, etag=tag, **(TENANT | {"weight": "3"})))
    assert "The change is stored." in said(won)
    lost = await there.send(form, etag=tag, **(TENANT | {"weight": "7", "tier_batch": ""}))
    assert lost.status_code == 412
    assert CHANGED_MEANWHILE in said(lost)
    assert "Weight 3 7" in said(lost)
    assert 'name="weight" type="text" value="7"' in lost.text
    stored = (await house.admin.tenants.show("acme")).tenant
    assert (stored.weight, len(stored.tiers)) == (3.0, 2)
    [new_tag] = re.findall(r'name="etag" value="([^"]+)"', lost.text)
    await followed(there, await there.send(form, etag=new_tag, **(TENANT | {"weight": "7"})))
    assert (await house.admin.tenants.show("acme")).tenant.weight == 7.0
    none = await here.send(form, **TENANT)
    assert none.status_code == 412
    assert (await house.admin.tenants.show("acme")).tenant.weight == 7.0


async def test_a_member_helps_himself_below_the_own_tenant_and_nowhere_else(house: House) -> None:
    admin = house.admin
    foreign, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="other"))
    own, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    strong, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", scopes=["admin:write"]))
    foreign_limit = await admin.limits.set(
        ACTOR, LimitSet(tenant="other", key=foreign.key_id, meter="requests", window="day", amount=5)
    )
    tenants_limit = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=5)
    )
    await house.deps.directory.refresh()
    member = await house.logged_in("member")
    listed = await member.get("/console/tenants")
    assert "acme" in said(listed)
    assert "other" not in said(listed)
    assert "other" not in said(await member.get("/console/keys"))
    for path in (
        "/console/tenants/other",
        "/console/tenants/other/keys",
        f"/console/tenants/acme/keys/{foreign.key_id}",
        f"/console/tenants/acme/limits/{foreign_limit.limit_id}",
        "/console/keys?tenant=other",
        "/console/tenants/no-such",
        "/console/no/such/page",
    ):
        page = await member.get(path)
        assert "Log out" in page.text, path
        assert (page.status_code, "Page not found" in page.text) == (404, True), path
    assert (await member.get("/console/tenants/acme/change")).status_code == 403

    keys = "/console/tenants/acme/keys"
    refused = await member.send(keys, name="strong", scope_admin_write="yes")
    assert (refused.status_code, "Only an owner" in said(refused)) == (422, True)
    path = f"{keys}/{strong.key_id}"
    tag = re.findall(r'name="etag" value="([^"]+)"', (await member.get(path)).text)[0]
    refused = await member.send(path, f"{path}/rotate", etag=tag, grace_h="0")
    assert (refused.status_code, "Only an owner" in said(refused)) == (422, True)
    assert not SECRET.search(refused.text.replace(strong.prefix, ""))
    assert (await member.send(keys, name="mine", scope_inference="yes")).status_code == 200
    for tenant in ("other", "no-such"):
        stolen = await member.send(keys, f"/console/tenants/{tenant}/keys", scope_inference="yes")
        assert stolen.status_code == 404

    path = f"{keys}/{foreign.key_id}"
    for act in ("rotate", "revoke"):
        crossed = await member.send(keys, f"{path}/{act}", etag=etag_of(foreign.as_json()), grace_h="0")
        assert (crossed.status_code, crossed.text.count("fg_live_")) == (404, 0)
    assert await admin.keys.show(foreign.key_id) == foreign

    limits = "/console/tenants/acme/limits"
    path, tag = f"{limits}/{foreign_limit.limit_id}", etag_of(limit_as_json(foreign_limit))
    for act in ("changed", "overridden"):
        typed = {"amount": "9", "override_amount": "9", "for_h": "1", "reason": "x", "mode": "hard"}
        assert (await member.send(limits, path, etag=tag, act=act, **typed)).status_code == 404
    assert (await member.send(limits, f"{path}/remove", etag=tag)).status_code == 404
    assert (await admin.limits.show(foreign_limit.limit_id)).limit == foreign_limit
    refused = await member.send(limits, **LIMIT)
    assert (refused.status_code, "Your role does not allow this" in refused.text) == (403, True)
    await followed(member, await member.send(limits, **(LIMIT | {"on": "key", "subject": own.key_id})))
    refused = await member.send(
        limits, f"{limits}/{tenants_limit.limit_id}", act="changed", amount="9", mode="hard"
    )
    assert refused.status_code == 403
    refused = await member.send(limits, f"{limits}/{tenants_limit.limit_id}/remove")
    assert refused.status_code == 403
    assert (await admin.limits.show(tenants_limit.limit_id)).limit.amount == 5
    assert {limit.kind.value for limit in await limits_of(admin, "acme")} == {"tenant", "key"}


async def test_an_auditor_sees_every_page_and_no_form(house: House) -> None:
    key, _ = await house.admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    limit = await house.admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=5)
    )
    auditor = await house.logged_in("auditor")
    here = "/console/tenants/acme"
    for path in (
        "/console/tenants",
        "/console/keys",
        here,
        *(f"{here}/{page}" for page in ("projects", "keys", "limits")),
        f"{here}/keys/{key.key_id}",
        f"{here}/limits/{limit.limit_id}",
    ):
        page = await auditor.get(path)
        assert page.status_code == 200, said(page)
        assert set(re.findall(r'method="post" action="([^"]+)"', page.text)) == {"/console/log-out"}, path


async def test_a_suspension_says_what_it_does_and_asks_once(house: House) -> None:
    owner = await house.logged_in("owner")
    asked = await owner.get("/console/tenants/acme/suspend")
    assert "Suspend acme?" in said(asked)
    assert "Now there are 0 running and 0 waiting requests." in said(asked)
    assert (await house.admin.tenants.show("acme")).tenant.status == "active"
    page = await followed(owner, await owner.send("/console/tenants/acme/suspend"))
    assert "its keys are refused" in said(page)
    assert (await house.admin.tenants.show("acme")).tenant.status == "suspended"
    await followed(owner, await owner.send("/console/tenants/acme", "/console/tenants/acme/resume"))
    assert (await house.admin.tenants.show("acme")).tenant.status == "active"

    made = await followed(owner, await owner.send("/console/tenants/acme/projects", name="search"))
    assert "search" in said(made)
    project = await house.admin.projects.show("search", "acme")
    path = f"/console/tenants/acme/projects/{project.project_id}/suspend"
    assert "end what runs?" in said(await owner.get(f"{path}?now=yes"))
    await followed(owner, await owner.send(path))
    assert (await house.admin.projects.show("search", "acme")).status == "suspended"
    foreign = await house.admin.projects.show("default", "other")
    crossed = await owner.get(f"/console/tenants/acme/projects/{foreign.project_id}/suspend")
    assert crossed.status_code == 404


async def test_a_key_under_a_capped_tenant_is_never_called_unlimited(house: House) -> None:
    admin = house.admin
    key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", name="plain"))
    free, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="other", name="free"))
    await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name="search"))
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="total_tokens", window="day", amount=1_000))
    await house.deps.directory.refresh()
    owner = await house.logged_in("owner")
    page = said(await owner.get(f"/console/tenants/acme/keys/{key.key_id}"))
    assert "tenant binds first 1,000 tokens a day (UTC)" in page
    assert "unlimited" not in page
    assert "no limit" not in page
    page = said(await owner.get(f"/console/tenants/other/keys/{free.key_id}"))
    assert "use is unlimited" in page
    # A limit on all tenants together binds it as well; a tenant's people do not read its numbers.
    await admin.limits.set(ACTOR, LimitSet(platform=True, meter="requests", window="day", amount=777))
    await house.deps.directory.refresh()
    page = said(await owner.get(f"/console/tenants/other/keys/{free.key_id}"))
    assert "all tenants together binds first 777 requests a day (UTC)" in page
    member = await house.logged_in("member")
    page = said(await member.get(f"/console/tenants/acme/keys/{key.key_id}"))
    assert "all tenants together has room" in page
    assert "777" not in page


async def test_keys_are_found_by_what_deserves_a_look(house: House) -> None:
    admin, now = house.admin, house.clock()
    for name, days in (("endless", None), ("ending", 1), ("idle", 90), ("used", 90)):
        expires_in_s = None if days is None else days * 86_400.0
        await admin.keys.create(ACTOR, KeyCreate(tenant="acme", name=name, expires_in_s=expires_in_s))
    await admin.keys.create(ACTOR, KeyCreate(tenant="other", name="capped"))
    gone, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="other", name="gone"))
    await admin.keys.revoke(ACTOR, gone.key_id)
    await admin.limits.set(ACTOR, LimitSet(tenant="other", meter="requests", window="day", amount=5))
    by_name = {key.name: key for key in await admin.transactions.read(queries.keys_where)}
    uses = {"idle": now - 40 * 86_400, "used": now - 60}
    rows = [{"key_id": by_name[name].key_id, "last_us": round(at_s * 1e6)} for name, at_s in uses.items()]
    await house.deps.database.write(lambda connection: connection.execute(key_uses.insert(), rows))
    await house.deps.directory.refresh()
    auditor = await house.logged_in("auditor")
    expected = {
        "never_used": {"endless", "ending", "capped"},
        "idle": {"idle"},
        "no_expiry": {"endless", "capped"},
        "expiring": {"ending"},
        "no_limit": {"endless", "ending", "idle", "used"},
        "": {"endless", "ending", "idle", "used", "capped", "gone"},
    }
    for finding, names in expected.items():
        page = await auditor.get(f"/console/keys?finding={finding}")
        assert set(re.findall(r'/keys/key_[^"]+">([^<]+)</a>', page.text)) == names, finding
    assert (await auditor.get("/console/keys?finding=nonsense")).status_code == 400
    of_one = await auditor.get("/console/keys?tenant=other")
    assert set(re.findall(r'/keys/key_[^"]+">([^<]+)</a>', of_one.text)) == {"capped", "gone"}


async def test_rotation_shows_a_secret_once_and_revocation_asks(house: House) -> None:
    key, old = await house.admin.keys.create(ACTOR, KeyCreate(tenant="acme", name="k"))
    member = await house.logged_in("member")
    path = f"/console/tenants/acme/keys/{key.key_id}"
    [tag] = re.findall(r'name="etag" value="([^"]+)"', (await member.get(path)).text)
    wrong = await member.send(path, f"{path}/rotate", etag=tag, grace_h="soon")
    assert (wrong.status_code, "number" in error_of(wrong, "grace_h")) == (422, True)
    rotated = await member.send(path, f"{path}/rotate", etag=tag, grace_h="0")
    [secret] = set(SECRET.findall(rotated.text))
    assert secret != old
    assert house.deps.directory.authenticate(secret, house.clock()).key_id == key.key_id
    asked = said(await member.get(f"{path}/revoke"))
    assert "This cannot be undone." in asked
    assert "0 running and 0 waiting" in asked
    page = await followed(member, await member.send(f"{path}/revoke"))
    assert "The key is revoked" in said(page)
    assert "New secret" not in said(page)
    operator = await house.logged_in("operator")
    assert (await operator.send("/console/tenants/acme", f"{path}/rotate")).status_code == 403


async def test_a_limit_is_changed_overridden_and_removed_by_forms(house: House) -> None:
    admin = house.admin
    limit = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter=Meter.COST_NANOUSD, window="month", amount=5_500_000_000)
    )
    await house.deps.directory.refresh()
    operator = await house.logged_in("operator")
    path = f"/console/tenants/acme/limits/{limit.limit_id}"

    async def tag() -> str:
        return str(re.findall(r'name="etag" value="([^"]+)"', (await operator.get(path)).text)[0])

    page = await operator.get(path)
    assert "$5.50 cost a month (UTC)" in said(page)
    old = await tag()
    changed = {"etag": old, "act": "changed", "amount": "7.25", "mode": "hard"}
    await followed(operator, await operator.send(path, **changed))
    assert (await admin.limits.show(limit.limit_id)).limit.amount == 7_250_000_000
    late = await operator.send(path, **(changed | {"amount": "9"}))
    assert late.status_code == 412
    assert "Stored now: amount: 7.25; what it does: hard" in said(late)
    assert 'value="9"' in late.text
    assert (await admin.limits.show(limit.limit_id)).limit.amount == 7_250_000_000
    override = {"etag": await tag(), "act": "overridden", "override_amount": "20", "for_h": "0"}
    wrong = await operator.send(path, **override, reason="launch")
    assert (wrong.status_code, bool(error_of(wrong, "for_h"))) == (422, True)
    assert 'value="launch"' in wrong.text
    page = await followed(operator, await operator.send(path, **(override | {"for_h": "2"}), reason="launch"))
    assert "$20.00 override instead of $7.25" in said(page)
    assert "launch" in said(page)
    member = await house.logged_in("member")
    assert "launch" not in said(await member.get(path))
    page = await followed(operator, await operator.send(path, etag=await tag(), act="cleared"))
    assert "override has ended" in said(page)
    asked = said(await operator.get(f"{path}/remove"))
    assert "Remove the limit of $7.25 cost a month (UTC) on tenant acme?" in asked
    [asked_tag] = re.findall(r'name="etag" value="([^"]+)"', (await operator.get(f"{path}/remove")).text)
    await admin.limits.override(ACTOR, limit.limit_id, LimitOverride(amount=1, reason="x", for_s=60.0))
    assert (await operator.send(f"{path}/remove", etag=asked_tag)).status_code == 412
    [asked_tag] = re.findall(r'name="etag" value="([^"]+)"', (await operator.get(f"{path}/remove")).text)
    page = await followed(operator, await operator.send(f"{path}/remove", etag=asked_tag))
    assert "The limit is removed." in said(page)
    assert await limits_of(admin, "acme") == []


async def test_tenants_are_searched_by_name_in_pages(house: House) -> None:
    for number in range(60):
        await house.admin.tenants.create(ACTOR, TenantCreate(name=f"Team_{number:02}"))
    auditor = await house.logged_in("auditor")
    names, path, pages = [], "/console/tenants?search=team_", 0
    while path:
        page = await auditor.get(path)
        names += re.findall(r'<a href="/console/tenants/(\w+)">', page.text)
        following = re.findall(r'<a href="([^"]+)">More tenants</a>', page.text)
        path = html.unescape(following[0]) if following else ""
        pages += 1
    assert (len(names), len(set(names)), pages) == (60, 60, 2)
    assert "acme" not in names
    assert "No tenant of that name" in said(await auditor.get("/console/tenants?search=%25"))
    wrong = await auditor.get("/console/tenants?cursor=nonsense")
    assert wrong.status_code == 400


async def test_the_projection_goes_by_the_last_weeks_hour_of_the_week(house: House) -> None:
    limit = LimitSet(tenant="acme", meter="total_tokens", window="day", amount=25)
    await house.admin.limits.set(ACTOR, limit)
    tenant_id = (await house.admin.tenants.show("acme")).tenant.tenant_id
    house.clock.advance((4 * WEEK_HOURS + 1) * 3_600)  # whole weeks after the hour of its making
    await house.deps.directory.refresh()
    this_hour_us = round(house.clock() * 1e6) // HOUR_US * HOUR_US
    of_one = {"grain": "hour", "tenant_id": tenant_id, "tier": "standard", "outcome": "completed"}
    of_one |= dict.fromkeys(("project_id", "key_id", "label_set"), "")
    rows = [
        of_one | dict.fromkeys(AMOUNTS, 0) | {"model": model, "start_us": start_us, "input_tokens": 5}
        for start_us in range(this_hour_us - 4 * WEEK_HOURS * HOUR_US, this_hour_us, HOUR_US)
        for model in ("m", "n")
    ]
    await house.deps.database.write(lambda connection: connection.execute(usage_sums.insert(), rows))
    minute = {"minute_us": this_hour_us, "pool": "m", "tier": "standard", "tenant_id": tenant_id}
    counts = {"served_tokens": 1_111, "fair_tokens": 2_222, "waiting_token_s": 0}
    counts |= {"arrivals": 1, "before_line_us": 0}
    served = minute | counts | {"gateway_id": "here"}
    await house.deps.database.write(lambda connection: connection.execute(flow_minutes.insert(), [served]))
    auditor = await house.logged_in("auditor")
    assert "UTC 1,111 2,222" in said(await auditor.get("/console/tenants/acme"))
    # Ten tokens an hour from 13:00:20 on: 25 are used at 15:30:20.
    at = "2023-12-14 15:30:20 UTC"
    for page in ("", "/limits"):
        text = said(await auditor.get(f"/console/tenants/acme{page}"))
        assert f"{at} to {at}" in text, text
        assert "the last 4 weeks, hour of the week by hour of the week: 1,680 a week" in text


async def test_a_limit_without_room_for_a_request_is_exhausted_on_the_tenant_and_in_the_list(
    house: House,
) -> None:
    for name, meter, amount in (("acme", "total_tokens", 100), ("other", "requests", 10)):
        await house.admin.limits.set(ACTOR, LimitSet(tenant=name, meter=meter, window="day", amount=amount))
    await house.deps.directory.refresh()
    tenants = {tenant.name: tenant.tenant_id for tenant in house.deps.directory.tenants()}
    now_s = house.clock()
    [limit] = house.deps.directory.limits(now_s, tenants["acme"])
    [spare] = house.deps.directory.limits(now_s, tenants["other"])
    store = house.deps.quota_store
    await store.rebuild([(limit, 74), (spare, 9)])
    now_us = round(now_s * 1e6)
    await write(house.deps.database, [row("req_used", tenant_id=tenants["acme"], at_us=now_us)])  # 30 tokens
    refused = RefusedRequest(
        "req_no",
        now_us,
        "insufficient_quota",
        tenants["acme"],
        limit_id=limit.limit_id,
        wanted=30,
        available=26,
    )
    counts = {refused.key: 1_234}
    await refusal_store.add(house.deps.database, counts, [refused], Flush("test", 1), now_s)
    auditor = await house.logged_in("auditor")
    page = await auditor.get("/console/tenants/acme")
    since = from_us(now_us).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = said(page)
    for words in (
        "active limit exhausted",
        "exhausted 1,234 requests refused today",
        f"Used up since {since}",
    ):
        assert words in text, text
    assert "fill-bad" in page.text
    [link] = {
        html.unescape(found)
        for found in re.findall(r'href="(/console/refusals[^"]*limit_id[^"]*)"', page.text)
    }
    assert "req_no" in (await auditor.get(link)).text
    text = said(await auditor.get("/console/tenants"))
    assert re.search("active limit exhausted .* 1,234 ", text)
    assert "active limit nearly used up" in text
    await store.rebuild([(limit, 0), (spare, 0)])
    assert "exhausted" not in said(await auditor.get("/console/tenants/acme"))
    # A limit of the platform refuses requests of any tenant.
    await house.admin.limits.set(ACTOR, LimitSet(platform=True, meter="requests", window="day", amount=10))
    await house.deps.directory.refresh()
    [shared] = house.deps.directory.limits(now_s, PLATFORM)
    await store.rebuild([(limit, 0), (spare, 0), (shared, 10)])
    by_shared = msgspec.structs.replace(refused, request_id="req_shared", limit_id=shared.limit_id)
    await refusal_store.add(house.deps.database, {by_shared.key: 7}, [by_shared], Flush("test", 2), now_s)
    assert "exhausted 7 requests refused today" in said(await auditor.get("/console/limits"))


async def test_a_page_costs_as_many_statements_for_many_rows_as_for_few(house: House) -> None:
    admin = house.admin

    async def more(number: int) -> None:
        await admin.tenants.create(ACTOR, TenantCreate(name=f"t{number}"))
        await admin.projects.create(ACTOR, ProjectCreate(tenant="acme", name=f"p{number}"))
        key, _ = await admin.keys.create(ACTOR, KeyCreate(tenant="acme", project=f"p{number}"))
        for subject in ({"key": key.key_id}, {"project": f"p{number}"}):
            amount = {"meter": "requests", "window": "day", "amount": 5}
            await admin.limits.set(ACTOR, LimitSet(tenant="acme", **subject, **amount))  # type: ignore[arg-type]

    here = "/console/tenants/acme"
    await more(0)
    auditor = await house.logged_in("auditor")
    paths = [
        "/console/tenants",
        "/console/tenants?search=t",
        "/console/keys",
        "/console/keys?finding=no_limit",
    ]
    paths += [here, f"{here}/keys", f"{here}/limits", f"{here}/projects"]

    async def statements() -> dict[str, int]:
        await house.deps.directory.refresh()
        found = {}
        for path in paths:
            heard.start()
            assert (await auditor.get(path)).status_code == 200
            found[path] = len(heard.stop())
        return found

    with recorder() as heard:
        few = await statements()
        for number in range(1, 20):
            await more(number)
        assert await statements() == few
