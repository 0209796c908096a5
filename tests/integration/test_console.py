"""The console over HTTP, through two gateways on one database of each kind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.console.forms import MAX_FIELDS, MAX_FORM_BYTES
from gateway.deps import GatewayDeps
from gateway.upstream.replica_set import ReplicaSet
from tenants.admin.admin import Admin
from tenants.admin.audit import LINK, Actor
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.ledger.ledger import Ledger
from tenants.networks import network_of
from tenants.nouns.tenant import TenantCreate
from tenants.people.passwords import NO_PASSWORD
from tenants.people.person import Person, PersonChange, PersonInvite
from tenants.people.throttle import FREE_BY_NAME
from tenants.quota.memory import MemoryQuotaStore
from tenants.resources.people import PEOPLE, PersonQuery
from tenants.resources.reading import read_page
from tenants.storage.database import Database, open_database
from tests.support import shared_routes as shared_routes
from tests.support.audited import audited
from tests.support.console import HASH, PASSWORD, Browser
from tests.support.quota import Clock
from tests.support.server_process import until

ACTOR = Actor("cli:tester", "cli")
PROXY = "198.51.100.7"
OWN_SCRIPT = r'<script (?:defer )?src="/console/assets/[a-zA-Z.-]+[0-9a-f]{16}\.js"></script>'
OTHER_PASSWORD = "another four words here"


CONSOLE_URL = "https://console.example.org:8443"


@dataclass
class House:
    """Two gateways, and what people's browsers see of them."""

    admin: Admin
    deps: GatewayDeps
    here: Litestar
    there: Litestar
    clock: Clock
    browsers: list[Browser] = field(default_factory=list)

    def browser(self, app: Litestar | None = None, **how: Any) -> Browser:
        made = Browser(app or self.here, **how)
        self.browsers.append(made)
        return made

    async def person(self, name: str, role: str = "owner", tenants: list[str] | None = None) -> Person:
        _, token = await self.admin.people.invite(ACTOR, PersonInvite(name=name, role=role, tenants=tenants))
        return await self.admin.people.redeem_link(Actor(LINK, "192.0.2.1"), token, HASH)

    async def people(self) -> list[str]:
        return [one.name for one in (await read_page(self.admin, PEOPLE, PersonQuery())).rows]

    async def logged_in(self, name: str, **how: Any) -> Browser:
        browser = self.browser(**how)
        answer = await browser.log_in(name)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console"), answer.text
        return browser

    async def is_in(self, browser: Browser, app: Litestar | None = None) -> bool:
        """Whether these cookies open a page of the other gateway."""
        other = self.browser(app or self.there)
        browser.copy_to(other)
        answer = await other.get("/console")
        assert answer.status_code in (200, 303)
        return answer.status_code == 200


@contextlib.asynccontextmanager
async def house_on(url: str, pepper: bytes) -> AsyncIterator[House]:
    """Two gateways on a database. The one there has a setting for where browsers reach its console."""
    clock, database, other = Clock(), open_database(url), open_database(url)
    nothing = cast(Any, None)

    def deps_of(name: str, on: Database, console_url: str = "") -> GatewayDeps:
        config = GatewayConfig(trusted_proxies=(network_of(PROXY),), console_url=console_url)
        return GatewayDeps(
            config=config, gateway_id=name, database=on, directory=Directory(on, pepper),
            admin=Admin(Transactions(on, pepper, clock)), ledger=Ledger(on),
            quota_store=MemoryQuotaStore(clock), prices=nothing, upstreams=ReplicaSet(), renderer=nothing,
            model_name="m", clock=clock, wall_clock=clock,
        )  # fmt: skip

    both = [deps_of("here", database), deps_of("there", other, CONSOLE_URL)]
    made = House(both[0].admin, both[0], create_app(both[0]), create_app(both[1]), clock)
    yield made
    for browser in made.browsers:
        await browser.http.aclose()
    for app in (made.here, made.there):
        app.state.gateway.way_in.close()
        await app.state.gateway.deps.database.close()


@pytest.fixture
async def house(sqlite_url: str, pepper: bytes) -> AsyncIterator[House]:
    async with house_on(sqlite_url, pepper) as made:
        yield made


@pytest.fixture
async def any_house(database_url: str, pepper: bytes) -> AsyncIterator[House]:
    """One on each kind of database."""
    async with house_on(database_url, pepper) as made:
        yield made


def error_of(page: httpx.Response, name: str) -> str:
    """What stands beside a field."""
    found = re.search(rf'id="error-{name}">([^<]*)<', page.text)
    assert found, page.text
    assert (
        f'aria-describedby="hint-{name} error-{name}"' in page.text
        or f'aria-describedby="error-{name}"' in page.text
    )
    return found[1]


async def test_the_first_owner_comes_in_by_the_link_and_only_once(house: House) -> None:
    token = await house.admin.people.make_set_up_link(ACTOR)
    assert token
    first, second = house.browser(), house.browser()
    wrong = await first.redeem(token, "short", name="Ada@Example.com")
    assert (wrong.status_code, "at least 12" in error_of(wrong, "password")) == (422, True)
    assert 'value="Ada@Example.com"' in wrong.text
    assert "short" not in wrong.text
    wrong = await first.send(
        f"/console/set-up?token={token}", token=token, name="ada", password=PASSWORD, repeat="other"
    )
    assert wrong.status_code == 422
    assert "do not match" in error_of(wrong, "repeat")
    late = await second.token(f"/console/set-up?token={token}")
    done = await first.redeem(token, name="Ada@Example.com")
    assert (done.status_code, done.headers["location"]) == (303, "/console")
    page = await first.get("/console")
    assert "ada@example.com" in page.text
    again = await second.http.post(
        "/console/set-up",
        data={"form_token": late, "token": token, "name": "eve", "password": PASSWORD, "repeat": PASSWORD},
    )
    assert (again.status_code, "does not work" in again.text) == (404, True)
    assert await house.people() == ["ada@example.com"]
    assert (await second.get("/console/set-up")).status_code == 404
    assert (await second.get("/console/set-up?token=" + "x" * 43)).status_code == 404


async def test_a_log_out_here_counts_there(any_house: House) -> None:
    house = any_house
    await house.person("ada")
    browser = await house.logged_in("ada")
    assert await house.is_in(browser)
    kept = house.browser()
    browser.copy_to(kept)
    answer = await browser.send("/console", "/console/log-out")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/log-in")
    assert "fairgate_session" not in browser.cookies
    assert not await house.is_in(kept)
    assert not await house.is_in(kept, house.here)


async def test_what_changes_a_person_ends_the_old_cookies_in_the_other_gateway(any_house: House) -> None:
    house = any_house
    person = await house.person("ada")
    await house.person("eve")
    for change in (
        lambda: house.admin.people.change(ACTOR, "ada", PersonChange(role="auditor")),
        lambda: house.admin.people.suspend(ACTOR, "ada"),
        lambda: house.admin.people.end_sessions(ACTOR, "ada"),
        lambda: house.admin.people.reset(ACTOR, "ada"),
    ):
        browser = await house.logged_in("ada")
        assert await house.is_in(browser)
        await change()
        assert not await house.is_in(browser)
        await house.admin.people.resume(ACTOR, "ada")
    assert person.role == "owner"


async def test_a_new_password_ends_all_old_cookies_and_keeps_this_browser_in(any_house: House) -> None:
    house = any_house
    await house.person("ada")
    here, elsewhere, old = await house.logged_in("ada"), await house.logged_in("ada"), house.browser()
    here.copy_to(old)
    page = "/console/password"
    wrong = await here.send(page, current="not this one", password=OTHER_PASSWORD, repeat=OTHER_PASSWORD)
    assert (wrong.status_code, error_of(wrong, "current")) == (403, "Wrong password.")
    wrong = await here.send(page, current=PASSWORD, password="ada", repeat="ada")
    assert wrong.status_code == 422
    assert PASSWORD not in wrong.text
    assert await house.is_in(elsewhere)
    done = await here.send(page, current=PASSWORD, password=OTHER_PASSWORD, repeat=OTHER_PASSWORD)
    assert (done.status_code, done.headers["location"]) == (303, f"{page}?changed")
    assert "is changed" in (await here.get(f"{page}?changed")).text
    assert await house.is_in(here)
    assert not await house.is_in(elsewhere)
    assert not await house.is_in(old)
    assert (await house.browser().log_in("ada")).status_code == 403
    assert (await house.browser().log_in("ada", OTHER_PASSWORD)).status_code == 303


async def test_a_session_ends_when_it_is_idle_and_at_its_latest_end(house: House) -> None:
    await house.person("ada")
    idle, busy = await house.logged_in("ada"), await house.logged_in("ada")
    rules = house.deps.people.rules
    for _ in range(2):
        house.clock.advance(rules.idle_s * 0.6)
        assert await house.is_in(busy)
    assert not await house.is_in(idle)
    for _ in range(int(rules.max_s / rules.idle_s) * 2):
        house.clock.advance(rules.idle_s * 0.6)
        if not await house.is_in(busy):
            break
    else:
        pytest.fail("it never ended")


async def test_a_form_token_of_another_session_or_site_is_refused(house: House) -> None:
    await house.person("ada")
    victim, thief = await house.logged_in("ada"), await house.logged_in("ada")
    stolen, own = await thief.token("/console"), await victim.token("/console")

    async def log_out(token: str, **headers: str) -> int:
        answer = await victim.http.post("/console/log-out", data={"form_token": token}, headers=headers)
        assert answer.status_code in (303, 403)
        assert answer.status_code == 303 or "was not accepted" in answer.text
        return answer.status_code

    for token in (stolen, "", "ü", own[:-1]):
        assert await log_out(token) == 403
    for site in ("cross-site", "same-site", "none"):
        assert await log_out(own, **{"sec-fetch-site": site}) == 403
    assert await house.is_in(victim)
    assert await log_out(own, **{"sec-fetch-site": "same-origin"}) == 303


async def test_a_log_in_needs_the_token_of_its_own_page(house: House) -> None:
    await house.person("ada")
    browser, other = house.browser(), house.browser()
    foreign = await other.token("/console/log-in")
    await browser.get("/console/log-in")
    for token in (foreign, ""):
        answer = await browser.http.post(
            "/console/log-in", data={"form_token": token, "name": "ada", "password": PASSWORD}
        )
        assert answer.status_code == 403
    without = await house.browser().http.post(
        "/console/log-in", data={"form_token": foreign, "name": "ada", "password": PASSWORD}
    )
    assert (without.status_code, "blocks cookies" in without.text) == (403, True)
    assert (await browser.log_in("ada")).status_code == 303


async def test_a_log_in_makes_a_new_session_and_ends_the_one_before(house: House) -> None:
    await house.person("ada")
    browser, old = await house.logged_in("ada"), house.browser()
    browser.copy_to(old)
    # A second log-in in the same browser, from a page that was open before the first.
    form = house.browser()
    token = await form.token("/console/log-in")
    browser.http.cookies.set("fairgate_form", form.cookies["fairgate_form"])
    answer = await browser.http.post(
        "/console/log-in", data={"form_token": token, "name": "ada", "password": PASSWORD}
    )
    assert answer.status_code == 303
    assert not await house.is_in(old)


async def test_unknown_names_and_wrong_passwords_are_told_apart_by_nothing(house: House) -> None:
    await house.person("ada")
    invited, _ = await house.admin.people.invite(ACTOR, PersonInvite(name="bob", role="auditor"))
    await house.person("sue", "auditor")
    await house.admin.people.suspend(ACTOR, "sue")
    answers, hashed = [], []
    for name in ("ada", invited.name, "sue", "nob"):
        browser = house.browser(headers={"user-agent": "same"})
        await browser.get("/console/log-in")
        before = house.here.state.gateway.way_in.gate.hashed
        answer = await browser.log_in(name, "not the password")
        hashed.append(house.here.state.gateway.way_in.gate.hashed - before)
        form = re.sub(r'(form_token" value=)"[^"]*"', r"\1", answer.text).replace(f'"{name}"', '"NAME"')
        plain = {key: value for key, value in answer.headers.items() if key not in VARYING}
        answers.append((answer.status_code, form, plain))
    assert answers[0][0] == 403
    assert all(each == answers[0] for each in answers)
    assert hashed == [1, 1, 1, 1]


VARYING = {"x-request-id", "openai-processing-ms", "content-length"}
"""Of any answer; the length is that of a page that repeats the name."""


async def test_of_a_hundred_wrong_log_ins_at_once_two_are_hashed_at_a_time_and_late_ones_wait(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.people.way_in.NO_PASSWORD", NO_PASSWORD)  # one that takes its time
    await house.person("ada")
    browser = house.browser()
    token = await browser.token("/console/log-in")

    async def attempt(number: int) -> httpx.Response:
        # Half of them from another address, and for other names.
        name = "ada" if number % 2 else f"name-{number}"
        return await browser.http.post(
            "/console/log-in", data={"form_token": token, "name": name, "password": "wrong"}
        )

    answers = await asyncio.gather(*(attempt(number) for number in range(100)))
    gate = house.here.state.gateway.way_in.gate
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {403, 429}
    assert statuses.count(403) == gate.hashed < 50
    assert gate.most_at_once == 2
    assert gate.on_event_loop == 0
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert f"Try again in {refused.headers['retry-after']} s" in refused.text
    assert 'role="alert"' in refused.text


async def test_a_hundred_wrong_passwords_in_a_row_slow_the_name_down_and_lock_nobody_out(
    house: House,
) -> None:
    await house.person("ada")
    browser = house.browser()
    statuses = []
    for _ in range(100):
        answer = await browser.log_in("ada", "wrong")
        statuses.append(answer.status_code)
    assert statuses == [403] * FREE_BY_NAME + [429] * (100 - FREE_BY_NAME)
    house.clock.advance(60)
    assert (await browser.log_in("ada")).status_code == 303
    # Asking for the password again is slowed by itself, and so is its guessing.
    statuses = []
    for _ in range(FREE_BY_NAME + 2):
        answer = await browser.send("/console/password", current="wrong", password="x", repeat="y")
        statuses.append(answer.status_code)
    assert statuses[-1] == 429


async def test_a_log_in_leads_nowhere_else(house: House) -> None:
    await house.person("ada")
    for wanted in ("https://evil.example/", "//evil.example", "/v1/models", "/console/../v1", "/consoles"):
        browser = house.browser()
        answer = await browser.log_in("ada", next=wanted)
        assert (answer.status_code, answer.headers["location"]) == (303, "/console"), wanted
    browser = await house.logged_in("ada")
    answer = await browser.get("/console/log-in?next=https://evil.example/")
    assert answer.headers["location"] == "/console"


async def test_acts_on_people_ask_for_the_password_and_reach_the_audit(house: House) -> None:
    await house.admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    await house.deps.directory.refresh()
    await house.person("ada")
    browser = await house.logged_in("ada")
    typed = {"name": "Bob@Example.com", "role": "member", "tenants": "acme, nope"}
    send = lambda **more: browser.send("/console/people", "/console/people/invite", **typed | more)  # noqa: E731
    for password in ("", "wrong"):
        wrong = await send(password=password)
        assert (wrong.status_code, error_of(wrong, "password")) == (403, "Wrong password.")
        assert 'value="Bob@Example.com"' in wrong.text
    wrong = await send(password=PASSWORD)
    assert (wrong.status_code, "nope" in error_of(wrong, "tenants")) == (422, True)
    made = await send(password=PASSWORD, tenants="acme")
    link = re.search(r'value="http://gateway(/console/set-up\?token=([^"]+))"', made.text)
    assert link, made.text
    twice = await send(password=PASSWORD, tenants="acme")
    assert (twice.status_code, "already" in error_of(twice, "name")) == (409, True)
    bob = house.browser()
    assert (await bob.redeem(link[2])).status_code == 303
    assert "bob@example.com" in (await bob.get("/console")).text
    person = await house.admin.people.show("bob@example.com")
    page = f"/console/people/{person.person_id}"
    acts = [
        ({"act": "role", "role": "auditor", "tenants": ""}, "auditor"),
        ({"act": "suspend"}, "suspended"),
        ({"act": "resume"}, "active"),
        ({"act": "end_sessions"}, "active"),
    ]
    for fields, shown in acts:
        assert (await browser.send(page, password="wrong", **fields)).status_code == 403
        done = await browser.send(page, password=PASSWORD, **fields)
        assert (done.status_code, done.headers["location"]) == (303, f"{page}?done={fields['act']}")
        assert f">{shown}</span>" in (await browser.get(done.headers["location"])).text
        assert not await house.is_in(bob)
    reset = await browser.send(page, password=PASSWORD, act="reset")
    assert "console/set-up?token=" in reset.text
    nonsense = await browser.send(page, password=PASSWORD, act="delete")
    assert (nonsense.status_code, "no such button" in nonsense.text) == (422, True)
    last = await house.admin.people.show("ada")
    refused = await browser.send(f"/console/people/{last.person_id}", password=PASSWORD, act="suspend")
    assert (refused.status_code, "last owner" in refused.text) == (422, True)
    rows = await audited(house.admin, actor="person:ada")
    assert [row.action for row in rows] == [
        "person.invite", "person.update", "person.suspend", "person.resume", "person.end_sessions",
        "person.reset",
    ]  # fmt: skip
    assert {row.origin for row in rows} == {"192.0.2.1"}
    assert PASSWORD not in repr(rows)
    assert link[2] not in repr(rows)


async def test_one_ends_ones_own_sessions_and_owners_see_those_of_others(house: House) -> None:
    for name, role in (("ada", "owner"), ("ann", "auditor"), ("olga", "operator")):
        await house.person(name, role)
    page = "/console/sessions"

    async def sessions() -> set[str]:
        return {each.session_id for each in (await house.admin.person_sessions.page(person="olga")).rows}

    first = await house.logged_in("olga")
    [of_first] = await sessions()
    second = await house.logged_in("olga")
    [of_second] = await sessions() - {of_first}
    ada, ann = await house.logged_in("ada"), await house.logged_in("ann")
    shown = (await first.get(page)).text
    assert of_first in shown
    assert of_second in shown
    assert "Other people" not in shown
    assert shown.count("this one") == 1
    for browser in (ada, ann):
        shown = (await browser.get(page)).text
        assert shown.count(">olga</a>") == 2
        assert of_first not in shown
        assert (await browser.send(page, f"{page}/end", session=of_first)).status_code == 404
    assert (await second.send(page, f"{page}/end", session="ses_none")).status_code == 404
    assert await house.is_in(first)
    answer = await second.send(page, f"{page}/end", session=of_first)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{page}?ended=1")
    assert not await house.is_in(first)
    assert await house.is_in(second)
    await second.send(page, f"{page}/end", session=of_second)
    assert not await house.is_in(second)


async def test_cookies_are_hidden_from_scripts_and_behind_tls_bound_to_this_host(house: House) -> None:
    await house.person("ada")
    plain = house.browser()
    for answer in (await plain.get("/console/log-in"), await plain.log_in("ada")):
        for cookie in set_cookies(answer):
            assert {"HttpOnly", "Path=/", "SameSite=lax"} <= cookie, cookie
            assert "Secure" not in cookie
    tls = {"x-forwarded-proto": "https", "x-forwarded-for": "192.0.2.1"}
    proxied = house.browser(address=PROXY, headers=tls)
    token = await proxied.token("/console/log-in")
    names = set()
    for answer in (
        await house.browser(address=PROXY, headers=tls).get("/console/log-in"),
        await proxied.http.post(
            "/console/log-in",
            data={"form_token": token, "name": "ada", "password": PASSWORD},
            # This client keeps cookies for https to itself, as it speaks http with the gateway.
            headers={"cookie": f"__Host-fairgate_form={proxied.cookies['__Host-fairgate_form']}"},
        ),
    ):
        for cookie in set_cookies(answer):
            assert {"HttpOnly", "Path=/", "SameSite=lax", "Secure"} <= cookie
            assert not any(part.startswith("Domain") for part in cookie)
            names |= {part.partition("=")[0] for part in cookie if part.startswith("__Host-")}
    assert names == {"__Host-fairgate_session", "__Host-fairgate_form"}
    # The word of another than the proxy does not count.
    liar = house.browser(headers=tls)
    assert all("Secure" not in cookie for cookie in set_cookies(await liar.get("/console/log-in")))


def set_cookies(answer: httpx.Response) -> list[set[str]]:
    """The parts of each cookie that an answer sets."""
    return [{part.strip() for part in value.split(";")} for value in answer.headers.get_list("set-cookie")]


async def test_every_answer_has_the_strict_headers_and_nothing_inline(house: House) -> None:
    await house.person("ada")
    browser = await house.logged_in("ada")
    person = await house.admin.people.show("ada")
    paths = [
        "",
        "/people",
        f"/people/{person.person_id}",
        "/people/psn_none",
        "/sessions",
        "/password",
        "/log-in",
    ]
    paths += ["/nothing", "/set-up?token=x", "/log-out", "/assets/none.css"]
    for path in paths:
        answer = await browser.get(f"/console{path}")
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        scripts = re.findall(r"<script.*?</script>", answer.text, re.DOTALL)
        assert all(re.fullmatch(OWN_SCRIPT, each) for each in scripts), path
        assert not re.search(r"<style| style=| on[a-z]+=|javascript:", answer.text), path
        if answer.status_code != 303:
            assert answer.text.startswith("<!doctype html>"), path
    assert (await browser.get("/console/log-out")).status_code == 405
    assert (await browser.get("/console/people/psn_none")).status_code == 404


async def test_assets_are_kept_by_browsers_and_named_after_their_content(house: House) -> None:
    browser = house.browser()
    page = await browser.get("/console/log-in")
    names = set(re.findall(r'(?:href|src)="(/console/assets/[^"]+)"', page.text))
    assert {name.rpartition(".")[2] for name in names} == {"css", "js", "svg"}
    assert len(names) == 11
    for name in names:
        answer = await browser.get(name)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in answer.headers


async def test_what_is_typed_is_shown_as_text(house: House) -> None:
    evil = "<script>alert(1)</script>\"'"
    answer = await house.browser().log_in(evil, "wrong")
    assert "<script>" not in answer.text
    assert "&lt;script&gt;" in answer.text
    await house.person("ada")
    browser = house.browser(headers={"user-agent": evil})
    assert (await browser.log_in("ada")).status_code == 303
    assert "<script>" not in (await browser.get("/console/sessions")).text


async def test_a_form_that_cannot_be_read_is_told_so_on_a_page(house: House) -> None:
    cases: tuple[tuple[str, dict[str, str], int, str], ...] = (
        ("a=%00", {}, 400, "control character"),
        ("a=1&a=2", {}, 400, "twice"),
        ("a=%ff", {}, 400, "UTF-8"),
        ("&".join(f"a{n}=1" for n in range(MAX_FIELDS + 1)), {}, 400, f"at most {MAX_FIELDS} fields"),
        ("a=" + "x" * MAX_FORM_BYTES, {}, 413, "MiB"),
        ("{}", {"content-type": "application/json"}, 415, "application/x-www-form-urlencoded"),
        ("a=1", {"content-encoding": "gzip"}, 415, "uncompressed"),
    )
    for body, headers, status, says in cases:
        typed = {"content-type": "application/x-www-form-urlencoded"} | headers
        answer = await house.browser().http.post("/console/log-in", content=body, headers=typed)
        assert answer.status_code == status
        assert answer.headers["content-type"].startswith("text/html")
        if status != 413:
            assert says in answer.text


async def test_a_lost_database_is_told_on_a_page(any_house: House) -> None:
    house = any_house
    await house.person("ada")
    browser = await house.logged_in("ada")
    token = await browser.token("/console/password")
    await house.deps.database.close()
    for answer in (
        await browser.get("/console"),
        await browser.http.post("/console/password", data={"form_token": token, "current": PASSWORD}),
        await house.browser().log_in("ada"),
    ):
        assert answer.status_code == 503, answer.text
        assert "database cannot be reached" in answer.text
        assert answer.headers["retry-after"]
        assert ("refresh" in answer.headers) == (answer.request.method == "GET")
    assert (await house.browser().get("/console/log-in")).status_code == 200


async def test_an_act_of_a_person_whose_role_was_taken_meanwhile_is_not_done(any_house: House) -> None:
    ada = await any_house.person("ada")
    await any_house.person("bo")
    browser = await any_house.logged_in("ada")
    gate, taken, go_on = any_house.here.state.gateway.way_in.gate, threading.Semaphore(0), threading.Event()

    def held() -> None:
        taken.release()
        go_on.wait()

    holders = [asyncio.create_task(gate.run(held)) for _ in range(2)]
    for _ in holders:
        await asyncio.to_thread(taken.acquire)
    fields = {"name": "eve", "role": "owner", "tenants": "", "password": PASSWORD}
    token = await browser.token("/console/people")
    sent = asyncio.create_task(
        browser.http.post("/console/people/invite", data={"form_token": token, **fields})
    )
    await asyncio.to_thread(until, lambda: gate.inside == 3)
    await any_house.admin.people.change(ACTOR, ada.person_id, PersonChange(role="auditor"))
    go_on.set()
    answer = await sent
    await asyncio.gather(*holders)
    assert (answer.status_code, "what you typed is kept" in answer.text) == (401, True)
    assert {each.name for each in (await read_page(any_house.admin, PEOPLE, PersonQuery())).rows} == {
        "ada",
        "bo",
    }


async def test_an_owner_ends_one_session_of_another_person_and_no_other(any_house: House) -> None:
    for name, role in (("ada", "owner"), ("ann", "auditor"), ("olga", "operator")):
        await any_house.person(name, role)
    first, second, ann = [await any_house.logged_in(name) for name in ("olga", "olga", "ann")]
    ada = await any_house.logged_in("ada")
    olga = await any_house.admin.people.show("olga")
    page = f"/console/people/{olga.person_id}"
    listed = (await any_house.admin.person_sessions.page(person="olga")).rows
    oldest = min(listed, key=lambda each: (each.created_us, each.session_id)).session_id
    shown = (await ada.get(page)).text
    assert all(f'name="session" value="{each.session_id}"' in shown for each in listed)
    assert 'name="session"' not in (await ann.get(page)).text, "auditors end none"
    end = {"act": "end_session", "session": oldest}
    wrong = await ada.send(page, **end, session_password="wrong")
    assert (wrong.status_code, error_of(wrong, "session_password")) == (403, "Wrong password.")
    [of_ann] = (await any_house.admin.person_sessions.page(person="ann")).rows
    other = await ada.send(page, act="end_session", session=of_ann.session_id, session_password=PASSWORD)
    assert (other.status_code, "No such session" in other.text) == (422, True), other.text
    done = await ada.send(page, **end, session_password=PASSWORD)
    assert (done.status_code, done.headers["location"]) == (303, f"{page}?done=end_session")
    assert "The session has ended." in (await ada.get(done.headers["location"])).text
    left = {each.session_id for each in (await any_house.admin.person_sessions.page(person="olga")).rows}
    assert left == {each.session_id for each in listed} - {oldest}
    assert sorted([await any_house.is_in(first), await any_house.is_in(second)]) == [False, True]
    assert await any_house.is_in(ann)


async def test_a_page_of_a_person_that_was_changed_meanwhile_changes_nothing(house: House) -> None:
    for name in ("acme", "zeta"):
        await house.admin.tenants.create(ACTOR, TenantCreate(name=name))
    await house.deps.directory.refresh()
    await house.person("ada")
    bo = await house.person("bo", "member", ["acme"])
    browser = await house.logged_in("ada")
    page = f"/console/people/{bo.person_id}"
    opened = (await browser.get(page)).text
    [seen] = re.findall(r'name="etag" value="([^"]+)"', opened)
    form = {"act": "role", "role": "member", "tenants": "acme", "etag": seen}
    wrong = await browser.send(page, **form, password="wrong")
    assert f'name="etag" value="{seen}"' in wrong.text
    await house.admin.people.change(ACTOR, "bo", PersonChange(tenants=["zeta"]))
    stale = await browser.send(page, **form, password=PASSWORD)
    assert (stale.status_code, "was changed after you opened the page" in stale.text) == (412, True)
    assert 'value="zeta"' in stale.text, "what is there now"
    [fresh] = re.findall(r'name="etag" value="([^"]+)"', stale.text)
    assert (await browser.send(page, **form | {"etag": fresh}, password=PASSWORD)).status_code == 303
    [tenant_id] = (await house.admin.people.show("bo")).tenants
    assert tenant_id == next(iter(bo.tenants))


async def test_links_begin_with_the_setting_whatever_the_host_says(house: House) -> None:
    await house.person("ada")
    for app, begins in ((house.here, "http://elsewhere.example"), (house.there, CONSOLE_URL)):
        browser = await house.logged_in("ada", app=app)
        browser.http.headers["host"] = "elsewhere.example"
        token = await browser.token("/console/people")
        fields = {"name": f"of-{len(begins)}", "role": "auditor", "tenants": "", "password": PASSWORD}
        made = await browser.http.post("/console/people/invite", data={"form_token": token, **fields})
        [link] = re.findall(r'value="([^"]*/console/set-up[^"]*)"', made.text)
        assert link.startswith(f"{begins}/console/set-up?token="), link
