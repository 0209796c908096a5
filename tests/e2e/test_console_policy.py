"""The page of the policy on a running server: what is in force; what-ifs, as on the command line, applied."""

from __future__ import annotations

import asyncio
import html
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.console import formats
from ops.cli.main import cli
from ops.sandbox.page_reader import parse_page
from tests.support.console import Browser
from tests.support.server_process import MODEL, Server, until

REQUESTS = 24
LIMITS = "what-if requests 500 hour\r\nwhat-if-too concurrency 50\r\nwhat-if total_tokens 100000"
"""So wide that they can be applied: other tests share the server."""
SCRIPT = "<script>alert(1)</script>"
COMMAND = re.compile(r'<pre class="command">([^<]*)</pre>')


@pytest.fixture(scope="module")
def traffic(server: Server) -> tuple[str, str]:
    """From when to when two tenants sent requests, as the form takes it."""
    keys = [server.tenant(name) for name in ("what-if", "what-if-too")]

    def send(number: int) -> None:
        with server.http(keys[number % 2]) as client:
            body = {"model": MODEL, "prompt": "sun and rain", "max_tokens": 4, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

    begun = instant()

    def is_known() -> bool:
        send(0)
        return bool(report(server, f"--from={begun}"))

    until(is_known, 60)  # how long its steps take, it finds out first
    # A request ends at the gateway a moment after its client has the answer.
    until(server.is_idle)
    since = instant()
    for number in range(REQUESTS):
        send(number)
    until(server.is_idle)
    until_ = instant()

    def all_are_written() -> bool:
        found = report(server, f"--from={since}", f"--to={until_}")
        return bool(found.get("recorded", {}).get("requests") == REQUESTS)

    until(all_are_written, 60)
    return since, until_


@pytest.fixture
def settings_again(server: Server) -> Iterator[None]:
    yield
    server.admin("POST", "/policy", {"from_settings": True})
    for name in ("what-if", "what-if-too"):
        server.admin("PATCH", f"/tenants/{name}", {"weight": 1.0})
        for limit in server.admin("GET", f"/limits?tenant={name}")["data"]:
            server.admin("DELETE", f"/limits/{limit['id']}")


def instant() -> str:
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")


def report(server: Server, *flags: str) -> dict[str, Any]:
    asked = ["whatif", "--data-dir", str(server.data_dir), *flags, "--json"]
    answered = CliRunner().invoke(cli, asked, prog_name="fairgate")
    if answered.exit_code != 0:
        print(answered.output)
    found: dict[str, Any] = json.loads(answered.stdout) if answered.exit_code == 0 else {}
    return found


async def logged_in(server: Server, browser: Browser, role: str) -> Browser:
    name = f"policy-{role}-{time.time_ns()}"
    link = server.admin("POST", "/people", {"name": name, "role": role})["link"]
    assert (await browser.redeem(link.partition("token=")[2])).status_code == 303
    return browser


async def ended(browser: Browser, path: str) -> str:
    """The page of a run, once it has ended."""
    async with asyncio.timeout(120):
        while True:
            page = await browser.get(path)
            assert page.status_code == 200, page.text
            if "hx-trigger" not in page.text:
                return page.text


def compared(page: str) -> list[list[str]]:
    """The figures of the table of policies, but for their names."""
    rows = parse_page("", page).tables["Side by side with what happened"]
    return [[cell.text for cell in row[1:]] for row in rows]


def in_words(row: dict[str, Any]) -> list[str]:
    """What the report says of one policy, or of what happened, as a page writes it."""
    times = [row[name][quantile] for name in ("ttft_s", "e2e_s") for quantile in ("p50", "p90", "p99")]
    return [
        formats.number(row["requests"]),
        formats.number(row["refused"]),
        *("never" if each is None else formats.seconds(each) for each in times),
        formats.percent(row["attainment"]),
        formats.number(row.get("preemptions")),
    ]


async def test_a_what_if_is_that_of_the_command_line_and_can_be_applied(
    server: Server, traffic: tuple[str, str], settings_again: None, tmp_path: Path
) -> None:
    since, until_ = traffic
    async with Browser(server.url) as owner, Browser(server.url) as auditor:
        await logged_in(server, owner, "owner")
        await logged_in(server, auditor, "auditor")
        shown = (await owner.get("/console/policy")).text
        assert shown.count("/console/requests/req_") >= 20

        lines = "what-if requests 500 hour\r\nwhat-if smiles <b> hour"
        wrong = await owner.send("/console/policy", "/console/policy/what-if", limits=lines)
        assert "Line 2: there is no meter &#39;smiles&#39;; there are total_tokens, " in wrong.text
        assert "what-if requests 500 hour\nwhat-if smiles &lt;b&gt; hour</textarea>" in wrong.text
        wrong = await owner.send(
            "/console/policy",
            "/console/policy/what-if",
            policies=SCRIPT,
            weights="what-if=2",
        )
        assert wrong.status_code == 422
        assert "There is no policy &#39;&lt;script&gt;alert(1)&lt;/script&gt;&#39;; there are " in wrong.text
        assert SCRIPT not in wrong.text
        assert 'value="what-if=2"' in wrong.text

        fields = {
            "from": since,
            "to": until_,
            "policies": "fcfs",
            "weights": "what-if=3 what-if-too=2",
            "limits": LIMITS,
        }
        begun = await owner.send("/console/policy", "/console/policy/what-if", **fields)
        assert begun.status_code == 303, begun.text
        path = begun.headers["location"]
        page = await ended(owner, path)
        assert "weight of what-if 3 (served: 1)" in page, page
        told = (await owner.get(f"{path}/report")).json()
        command, limits = map(html.unescape, COMMAND.findall(page))
        (tmp_path / "limits.yaml").write_text(limits)
        flags = command.replace("limits.yaml", str(tmp_path / "limits.yaml")).split()[2:-1]
        assert told == await asyncio.to_thread(report, server, *flags)
        assert len(told["overrides"]) == 2 + len(LIMITS.splitlines())
        assert [row["policy"] for row in told["policies"]] == [told["policies"][0]["policy"], "fcfs"]
        assert told["recorded"]["requests"] == REQUESTS
        assert compared(page) == [in_words(told["recorded"]), *map(in_words, told["policies"])]

        # An auditor sees it, and has no button.
        seen = (await auditor.get(path)).text
        assert "what-if-too" in seen
        assert "Apply this" not in seen
        assert "Apply this" in page
        assert "Simulate" not in (await auditor.get("/console/policy")).text

        # Asked once, with what it will do; not if something else was changed meanwhile.
        asked = await owner.send(path, f"{path}/apply", number="1")
        assert "weight 1.0 → 3.0" in asked.text
        assert "Scheduling policy: policy" in asked.text
        tag = re.findall(r'name="etag" value="([^"]*)"', asked.text)[0]
        server.admin("PATCH", "/tenants/what-if", {"weight": 2.0})
        late = await owner.send(path, f"{path}/apply", number="1", etag=tag)
        assert late.status_code == 412
        assert "weight 2.0 → 3.0" in late.text
        assert server.admin("GET", "/policy")["policy"] != "fcfs"
        tag = re.findall(r'name="etag" value="([^"]*)"', late.text)[0]
        done = await owner.send(path, f"{path}/apply", number="1", etag=tag)
        assert (done.status_code, done.headers["location"]) == (303, "/console/policy?done=applied")
        assert server.admin("GET", "/policy")["policy"] == "fcfs"
        assert server.admin("GET", "/tenants/what-if")["weight"] == 3.0
        shown = (await owner.get("/console/policy?done=applied")).text
        assert re.search(r"<strong>fcfs( \(|</strong>)", shown)
        assert "by person:policy-owner-" in shown
        again = await owner.send(path, f"{path}/apply", number="1")
        assert again.headers["location"] == "/console/policy?done=nothing"
        # Neither the baseline nor what happened can be applied.
        for number in ("0", "", "7", "x"):
            assert (await owner.send(path, f"{path}/apply", number=number)).status_code == 422


async def test_a_run_that_cannot_be_says_why_and_one_that_runs_is_cancelled(
    server: Server, traffic: tuple[str, str]
) -> None:
    async with Browser(server.url) as owner:
        await logged_in(server, owner, "owner")
        nothing = await owner.send(
            "/console/policy",
            "/console/policy/what-if",
            **{"from": "2020-01-01T00:00", "to": "2020-01-02T00:00"},
        )
        text = await ended(owner, nothing.headers["location"])
        assert "no answer was recorded in that time" in text
        since, until_ = traffic
        begun = await owner.send(
            "/console/policy", "/console/policy/what-if", **{"from": since, "to": until_}
        )
        path = begun.headers["location"]
        busy = await owner.send("/console/policy", "/console/policy/what-if", **{"from": since, "to": until_})
        assert busy.status_code == 409
        assert "Another what-if is running" in busy.text
        cancelled = await owner.send(path, f"{path}/cancel")
        assert cancelled.headers["location"] == path
        assert '<span role="status">cancelled</span>' in (await owner.get(path)).text
        assert (await owner.get(f"{path}/report")).status_code == 404
        elsewhere = await owner.get("/console/policy/what-if/of-another-gateway")
        assert (elsewhere.status_code, "keeps the last ten that it ran" in elsewhere.text) == (404, True)
