"""The placer's turns, on a database and a cluster of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from migrations import runner
from ops.placement.placer import LEASE_S, Placer
from ops.placement.plan import ReplicaReport
from tenants.directory.placed_engines import PlacedEngines
from tenants.storage.database import open_database

NOW_S = 1_800_000_000.0


class FakeCluster:
    """A cluster that places at once."""

    kind = "ray"

    def __init__(self) -> None:
        self.placed: dict[str, ReplicaReport | None] = {}

    def reports(self) -> dict[str, ReplicaReport | None]:
        return dict(self.placed)

    def lack(self) -> str:
        return "it needs 1 GPU"

    def start(self, name: str) -> None:
        self.placed[name] = None

    def end(self, name: str) -> None:
        self.placed.pop(name, None)


class House:
    def __init__(self, data_dir: Path) -> None:
        runner.upgrade(url := f"sqlite:///{data_dir / 'fairgate.db'}")
        self.now_s, self.cluster = NOW_S, FakeCluster()
        self.database = open_database(url)
        self.rows = PlacedEngines(self.database, lambda: self.now_s)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.states: list[str] = []
        """Of engine-1, at each look: the answers of a server; none: no server runs."""
        self.placer = Placer(self.cluster, self.rows, self.ask, self.said.append)

    def ask(self, method: str, path: str) -> dict[str, Any]:
        if not self.states:
            return {}
        self.asked.append(path)
        if method == "POST":
            return {"replica": "engine-1"}
        return {"data": [{"replicas": [{"replica_id": "engine-1", "state": self.states.pop(0)}]}]}

    async def written(self) -> dict[str, tuple[str, float]]:
        return {row.name: (row.address, row.left_s) for row in await self.rows.read()}


@pytest.fixture
async def house(tmp_path: Path) -> Any:
    house = House(tmp_path)
    yield house
    await house.database.close()


async def test_a_replica_is_placed_written_when_it_serves_and_renewed(house: House) -> None:
    await house.placer.turn(["engine-0"], 0)
    await house.placer.turn(["engine-0"], 0)
    await house.placer.turn(["engine-0"], 0)
    assert house.said == ["engine-0 waits for room: it needs 1 GPU"], "once"
    assert await house.written() == {}
    house.cluster.placed["engine-0"] = ReplicaReport("10.0.0.5", "tcp://10.0.0.5:1")
    await house.placer.turn(["engine-0"], 0)
    house.now_s += LEASE_S / 2
    await house.placer.turn(["engine-0"], 0)
    assert await house.written() == {"engine-0": ("tcp://10.0.0.5:1", LEASE_S)}
    house.cluster.placed["engine-0"] = ReplicaReport("10.0.0.6")
    house.now_s += 1
    await house.placer.turn(["engine-0"], 0)
    assert await house.written() == {"engine-0": ("tcp://10.0.0.5:1", LEASE_S - 1)}, "it ends by itself"
    assert house.said[-2:] == ["engine-0 serves at tcp://10.0.0.5:1", "engine-0 starts on 10.0.0.6"]


async def test_what_is_too_much_is_drained_then_ended_then_forgotten(house: House) -> None:
    for name in ("engine-0", "engine-1"):
        house.cluster.placed[name] = ReplicaReport("10.0.0.5", f"tcp://{name}:1")
    await house.placer.turn(["engine-0", "engine-1"], 60)
    house.states = ["draining", "drained", "gone"]
    await house.placer.turn(["engine-0"], 60)
    drain, resume = "/upstreams/engine-1/drain", "/upstreams/engine-1/resume"
    assert house.asked == [drain, "/upstreams", "/upstreams", resume]
    assert set(house.cluster.placed) == set(await house.written()) == {"engine-0"}


async def test_a_drain_that_does_not_end_holds_nothing_up_longer_than_it_may(house: House) -> None:
    house.cluster.placed["engine-1"] = ReplicaReport("10.0.0.5", "tcp://10.0.0.5:1")
    house.states = ["draining"] * 9
    await house.placer.retire(["engine-1"], 1.0)
    assert house.asked.count("/upstreams") == 2
    assert house.cluster.placed == {}


async def test_without_a_server_and_without_an_actor_a_written_replica_is_forgotten(house: House) -> None:
    await house.rows.write("engine-9", "tcp://10.0.0.9:1", LEASE_S, placed_by="ray", place="10.0.0.9")
    await house.rows.write("other", "tcp://10.0.0.8:1", LEASE_S, placed_by="kubernetes", place="10.0.0.8")
    await house.placer.turn([], 60)
    assert set(await house.written()) == {"other"}
