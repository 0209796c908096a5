"""Charges when one of two gateways dies, stands still, or loses Redis with the other.

Two real gateways, each with a data directory of its own, on one PostgreSQL, one Redis and one engine: all
private servers that these tests stop and kill. Every request has exactly one settlement, and the counters say
what the ledger says.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from engine.process.options import EngineOptions
from tests.e2e.test_crash import Stream, let_end, start_streams
from tests.e2e.test_stores_down import checks, refused, served
from tests.support import services
from tests.support.engine_process import engine_options
from tests.support.server_process import Server, server_process, until
from tests.support.warm_engine import WarmEngine

STALE_S = 4
LEASE_S = 3
BUDGET = 1_000_000
RATE_PER_S = 40
LONG = 2_000
"""Tokens of a stream that is still going on when something is killed, at that rate."""


def counted_tokens(row: dict[str, Any]) -> int:
    """Input and output as limits count them."""
    both = (("counted_input", "input_tokens"), ("counted_output", "output_tokens"))
    return sum(row[billed] if row[counted] is None else row[counted] for counted, billed in both)


@dataclass
class House:
    """Everything, and what the ledger says of it."""

    postgres: services.Service
    redis: services.Service
    options: EngineOptions
    gateways: list[Server] = field(default_factory=list)
    engine: WarmEngine | None = None

    def start_engine(self) -> None:
        self.engine = WarmEngine(self.options, self.options.data_dir / "stderr")

    def kill_engine(self) -> None:
        assert self.engine is not None
        self.engine.kill()
        self.engine.wait()

    def rows(self, tenant_id: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.postgres.url, row_factory=dict_row) as connection:
            query = "SELECT * FROM ledger WHERE tenant_id = %s ORDER BY id"
            return connection.execute(query, [tenant_id]).fetchall()

    def settled(self, tenant_id: str) -> dict[str, dict[str, Any]]:
        """Settle rows by request; each request has one at most."""
        rows = [row for row in self.rows(tenant_id) if row["kind"] == "settle"]
        found = {row["request_id"]: row for row in rows}
        assert len(found) == len(rows), "one settlement each"
        return found

    def tenant(self, name: str, *, slow_keys: int = 0) -> tuple[str, list[str]]:
        """A tenant with a budget; its id, and a key that both gateways know, or so many keys that each get
        `RATE_PER_S` tokens a second: their streams are still going on when something is killed."""
        one, other = self.gateways
        keys = [one.tenant(name)]
        one.limit(name, "total_tokens", BUDGET, window="lifetime")
        tenant_id: str = one.admin("GET", f"/tenants/{name}")["id"]
        if slow_keys:
            made = [one.admin("POST", "/keys", {"tenant": name}) for _ in range(slow_keys)]
            keys = [each["key"] for each in made]
            for each in made:
                one.limit(name, "output_tokens", RATE_PER_S, rate_per_s=RATE_PER_S, key=each["id"])
        until(lambda: self.limits_at(other, name) == 1 + slow_keys)
        return tenant_id, keys

    def limits_at(self, server: Server, name: str) -> int:
        return sum(len(shown["limits"]) for shown in server.status()["tenants"] if shown["name"] == name)

    def books_agree(self, tenant_id: str, name: str, server: Server) -> None:
        """Ledger and counters say the same, nothing is held, and `verify` finds nothing."""
        used = sum(map(counted_tokens, self.settled(tenant_id).values()))
        state = server.limit_state(name, "total_tokens")
        assert (state["used"], state["held"]) == (used, 0)
        report = server.verify()
        assert report["ok"], report


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[House]:
    with ExitStack() as closing:
        postgres, redis = services.start_postgres(), services.start_redis()
        closing.callback(postgres.stop)
        closing.callback(redis.stop)
        base = tmp_path_factory.mktemp("house")
        options = engine_options(chat_model, base / "engine", max_sequences=8, num_blocks=4096)
        house = House(postgres, redis, options)
        house.start_engine()
        closing.callback(house.kill_engine)
        for name in ("one", "other"):
            data_dir = base / name
            if name == "other":
                data_dir.mkdir()
                shutil.copy(base / "one" / "pepper", data_dir / "pepper")
            arguments = ["--database-url", postgres.url, "--redis-url", redis.url]
            arguments += ["--engine-address", options.address]
            arguments += ["--gateway-stale", str(STALE_S), "--gateway-lease", str(LEASE_S)]
            server = closing.enter_context(server_process(data_dir, chat_model, *arguments))
            house.gateways.append(server)
        house.gateways[1].owner_key = house.gateways[0].owner_key
        yield house
        if redis.process is not None and redis.process.poll() is None:
            redis.process.send_signal(signal.SIGCONT)


@pytest.fixture(autouse=True)
def everybody_lives(house: House) -> None:
    """Also after a test that failed half-way."""
    assert house.redis.process is not None
    house.redis.process.send_signal(signal.SIGCONT)
    if house.engine is None or house.engine.poll() is not None:
        house.start_engine()
    for server in house.gateways:
        if server.process is None or server.process.poll() is not None:
            server.start()
        until(lambda server=server: checks(server)[0] == 200, deadline_s=60)  # type: ignore[misc]


def begun(server: Server, keys: list[str], max_tokens: int = LONG) -> list[Stream]:
    """A stream of each key, with its first tokens."""
    streams = [start_streams(server, key, 1, max_tokens)[0] for key in keys]
    for stream in streams:
        assert stream.has_tokens.wait(60)
        assert stream.delivered >= 3
    return streams


def ended(streams: list[Stream]) -> None:
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive()


def detail(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = row["detail"] if isinstance(row["detail"], dict) else json.loads(row["detail"])
    return found


def test_a_killed_gateway_is_adopted_by_the_other_and_charged_by_the_engines_count(house: House) -> None:
    one, other = house.gateways
    tenant_id, keys = house.tenant("adopted", slow_keys=4)
    streams = begun(one, keys[:3])
    theirs = begun(other, keys[3:], max_tokens=300)
    one.kill()
    ended(streams)
    until(lambda: len(house.settled(tenant_id)) >= 3, deadline_s=40)
    ended(theirs)
    until(other.is_idle)
    settled = house.settled(tenant_id)
    assert len(settled) == 4
    for stream in streams:
        row = settled[stream.request_id]
        assert row["outcome"] == "recovered", str(row)
        assert detail(row)["basis"] == "engine"
        assert detail(row)["reserved_by"] != row["gateway_id"]
        assert stream.delivered <= row["output_tokens"] < LONG
    assert settled[theirs[0].request_id]["output_tokens"] == 300, "the living gateway's was not touched"
    house.books_agree(tenant_id, "adopted", other)
    one.start()
    house.books_agree(tenant_id, "adopted", one)
    assert one.status()["recovery"]["open_reserves"] == 0


def test_a_gateway_that_stood_still_and_comes_back_charges_nothing_twice(house: House) -> None:
    one, other = house.gateways
    tenant_id, keys = house.tenant("stalled", slow_keys=13)
    # More streams than the engine runs at once: some decode, some wait in the gateway's queue.
    streams = [start_streams(one, key, 1, LONG)[0] for key in keys]
    until(lambda: one.status()["queued"]["standard"] >= 2)
    until(lambda: sum(row["kind"] == "reserve" for row in house.rows(tenant_id)) == 13)
    assert one.process is not None
    one.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: len(house.settled(tenant_id)) == 13, deadline_s=60)
    finally:
        one.process.send_signal(signal.SIGCONT)
    before = house.settled(tenant_id)
    ended(streams)
    until(one.is_idle, deadline_s=40)
    assert not any(stream.saw_done for stream in streams)
    after = house.settled(tenant_id)
    assert after == before, "what was settled stays as it is, and nothing runs again"
    never_ran = [row for row in after.values() if row["output_tokens"] == 0]
    assert len(never_ran) >= 2
    house.books_agree(tenant_id, "stalled", other)
    house.books_agree(tenant_id, "stalled", one)
    until(lambda: served(one, keys[0]))


def test_engine_and_gateway_killed_at_once_bill_the_last_report_and_count_what_was_held(house: House) -> None:
    one, other = house.gateways
    tenant_id, keys = house.tenant("both", slow_keys=3)
    streams = begun(one, keys)
    ids = {stream.request_id for stream in streams}
    until(lambda: ids == {row["request_id"] for row in house.rows(tenant_id) if row["kind"] == "top_up"})
    assert house.engine is not None
    house.engine.kill()  # and the gateway before it can notice
    one.kill()
    house.kill_engine()
    ended(streams)
    house.start_engine()  # it knows nothing
    until(lambda: set(house.settled(tenant_id)) == ids, deadline_s=90)
    rows = house.rows(tenant_id)
    for stream in streams:
        row = house.settled(tenant_id)[stream.request_id]
        mine = [each for each in rows if each["request_id"] == stream.request_id]
        top_ups = [each for each in mine if each["kind"] == "top_up"]
        reported = detail(top_ups[-1])["used"]
        assert detail(row)["basis"] == "last_report"
        # The progress record of the last second may say more than the last top-up.
        assert [row["input_tokens"], row["output_tokens"], row["cost_nanousd"]] >= reported[:3]
        held = sum(each["output_tokens"] for each in mine if each["kind"] in ("reserve", "top_up"))
        assert detail(row)["uncertain_tokens"] == held - row["output_tokens"]
        assert row["counted_output"] == held
        assert stream.delivered <= held, "nothing was emitted that the ledger did not know to be held"
        assert row["output_tokens"] > 0
    house.books_agree(tenant_id, "both", other)
    one.start()
    house.books_agree(tenant_id, "both", one)


def test_redis_that_comes_back_empty_is_filled_once_while_both_gateways_stream(house: House) -> None:
    one, other = house.gateways
    tenant_id, keys = house.tenant("refilled", slow_keys=5)
    spare = keys.pop()
    for server in house.gateways:
        assert served(server, spare)
    streams = [*begun(one, keys[:2], max_tokens=500), *begun(other, keys[2:], max_tokens=500)]
    house.redis.kill()
    refused(one, spare, "quota_store_unavailable")
    house.redis.start()
    for server in house.gateways:
        until(lambda server=server: checks(server)[0] == 200)  # type: ignore[misc]
        # What is there again: what was settled, and what the running streams hold or had.
        state = server.limit_state("refilled", "total_tokens")
        assert state["used"] >= 2 * 5
        assert state["used"] + state["held"] > 2 * 5 + 4 * 16
    let_end(one, "refilled")
    ended(streams)
    assert [(stream.saw_done, stream.error) for stream in streams] == [(True, None)] * 4
    for server in house.gateways:
        until(server.is_idle)
    assert sum(row["output_tokens"] for row in house.settled(tenant_id).values()) == 4 * 500 + 2 * 4
    for server in house.gateways:
        house.books_agree(tenant_id, "refilled", server)


def test_redis_that_answers_nothing_for_ten_seconds_gives_no_credit_and_is_back_within_two(
    house: House,
) -> None:
    one, other = house.gateways
    tenant_id, [key] = house.tenant("silent")
    one.limit("silent", "requests", 3, rate_per_s=0.001)
    until(lambda: house.limits_at(other, "silent") == 2)
    assert served(one, key)
    assert served(other, key)
    assert house.redis.process is not None
    house.redis.process.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        for server in house.gateways:
            refused(server, key, "quota_store_unavailable")
            assert checks(server)[1]["quota_store"] != "ok"
        until(lambda: time.monotonic() - stopped_s >= 10)
    finally:
        house.redis.process.send_signal(signal.SIGCONT)
    for server in house.gateways:
        until(lambda server=server: checks(server)[0] == 200, deadline_s=2)  # type: ignore[misc]
    # What was refused meanwhile may hold for a moment, until its gateway has released it.
    until(lambda: one.limit_state("silent", "requests")["available"] == 1, deadline_s=LEASE_S + 4)
    assert served(one, key)
    with other.http(key) as client:
        answer: httpx.Response = client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert answer.status_code == 429, "the bucket has no more than it had"
    house.books_agree(tenant_id, "silent", other)


def test_postgresql_restarted_loses_nothing_and_nobody_is_taken_for_dead(house: House) -> None:
    one, other = house.gateways
    tenant_id, keys = house.tenant("restarted", slow_keys=4)
    key = keys[3]
    streams = [*begun(one, keys[:2], max_tokens=600), *begun(other, keys[2:3], max_tokens=600)]
    house.postgres.kill()
    for server in house.gateways:
        refused(server, key, "database_unavailable")
    house.postgres.start()
    for server in house.gateways:
        until(lambda server=server: served(server, key), deadline_s=40)  # type: ignore[misc]
    let_end(one, "restarted")
    ended(streams)
    for server in house.gateways:
        until(server.is_idle, deadline_s=40)
    settled = house.settled(tenant_id)
    assert not [row for row in settled.values() if row["outcome"] in ("lost", "recovered")]
    for stream in streams:
        assert stream.delivered <= settled[stream.request_id]["output_tokens"] <= 600
    house.books_agree(tenant_id, "restarted", other)
