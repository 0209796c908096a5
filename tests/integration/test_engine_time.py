"""Engine time over hours in both databases, and the page that makes money of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.counts import minute_store
from tenants.counts.minute_store import (
    HOUR_US,
    MINUTE_US,
    EngineKey,
    EngineMinute,
    FlowKey,
    FlowMinute,
    MinutesCounted,
)
from tenants.nouns.tenant import TenantChange
from tenants.people.person import PersonInvite
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tests.support.console import Browser
from tests.support.gateway_app import MODEL, OWNER, gateway_app

START = 1_700_000_000_000_000 // HOUR_US * HOUR_US


@pytest.fixture
def admin(database: Database, pepper: bytes) -> Admin:
    return Admin(Transactions(database, pepper))


def engine_minute(seen_s: int, *, up_s: int, idle_s: int, tokens: int = 0) -> EngineMinute:
    return EngineMinute(
        "up", seen_s * 1_000_000, up_s * 1_000_000, idle_s * 1_000_000, computed_tokens=tokens
    )


async def write(database: Database, gateway: str, counted: MinutesCounted, number: int) -> None:
    await minute_store.add(database, gateway, counted, Flush(f"{gateway}/1", number), START)


async def test_of_several_gateways_the_one_that_saw_a_replica_longest_counts_minute_by_minute(
    database: Database, admin: Admin
) -> None:
    keys = [EngineKey(START + number * MINUTE_US, "m", "m-0") for number in range(3)]
    other = EngineKey(START, "n", "n-0")
    first = {keys[0]: engine_minute(60, up_s=60, idle_s=10), keys[1]: engine_minute(20, up_s=20, idle_s=0)}
    second = {
        keys[0]: engine_minute(30, up_s=0, idle_s=0, tokens=99),
        keys[1]: engine_minute(50, up_s=40, idle_s=5, tokens=7),
        keys[2]: engine_minute(60, up_s=60, idle_s=60),
        other: engine_minute(60, up_s=0, idle_s=0),
    }
    await write(database, "here", MinutesCounted({}, first), 1)
    await write(database, "there", MinutesCounted({}, second), 1)
    found = {
        (each.pool, each.replica): each.counts
        for each in await admin.engine_time.by_replica(START, START + HOUR_US)
    }
    assert list(found) == [("m", "m-0"), ("n", "n-0")]
    sums = found["m", "m-0"]
    assert (sums.seen_us, sums.up_us, sums.idle_us) == (170_000_000, 160_000_000, 75_000_000)
    assert sums.computed_tokens == 7
    # The end is not part of it.
    [part] = await admin.engine_time.by_replica(START + 2 * MINUTE_US, START + 3 * MINUTE_US)
    assert part.counts.seen_us == 60_000_000
    assert await admin.engine_time.by_replica(START + HOUR_US, START + 2 * HOUR_US) == []


async def test_service_is_summed_by_the_hour_of_those_asked_about(database: Database, admin: Admin) -> None:
    flow = {
        FlowKey(START + minute * MINUTE_US, pool, "standard", tenant): FlowMinute(tokens)
        for minute, pool, tenant, tokens in (
            (0, "m", "ten_a", 1), (59, "n", "ten_a", 2), (60, "m", "ten_a", 4), (5, "m", "ten_b", 8),
            (180, "m", "ten_a", 100),
        )
    }  # fmt: skip
    await write(database, "here", MinutesCounted(flow, {}), 1)
    found = await admin.engine_time.served(START, START + 3 * HOUR_US, ["ten_a", "ten_c"])
    assert found.all_tokens == 15
    assert {name: sorted(hours) for name, hours in found.by_hour.items()} == {"ten_a": [3, 4], "ten_c": []}
    assert (await admin.engine_time.served(START, START + HOUR_US, [])).by_hour == {}


async def test_the_page_of_recovery_is_engine_minutes_times_the_price(
    database_url: str, database: Database, admin: Admin, tmp_path: Path
) -> None:
    async with gateway_app(database_url, tmp_path / "data") as client:
        app = client._transport.app  # type: ignore[attr-defined]
        gateway = app.state.gateway
        now_us = round(gateway.deps.wall_clock() * 1e6) // HOUR_US * HOUR_US
        # Two hours, of which half an hour waited and a quarter of an hour was away.
        engines = {
            EngineKey(now_us - (number + 1) * MINUTE_US, MODEL, "away"): engine_minute(
                60, up_s=0 if number < 15 else 60, idle_s=60 if 15 <= number < 45 else 0, tokens=1
            )
            for number in range(120)
        }
        key = FlowKey(now_us - MINUTE_US, MODEL, "standard", "ten_x")
        await write(database, "here", MinutesCounted({key: FlowMinute(75 * 60)}, engines), 1)
        await admin.tenants.update("test", OWNER, TenantChange(reserved_tokens_per_s=0.05))
        await gateway.deps.directory.refresh()
        _, token = await admin.people.invite("test", PersonInvite(name="ada", role="auditor"))
        async with Browser(app) as browser:
            assert (await browser.redeem(token)).status_code == 303
            page = await browser.get("/console/usage/recovery?price=4&hours=24")
        assert page.status_code == 200, page.text
        assert "2 h of 1 replica, at $4.00 an hour each" in re.sub(r"\s+", " ", page.text)
        figures = dict(
            re.findall(r'subheader">([^<]+)</div>\s*<div class="h1">(?:<a [^>]*>)?([^<]+)<', page.text)
        )
        assert figures["Engines cost"] == "$8.00"
        assert figures["Charged, less credits"] == "$0.00"
        assert figures["Missing"] == "$8.00"
        assert figures["It breaks even at"] == "–"
        words = re.findall(
            r">(work|computed once more|waiting, reserved|waiting, otherwise|away)</text>.*?>(\$[\d.]+)<",
            page.text,
        )
        # 0.05 tokens a second of a day are 4,320, at 60 tokens a minute 72 minutes: more than was waited.
        assert words == [
            ("work", "$5.00"), ("computed once more", "$0.00"), ("waiting, reserved", "$2.00"),
            ("waiting, otherwise", "$0.00"), ("away", "$1.00"),
        ]  # fmt: skip
