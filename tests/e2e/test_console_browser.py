"""The console in a real browser: links, log-ins, sessions, and what the browser itself complains about.

Without a Chromium this file is skipped; `tests/integration/test_console.py` asks for the same pages without a
browser.
"""

from __future__ import annotations

import re

from playwright.sync_api import Browser, Page, expect

from tests.support.chromium import DESK, PHONE, Visitor, fits, needs_chromium, problems_of
from tests.support.console import PASSWORD
from tests.support.server_process import Server, until

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
    expect(page.get_by_role("heading", name="Hello, browser@example.org")).to_be_visible()
    assert all(cookie["httpOnly"] and cookie["sameSite"] == "Lax" for cookie in context.cookies())
    assert page.locator("html").evaluate("() => document.cookie") == ""
    assert fits(page)
    log_out(page)

    # A page that needs a session leads to the log-in, and from there back.
    page.goto("/console/sessions")
    expect(page.get_by_role("status")).to_contain_text("you go on where you were")
    log_in(page, "browser@example.org", "not the password")
    expect(page.get_by_role("alert")).to_have_text("Name and password do not go together.")
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
    expect(second.get_by_role("heading", name="Hello")).to_be_visible()
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
    expect(page.get_by_role("region", name="The newest")).to_contain_text("webhook.test")
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
        expect(at.get_by_role("heading", name=f"Hello, {name}")).to_be_visible()
    page.goto(f"/console/people/{server.admin('GET', '/people/browser-bo')['id']}")
    assert fits(page)
    sessions = page.get_by_role("region", name="Sessions")
    sessions.get_by_role("radio").check()
    # Return does what the button below it does, and nothing else.
    password = page.locator("#session_password")
    password.fill("not the password")
    password.press("Enter")
    expect(password).to_have_accessible_description(re.compile("This is not your password"))
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
