"""The console in a real browser: links, log-ins, sessions, and what the browser itself complains about.

Without a Chromium this file is skipped; `tests/integration/test_console.py` asks for the same pages without a
browser.
"""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing

from playwright.sync_api import Browser, Page, expect

from tenants.storage import tables
from tests.e2e.test_console_tenants import busy_tenant
from tests.e2e.test_refusals import complete
from tests.support.chromium import DESK, PHONE, Visitor, fits, needs_chromium, problems_of
from tests.support.console import PASSWORD
from tests.support.server_process import MODEL, Server, until

pytestmark = needs_chromium


def log_in(page: Page, name: str, password: str) -> None:
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def test_from_the_link_to_the_log_out(server: Server, chromium: Browser, visitor: Visitor) -> None:
    context = visitor.context
    link = server.admin("POST", "/people", {"name": "browser@example.org", "role": "owner"})["link"]
    page = context.new_page()
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.goto(link)
    expect(page.get_by_role("heading", name="Choose a password")).to_be_visible()
    page.get_by_label("Password", exact=True).fill("too short")
    page.get_by_label("Password again").fill("too short")
    page.get_by_role("button", name="Set the password").click()
    wrong = page.get_by_label("Password", exact=True)
    expect(wrong).to_be_focused()
    expect(wrong).to_have_accessible_description(re.compile("needs at least 12 characters", re.IGNORECASE))
    wrong.fill(PASSWORD)
    page.get_by_label("Password again").fill(PASSWORD)
    page.get_by_role("button", name="Set the password").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert all(cookie["httpOnly"] and cookie["sameSite"] == "Lax" for cookie in context.cookies())
    assert page.locator("html").evaluate("() => document.cookie") == ""
    assert fits(page)
    log_out(page)

    # A page that needs a session leads to the log-in, and from there back.
    page.goto("/console/sessions")
    expect(page.get_by_role("status")).to_contain_text("you go on where you were")
    log_in(page, "browser@example.org", "not the password")
    expect(page.get_by_role("alert")).to_have_text("Wrong name or password.")
    expect(page.get_by_label("Name")).to_have_value("browser@example.org")
    expect(page.get_by_label("Password")).to_have_value("")
    log_in(page, "Browser@Example.org", PASSWORD)
    expect(page).to_have_url(f"{server.url}/console/sessions")
    assert fits(page)

    # Another browser of the same person is ended from here.
    other = chromium.new_context(base_url=server.url)
    second = other.new_page()
    second.goto("/console/log-in")
    log_in(second, "browser@example.org", PASSWORD)
    expect(second.get_by_role("heading", name="Overview")).to_be_visible()
    page.reload()
    own = page.get_by_role("region", name="Your sessions").get_by_role("row")
    ending = own.filter(has_not_text="this one").get_by_role("button")
    expect(ending).to_have_count(1)
    ending.click()
    expect(page.get_by_role("status")).to_contain_text("has ended")
    second.reload()
    expect(second.get_by_role("heading", name="Log in")).to_be_visible()
    other.close()

    log_out(page)
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    assert visitor.serious == []
    assert len(visitor.complaints) == 2  # the two forms above


def log_out(page: Page) -> None:
    """By the menu, which a phone hides."""
    if page.get_by_role("button", name="Menu").is_visible():
        page.get_by_role("button", name="Menu").click()
    if not page.get_by_role("button", name="Log out").is_visible():
        page.locator(".account summary").click()
    page.get_by_role("button", name="Log out").click()


def test_pages_of_the_account_are_accessible_and_fit(visitor: Visitor) -> None:
    page = visitor.context.new_page()
    page.goto("/console/log-in")
    found = problems_of(page, "log-in")
    page = visitor.log_in("looks@example.org")
    for name in ("start", "password", "sessions", "people"):
        page.goto("/console" if name == "start" else f"/console/{name}")
        found += problems_of(page, name)
    page.get_by_role("link", name="looks@example.org").click()
    found += problems_of(page, "person")
    assert found == []
    assert page.viewport_size == DESK


def test_pages_of_alerts_are_accessible_and_fit(server: Server, visitor: Visitor) -> None:
    server.admin("POST", "/tenants", {"name": "browser-alerts"})
    # An alert of a tenant, and an event that could not be delivered.
    server.admin("POST", "/keys", {"tenant": "browser-alerts", "expires_in_s": 3_600})
    page = visitor.log_in("alerted@example.org")
    page.goto("/console/alerts")
    page.get_by_label("Address of the receiver").fill("http://127.0.0.1:9/hook")
    page.get_by_label("Tenant", exact=True).fill("browser-alerts")
    page.get_by_role("button", name="Add the webhook").click()
    found = problems_of(page, "secret")
    page.get_by_role("link", name="To the webhook").click()
    page.get_by_role("button", name="Send a test event").click()
    until(lambda: server.admin("GET", "/alerts?state=firing")["data"])
    page.reload()
    found += problems_of(page, "webhook")
    expect(page.get_by_role("region", name="Newest")).to_contain_text("webhook.test")
    page.goto("/console/alerts")
    found += problems_of(page, "alerts")
    expect(page.get_by_role("region", name="Firing")).to_contain_text("expires in 1.0 hours")
    page.get_by_role("link", name="http://127.0.0.1:9").click()
    page.get_by_role("link", name="Remove…").click()
    page.get_by_role("button", name="Remove it").click()
    expect(page.get_by_role("status")).to_contain_text("The webhook is removed")
    assert found == []


def test_an_owner_ends_one_session_of_another_person(
    server: Server, chromium: Browser, visitor: Visitor
) -> None:
    other = chromium.new_context(base_url=server.url)
    page, theirs = visitor.context.new_page(), other.new_page()
    for at, name, role in ((page, "browser-owner", "owner"), (theirs, "browser-bo", "auditor")):
        at.goto(server.admin("POST", "/people", {"name": name, "role": role})["link"])
        at.get_by_label("Password", exact=True).fill(PASSWORD)
        at.get_by_label("Password again").fill(PASSWORD)
        at.get_by_role("button", name="Set the password").click()
        expect(at.get_by_role("heading", name="Overview")).to_be_visible()
    page.goto(f"/console/people/{server.admin('GET', '/people/browser-bo')['id']}")
    assert fits(page)
    sessions = page.get_by_role("region", name="Sessions")
    sessions.get_by_role("radio").check()
    # Return does what the button below it does, and nothing else.
    password = page.locator("#session_password")
    password.fill("not the password")
    password.press("Enter")
    expect(password).to_have_accessible_description(re.compile("Wrong password"))
    expect(password).to_be_focused()
    page.get_by_role("radio").check()
    password.fill(PASSWORD)
    page.get_by_role("button", name="End the chosen session").click()
    expect(page.get_by_role("status")).to_have_text("The session has ended.")
    expect(page.get_by_text("There are none.")).to_be_visible()
    theirs.reload()
    expect(theirs.get_by_role("heading", name="Log in")).to_be_visible()
    other.close()
    assert visitor.serious == []


# ---------------------------------------------------------------- tenants


def make_key_by_keyboard(page: Page) -> str:
    """From the list of keys to the secret, without a mouse; returns the secret."""
    page.get_by_label("Name", exact=True).focus()
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    secret = page.get_by_label("Secret")
    expect(secret).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Copy")).to_be_focused()
    return secret.input_value()


def test_the_pages_are_accessible_fit_and_make_a_key_by_keyboard(server: Server, visitor: Visitor) -> None:
    busy_tenant(server, "page-looks")
    page = visitor.log_in("page-looks@example.org")
    found = []
    for name, path in (
        ("tenants", "/console/tenants?search=page-"),
        ("tenant", "/console/tenants/page-looks"),
        ("limits", "/console/tenants/page-looks/limits"),
        ("tenant-suspend", "/console/tenants/page-looks/suspend"),
        ("hygiene", "/console/keys?finding=no_expiry&tenant=page-looks"),
    ):
        page.goto(path)
        found += problems_of(page, name)
    page.goto("/console/tenants/page-looks/limits")
    page.get_by_role("region", name="Limits").get_by_role("link").first.click()
    page.get_by_role("heading", name="Change it").wait_for()
    found += problems_of(page, "limit")
    page.goto("/console/tenants/page-looks/keys")
    found += problems_of(page, "keys")
    secret = make_key_by_keyboard(page)
    found += problems_of(page, "secret")
    with server.http(secret) as client:
        assert client.get("/v1/limits").status_code == 200
    page.get_by_role("link", name="To the key").click()
    expect(page.get_by_role("heading", name="typed")).to_be_visible()
    assert secret not in page.content()
    found += problems_of(page, "key")
    assert found == []


# ---------------------------------------------------------------- requests


def test_the_pages_are_accessible_fit_and_hold_still(server: Server, visitor: Visitor) -> None:
    key = server.tenant("looked-at", tier="standard", tiers=["standard"])
    limit_id = server.limit("looked-at", "output_tokens", 60, window="day")
    targets = [
        server.admin("POST", "/slos", {"tenant": "looked-at", "tier": "standard", "target_s": 0.0001} | each)
        for each in ({"metric": "ttft", "percentile": 95}, {"metric": "e2e", "percentile": 90})
    ]
    sent = [complete(server, key).headers["x-request-id"] for _ in range(3)]
    assert complete(server, key, max_tokens=100).status_code == 429
    until(lambda: len(server.admin("GET", "/slo/misses?tenant=looked-at")["data"]) == 6)
    page = visitor.log_in("looks-at-requests@example.org", role="auditor")
    page.clock.install()
    page.goto("/console/requests?tenant=looked-at")
    expect(page.get_by_role("region", name="Requests").get_by_role("row")).to_have_count(4)
    found = problems_of(page, "requests")
    newest = complete(server, key).headers["x-request-id"]
    until(lambda: newest in str(server.admin("GET", "/requests/ended?tenant=looked-at")))
    page.clock.fast_forward(16_000)
    more = page.get_by_role("link", name="1 new")
    expect(more).to_be_visible()
    expect(page.get_by_role("region", name="Requests").get_by_role("row")).to_have_count(4)
    more.click()
    expect(page.get_by_role("region", name="Requests").get_by_role("row")).to_have_count(5)
    for name, path in (
        ("request", f"requests/{sent[0]}"),
        ("refusals", f"refusals?tenant=looked-at&limit_id={limit_id}"),
        ("slo", "slo?tenant=looked-at"),
        ("misses", "slo/misses?tenant=looked-at"),
        ("quotes", "quotes"),
    ):
        page.goto(f"/console/{path}")
        found += problems_of(page, name)
    for each in targets:
        server.admin("DELETE", f"/slos/{each['id']}")
    assert found == []


def test_a_request_and_last_months_cost_are_found_at_once_in_the_viewers_time_zone(
    server: Server, chromium: Browser
) -> None:
    key = server.tenant("found-at-once")
    answer = complete(server, key)
    context = chromium.new_context(base_url=server.url, viewport=DESK, timezone_id="Asia/Tokyo")  # type: ignore[arg-type]
    visitor = Visitor(server, context)
    page = visitor.log_in("finds@example.org")
    page.goto("/console/tenants")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type(answer.json()["id"])
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{server.url}/console/requests/{answer.headers['x-request-id']}")

    page.get_by_role("navigation").get_by_role("link", name="Usage").click()
    page.get_by_role("link", name="Last month").click()
    page.get_by_role("link", name="project", exact=True).click()
    page.wait_for_url("**group=project**")
    expect(page.locator("main")).to_contain_text("Times are in UTC.")
    begin, end = (page.locator("main strong").nth(place).inner_text() for place in (0, 1))
    assert (begin[-3:], end[-3:], begin < end) == ("-01", "-01", True)
    page.get_by_role("link", name="This month").click()
    page.wait_for_url(lambda address: "to=" not in address)
    expect(page.get_by_role("region", name="Usage by project")).to_contain_text("default")

    page.goto("/console/requests?tenant=found-at-once&from=2026-01-31T15:00:00Z")
    expect(page.locator("main")).to_contain_text("Times are in Asia/Tokyo (UTC+9).")
    begin_field = page.get_by_label("From", exact=True)
    expect(begin_field).to_have_value("2026-02-01 00:00:00")
    begin_field.fill("2026-02-01 09:00")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**from=2026-02-01T00%3A00%3A00.000Z**")
    page.get_by_role("link", name="The slowest of the last hour").click()
    page.wait_for_url("**sort=slowest**")
    expect(page.get_by_role("region", name="Requests").get_by_role("row")).to_have_count(2)
    page.get_by_role("link", name="Refused", exact=True).click()
    expect(page).to_have_url(re.compile(r"/console/refusals\?tenant=found-at-once&from="))
    found = []
    for name in ("search?q=found", "search", "requests", "tenants?sort=requests", "usage?group=project"):
        page.goto(f"/console/{name}")
        found += problems_of(page, name.partition("?")[0])
    assert found == visitor.serious == []
    context.close()


# ---------------------------------------------------------------- money and platform

PAGES = {
    "usage": "/console/usage?group=tenant&then=model&window=month&from=2026-01-01",
    "usage-total": "/console/usage?group=tenant&then=label:team&window=total",
    "recovery": "/console/usage/recovery?price=2.50&hours=24",
    "upstreams": "/console/upstreams",
    "audit": "/console/audit",
    "settings": "/console/settings?only=set",
}


def engine_minutes(server: Server) -> None:
    """Two hours of an engine, as its gateway writes them: what waiting for them would give."""
    hour = int(time.time()) // 3600 * 3600
    names = [column.name for column in tables.engine_minutes.c]
    sums = {
        "seen_us": 60_000_000,
        "up_us": 60_000_000,
        "steps": 900,
        "batch_sum": 3_600,
        "step_us": 27_000_000,
    }
    rows = [
        dict.fromkeys(names, 0)
        | {"minute_us": (hour - 60 * number) * 1_000_000, "pool": MODEL, "replica": "engine-0"}
        | {"gateway_id": "pictures", "state": "up", "idle_us": 1_000_000 * (number % 45)}
        | {
            "computed_tokens": 700,
            "emitted_tokens": 800,
            "recomputed_tokens": 90,
            "kv_permille_s": 400 * number,
        }
        | sums
        for number in range(1, 121)
    ]
    values = ", ".join(f":{name}" for name in names)
    with closing(sqlite3.connect(server.data_dir / "fairgate.db", timeout=30)) as connection, connection:
        connection.executemany(f"INSERT INTO engine_minutes ({', '.join(names)}) VALUES ({values})", rows)


def test_pages_of_money_and_platform_are_accessible_and_fit(visitor: Visitor) -> None:
    server = visitor.server
    for name in ("pictures-a", "pictures-b"):
        key = server.tenant(name)
        server.admin("PATCH", f"/tenants/{name}", {"labels": {"team": ["search", "ads"]}})
        for team in ("search", "ads"):
            body = {"model": MODEL, "prompt": "say it", "max_tokens": 40, "ignore_eos": True}
            with server.http(key) as client:
                client.post("/v1/completions", json=body | {"metadata": {"team": team}}).raise_for_status()
    engine_minutes(server)
    page = visitor.log_in("money-looks@example.org")
    found = []
    for name, path in PAGES.items():
        page.goto(path)
        expect(page.locator("main h1")).to_be_visible()
        found += problems_of(page, f"money-{name}")
    # Drain asks first, and can be left.
    page.goto("/console/upstreams")
    page.get_by_role("link", name="Drain").first.click()
    expect(page.get_by_role("button", name="Drain it")).to_be_visible()
    found += problems_of(page, "money-drain")
    page.get_by_role("link", name="Cancel").click()
    expect(page.get_by_role("heading", name="Upstreams")).to_be_visible()
    assert found == []
