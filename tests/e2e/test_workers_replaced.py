"""Several gateway processes behind one port: one server to those who use it, whatever happens to one of them.

What each of them answers alike is in `test_workers_alike.py`, which runs before these.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from ops.serving import datadir
from tests.e2e.test_crash import Stream, let_end, start_streams
from tests.e2e.test_hard_limit import burst
from tests.support import services, warm_command
from tests.support.commands import answer_of
from tests.support.server_process import MODEL, Server, server_process, until

SLOW_PER_S = 40
"""Tokens of a stream that still runs when something ends."""
LONG = 600
COMPLETIONS = "/v1/completions"
ASKED = {"model": MODEL, "prompt": "abc", "max_tokens": 4}


def option(server: Server, flag: str) -> str:
    return server.arguments[server.arguments.index(flag) + 1]


def workers(server: Server) -> dict[int, psutil.Process]:
    """Those that live, by process id."""
    assert server.process is not None
    found = {}
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # also one that has just ended
            if "ops.serving.processes.worker" in child.cmdline():
                found[child.pid] = child
    return found


def gateway_of(server: Server, worker: psutil.Process) -> str:
    """The id under which it serves: that of the directory that it has locked."""
    places = {Path(file.path).parent for file in worker.open_files() if file.path.endswith("serve.lock")}
    [place] = [each for each in places if each.parent == server.data_dir / "workers"]
    return (place / "gateway-id").read_text().strip()


def rows(server: Server, kind: str) -> dict[str, str]:
    """Rows of the ledger: which gateway wrote it, by request."""
    with psycopg.connect(option(server, "--database-url")) as connection:
        found = connection.execute("SELECT request_id, gateway_id FROM ledger WHERE kind = %s", [kind])
        return dict(found.fetchall())


def complete(server: Server, key: str) -> httpx.Response:
    """Over a connection of its own."""
    with server.http(key) as client:
        return client.post(COMPLETIONS, json=ASKED)


def slow_streams(server: Server, tenant: str, count: int, tokens: int = LONG) -> list[Stream]:
    """Each of a key of its own, with its first tokens."""
    server.tenant(tenant)
    keys = [server.admin("POST", "/keys", {"tenant": tenant}) for _ in range(count)]
    for key in keys:
        server.limit(tenant, "output_tokens", SLOW_PER_S, rate_per_s=SLOW_PER_S, key=key["id"])
    streams = [start_streams(server, key["key"], 1, tokens)[0] for key in keys]
    for stream in streams:
        assert stream.has_tokens.wait(60)
        assert stream.delivered >= 3
    return streams


def are_up(server: Server, *without: int) -> bool:
    """Whether all live and have been up, none of `without`."""
    ups = [line for line in server.log().splitlines() if " is up: process " in line]
    living = workers(server).keys()
    is_complete = len(living) == int(option(server, "--workers"))
    return is_complete and living <= {int(line.split()[-1]) for line in ups} and not living & set(without)


def test_it_is_one_server_to_those_who_use_it(two_workers: Server) -> None:
    server = two_workers
    assert json.loads(server.announced)["workers"] == 2
    found = datadir.read_server_file(server.data_dir)
    assert found is not None
    assert server.process is not None
    assert (found.pid, found.url) == (server.process.pid, server.url)
    for _ in range(10):
        assert answer_of(server.data_dir, "status")["model"] == MODEL
    key = server.tenant("both")
    until(lambda: complete(server, key).is_success and len(set(rows(server, "settle").values())) == 2)
    assert set(rows(server, "settle").values()) == {
        gateway_of(server, worker) for worker in workers(server).values()
    }
    for number in (0, 1):
        place = server.data_dir / "workers" / str(number)
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert not (place / "audit-key").exists()
        assert not (place / "pepper").exists()
    assert server.verify()["ok"]


def test_a_worker_that_dies_is_replaced_and_what_it_left_is_settled(two_workers: Server) -> None:
    server = two_workers
    streams = slow_streams(server, "mourned", 6)
    begun_by = rows(server, "reserve")
    pid, worker = next(iter(workers(server).items()))
    dead = gateway_of(server, worker)
    worker.kill()
    until(lambda: are_up(server, pid), 60)
    assert "has ended by SIGKILL" in server.log()
    let_end(server, "mourned")
    for stream in streams:
        stream.join(60)
        is_of_dead = begun_by[stream.request_id] == dead
        assert stream.saw_done is not is_of_dead, "only those of the dead one break"
        assert is_of_dead or stream.delivered == LONG
    ours = {stream.request_id for stream in streams}
    until(lambda: ours <= rows(server, "settle").keys())
    assert server.verify()["ok"]


@pytest.mark.long
def test_sighup_replaces_all_under_load_and_no_request_fails(two_workers: Server) -> None:
    server = two_workers
    key, before = server.tenant("loaded"), set(workers(server))
    over, failed, served = threading.Event(), list[object](), list[int]()

    def load(ask: Callable[[], httpx.Response]) -> None:
        while not over.is_set():
            try:
                answer = ask()
                served.append(answer.status_code)
                if not answer.is_success:
                    failed.append(answer.text)
            except httpx.HTTPError as error:
                failed.append(error)

    with server.http(key) as kept:
        askers = (lambda: complete(server, key), lambda: kept.post(COMPLETIONS, json=ASKED))
        clients = [threading.Thread(target=load, args=[ask]) for ask in askers]
        for client in clients:
            client.start()
        try:
            assert server.process is not None
            server.process.send_signal(signal.SIGHUP)
            until(lambda: are_up(server, *before), 60)
        finally:
            over.set()
            for client in clients:
                client.join()
    assert not failed
    assert len(served) > 20
    assert server.verify()["ok"]


@pytest.mark.long
def test_workers_outlive_a_killed_supervisor_for_a_drain_and_the_next_server_waits(
    two_workers: Server,
) -> None:
    server, left = two_workers, list(workers(two_workers).values())
    [stream] = slow_streams(server, "orphaned", 1, tokens=3 * SLOW_PER_S)
    server.kill()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(server.start)
        stream.join(60)
        assert stream.saw_done
        assert stream.delivered == 3 * SLOW_PER_S
        starting.result()
    assert not any(worker.is_running() for worker in left)
    assert complete(server, server.tenant("later")).is_success
    assert server.verify()["ok"]


@pytest.mark.long
def test_a_worker_s_reason_not_to_start_is_one_line(two_workers: Server, tmp_path: Path) -> None:
    """Both have it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    upstream = {"name": "none", "url": "http://127.0.0.1:1/v1", "model": "m"}
    arguments = ["--engine-serve", "no", "--upstreams", json.dumps([upstream]), "--workers", "2"]
    for flag in ("--database-url", "--redis-url"):
        arguments += [flag, option(two_workers, flag)]
    arguments += ["--port", "0", "--data-dir", str(tmp_path), "--log-level", "error"]
    done = warm_command.fairgate("serve", *arguments, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("fairgate serve: the API keys in this database were made with another pepper")


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 4])
async def test_500_at_once_never_exceed_a_hard_limit_and_the_books_agree(
    tmp_path: Path, chat_model: Path, count: int
) -> None:
    """With two and more, one is killed meanwhile."""
    held = len(str(ASKED["prompt"])) + int(str(ASKED["max_tokens"]))
    with ExitStack() as closing:
        postgres, redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(redis.stop)
        arguments = ["--workers", str(count), "--database-url", postgres.url, "--redis-url", redis.url]
        arguments += ["--engine-max-sequences", "32", "--gateway-stale", "4", "--gateway-lease", "3"]
        server = closing.enter_context(server_process(tmp_path / "data", chat_model, *arguments))
        amounts = {name: number * held + held // 2 for name, number in (("a", 40), ("b", 80), ("c", 20))}
        keys = {name: server.tenant(name) for name in amounts}
        for name, amount in amounts.items():
            server.limit(name, "total_tokens", amount, window="lifetime")
        asked = [(COMPLETIONS, ASKED | {"ignore_eos": True})] * 167
        answers = await asyncio.gather(*(burst(server, key, asked) for key in keys.values()))
        for (name, amount), answered in zip(amounts.items(), answers, strict=True):
            statuses = {answer.status_code for answer in answered}
            assert statuses <= {200, 429, 503}
            used = sum(answer.json()["usage"]["total_tokens"] for answer in answered if answer.is_success)
            state = server.limit_state(name, "total_tokens")
            assert state["used"] == used <= amount
            # Where one process is asked more than it can ask Redis in time, it refuses without counting.
            assert 503 in statuses or amount - used < held
        if count > 1:
            await kill_one_under_load(server, server.tenant("d"))
        until(server.is_idle)
        assert server.verify()["ok"]


async def kill_one_under_load(server: Server, key: str) -> None:
    amount, earlier = 700, len(rows(server, "reserve"))
    server.limit("d", "total_tokens", amount, window="lifetime")
    pid, worker = next(iter(workers(server).items()))
    slow = ASKED | {"max_tokens": 32, "ignore_eos": True}
    asking = [asyncio.create_task(burst(server, key, [(COMPLETIONS, slow)])) for _ in range(60)]
    await asyncio.to_thread(until, lambda: len(rows(server, "reserve")) > earlier)
    worker.kill()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    served = [one[0] for one in answers if isinstance(one, list) and one[0].is_success]
    await asyncio.to_thread(until, lambda: are_up(server, pid) and server.is_idle(), 60)
    delivered = sum(answer.json()["usage"]["total_tokens"] for answer in served)
    state = server.limit_state("d", "total_tokens")
    assert delivered <= state["used"] <= amount, "what broke was settled by what the engine emitted"
    # What was held and not written down yet when it died runs out.
    await asyncio.to_thread(until, lambda: server.limit_state("d", "total_tokens")["held"] == 0)
