"""Screenshots of the console on a busy server, light and dark, on a desk and on a phone.

    python -m tests.support.screenshots OUT_DIR [--docs docs] [--seconds 240]

Eight tenants share one small engine: a flood, a night job, an exhausted limit, a target that is missed.
`--docs`: also writes the pictures that README and the documents show."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests.support.chromium import PHONE, Visitor, browser_open
from tests.support.server_process import Server, save_chat_model, server_process
from tests.support.traffic import Sender, traffic

DESK = {"width": 1440, "height": 900}
TIERS = ["interactive", "standard", "batch"]
TENANTS = {
    "search": ("interactive", 3),
    "mobile": ("interactive", 2),
    "ads": ("standard", 1),
    "labs": ("standard", 2),
    "crawler": ("standard", 1),
    "finance": ("standard", 1),
    "support": ("standard", 1),
    "nightly": ("batch", 1),
}
"""By name: default tier and weight."""
DOCS = {
    "overview": "console-overview.png",
    "move": "move.png",
    "waiting": "console-waiting.png",
    "request": "console-request.png",
}
"""Pictures of README and the documents, light and of a desk, by page."""


@contextmanager
def busy_server(directory: Path) -> Iterator[Server]:
    """Serves, with its tenants' traffic, until the block ends."""
    arguments = ["--engine-max-sequences", "4", "--engine-max-tokens-per-s", "120"]
    model = save_chat_model(directory / "model")
    with server_process(directory / "server", model, *arguments) as server:
        keys = {
            name: server.tenant(name, weight=weight, tier=tier, tiers=TIERS)
            for name, (tier, weight) in TENANTS.items()
        }
        server.limit("finance", "total_tokens", 60, window="day")
        server.limit("labs", "total_tokens", 4_000, window="day")
        for tier, target_s in (("interactive", 1.0), ("standard", 2.0)):
            target = {"tier": tier, "metric": "ttft", "target_s": target_s, "percentile": 95}
            server.admin("POST", "/slos", target)
        senders = [
            Sender(keys["search"], 2, pause_s=1.0, max_tokens=16),
            Sender(keys["mobile"], 1, pause_s=1.5, max_tokens=16),
            Sender(keys["ads"], 1, pause_s=0.5, max_tokens=24),
            Sender(keys["labs"], 2, pause_s=1.0, max_tokens=24),
            Sender(keys["crawler"], 14, max_tokens=32, prompt="again and again " * 4),
            Sender(keys["finance"], 1, pause_s=1.0, max_tokens=24),
            Sender(keys["support"], 1, pause_s=3.0, max_tokens=12),
            Sender(keys["nightly"], 6, max_tokens=64, prompt="all of yesterday " * 4, timeout_s=3_600),
        ]
        with traffic(server, senders):
            yield server


def waiting_request(page: Page, tenant: str) -> str:
    """The address of the page that moves one of its waiting requests."""
    page.goto(f"/console/waiting?tenant={tenant}")
    move = page.get_by_role("link", name=re.compile("^Move ")).last
    return move.get_attribute("href") or "/console/waiting"


def missed_request(page: Page) -> str:
    page.goto("/console/slo/misses")
    return (
        page.locator("tbody a[href*='/console/requests/']").first.get_attribute("href") or "/console/requests"
    )


def addresses(page: Page) -> dict[str, str]:
    """By page; of what comes and goes, as it is now."""
    return {
        "overview": "/console",
        "waiting": "/console/waiting",
        "move": waiting_request(page, "nightly"),
        "request": missed_request(page),
        "tenant": "/console/tenants/finance",
        "tenants": "/console/tenants",
        "slo": "/console/slo",
        "usage": "/console/usage",
    }


def take(browser: Browser, server: Server, out_dir: Path, docs: Path | None) -> None:
    context = browser.new_context(base_url=server.url, viewport=DESK)  # type: ignore[arg-type]
    page = Visitor(server, context).log_in("ada@example.org")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
        page.set_viewport_size(DESK)  # type: ignore[arg-type]
        places = addresses(page)
        for size in (DESK, PHONE):
            page.set_viewport_size(size)  # type: ignore[arg-type]
            for name, address in places.items():
                page.goto(address)
                page.locator("main").wait_for()
                path = out_dir / f"{name}-{theme}-{size['width']}.png"
                page.screenshot(path=path, full_page=True)
                if docs is not None and theme == "light" and size is DESK and name in DOCS:
                    page.screenshot(path=docs / DOCS[name])
    context.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--docs", type=Path, help="Where the pictures of README and the documents go.")
    parser.add_argument("--seconds", type=float, default=240.0, help="Traffic before the first one.")
    options = parser.parse_args()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        busy_server(Path(directory)) as server,
        browser_open() as browser,
    ):
        time.sleep(options.seconds)  # a chart of minutes needs some
        take(browser, server, options.out_dir, options.docs)


if __name__ == "__main__":
    main()
