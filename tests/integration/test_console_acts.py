"""Forms that resources declare: what they store, how they say it again, and whom they refuse."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import AsyncIterator

import pytest

from tenants.admin.platform.policy import StoredPolicy
from tenants.nouns.key import KeyChange
from tenants.nouns.tenant import TenantCreate
from tests.integration.test_console import ACTOR, House, error_of, house_on
from tests.support.audited import audited
from tests.support.console import Browser


@pytest.fixture
async def house(sqlite_url: str, pepper: bytes) -> AsyncIterator[House]:
    async with house_on(sqlite_url, pepper) as made:
        await made.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
        for name, role in (("ada", "owner"), ("cy", "auditor")):
            await made.person(name, role)
        await made.person("bo", "member", ["acme"])
        yield made


async def refused_to_others(house: House, path: str, *, has_page: bool = True) -> None:
    """An auditor and a member reach neither the form nor the act."""
    for name in ("bo", "cy"):
        browser = await house.logged_in(name)
        assert not has_page or (await browser.get(path)).status_code == 403
        token = await browser.token("/console/password")
        assert (await browser.http.post(path, data={"form_token": token})).status_code == 403


async def owner_of(house: House) -> Browser:
    return await house.logged_in("ada")


async def test_a_brake_is_set_and_released(house: House) -> None:
    path, owner = "/console/policy/brake", await owner_of(house)
    assert "No brake is in force" in (await owner.get(path)).text
    wrong = await owner.send(f"{path}/set", tier="batch", share="150 %", for_s="30m", reason="")
    assert "at most 1" in error_of(wrong, "share")
    made = await owner.send(f"{path}/set", tier="batch", share="10 %", for_s="30m", reason="night job")
    page = await owner.get(made.headers["location"])
    assert "The brake is set" in page.text
    [brake] = await house.admin.brakes.all()
    assert (brake.tier, brake.share, brake.by, brake.reason) == ("batch", 0.1, "person:ada", "night job")
    assert all(text in page.text for text in ("10.0 %", "night job", f"{path}/batch/end"))
    assert "night job" in (await owner.get("/console/policy")).text
    await refused_to_others(house, f"{path}/set")
    await refused_to_others(house, f"{path}/batch/end")
    tag = (await owner.get(f"{path}/batch/end")).text.partition('name="etag" value="')[2].partition('"')[0]
    ended = await owner.send(f"{path}/batch/end", etag=tag)
    assert "The brake is released" in (await owner.get(ended.headers["location"])).text
    assert await house.admin.brakes.all() == []
    assert [row.action for row in await audited(house.admin, act="brake")] == ["brake.set", "brake.end"]


async def test_a_target_is_set_changed_and_removed(house: House) -> None:
    path, owner = "/console/slo/targets", await owner_of(house)
    wanted = {
        "tier": "standard",
        "metric": "ttft",
        "target_s": "0.5",
        "percentile": "99.5 %",
        "tenant": "acme",
    }
    wrong = await owner.send(f"{path}/set", **wanted | {"target_s": "soon"})
    assert "is not a number" in error_of(wrong, "target_s")
    await owner.send(f"{path}/set", **wanted)
    [target] = [each for each in (await owner.get(path)).text.split("<tr>") if "ttft" in each]
    assert all(text in target for text in ("acme", "standard", "99.5"))
    change = target.partition(f'href="{path}/set')[2].partition('"')[0].replace("&amp;", "&")
    form = await owner.get(f"{path}/set{change}")
    assert 'value="99.5"' in form.text
    await owner.send(f"{path}/set", **wanted | {"target_s": "2"})
    await refused_to_others(house, f"{path}/set")
    reference = target.partition(f'href="{path}/slo_')[2].partition("/")[0]
    removal = f"{path}/slo_{reference}/remove"
    tag = (await owner.get(removal)).text.partition('name="etag" value="')[2].partition('"')[0]
    await owner.send(removal, etag=tag)
    assert "No targets" in (await owner.get(path)).text
    rows = await audited(house.admin, act="slo", actor="person")
    assert [(row.after or {}).get("target_s") for row in rows] == [0.5, 2.0, None]


async def test_prices_are_typed_in_dollars_per_million_tokens(house: House) -> None:
    path, owner = "/console/prices", await owner_of(house)
    wanted = {"model": "tiny", "input_nanousd": "$0.15", "output_nanousd": "0.6", "multiplier": "50 %"}
    finer = await owner.send(f"{path}/set", **wanted | {"input_nanousd": "0.0001"})
    assert "would be rounded" in error_of(finer, "input_nanousd")
    await owner.send(f"{path}/set", **wanted | {"tier": "batch"})
    [row] = await house.admin.prices.all()
    price = row.entry.price
    assert (price.input_nanousd, price.cached_input_nanousd, price.output_nanousd) == (150, 150, 600)
    assert row.entry.multiplier == 500
    await owner.send(f"{path}/set", model="tiny", tier="batch", output_nanousd="1,000")
    page = await owner.get(path)
    assert all(text in page.text for text in ("$0.15 / M", "$1000 / M", "output_nanousd=1000&amp;"))
    history = (await owner.get(f"{path}/history?model=tiny")).text
    assert history.index("$1000 / M") < history.index("$0.6 / M")
    await refused_to_others(house, f"{path}/set")


async def test_the_policy_is_changed_through_a_page_that_says_what_changes(house: House) -> None:
    path, owner = "/console/policy", await owner_of(house)
    wrong = await owner.send(path, f"{path}/change", new_policy="fcfs", new_options="slots=8")
    assert (wrong.status_code, "does nothing here" in error_of(wrong, "new_options")) == (422, True)
    asked = await owner.send(path, f"{path}/change", new_policy="vtc", new_options="slots=8")
    assert "vtc (slots=8 tokens a step)" in asked.text
    assert "The tenant with the least service" in asked.text
    assert await house.admin.policy.stored() is None
    fields = dict(re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', asked.text))
    done = await owner.http.post(f"{path}/change", data=fields)
    assert done.headers["location"] == f"{path}?done=changed"
    stored = await house.admin.policy.stored()
    assert stored == StoredPolicy("vtc", {"slots": 8})
    assert [row.action for row in await audited(house.admin, act="policy")] == ["policy.set"]
    late = await owner.http.post(f"{path}/change", data=fields | {"new_policy": "fcfs", "new_options": ""})
    assert (late.status_code, "It was changed after" in late.text) == (412, True)
    await owner.send(path, f"{path}/change", new_policy="", new_options="")
    await refused_to_others(house, path + "/change", has_page=False)


SENTENCE = {"amount": "1m", "meter": "total_tokens", "window": "day", "mode": "hard", "time_zone": "UTC"}


async def test_a_limit_is_previewed_as_a_sentence_and_then_set(house: House) -> None:
    path, owner = "/console/tenants/acme/limits", await owner_of(house)
    shown = await owner.send(path, on="project", subject="search", preview="yes", tier="batch", **SENTENCE)
    assert (
        "At most 1,000,000 tokens a day (UTC) for project search of acme, only tier batch."
        " Further requests are refused."
    ) in shown.text
    assert 'value="1m"' in shown.text
    assert "<details open><summary>More" in shown.text
    assert await audited(house.admin, act="limit") == []
    await owner.send(path, on="tenant", **SENTENCE)
    assert "1,000,000" in (await owner.get(path)).text


async def test_limits_of_all_tenants_together(house: House) -> None:
    path, owner = "/console/limits", await owner_of(house)
    assert "Use is unlimited" in (await owner.get(path)).text
    wrong = await owner.send(path, **SENTENCE | {"amount": "much"})
    assert "Give a whole number" in error_of(wrong, "amount")
    preview = await owner.send(path, preview="yes", **SENTENCE)
    assert "At most 1,000,000 tokens a day (UTC) for all tenants together." in preview.text
    await owner.send(path, **SENTENCE)
    [view] = await house.admin.limits.of_platform()
    one = f"{path}/{view.limit.limit_id}"
    assert one in (await owner.get(path)).text
    for act, fields in (
        ("changed", {"amount": "2m"}),
        ("overridden", {"override_amount": "3m", "reason": "x"}),
    ):
        tag = (await owner.get(one)).text.partition('name="etag" value="')[2].partition('"')[0]
        await owner.send(one, act=act, etag=tag, mode="hard", for_h="1", **fields)
    [view] = await house.admin.limits.of_platform()
    assert (view.limit.amount, view.limit.override and view.limit.override.amount) == (2_000_000, 3_000_000)
    await house.admin.tenants.create(ACTOR, TenantCreate(name="other"))
    assert (await owner.get(f"/console/tenants/other/limits/{view.limit.limit_id}")).status_code == 404
    member, auditor = await house.logged_in("bo"), await house.logged_in("cy")
    assert [(await member.get(each)).status_code for each in (path, one, f"{one}/remove")] == [403, 403, 403]
    assert [(await auditor.get(each)).status_code for each in (path, one, f"{one}/remove")] == [200, 200, 403]
    await refused_to_others(house, path, has_page=False)
    await refused_to_others(house, one, has_page=False)
    tag = (await owner.get(f"{one}/remove")).text.partition('name="etag" value="')[2].partition('"')[0]
    await owner.send(f"{one}/remove", etag=tag)
    assert await house.admin.limits.of_platform() == []


async def test_the_audit_is_verified_by_a_button(house: House) -> None:
    path, auditor = "/console/audit/verify", await house.logged_in("cy")
    assert f'action="{path}"' in (await auditor.get("/console/audit")).text
    assert "Nothing was changed: " in (await auditor.get(f"{path}?run=1")).text
    elsewhere = {"sec-fetch-site": "cross-site"}
    assert "Nothing was changed" not in (await auditor.http.get(f"{path}?run=1", headers=elsewhere)).text
    with contextlib.closing(sqlite3.connect(house.deps.database.url.removeprefix("sqlite:///"))) as other:
        other.executescript("DROP TRIGGER audit_no_update; UPDATE audit SET actor = 'x' WHERE seq = 1")
    assert "The audit was changed: row 1" in (await auditor.get(f"{path}?run=1")).text
    assert (await (await house.logged_in("bo")).get(path)).status_code == 403


async def test_tenants_and_keys_have_display_names(house: House) -> None:
    owner, tenant = await owner_of(house), "/console/tenants/acme"
    form = {"weight": "1", "default_tier": "standard", "tier_standard": "yes", "on_low_budget": "refuse"}
    form |= {"reserved_tokens_per_s": "0", "reserved_tier": "all"}
    tag = (await owner.get(f"{tenant}/change")).text.partition('name="etag" value="')[2].partition('"')[0]
    wrong = await owner.send(f"{tenant}/change", etag=tag, display_name="x" * 101, **form)
    assert "at most 100" in error_of(wrong, "display_name")
    await owner.send(f"{tenant}/change", etag=tag, display_name=" Video team <b> ", **form)
    stored = (await house.admin.tenants.show("acme")).tenant
    assert (stored.name, stored.display_name) == ("acme", "Video team <b>")
    for path in ("/console/tenants", tenant):
        assert "Video team &lt;b&gt;" in (await owner.get(path)).text
    typed = {"name": "web", "display_name": "Web shop, live", "scope_inference": "yes"}
    await owner.send(f"{tenant}/keys", **typed)
    for path in ("/console/keys", f"{tenant}/keys"):
        page = (await owner.get(path)).text
        assert "Web shop, live" in page
        assert "web, " in page
    [key] = (await house.admin.tenants.show("acme")).keys
    assert key.display_name == "Web shop, live"
    await house.admin.keys.update(ACTOR, key.key_id, KeyChange(display_name=""))
    [key] = (await house.admin.tenants.show("acme")).keys
    assert key.display_name is None
