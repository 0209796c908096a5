"""The overview says by its text alone who takes more than the share and why, who is refused, and what to do.

On a server with a flood, an exhausted limit and a slow store; of 8 tenants, and of 308.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.chromium import Visitor, needs_chromium, problems_of
from tests.support.server_process import MODEL, Server, server_process
from tests.support.traffic import Sender, traffic

pytestmark = needs_chromium
FLOOD = 8
"""Connections of the tenant that floods: more than have a turn at a time."""
HELD_S = 2.0
SCREENS = 3 * 900


@pytest.fixture
def server(tmp_path: Path, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "2", "--engine-max-tokens-per-s", "200"]
    with server_process(tmp_path / "server", chat_model, *arguments) as running:
        yield running


@contextmanager
def slow_store(server: Server) -> Iterator[None]:
    """Another writer holds the database most of the time."""
    over = threading.Event()

    def hold() -> None:
        other = sqlite3.connect(server.data_dir / "fairgate.db", timeout=60, isolation_level=None)
        while not over.is_set():
            other.execute("BEGIN IMMEDIATE")
            over.wait(HELD_S)
            other.execute("ROLLBACK")
            time.sleep(0.4)  # else none of the server's writes ever has its turn
        other.close()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    try:
        yield
    finally:
        over.set()
        holder.join(30)


def answered(server: Server, visitor: Visitor, tenants: int) -> Page:
    names = ["crawler", "finance", *(f"team-{number:03}" for number in range(tenants - 2))]
    keys = {name: server.tenant(name) for name in names}
    server.limit("finance", "total_tokens", 60, window="day")
    page = visitor.log_in("overview@example.org", "operator")
    others = names[2:8]
    senders = [
        Sender(keys["crawler"], FLOOD),
        *(Sender(keys[one], pause_s=1.0) for one in ("finance", *others)),
    ]
    with ExitStack() as stack:
        if tenants > 20:  # each is active, and few at a time
            for name in names[2:]:
                with server.http(keys[name]) as client:
                    client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
        stack.enter_context(traffic(server, senders))
        needs = page.get_by_role("region", name="What needs you")
        row = page.get_by_role("region", name="Tenants", exact=True).get_by_role("row", name="crawler")
        # Who takes more than the share, and why.
        expect(row).to_contain_text(re.compile("times its weight: others left .* unused"), timeout=90_000)
        expect(needs).to_contain_text(re.compile(r"crawler had \d+ %, "))
        # Is somebody refused.
        refused = page.get_by_role("region", name="Who is refused")
        expect(refused).to_contain_text(re.compile(r"finance: \d+, daily tokens"), timeout=60_000)
        # What to do.
        exhausted = needs.get_by_role("listitem").filter(has_text="finance: the limit of 60 tokens a day")
        expect(exhausted).to_contain_text(re.compile(r"exhausted; \d+ requests refused today"))
        expect(exhausted.get_by_role("link")).to_have_attribute("href", re.compile("/limits/lim_"))
        stack.enter_context(slow_store(server))
        expect(needs).to_contain_text(
            re.compile("Requests of .* take .* to reach the queue: a store is slow"), timeout=90_000
        )
    return page


def test_eight_tenants(server: Server, visitor: Visitor) -> None:
    page = answered(server, visitor, 8)
    refused = page.get_by_role("region", name="Who is refused").get_by_role("link").first
    assert refused.get_attribute("href") is not None
    assert problems_of(page, "overview") == []
    page.goto("/console?tenant=fina")
    rows = page.get_by_role("region", name="Tenants", exact=True)
    expect(rows.or_(page.get_by_text('No active tenant has "fina"')).first).to_be_visible()
    expect(rows.get_by_role("row", name="crawler")).to_have_count(0)


@pytest.mark.long
def test_three_hundred_and_eight_tenants_fit_in_three_screens(
    server: Server, visitor: Visitor, chromium: Browser
) -> None:
    page = answered(server, visitor, 308)
    page.set_viewport_size({"width": 1440, "height": 900})
    height: int = page.locator("html").evaluate("root => root.scrollHeight")
    assert height <= SCREENS
    page.get_by_role("link", name=re.compile("All .* rows")).click()
    expect(page.get_by_role("link", name="Only the furthest off")).to_be_visible()
    assert problems_of(page, "overview of 308") == []
