"""The console in a real browser: Debian's `chromium`, or the one that `FAIRGATE_TEST_CHROMIUM` names.

Locators only: a predicate as a string is evaluated in the page, which its content security policy forbids.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support.console import PASSWORD
from tests.support.server_process import Server

CHROMIUM = os.environ.get("FAIRGATE_TEST_CHROMIUM") or shutil.which("chromium")
REFUSED_FORM = re.compile(r"Failed to load resource: the server responded with a status of 4\d\d \(.*\)")
"""Chromium's line for every answer of 4xx, also to a form that was not filled in well."""
MOST_ROWS = 8
"""Of a table, that are looked at by axe: the rest come from the same lines of a template."""
RUN_AXE = "([left_out, options]) => axe.run({exclude: [[left_out]]}, options).then(each => each.violations)"
RULES: dict[str, dict[str, Any]] = {"light": {}, "dark": {"runOnly": ["color-contrast"]}}
"""By theme, for axe: one of its rules is about colours, and the rest of a page is the same in the dark."""
PHONE = {"width": 390, "height": 800}
DESK = {"width": 1280, "height": 900}

expect.set_options(timeout=30_000)  # as long as acts wait by themselves

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


@contextmanager
def browser_open() -> Iterator[Browser]:
    """A browser: while it is open, no other event loop can run on this thread."""
    # Its sandbox needs another user than root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for the tests of a file, which has no asynchronous ones."""
    with browser_open() as browser:
        yield browser


@dataclass
class Visitor:
    """A person's browser, and what it complained about: its own console, requests to other servers."""

    server: Server
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        note = self.complaints.append
        self.context.on("console", lambda message: note(f"{message.type}: {message.text}"))
        self.context.on("weberror", lambda error: note(str(error.error)))
        self.context.on(
            "request", lambda request: None if request.url.startswith(self.server.url) else note(request.url)
        )

    @property
    def serious(self) -> list[str]:
        """The complaints without Chromium's lines about refused forms."""
        return [each for each in self.complaints if not REFUSED_FORM.search(each)]

    def log_in(self, name: str, role: str = "owner", tenants: list[str] | None = None) -> Page:
        """A page of a new person with this role, logged in."""
        asked = {"name": name, "role": role} | ({"tenants": tenants} if tenants else {})
        return self.opens(self.server.admin("POST", "/people", asked)["link"])

    def opens(self, link: str) -> Page:
        """A page of the person behind the link, logged in."""
        page = self.context.new_page()
        page.goto(link)
        page.get_by_label("Password", exact=True).fill(PASSWORD)
        page.get_by_label("Password again").fill(PASSWORD)
        page.get_by_role("button", name="Set the password").click()
        page.get_by_role("search").first.wait_for()
        return page


@pytest.fixture
def visitor(chromium: Browser, server: Server) -> Iterator[Visitor]:
    """A browser on a desk; nothing serious may be complained about."""
    context = chromium.new_context(base_url=server.url, viewport=DESK)  # type: ignore[arg-type]
    made = Visitor(server, context)
    yield made
    context.close()
    assert made.serious == []


def fits(page: Page) -> bool:
    """Whether nothing stands beyond the right edge."""
    wide: bool = page.locator("html").evaluate("root => root.scrollWidth <= root.clientWidth")
    return wide


TORN = """cells => cells.filter(cell => cell.checkVisibility()).filter(cell => {
  const boxes = [...cell.childNodes].filter(node => node.textContent.trim()).map(node => {
    const range = document.createRange();
    range.selectNode(node);
    return range.getBoundingClientRect();
  });
  const apart = (one, other) => other.top < one.bottom - 2 && other.left - one.right > 24;
  return boxes.some((box, place) => place && apart(boxes[place - 1], box));
}).map(cell => cell.textContent.trim())"""


def torn(page: Page) -> list[str]:
    """Cells whose parts stand apart on one line."""
    found: list[str] = page.locator(".stacked td").evaluate_all(TORN)
    return found


def _serious(page: Page, name: str, theme: str) -> list[str]:
    """What axe, which is in the page already, calls serious."""
    options = {"resultTypes": ["violations"]} | RULES[theme]
    violations = page.evaluate(RUN_AXE, [f"tbody tr:nth-child(n+{MOST_ROWS + 1})", options])
    return [
        f"{name}, {theme}: {each['id']}: {[node['html'][:200] for node in each['nodes'][:3]]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]


def problems_of(page: Page, name: str) -> list[str]:
    """What axe calls serious, light and dark, and whether the page fits a phone."""
    found = []
    page.evaluate(AXE_SCRIPT)
    # Colours that are on their way from one theme to the other have the contrast of neither.
    page.emulate_media(reduced_motion="reduce")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.locator(f"html[data-bs-theme={theme}]").wait_for()
        found += _serious(page, name, theme)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    if not fits(page):
        found.append(f"{name}: wider than {PHONE['width']} px")
    page.locator(".row-button").evaluate_all("buttons => buttons.forEach(each => each.click())")
    found += [f"{name}: torn apart: {each}" for each in torn(page)]
    page.set_viewport_size(DESK)  # type: ignore[arg-type]
    return found


def problems_of_files(paths: Sequence[Path]) -> list[str]:
    """Of pages that stand alone, opened from disk: each request for something else, each script, each
    complaint, and what axe calls serious, light and dark."""
    found: list[str] = []
    with browser_open() as browser:
        for path in paths:
            asked: list[str] = []
            page = browser.new_page(viewport=DESK)  # type: ignore[arg-type]
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, path=path: found.append(f"{path.name}: {message.text}"))
            page.goto(path.as_uri())
            if page.locator("script").count() or asked != [path.as_uri()]:
                found.append(f"{path.name}: scripts, or requests beside the page's own: {asked}")
            page.locator("details").evaluate("details => { details.open = true }")
            page.evaluate(AXE_SCRIPT)
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                found.extend(_serious(page, path.name, theme))
    return found
