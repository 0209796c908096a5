"""Pages of usage, recovery, upstreams, audit and settings in a real browser, light, dark and on a phone."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

from playwright.sync_api import expect

from tenants.storage import tables
from tests.support.chromium import Visitor, needs_chromium, problems_of
from tests.support.server_process import MODEL, Server

pytestmark = needs_chromium
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
    page.get_by_role("link", name="Leave it as it is").click()
    expect(page.get_by_role("heading", name="Upstreams")).to_be_visible()
    assert found == []
