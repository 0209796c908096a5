"""What one gateway process keeps in memory holds for all that serve one port: whichever is asked, over
connections of their own, says the same."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pytest

from ops.serving import datadir
from tenants.people.throttle import FREE_BY_NAME
from tests.e2e.test_console_live import OVERVIEW, person, plain, stream
from tests.e2e.test_crash import let_end
from tests.e2e.test_workers_replaced import slow_streams
from tests.support.commands import run_command
from tests.support.console import Browser
from tests.support.prometheus import value
from tests.support.server_process import MODEL, Server, until

TIMES = 50
COMPLETION = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
ENDED = "gen_ai_server_request_duration_seconds_count"
MOST_OF_ADDRESS = 100
"""As the fixture sets it."""


def each_time(server: Server, path: str, times: int = TIMES) -> list[httpx.Response]:
    """Asks `times` over a new connection each, with the control token."""
    found = datadir.read_server_file(server.data_dir)
    assert found is not None
    headers = {"authorization": f"Bearer {found.control_token}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30.0) as template:
        answers = []
        for _ in range(times):
            request = template.build_request("GET", path, headers={"connection": "close"})
            answers.append(template.send(request))
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    return answers


def option(server: Server, name: str) -> str:
    return server.arguments[server.arguments.index(f"--{name}") + 1]


def settled(server: Server) -> int:
    with psycopg.connect(option(server, "database-url")) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM ledger WHERE kind = 'settle'").fetchall()
    return int(count)


def ended(server: Server) -> float:
    return value(each_time(server, "/metrics", 1)[0].text, ENDED, error_type="") or 0.0


async def at_once(server: Server, count: int, ask: Callable[[httpx.AsyncClient], Any]) -> list[Any]:
    """Each over a client of its own."""

    async def asked() -> Any:
        async with httpx.AsyncClient(base_url=server.url, timeout=30.0) as client:
            return await ask(client)

    return await asyncio.gather(*(asked() for _ in range(count)))


def test_counters_of_all_are_one_that_never_falls_and_is_what_the_ledger_has(two_workers: Server) -> None:
    server = two_workers
    key = server.tenant("counted")
    before, rows = ended(server), settled(server)
    for _ in range(12):
        with server.http(key) as client:
            assert client.post("/v1/completions", json=COMPLETION).is_success
    until(server.is_idle)
    pages = [answer.text for answer in each_time(server, "/metrics")]
    assert {value(page, ENDED, error_type="") for page in pages} == {before + 12}
    assert settled(server) - rows == 12
    for name in ("fairgate_engine_up", "fairgate_running", "fairgate_build_info"):
        assert {value(page, name) for page in pages} == {float(name != "fairgate_running")}
    whole = [value(page, "fairgate_password_hashes_total") or 0.0 for page in pages]
    assert whole == sorted(whole)


def test_readiness_status_and_the_logs_of_one_worker_are_alike(two_workers: Server) -> None:
    server = two_workers
    until(server.is_idle)
    ready = {answer.text for answer in each_time(server, "/readyz")}
    assert len(ready) == 1
    assert '"workers":{"up":2,"of":2}' in ready.pop()
    shown = Counter(str(_still(answer.json())) for answer in each_time(server, "/admin/v1/status"))
    assert len(shown) == 1, shown
    workers = each_time(server, "/admin/v1/status", 1)[0].json()["workers"]
    assert len({worker["pid"] for worker in workers}) == len({each["gateway_id"] for each in workers}) == 2
    logs = [
        {answer.text for answer in each_time(server, f"/admin/v1/dispatch-log{asked}", 20)}
        for asked in ("", *(f"?worker={worker['number']}" for worker in workers))
    ]
    assert [len(log) for log in logs] == [1, 1, 1]
    assert logs[0] == logs[1] != logs[2]
    stores = {name: option(server, name) for name in ("database-url", "redis-url")}
    environment = {f"FAIRGATE_{name.upper().replace('-', '_')}": url for name, url in stores.items()}
    said = run_command("doctor", "--json", "--data-dir", str(server.data_dir), env=environment).stdout
    assert "2 of 2 workers serve" in {found["detail"] for found in json.loads(said)["checks"]}, said


def _still(status: dict[str, Any]) -> dict[str, Any]:
    names = ("gateway_id", "queued", "running", "refusals", "recovery", "settlements_pending", "workers")
    counted = (
        "name",
        "queued",
        "running",
        "dispatched",
        "finished",
        "service_cost",
        "output_tokens",
        "limits",
    )
    tenants = [{name: tenant[name] for name in counted} for tenant in status["tenants"]]
    return {name: status[name] for name in names} | {"tenants": tenants}


async def test_log_ins_are_slowed_as_by_one(two_workers: Server) -> None:
    browsers = [Browser(two_workers.url) for _ in range(4 * FREE_BY_NAME)]
    tokens = [await browser.token("/console/log-in") for browser in browsers]
    pages = await asyncio.gather(
        *(
            browser.http.post(
                "/console/log-in", data={"form_token": token, "name": "nemo", "password": "a guess"}
            )
            for browser, token in zip(browsers, tokens, strict=True)
        )
    )
    for browser in browsers:
        await browser.http.aclose()
    slowed = ["Too many" in page.text for page in pages]
    assert slowed.count(False) == FREE_BY_NAME, Counter(slowed)


async def test_quotes_are_counted_as_by_one(two_workers: Server) -> None:
    key = await asyncio.to_thread(two_workers.tenant, "quoted")
    headers = {"authorization": f"Bearer {key}"}
    begun_s = time.monotonic()
    answers = await at_once(
        two_workers, 30, lambda client: client.post("/v1/quotes", json=COMPLETION, headers=headers)
    )
    most = 10 + 5 * (time.monotonic() - begun_s)
    assert 10 <= [answer.status_code for answer in answers].count(200) <= most
    assert {answer.status_code for answer in answers} == {200, 429}


def test_connections_of_one_address_are_counted_as_by_one(two_workers: Server) -> None:
    host, port = httpx.URL(two_workers.url).host, httpx.URL(two_workers.url).port
    assert port is not None
    held: list[socket.socket] = []
    try:
        answered: Counter[int] = Counter()
        for _ in range(MOST_OF_ADDRESS + 30):
            held.append(socket.create_connection((host, port), 10))
            held[-1].sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            answered[int(held[-1].recv(4_096)[9:12])] += 1
    finally:
        for each in held:
            each.close()
    assert set(answered) == {200, 429}
    assert MOST_OF_ADDRESS - 5 <= answered[200] <= MOST_OF_ADDRESS
    until(lambda: value(each_time(two_workers, "/metrics", 1)[0].text, "fairgate_connections") == 1)


@pytest.mark.parametrize("level", ["debug", "info"])
def test_a_signal_for_the_log_reaches_all(two_workers: Server, level: str) -> None:
    server = two_workers
    assert server.process is not None
    said = re.compile(rf"worker=(\d+) .*SIGUSR1: the log's level is {level}")
    before = Counter(said.findall(server.log()))
    server.process.send_signal(signal.SIGUSR1)
    until(lambda: len(Counter(said.findall(server.log())) - before) == 2)


async def test_pages_of_what_one_process_has_are_its_whichever_is_asked(two_workers: Server) -> None:
    link = (two_workers.data_dir / datadir.SET_UP_LINK_FILE).read_text().strip()
    async with Browser(two_workers.url) as first:
        await first.redeem(link.rpartition("=")[2], name="ada@example.org")
        checked = (await first.get("/console/usage/check?run=1")).text
        run = (await first.send("/console/policy", "/console/policy/what-if")).headers["location"]

        async def ask() -> tuple[str, int, int]:
            async with Browser(two_workers.url) as browser:
                first.copy_to(browser)
                page, shown = await browser.get("/console/usage/check"), await browser.get(run)
                second = await browser.send("/console/policy", "/console/policy/what-if")
                return page.text, shown.status_code, second.status_code

        answers = {await ask() for _ in range(10)}
        assert (await first.send(run, f"{run}/cancel")).headers["location"] == run
    assert answers == {(checked, 200, 409)}, "one what-if at a time, and each of them knows it"


async def test_streams_of_the_console_show_what_runs_at_all(two_workers: Server) -> None:
    streams = await asyncio.to_thread(slow_streams, two_workers, "watched", 4)
    try:
        async with person(two_workers, "watcher", "auditor") as browser:
            for _ in range(10):
                async with stream(browser, f"{OVERVIEW}/live") as events:
                    words = plain(await anext(events))
                assert "2 of 2 gateways answer" in words
                assert "Running 4 requests" in words
    finally:
        await asyncio.to_thread(let_end, two_workers, "watched")
        for each in streams:
            each.join(60)


@pytest.mark.long
def test_counters_outlive_a_worker_that_is_killed(two_workers: Server) -> None:
    server, key = two_workers, two_workers.tenant("outlived")
    workers = each_time(server, "/admin/v1/status", 1)[0].json()["workers"]
    for _ in range(8):
        with server.http(key) as client:
            assert client.post("/v1/completions", json=COMPLETION).is_success
    until(server.is_idle)
    shown = [ended(server)]
    os.kill(workers[0]["pid"], signal.SIGKILL)

    def is_replaced() -> bool:
        shown.append(ended(server))
        now = each_time(server, "/admin/v1/status", 1)[0].json()["workers"]
        return len(now) == 2 and now[0]["pid"] != workers[0]["pid"]

    until(is_replaced, 30)
    assert set(shown) == {shown[0]}
    with server.http(key) as client:
        assert client.post("/v1/completions", json=COMPLETION).is_success
    until(lambda: ended(server) == shown[0] + 1)
