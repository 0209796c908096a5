"""`fairgate policy moves --worth`: replays what the database has of traffic, refusals and moves."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from engine.messages import StepTime
from gateway.config import GatewayConfig
from gateway.domain.outcomes import RequestOutcome
from gateway.domain.server_description import (
    DescribedEngine,
    DescribedQueue,
    RequestTerms,
    ServerDescription,
    packed,
)
from gateway.domain.timeline import OUTCOMES, Event, TimelineKind, pack
from ops.cli.main import cli
from ops.cli.simulate import policy_moves
from tenants.admin.admin import Admin
from tenants.admin.commands import TenantCreate
from tenants.ledger import timelines
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow
from tenants.ledger.timelines import StoredTimeline
from tenants.moves import store
from tenants.moves.move import StoredMove
from tenants.refusals import store as refusals
from tenants.refusals.refusal import RefusalKey
from tenants.storage.database import Database
from tenants.storage.flushes import Flush
from tenants.types import Amounts

SERVER = ServerDescription(
    "gw_1", "small", False, (DescribedEngine("cpu", 4_096, 16, 512, 8, 256),), "fcfs", {},
    DescribedQueue.of(GatewayConfig()), StepTime(0.05, 0.0, 0.0, 0.0, samples=5_000, relative_error=0.1),
)  # fmt: skip
TERMS = packed(RequestTerms(1.0))
RESTS = {"batch_cap": 1.0, "lookahead": 0.0, "token_budget": 1.0}
DONE = OUTCOMES.index(RequestOutcome.COMPLETED)


class House:
    """A database with traffic of an hour ago."""

    def __init__(self, database: Database, tenant_id: str, flags: list[str]) -> None:
        self.database = database
        self.tenant_id = tenant_id
        self.flags = flags
        self.minute_s = (int(time.time()) - 3_600) // 60 * 60
        self.rows = 0

    async def served(
        self, seconds: range, *, server: ServerDescription = SERVER, model: str = "small", each: int = 2
    ) -> None:
        """`each` answers a second, of 20 tokens, as an engine with room for them gives them."""
        stored, settled, ledger = [], [], Ledger(self.database)
        for second in seconds:
            for part in range(each):
                self.rows += 1
                arrived_us = self.minute_s * 1_000_000 + second * 1_000_000 + part * 1_000_000 // each
                events = [
                    Event(TimelineKind.RECEIVED, 0, (32, 1, 1, 64)),
                    Event(TimelineKind.QUEUED, 1_000, (0, 0, 0, 0)),
                    Event(TimelineKind.DISPATCHED, 2_000, (1, 0, 0)),
                    Event(TimelineKind.FIRST_TOKEN, 100_000),
                    Event(TimelineKind.LAST_TOKEN, 1_050_000, (20,)),
                    Event(TimelineKind.ENDED, 1_060_000, (DONE,)),
                ]
                contents = {timelines.description_id(one): one for one in (packed(server), TERMS)}
                row = LedgerRow(
                    f"req_{self.rows}", "settle", self.tenant_id, "prj", "key", server.gateway_id, "standard",
                    model, Amounts(32, 20, 0, 1), "completed",
                    datetime.fromtimestamp(arrived_us / 1e6 + 1.06, UTC),
                )  # fmt: skip
                settled.append(ledger.append(row))
                stored.append(
                    StoredTimeline(
                        f"req_{self.rows}", self.tenant_id, arrived_us + 1_060_000, pack(events), *contents
                    )
                )
        await asyncio.gather(*settled)
        await timelines.add(self.database, stored, contents)

    async def moved(self, second: int, knob: str = "batch_cap", after: float = 0.125, **fields: Any) -> None:
        knobs = RESTS | {knob: after}
        move = StoredMove(
            f"mov_{second}{knob}", (self.minute_s + second) * 1_000_000, "gw_1", "small", knob, 1.0, after,
            "constructed (0.95)", True, "acting", knobs,
        )  # fmt: skip
        await store.add(self.database, [structs.replace(move, **fields)])

    def asked(self, *arguments: str) -> Result:
        command = ["policy", "moves", *self.flags, *arguments]
        return CliRunner().invoke(cli, command, prog_name="fairgate", catch_exceptions=False)

    async def worths(self, *arguments: str) -> list[dict[str, Any]]:
        """Of all moves, the newest first."""
        answered = await asyncio.to_thread(self.asked, "--worth", "--window", "1m", "--json", *arguments)
        assert answered.exit_code == 0, answered.output
        return [each["worth"] for each in json.loads(answered.stdout)["data"]]


@pytest.fixture
async def house(database: Database, pepper: bytes, database_url: str, tmp_path: Path) -> House:
    tenant = await Admin(database, pepper).create_tenant("test", TenantCreate(name="acme"))
    flags = ["--database-url", database_url, "--data-dir", str(tmp_path)]
    return House(database, tenant.tenant_id, flags)


async def test_a_move_that_would_have_cost_is_said_to(house: House) -> None:
    await house.served(range(60))
    await house.moved(0, is_made=False, mode="advice", knobs=RESTS)
    [worth] = await house.worths("--slo", "ttft=1")
    assert worth["verdict"] == "cost"
    assert worth["requests"] == worth["recorded"]["requests"] == 120
    assert worth["recorded"]["attainment"] == worth["without"]["attainment"] == 1.0
    assert worth["with_it"]["attainment"] < 0.6
    assert worth["recorded"]["wait_p90_s"] == pytest.approx(0.001), "from the line on"
    [again] = await house.worths("--slo", "ttft=1")
    assert again == worth
    text = (await asyncio.to_thread(house.asked, "--worth", "--window", "1m", "--slo", "ttft=1")).stdout
    head, verdict, figures, times, note = text.splitlines()
    assert head.endswith("Z  small: advised batch_cap 1 -> 0.125 (constructed (0.95))")
    assert verdict == f"  cost: {worth['why']}"
    assert figures.startswith("  of 120 requests in the 1 min after it: met 100 % without, ")
    assert times.startswith("  TTFT p90 0.1")
    assert note == "  it was only advised: replayed as if it had been made, the other knobs as they stood"
    assert worth["error"]["attainment"] < 0.05


async def test_what_was_refused_as_late_is_replayed(house: House) -> None:
    await house.served(range(60))
    await house.moved(0, "token_budget", 0.5)
    late = RefusalKey(house.minute_s, house.tenant_id, "target_unreachable", "")
    other = late._replace(code="insufficient_quota")
    await refusals.add(house.database, {late: 60, other: 1_000}, [], Flush("test", 1), time.time())
    [worth] = await house.worths()
    assert worth["requests"] == 180
    assert worth["recorded"]["attainment"] == pytest.approx(120 / 180)
    assert worth["notes"] == [
        "60 requests that were refused as late are replayed, too, with lengths of others: theirs are not"
        " known"
    ]
    await refusals.add(house.database, {late: 400}, [], Flush("test", 2), time.time())
    [worth] = await house.worths()
    assert worth["requests"] == 120
    assert worth["notes"][0].startswith(
        "about 460 requests were refused as late around it and are not replayed"
    )


async def test_what_cannot_be_replayed_says_why(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.moved(0)
    [worth] = await house.worths()
    assert (worth["verdict"], worth["why"].split(":")[0]) == (None, "the traffic around it"), worth
    await house.served(range(30))
    await house.served(range(30, 60), server=structs.replace(SERVER, policy="vtc"))
    [worth] = await house.worths()
    assert worth["why"].startswith("the server changed in that time")
    monkeypatch.setattr(policy_moves, "MOST_ROWS", 100)
    [worth] = await house.worths()
    assert worth["why"] == ("more than 100 requests ended around it: take a shorter --window than 1 minutes")
    text = (await asyncio.to_thread(house.asked, "--worth", "--window", "1m")).stdout
    assert f"  not known: {worth['why']}" in text


async def test_a_gateway_with_engines_of_its_own_is_replayed_alone(house: House) -> None:
    await house.served(range(60))
    await house.served(range(60), server=structs.replace(SERVER, gateway_id="gw_2", policy="vtc"), each=1)
    await house.served(range(60), server=structs.replace(SERVER, model="large"), model="large", each=1)
    await house.moved(0)
    await house.moved(1, gateway_id="gw_2", move_id="mov_2")
    of_second, of_first = await house.worths()
    assert (of_first["requests"], of_second["requests"]) == (120, 59)


async def test_only_the_latest_are_replayed_and_the_others_counted(house: House) -> None:
    await house.served(range(60))
    for second in range(3):
        await house.moved(second, after=1.0)
    answered = await asyncio.to_thread(
        house.asked, "--worth", "--window", "50s", "--replays", "1", "--limit", "2"
    )
    assert answered.stdout.count("within the simulator's error") == 1
    assert answered.stdout.splitlines()[-2:] == [
        "1 older ones were not replayed (--replays)",
        "there are older ones: a higher --limit shows them",
    ]
    refused = await asyncio.to_thread(house.asked, "--worth", "--slo", "speed=1")
    assert refused.exit_code == 2
    assert "--slo: 'speed=1' is no target" in refused.output
    assert (await asyncio.to_thread(house.asked, "--replays", "0")).exit_code == 2


async def test_the_list_is_of_what_was_asked_for(house: House) -> None:
    await house.moved(0)
    await house.moved(30, "ageing", is_made=False, gateway_id="gw_2")
    text = (await asyncio.to_thread(house.asked)).stdout
    assert [
        word in text for word in ("moved", "advised", "batch_cap", "ageing", "gw_2", "constructed (0.95)")
    ] == ([True] * 6)
    assert "batch_cap" not in (await asyncio.to_thread(house.asked, "--advised")).stdout
    assert "gw_1" not in (await asyncio.to_thread(house.asked, "--made")).stdout, "one gateway needs no name"
    assert "moves: none" in (await asyncio.to_thread(house.asked, "--last", "30m")).stdout
    assert "knob" in (await asyncio.to_thread(house.asked, "--knob", "")).output
