"""Two processes under one gateway's id, by their heartbeats in a real database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.cluster import identity
from gateway.config import GatewaySettings
from ops.sandbox.server import until
from ops.serving import datadir, doctor
from ops.settings.settings import Settings
from tenants.directory.gateways import GatewayRegistry, IdentityTaken, Instance
from tenants.release import this_release
from tenants.storage.database import Database
from tests.support.quota import Clock

BEAT_S = 3.0
FIRST, SECOND = Instance("first", "boot:1:1"), Instance("second", "boot:1:2")


async def beat(registry: GatewayRegistry, instance: Instance, *, takes_over: bool = False) -> None:
    await registry.beat("gw", "there:1", frozenset({"engine"}), instance, takes_over=takes_over)


async def has_beaten(registry: GatewayRegistry, gateway_id: str) -> bool:
    return await registry.find(gateway_id) is not None


def sleeper(clock: Clock, meanwhile: Callable[[], Awaitable[None]]) -> Callable[[float], Awaitable[None]]:
    """Time passes, and `meanwhile` happens."""

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await meanwhile()

    return sleep


async def test_a_gateways_row_names_its_release(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    registry = GatewayRegistry(database)
    await beat(registry, FIRST)
    found = await registry.find("gw")
    assert found is not None
    assert found.release == this_release() != ""
    await database.close()


async def test_the_doctor_finds_a_copied_identity(sqlite_url: str, tmp_path: Path) -> None:
    gateway_id = datadir.gateway_id(tmp_path)
    settings = Settings(data_dir=tmp_path, gateway=GatewaySettings(gateway_stale_s=3))
    database = Database(sqlite_url)
    registry = GatewayRegistry(database)

    async def live(instance: Instance) -> None:
        while True:
            await registry.beat(gateway_id, "there:1", frozenset(), instance)
            await asyncio.sleep(0.02)

    for runs_in, is_ok in ((datadir.runs_in(tmp_path), True), ("of another directory", False)):
        living = asyncio.create_task(live(Instance("other", runs_in)))
        assert await until(lambda: has_beaten(registry, gateway_id), 5.0)
        found = await doctor._identity(settings)
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        assert found.ok is is_ok, found
        assert ("copy of the same data directory" in found.detail) is not is_ok
        await registry.forget(gateway_id)
    await database.close()


async def test_a_row_of_another_process_is_not_overwritten(database: Database) -> None:
    registry = GatewayRegistry(database)
    await beat(registry, FIRST)
    with pytest.raises(IdentityTaken) as refused:
        await beat(registry, SECOND)
    assert refused.value.taken_by.instance_id == "first"
    assert "there:1" in str(refused.value)
    assert "gateway-id" in str(refused.value)
    await beat(registry, FIRST)
    assert await registry.is_held_by("gw", FIRST)
    assert not await registry.is_held_by("gw", SECOND)
    # What stops in order forgets its own row only.
    await registry.forget("gw", instance=SECOND)
    assert (await registry.find("gw")) is not None
    await beat(registry, SECOND, takes_over=True)
    await registry.forget("gw", instance=FIRST)
    assert await registry.is_held_by("gw", SECOND)
    await registry.forget("gw", instance=SECOND)
    assert (await registry.find("gw")) is None


async def test_an_id_whose_heartbeat_moves_on_is_not_claimed(sqlite_url: str, clock: Clock) -> None:
    database = Database(sqlite_url)
    registry = GatewayRegistry(database, clock)
    await beat(registry, FIRST)
    with pytest.raises(IdentityTaken):
        await identity.claim(
            registry, "gw", SECOND, BEAT_S, clock=clock, sleep=sleeper(clock, lambda: beat(registry, FIRST))
        )
    await database.close()


async def test_an_id_whose_heartbeat_stands_still_is_claimed_after_two_beats(
    sqlite_url: str, clock: Clock
) -> None:
    database = Database(sqlite_url)
    registry = GatewayRegistry(database, clock)
    await beat(registry, FIRST)
    begun_s = clock()

    async def nothing() -> None:
        pass

    await identity.claim(registry, "gw", SECOND, BEAT_S, clock=clock, sleep=sleeper(clock, nothing))
    assert 2 * BEAT_S < clock() - begun_s <= 2 * BEAT_S + BEAT_S / 2
    # In the very same directory there is no wait: it holds the lock of that directory.
    await beat(registry, FIRST)
    waited_s = clock()
    await identity.claim(
        registry, "gw", Instance("third", FIRST.runs_in), BEAT_S, clock=clock, sleep=sleeper(clock, nothing)
    )
    assert clock() == waited_s
    await database.close()
