"""Limits that are set, lowered and used in the same instant, at two gateways.

Two real gateways on one database, one Redis and one engine that runs one sequence at a time.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import services
from tests.support.engine_process import engine_options, running_engine
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.waiting_streams import ENDLESS, events, full, waiting
from tests.support.warm_command import fairgate

pytestmark = pytest.mark.attack
AT_ONCE = 24
LIMIT = 400
ROUNDS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as closing:
        redis = services.start_redis()
        closing.callback(redis.stop)
        base = tmp_path_factory.mktemp("pair")
        options = engine_options(chat_model, base / "engine", max_sequences=1, num_blocks=2048)
        closing.enter_context(running_engine(options))
        servers: list[Server] = []
        for name in ("one", "other"):
            if servers:
                (base / name).mkdir()
                shutil.copy(base / "one" / "pepper", base / name / "pepper")
            arguments = ["--database-url", f"sqlite:///{base / 'shared.db'}", "--redis-url", redis.url]
            arguments += ["--engine-address", options.address, "--gateway-stale", "20"]
            arguments += ["--gateway-long-tokens", "8192", "--gateway-ttl-standard", "20000"]
            servers.append(closing.enter_context(server_process(base / name, chat_model, *arguments)))
        servers[1].owner_key = servers[0].owner_key
        servers[0].tenant("crowd", tier="interactive")
        yield servers[0], servers[1]


def complete(server: Server, key: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 80, "ignore_eos": True}
    with server.http(key) as client:
        return client.post("/v1/completions", json=body | fields)


def charged(server: Server, tenant: str) -> int:
    """Tokens, of the ledger's answers to a tenant."""
    until(server.is_idle)
    used: int = server.limit_state(tenant, "total_tokens")["used"]
    report = server.verify()
    assert report["ok"], report["problems"]
    return used


def set_by_command(server: Server, tenant: str, amount: int) -> subprocess.CompletedProcess[str]:
    limit = ["--tenant", tenant, "--meter", "total_tokens", "--window", "lifetime", "--amount", str(amount)]
    database = server.arguments[server.arguments.index("--database-url") + 1]
    where = ["--data-dir", str(server.data_dir), "--database-url", database]
    return fairgate("limit", "set", *limit, "--json", *where)


def test_a_limit_binds_at_the_other_gateway_when_the_call_that_sets_it_returns(
    pair: tuple[Server, Server],
) -> None:
    one, other = pair
    for number in range(ROUNDS):
        name = f"instant-{number}"
        key = one.tenant(name)
        until(lambda key=key: complete(other, key, max_tokens=1).status_code == 200)  # type: ignore[misc]
        with ThreadPoolExecutor(AT_ONCE) as clients:
            one.limit(name, "total_tokens", LIMIT, window="lifetime")
            answers = list(clients.map(lambda _, key=key: complete(other, key), range(AT_ONCE)))  # type: ignore[misc]
        served = [answer for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} <= {200, 429}
        assert sum(answer.json()["usage"]["total_tokens"] for answer in served) <= LIMIT
        assert charged(one, name) <= LIMIT


@pytest.mark.parametrize("before", ["no limit", "a larger limit"])
def test_what_waits_takes_the_limits_in_force_at_its_turn(pair: tuple[Server, Server], before: str) -> None:
    one, other = pair
    name = f"waits-{before.replace(' ', '-')}"
    key = one.tenant(name)
    if before == "a larger limit":
        one.limit(name, "total_tokens", 100_000, window="lifetime")
    with ExitStack() as stack:
        with full(other, one.key("crowd")):
            lines = [
                stack.enter_context(waiting(other, key, max_tokens=80, prompt=[5] * 20))[1] for _ in range(6)
            ]
            one.limit(name, "total_tokens", 250, window="lifetime")
        ends = [[said for kind, said in events(each) if kind in ("error", "done")] for each in lines]
    errors = [said[0]["error"] for said in ends if said[0] is not None]
    assert {error["status"] for error in errors} == {429}
    served = 6 - len(errors)
    # A first limit takes what fits. What waits holds on a limit that is lowered, so that more may be refused.
    assert served == 2 if before == "no limit" else served <= 2
    assert charged(other, name) == 100 * served


def test_a_stream_that_tops_up_ends_with_a_limit_that_came_later(pair: tuple[Server, Server]) -> None:
    one, other = pair
    key = one.tenant("streams", on_low_budget="truncate")
    # Paced, so that it still runs when the limit comes.
    one.limit("streams", "output_tokens", 40, rate_per_s=40)
    with (
        other.http(key) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS | {"max_tokens": 4000}) as response,
    ):
        said = events(response.iter_lines())
        for _ in range(5):
            next(said)
        one.limit("streams", "total_tokens", 150, window="lifetime")
        finishes = [
            choice["finish_reason"]
            for kind, value in said
            if kind == "data"
            for choice in value["choices"]
            if choice["finish_reason"]
        ]
    assert finishes == ["length"]
    assert charged(other, "streams") == 150, "to the last token of the limit, and no further"


def test_a_gateway_that_has_not_confirmed_is_named(pair: tuple[Server, Server]) -> None:
    one, other = pair
    one.tenant("named")
    assert other.process is not None
    other.process.send_signal(signal.SIGSTOP)
    try:
        done = set_by_command(one, "named", LIMIT)
    finally:
        other.process.send_signal(signal.SIGCONT)
    assert done.returncode == 3, done.stderr
    [late] = json.loads(done.stdout)["not_in_force_on"]
    assert late in done.stderr
    assert set_by_command(one, "named", LIMIT + 1).returncode == 0, "it answers again"
