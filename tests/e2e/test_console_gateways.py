"""The live pages with two gateways: both are shown, one that is gone is counted, a log-out reaches both, and
a gateway that stops ends its streams before it waits for its requests. A replica is drained under load."""

from __future__ import annotations

import re
import signal

from ops.sandbox.server import until as in_time
from tests.e2e.test_console_live import OVERVIEW, WAITING, person, plain, stream
from tests.e2e.test_crash import let_end, start_streams
from tests.e2e.test_fleet import (
    RATE_PER_S,
    answered_by,
    begun,
    gateways,
    nothing_is_drained,
    slow_key,
    states,
)
from tests.support.console import Browser
from tests.support.server_process import Server, until

__all__ = ["gateways", "nothing_is_drained"]
UPSTREAMS = "/console/upstreams"
LONG_TOKENS = 600
"""At 40 a second it runs for the rest of a test."""


def figure(page: str, name: str) -> int:
    """A figure of the overview, by its name."""
    [found] = re.findall(rf">{name}</div>\s*<div class=\"h1\">(?:<a [^>]*>)?([\d,]+)", page)
    return int(found.replace(",", ""))


async def test_both_gateways_are_shown_and_a_log_out_in_one_ends_the_stream_of_the_other(
    gateways: list[Server],
) -> None:
    one, other = gateways
    one.tenant("live-both")
    keys = [slow_key(one, "live-both") for _ in gateways]
    async with person(one, "live-both-owner", "owner") as here, Browser(other.admin_url) as there:
        here.copy_to(there)
        streams = [begun(each, key, LONG_TOKENS) for each, key in zip(gateways, keys, strict=True)]
        pages = []
        for each in (here, there):

            async def has_both(browser: Browser = each) -> bool:  # a snapshot may be older than the streams
                return figure((await browser.get(OVERVIEW)).text, "Running") == 2

            assert await in_time(has_both, 20)
            pages.append((await each.get(OVERVIEW)).text)
        for page in pages:
            assert "2 of 2 gateways answer" in plain(page)
            assert figure(page, "Running") == 2
            assert page.count('data-label="Gateway"') == 2
            assert page.count('data-label="Replica"') == 2, "each replica once, though both see it"
            live, _, _ = page.partition("Figures of the last hour")
            assert len(re.findall(r'data-label="Tenant"><a [^>]*>live-both<', live)) == 1
        assert "2 of 2 gateways answer" in plain((await there.get(WAITING)).text)
        async with stream(there, f"{OVERVIEW}/live") as events:
            assert "2 of 2 gateways answer" in plain(await anext(events))
            assert (await here.send("/console/sessions", "/console/log-out")).status_code == 303
            rest = [each async for each in events]
        assert "Your session has ended" in rest[-1]
    let_end(one, "live-both")
    for each in streams:
        each.join()


async def test_a_gateway_that_stops_ends_its_streams_before_it_waits_for_requests(
    gateways: list[Server],
) -> None:
    one, other = gateways
    key = slow_key_of(one, "live-stop")
    async with person(one, "live-stop-owner", "owner") as here, Browser(other.admin_url) as there:
        here.copy_to(there)
        [running] = start_streams(other, key, 1, LONG_TOKENS // 2)
        assert running.has_tokens.wait(60)
        async with stream(there, f"{OVERVIEW}/live") as events:
            assert "2 of 2" in await anext(events)
            assert other.process is not None
            other.process.send_signal(signal.SIGTERM)
            [_ async for _ in events]
            # The stream's end is here, and the request still runs.
            assert running.is_alive()
            assert other.process.poll() is None
        assert other.process.wait(60) == 0
        running.join()
        # It has said good-bye: nothing is missing.
        page = (await here.get(OVERVIEW)).text
        assert "1 of 1 gateways answer" in plain(page)
    other.start()


async def test_a_gateway_that_is_killed_is_missing_and_nothing_is_there_twice(gateways: list[Server]) -> None:
    one, other = gateways
    key = slow_key_of(one, "live-kill")
    async with person(one, "live-kill-owner", "owner") as here:
        mine = begun(one, key, LONG_TOKENS)
        other.kill()
        page = (await here.get(OVERVIEW)).text
        assert "1 of 2 gateways answer" in plain(page)
        assert "figures of the others are missing" in page
        assert page.count('data-label="Gateway"') == 1
        assert figure(page, "Running") == 1
        waiting = (await here.get(WAITING)).text
        assert "1 of 2 gateways answer" in plain(waiting)
        async with stream(here, f"{WAITING}/live") as events:
            assert "1 of 2 gateways answer" in plain(await anext(events))
        let_end(one, "live-kill")
        mine.join()
    other.start()


async def test_a_replica_is_drained_from_its_page_under_load_and_no_token_is_lost(
    gateways: list[Server],
) -> None:
    one, other = gateways
    key = one.tenant("drained-by-hand")
    slow = one.admin("POST", "/keys", {"tenant": "drained-by-hand"})
    one.limit("drained-by-hand", "output_tokens", RATE_PER_S, rate_per_s=RATE_PER_S, key=slow["id"])
    async with person(one, "live-drain-operator", "operator") as here, Browser(other.admin_url) as there:
        here.copy_to(there)
        [running] = start_streams(one, slow["key"], 1, LONG_TOKENS)
        assert running.has_tokens.wait(60)
        [busy] = [name for name, (_, count) in states(other).items() if count]
        [idle] = {"left", "right"} - {busy}
        path = f"{UPSTREAMS}/{busy}"
        asked = plain((await there.get(f"{path}/drain")).text)
        assert "1 request runs there now: it ends by itself, and no token is lost." in asked
        assert "What waits goes to the 1 other replica of tiny." in asked
        done = await there.send(f"{path}/drain", reason="new driver")
        assert (done.status_code, done.headers["location"]) == (
            303,
            f"{UPSTREAMS}?done=drain&replica={busy}",
        )
        page = plain((await here.get(UPSTREAMS)).text)
        assert "draining by person:live-drain-operator: new driver" in page
        assert [answered_by(each, key) for each in (one, other, one)] == [idle] * 3
        assert running.is_alive(), "it ran on meanwhile"
        one.limit("drained-by-hand", "output_tokens", 1_000_000, rate_per_s=1_000_000, key=slow["id"])
        running.join(60)
        assert (running.saw_done, running.delivered, running.error) == (True, LONG_TOKENS, None)
        until(lambda: states(one)[busy] == ("drained", 0))
        assert "drained by person:live-drain-operator" in plain((await here.get(UPSTREAMS)).text)
        back = await here.send(UPSTREAMS, f"{path}/resume")
        assert back.headers["location"] == f"{UPSTREAMS}?done=resume&replica={busy}"
        assert states(other) == {busy: ("serving", 0), idle: ("serving", 0)}
    one.admin("POST", f"/upstreams/{idle}/drain")
    assert answered_by(other, key) == busy


def slow_key_of(server: Server, tenant: str) -> str:
    """Of a new tenant."""
    server.tenant(tenant)
    return slow_key(server, tenant)
