"""One story in a browser, from the first set-up link to a member who sees the own tenant alone.

On a server of its own whose engine runs one sequence at a time, with requests by the unchanged `openai` SDK.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.chromium import DESK, PHONE, Visitor, needs_chromium, problems_of
from tests.support.console import PASSWORD
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.waiting_streams import full, waiting

pytestmark = needs_chromium
TENANT, RIVAL = "acme", "rival"
SLOW_PER_S, SLOW_TOKENS = 10, 300
"""A stream that is under way until its limit is raised."""
STREAMS = 5
"""One runs, two are dispatched ahead, two wait."""
SHORT_TOKENS = 12
FLOOD = 8
"""Connections of each of two tenants: more than have a turn at a time."""
COUNTED = 40
"""Answers that a share is counted over."""
SLACK = 4
"""Answers by which a backlogged tenant may miss its share: 2U of service, and what is dispatched ahead."""
SETTLED = 3 * FLOOD
"""Answers until all that was in line before a change is gone."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--engine-max-sequences", "1", "--gateway-long-tokens", "8192"]
    # Slow enough that a flood leaves the processors to the browser.
    arguments += ["--engine-max-tokens-per-s", "400"]
    with server_process(tmp_path_factory.mktemp("flow"), chat_model, *arguments) as running:
        yield running


class SlowStream(threading.Thread):
    """Reads one stream of the SDK to its end."""

    def __init__(self, client: OpenAI) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.request_id = ""
        self.is_under_way = threading.Event()
        self.usage: Any = None

    def run(self) -> None:
        with self._client.chat.completions.with_streaming_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me"}],
            max_tokens=SLOW_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-fairgate-progress": "1"},
            extra_body={"ignore_eos": True},
        ) as response:
            self.request_id = response.headers["x-request-id"]
            self.is_under_way.set()
            for chunk in response.parse():
                self.usage = chunk.usage or self.usage


class Flood:
    """Two tenants that always have requests waiting; notes whose each answer was."""

    def __init__(self, clients: dict[str, OpenAI]) -> None:
        self.answered: list[str] = []
        self.errors: list[Exception] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(name, client), daemon=True)
            for name, client in clients.items()
            for _ in range(FLOOD)
        ]

    def _ask(self, name: str, client: OpenAI) -> None:
        try:
            while not self._over.is_set():
                complete(client)
                self.answered.append(name)
        except openai.OpenAIError as error:
            self.errors.append(error)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        for each in self._threads:
            each.start()
        try:
            yield
        finally:
            self._over.set()
            for each in self._threads:
                each.join(120)
        assert self.errors == []

    def counted(self) -> int:
        """The first tenant's of the next `COUNTED` answers, after those that were in line."""
        begin = len(self.answered) + SETTLED
        until(lambda: len(self.answered) >= begin + COUNTED or self.errors, 240)
        assert self.errors == []
        return self.answered[begin : begin + COUNTED].count(TENANT)


def complete(client: OpenAI, max_tokens: int = SHORT_TOKENS) -> Any:
    return client.completions.create(
        model=MODEL, prompt="again", max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )


@contextmanager
def sdk(server: Server, key: str) -> Iterator[OpenAI]:
    with OpenAI(api_key=key, base_url=f"{server.url}/v1", max_retries=0, timeout=240) as client:
        yield client


def cell(row: Locator, label: str) -> Locator:
    return row.locator(f"td[data-label='{label}']")


def row_of(page: Page, table: str, text: str) -> Locator:
    return page.get_by_role("region", name=table, exact=True).get_by_role("row").filter(has_text=text)


def go(page: Page, name: str) -> None:
    """To a page by the navigation."""
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(f"^{name}"))


def test_the_whole_flow_in_one_browser(server: Server, chromium: Browser, visitor: Visitor) -> None:
    page = visitor.context.new_page()
    problems: list[str] = []

    set_up(server, page)
    make_tenant(page)
    secret = make_key(page)
    slow_down(page)
    request_id = see_live(server, page, secret, problems)
    see_waterfall(page, request_id, problems)
    rotate_and_revoke(server, page, secret)
    keys = {TENANT: server.key(TENANT), RIVAL: server.tenant(RIVAL)}
    change_weight(server, page, keys)
    refused_id = be_refused(server, page, keys[TENANT])
    try_and_apply(server, page, problems)
    link = invite_member(page)
    assert visitor.serious == []

    other = Visitor(server, chromium.new_context(base_url=server.url, viewport=DESK))  # type: ignore[arg-type]
    see_as_member(other.context.new_page(), link, request_id, refused_id)
    other.context.close()
    assert other.serious == []
    assert problems == []


def set_up(server: Server, page: Page) -> None:
    link = (server.data_dir / "set-up-link").read_text().strip()
    page.goto(link)
    expect(page.get_by_role("heading", name="Set up the first owner")).to_be_visible()
    page.get_by_label("Name").fill("ada@example.org")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Password again").fill(PASSWORD)
    page.get_by_role("button", name="Set the password").click()
    expect(page.get_by_role("heading", name="First steps")).to_be_visible()


def make_tenant(page: Page) -> None:
    go(page, "Tenants")
    page.get_by_label("Name", exact=True).fill(TENANT)
    page.get_by_role("button", name="Create the tenant").click()
    expect(page.get_by_role("heading", name=TENANT, level=1)).to_be_visible()


def make_key(page: Page) -> str:
    """The secret, which is shown once."""
    page.get_by_role("link", name="Keys").last.click()
    page.get_by_label("Name", exact=True).fill("story")
    page.get_by_role("button", name="Create the key").click()
    secret = page.get_by_label("Secret").input_value()
    page.get_by_role("link", name="To the key").click()
    expect(page.get_by_role("heading", name="story", level=1)).to_be_visible()
    assert secret not in page.content()
    return secret


def slow_down(page: Page) -> None:
    """A rate that a stream is held to."""
    page.get_by_role("link", name=TENANT, exact=True).click()
    page.get_by_role("link", name="Set a limit").click()
    set_limit(page, amount=str(SLOW_PER_S), window="rate", rate=str(SLOW_PER_S))
    expect(row_of(page, "Limits", TENANT)).to_contain_text("output tokens")


def set_limit(page: Page, amount: str, window: str, rate: str = "") -> None:
    """On the tenant's output tokens, by the form of its page of limits."""
    page.get_by_label("of", exact=True).select_option("output_tokens")
    page.get_by_label("At most", exact=True).fill(amount)
    page.get_by_label("per", exact=True).select_option(window)
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Rate a second").fill(rate)
    page.get_by_role("button", name="Set the limit").click()
    expect(page.get_by_role("status")).to_be_visible()


def see_live(server: Server, page: Page, secret: str, problems: list[str]) -> str:
    """Streams are seen while they run and wait, until their limit is raised; the id of one that waited."""
    limit = page.get_by_role("region", name="Limits", exact=True).get_by_role("link", name=TENANT)
    path = limit.get_attribute("href")
    assert path is not None
    with sdk(server, secret) as client:
        streams = [SlowStream(client) for _ in range(STREAMS)]
        for each in streams:
            each.start()
        for each in streams:
            assert each.is_under_way.wait(60)
        go(page, "Overview")
        row = row_of(page, "Tenants", TENANT)
        expect(cell(row, "Running")).not_to_have_text("0")
        go(page, "Waiting")
        waiting = row_of(page, "Waiting requests", TENANT).first
        expect(waiting).to_be_visible()
        cell(waiting, "Request").get_by_role("link").click()
        request_id = page.get_by_role("heading", level=1).text_content() or ""
        assert request_id in [each.request_id for each in streams]
        expect(page.get_by_role("heading", name="Now", exact=True)).to_be_visible()
        go(page, "Requests")
        assert all(each.is_alive() for each in streams)

        page.goto(path)
        page.get_by_label("Amount", exact=True).fill("1000000")
        page.get_by_label("Rate a second", exact=True).fill("1000000")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("status")).to_be_visible()
        for each in streams:
            each.join(240)
            assert each.usage is not None
            assert each.usage.completion_tokens == SLOW_TOKENS
    return request_id


def see_waterfall(page: Page, request_id: str, problems: list[str]) -> None:
    go(page, "Requests")
    page.get_by_role("region", name="Requests").get_by_title(request_id).click()
    expect(page.get_by_role("heading", name=re.compile("^Why it took "))).to_be_visible()
    expect(page.get_by_role("img", name="Stages of the request")).to_be_visible()
    expect(row_of(page, "Ledger rows", "settle")).to_contain_text(str(SLOW_TOKENS))


def rotate_and_revoke(server: Server, page: Page, secret: str) -> None:
    page.goto(f"/console/tenants/{TENANT}/keys")
    page.get_by_role("region", name="Keys", exact=True).get_by_role("link", name="story").click()
    page.get_by_label("Hours until older secrets stop").fill("1")
    page.get_by_role("button", name="Create a new secret").click()
    newer = page.get_by_label("Secret").input_value()
    assert newer != secret
    for each in (secret, newer):
        with sdk(server, each) as client:
            assert complete(client).usage.completion_tokens == SHORT_TOKENS
    page.get_by_role("link", name="To the key").click()
    page.get_by_role("link", name="Revoke…").click()
    page.get_by_role("button", name="Revoke it").click()
    expect(page.get_by_role("status")).to_be_visible()
    for each in (secret, newer):
        with sdk(server, each) as client, pytest.raises(openai.AuthenticationError):
            complete(client)


def change_weight(server: Server, page: Page, keys: dict[str, str]) -> None:
    """The tenant's part of counted answers, and of what the overview shows, follows its weight."""
    with sdk(server, keys[TENANT]) as own, sdk(server, keys[RIVAL]) as theirs:
        flood = Flood({TENANT: own, RIVAL: theirs})
        with flood.under_way():
            assert abs(flood.counted() - COUNTED / 2) <= SLACK
            page.goto(f"/console/tenants/{TENANT}/change")
            page.get_by_label("Weight").fill("3")
            page.get_by_role("button", name="Save").click()
            expect(page.get_by_role("heading", name=TENANT, level=1)).to_be_visible()
            assert abs(flood.counted() - COUNTED * 3 / 4) <= SLACK
            # What was before is forgotten by half every 30 s, so the shares follow by and by.
            until(lambda: 0.62 <= share_of(server) < 0.8, 120)
            go(page, "Overview")
            row = row_of(page, "Tenants", TENANT)
            expect(cell(row, "Tenant")).to_contain_text("weight 3")
            for label in ("Had", "Due"):
                expect(cell(row, label)).to_have_text(
                    re.compile(r"^(6[2-9]|7\d)(\.\d+)? %$"), timeout=120_000
                )


def share_of(server: Server) -> float:
    """Of the first tenant, as the status says."""
    [tiers] = [each["tiers"] for each in server.status()["tenants"] if each["name"] == TENANT]
    return float(tiers.get("standard", {}).get("share") or 0)


def be_refused(server: Server, page: Page, key: str) -> str:
    """A refusal, found by its request and by its tenant; its request's id."""
    page.goto(f"/console/tenants/{TENANT}/limits")
    set_limit(page, amount="10", window="day")
    row = row_of(page, "Limits", "output tokens a day")
    limit_id = (row.get_by_role("link").get_attribute("href") or "").rpartition("/")[2]
    with sdk(server, key) as client, pytest.raises(openai.RateLimitError) as refused:
        complete(client, max_tokens=100)
    request_id: str = refused.value.response.headers["x-request-id"]
    until(lambda: server.admin("GET", f"/refusals?request_id={request_id}")["data"])
    go(page, "Requests")
    page.get_by_role("link", name="Refused", exact=True).click()
    for label, text in (("Request", request_id), ("Tenant", TENANT)):
        page.get_by_role("link", name="Clear").click()
        page.get_by_label(label, exact=True).fill(text)
        page.get_by_role("button", name="Show").click()
        row = row_of(page, "Refusals", "insufficient_quota")
        expect(row).to_have_count(1)
        expect(row.get_by_title(request_id)).to_be_visible()
        expect(row.get_by_title(limit_id)).to_be_visible()
        expect(cell(row, "Wanted")).to_have_text("100")
        expect(cell(row, "Available")).to_have_text("10")
    return request_id


def try_and_apply(server: Server, page: Page, problems: list[str]) -> None:
    """A what-if with another policy, and its policy put in force."""
    assert server.admin("GET", "/policy")["policy"] != "fcfs"
    go(page, "Policy")
    expect(page.get_by_role("group", name="Which traffic").get_by_role("radio").first).to_be_checked()
    expect(page.get_by_role("checkbox", name="fcfs")).to_be_checked()
    page.get_by_role("button", name="Simulate").click()
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible(timeout=120_000)
    problems += problems_of(page, "flow-what-if")
    page.get_by_role("button", name="Apply fcfs").click()
    expect(page.get_by_role("heading", name="Apply this what-if")).to_be_visible()
    page.get_by_role("button", name="Apply it").click()
    expect(page.get_by_role("status")).to_contain_text("It is applied")
    assert server.admin("GET", "/policy")["policy"] == "fcfs"
    problems += problems_of(page, "flow-policy")


def invite_member(page: Page) -> str:
    """The link for a member of the first tenant."""
    go(page, "People")
    page.get_by_label("Name", exact=True).fill("bo@example.org")
    page.get_by_label("Role").select_option("member")
    page.get_by_label("Tenants").fill(TENANT)
    page.get_by_label("Your password").fill(PASSWORD)
    page.get_by_role("button", name="Make a link").click()
    return page.get_by_label("Link").input_value()


def see_as_member(page: Page, link: str, request_id: str, refused_id: str) -> None:
    """The own tenant, its requests and refusals, and nothing of another."""
    page.goto(link)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Password again").fill(PASSWORD)
    page.get_by_role("button", name="Set the password").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.locator("main")).to_contain_text("Closest limit")
    expect(page.locator("main")).not_to_contain_text(RIVAL)
    names = page.get_by_role("navigation").get_by_role("link").all_text_contents()
    assert not {"Quotes", "Policy", "Upstreams", "Audit", "People", "Settings"} & set(names)
    for name, table in (("Tenants", "Tenants"), ("Requests", "Requests"), ("Keys", "Keys")):
        go(page, name)
        rows = page.get_by_role("region", name=table, exact=True).get_by_role("row")
        expect(rows.filter(has_text=RIVAL)).to_have_count(0)
        expect(page.locator("main")).not_to_contain_text(RIVAL)
    for each, words in ((request_id, "Why it took "), (refused_id, "Refused: ")):
        page.goto(f"/console/requests/{each}")
        expect(page.get_by_role("heading", name=words)).to_be_visible()
    for path in ("", "/limits", "/keys"):
        answer = page.goto(f"/console/tenants/{RIVAL}{path}")
        assert answer is not None
        assert answer.status == 404


def test_the_live_pages_are_accessible_fit_and_move_by_themselves(server: Server, visitor: Visitor) -> None:
    every = ["interactive", "standard", "batch"]
    crowd = server.tenant("crowd", tier="interactive")
    keys = [server.tenant(name, tiers=every) for name in ("looked-at", "other")]
    page = visitor.log_in("live-looks@example.org")
    with (
        full(server, crowd),
        waiting(server, keys[1]),
        waiting(server, keys[0]) as (request_id, _),
    ):
        page.goto("/console")
        at = page.locator("#overview-now time").first
        first = at.text_content()
        expect(at).not_to_have_text(first or "")
        expect(page.locator("[data-state=on]")).to_be_visible()
        found = problems_of(page, "overview")
        page.goto("/console/waiting")
        link = page.get_by_role("link", name=f"Move {request_id}")
        link.focus()
        at = page.locator("#waiting-now time").first
        expect(at).not_to_have_text(at.text_content() or "")
        expect(link).to_be_focused()
        found += problems_of(page, "waiting")
        # On a phone a row is a card of two facts; one that is opened stays open.
        page.reload()
        page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        card = (
            page.get_by_role("region", name="Waiting requests")
            .locator("tbody tr")
            .filter(has=page.locator(f"[title={request_id}]"))
        )
        expect(card.locator("td:visible")).to_have_count(2)
        card.get_by_role("button", name="More").click()
        expect(link).to_be_visible()
        expect(at).not_to_have_text(at.text_content() or "")
        expect(card.get_by_role("button", name="More", expanded=True)).to_be_visible()
        expect(link).to_be_visible()
        page.set_viewport_size(DESK)  # type: ignore[arg-type]
        link.click()
        offer = page.get_by_role("region", name=re.compile("^To interactive: .*, 2x the price$"))
        expect(offer).to_contain_text("instead of")
        found += problems_of(page, "move")
        offer.get_by_role("button", name="Move to interactive").click()
        expect(page.get_by_role("status").first).to_have_text("The request is moved.")
    assert found == []
