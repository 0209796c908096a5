"""Every token is covered when it is emitted, and charged once, whatever happens to its request.

Random histories of several tenants with windows and rates: requests come, with one choice or several, named
lengths or none; clients leave in the middle; memory is short. Through the real lifecycle, quota store, ledger
and engine core, on a virtual clock; every step is looked at.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from engine.core.core import EngineConfig
from engine.messages import StepTime
from tenants.outcomes import RequestOutcome
from tenants.storage.database import Database, open_database
from tenants.types import Limit, Meter, SubjectKind, Window
from tests.support.virtual_streams import Stream, VirtualStreams

STEP = StepTime(0.004, 0.00001, 0.0, 0.0001, 1, 0.0)
REQUESTS = 40
SEEDS = 3


@pytest.fixture
async def database(sqlite_url: str) -> AsyncIterator[Database]:
    opened = open_database(sqlite_url)
    yield opened
    await opened.close()


def limits_of(tenant_id: str) -> tuple[Limit, ...]:
    def limit(meter: Meter, amount: int, **shape: object) -> Limit:
        return Limit(meter, tenant_id, SubjectKind.TENANT, tenant_id, meter, amount, **shape)  # type: ignore[arg-type]

    return {
        "budget": (limit(Meter.TOTAL_TOKENS, 500, window=Window.LIFETIME),),
        "rate": (limit(Meter.OUTPUT_TOKENS, 30, rate_per_s=120.0),),
        "both": (
            limit(Meter.OUTPUT_TOKENS, 60, rate_per_s=300.0),
            limit(Meter.COST_NANOUSD, 500, window=Window.LIFETIME),
            limit(Meter.GPU_MS, 1_000_000, window=Window.LIFETIME),
        ),
        "free": (),
    }[tenant_id]


async def test_every_token_is_covered_when_emitted_and_charged_once(database: Database) -> None:
    met = Counter[str]()
    for seed in range(SEEDS):
        await one_history(database, random.Random(seed), met)
    for what in ("completed", "budget", "disconnected", "refused", "topped up", "rested", "preempted"):
        assert met[what] > 0, f"{what} never happened: {met}"


async def one_history(database: Database, rng: random.Random, met: Counter[str]) -> None:
    world = VirtualStreams(
        database, STEP, num_blocks=24, config=EngineConfig(max_sequences=6, max_batched_tokens=64)
    )
    core = world.replica.core
    leaves_at: dict[Stream, int] = {}
    left_at_step: dict[Stream, tuple[int, int]] = {}

    def every_step() -> None:
        core.check()
        world.store.check()
        for each in core.table.sequences.values():
            assert each.emitted_tokens <= each.lease_tokens
            met["rested"] += not each.may_emit
        for stream in world.streams.values():
            leases = stream.run.leases
            if leases is not None:
                assert len(stream.came_s) <= sum(leases.tokens) <= leases.covered_output_tokens
            if stream in leaves_at and len(stream.came_s) >= leaves_at[stream]:
                del leaves_at[stream]
                left_at_step[stream] = core.snapshot("e").step, len(stream.came_s)
                stream.run.interrupt(RequestOutcome.DISCONNECTED)

    def go_on() -> bool:
        live = sum(stream.closed is None for stream in world.streams.values())
        if len(world.streams) < REQUESTS and live < 12 and (live == 0 or rng.random() < 0.5):
            tenant_id = rng.choice(["budget", "rate", "both", "free"])
            asks = rng.random() < 0.7
            stream = world.begin(
                tenant_id,
                *limits_of(tenant_id),
                prompt_tokens=rng.randint(1, 60),
                max_tokens=rng.randint(1, 60) if asks else 200,
                choices=rng.choice([1, 1, 2, 3]),
                asked_max_tokens=asks,
            )
            if rng.random() < 0.3:
                leaves_at[stream] = rng.randint(0, 40)
        return len(world.streams) == REQUESTS and live == 0

    world.on_step = every_step
    await world.run_until(go_on)
    used = Counter[tuple[str, Meter]]()
    for stream in world.streams.values():
        assert stream.closed is not None
        account = stream.closed.account
        met[account.outcome] += 1
        met["topped up"] += account.top_ups > 0
        met["preempted"] += account.preemptions
        # Everything that was emitted reached the gateway here, and exactly that is charged.
        assert account.charged.output_tokens == len(stream.came_s)
        if stream in left_at_step:
            # Its client left between two steps: nothing of it was computed after that.
            assert len(stream.came_s) == left_at_step[stream][1]
        rows = await world.ledger.find(account.request_id)
        if rows:
            assert [row.kind for row in rows].count("settle") == 1
            assert rows[-1].amounts.output_tokens == account.charged.output_tokens
        for limit in limits_of(stream.tenant_id):
            used[stream.tenant_id, limit.meter] += account.charged.of(limit.meter)
    for tenant_id in ("budget", "both"):
        for state in await world.store.states(limits_of(tenant_id)):
            assert state.held == 0
            assert state.used <= state.limit.amount
            if state.limit.window is not None:
                assert state.used == used[tenant_id, state.limit.meter]
    await world.close()
