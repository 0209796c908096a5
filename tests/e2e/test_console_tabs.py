"""Several tabs of one browser: they share a connection, and say when it is lost or their session over."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.chromium import DESK, Visitor, needs_chromium
from tests.support.server_process import Server

pytestmark = needs_chromium


class Wire:
    """A way to a server that can be cut, and mended."""

    def __init__(self, to: int) -> None:
        self._to, self._port, self._open = to, 0, list[socket.socket]()
        self.mend()
        self.url = f"http://127.0.0.1:{self._port}"

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self._open = [listener]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = [listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))]
                self._open += ends
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    made = Wire(int(server.url.rpartition(":")[2]))
    yield made
    made.cut()


def moves(page: Page, region: str) -> None:
    at = page.locator(f"{region} time").first
    expect(at).not_to_have_text(at.text_content() or "")


PLACES = [("/console/overview", "#overview-now"), ("/console/waiting?tier=batch", "#waiting-now")]


@pytest.mark.long
def test_seven_live_tabs_move_and_an_eighth_page_opens(visitor: Visitor) -> None:
    page = visitor.log_in("seven@example.org")
    tabs = [visitor.context.new_page() for _ in range(7)]
    for number, tab in enumerate(tabs):
        tab.goto(PLACES[number % 2][0])
    page.goto("/console/tenants")
    for number, tab in enumerate(tabs):
        moves(tab, PLACES[number % 2][1])


def test_tabs_share_a_stream_say_when_it_is_lost_and_show_nothing_after_their_session(
    server: Server, chromium: Browser, wire: Wire
) -> None:
    context = chromium.new_context(base_url=wire.url, viewport=DESK)  # type: ignore[arg-type]
    link = server.admin("POST", "/people", {"name": "tabs@example.org", "role": "owner"})["link"]
    page = Visitor(server, context).opens(link.replace(server.url, wire.url))
    tabs = [context.new_page() for _ in PLACES]
    for tab, (path, region) in zip(tabs, PLACES, strict=True):
        tab.goto(path)
        moves(tab, region)
    first, grey = tabs[0], "element => getComputedStyle(element).filter"
    wire.cut()
    expect(first.get_by_role("status").filter(has_text="Connection lost. Reconnecting.")).to_be_visible()
    expect(first.get_by_text("Figures as of")).to_contain_text(" s ago.")
    assert first.title() == "Not live: Overview · Fairgate"
    assert first.locator("#overview-now").evaluate(grey) == "grayscale(1)"
    wire.mend()
    for tab, (_, region) in zip(tabs, PLACES, strict=True):
        expect(tab.get_by_role("status")).to_have_text("Live again.")
        moves(tab, region)
        assert tab.locator(region).evaluate(grey) == "none"
    assert first.title() == "Overview · Fairgate"
    page.goto("/console")
    page.locator(".account summary").click()
    page.get_by_role("button", name="Log out").click()
    for tab in tabs:
        expect(tab.get_by_role("status")).to_have_text("Your session has ended. Log in")
        expect(tab.locator("main table, main section")).to_have_count(0)
    context.close()
