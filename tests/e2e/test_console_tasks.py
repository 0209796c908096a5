"""What an operator does in an incident, in a real browser: within so many clicks, on pages that fit."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.support.chromium import Visitor, needs_chromium, problems_of
from tests.support.server_process import Server

pytestmark = needs_chromium


def clicked(page: Page, *names: str) -> int:
    """Clicks on links and buttons of these names, one after the other; returns how many."""
    for name in names:
        target = page.get_by_role("link", name=name, exact=True).or_(
            page.get_by_role("button", name=name, exact=True)
        )
        target.first.click()
    return len(names)


def test_incidents_take_few_clicks(server: Server, visitor: Visitor) -> None:
    server.admin("POST", "/tenants", {"name": "tasks", "display_name": "Video team"})
    page = visitor.log_in("on-call@example.org")

    clicks = clicked(page, "Policy", "Brake a tier")
    page.get_by_label("Tier").select_option("batch")
    page.get_by_label("Share of each engine").fill("10 %")
    page.get_by_label("For", exact=True).fill("30m")
    found = problems_of(page, "brake form")
    assert clicks + clicked(page, "Brake a tier") == 3
    expect(page.get_by_role("status")).to_contain_text("The brake is set")
    found += problems_of(page, "brakes")
    clicked(page, "End", "Release the brake")
    expect(page.get_by_role("status")).to_contain_text("The brake is released")

    clicks = clicked(page, "Policy")
    found += problems_of(page, "policy")
    page.get_by_label("Policy", exact=True).select_option("vtc")
    clicks += clicked(page, "Review the change")
    expect(page.get_by_role("listitem").filter(has_text="hybrid → vtc")).to_be_visible()
    found += problems_of(page, "change of the policy")
    assert clicks + clicked(page, "Change it") == 3
    expect(page.get_by_role("status")).to_contain_text("The policy is changed")
    server.admin("POST", "/policy", {"from_settings": True})

    assert clicked(page, "Audit", "Verify") == 2
    expect(page.get_by_role("status")).to_contain_text("Nothing was changed")
    found += problems_of(page, "audit verified")

    clicked(page, "Tenants")
    page.get_by_label("Search by name").fill("tasks")
    clicked(page, "Search")
    expect(page.get_by_role("row").filter(has_text="Video team")).to_contain_text("tasks")
    clicks = clicked(page, "Limits of tasks")
    page.get_by_label("At most").fill("1m")
    clicked(page, "Preview")
    expect(page.get_by_role("status")).to_contain_text(
        "At most 1,000,000 tokens a day (UTC) for tenant tasks."
    )
    found += problems_of(page, "limit form")
    assert clicks + clicked(page, "Set the limit") == 2
    expect(page.get_by_role("status")).to_contain_text("The limit is set")

    for path in ("prices", "prices/set", "slo/targets", "slo/targets/set", "limits", "settings", "quotes"):
        page.goto(f"/console/{path}")
        found += problems_of(page, path)
    assert found == []
