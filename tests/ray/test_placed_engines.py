"""Engines that a real Ray places, under load from two gateways: what dies comes back, no stream breaks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("ray", reason="make test-ray")

from tests.support.ray_cluster import SERVES_S, PlacedHouse, SteadyLoad
from tests.support.server_process import until

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]
STREAMS = 6


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedHouse]:
    with ExitStack() as closing:
        yield PlacedHouse(tmp_path_factory.mktemp("placed"), closing)


@pytest.fixture(scope="module")
def load(house: PlacedHouse) -> Iterator[SteadyLoad]:
    """It begins once the engines serve, and each of its streams has ended once."""
    key = house.gateways[0].tenant("acme")
    house.start_placer()
    for gateway in house.gateways:
        until(lambda gateway=gateway: house.serving(gateway) == 2, SERVES_S)
        with gateway.http(key) as client:
            until(lambda client=client: client.get("/v1/models").is_success)
    load = SteadyLoad(house.gateways, key, STREAMS)
    until(lambda: len(load.texts) == STREAMS or load.broken, SERVES_S)
    yield load
    for number in (0, 1):
        load.end(number)


def test_an_engine_inherits_no_niceness_and_outlives_its_placer(house: PlacedHouse, load: SteadyLoad) -> None:
    assert {engine.nice() for engine in house.engines().values()} == {0}
    before, said = house.engines(), house.said()
    house.end_placer(signal.SIGKILL)
    house.start_placer()
    house.says("engine-0 serves at", said)
    assert house.engines() == before
    assert load.broken == []


@pytest.mark.parametrize("victim", ["engine", "actor"])
def test_an_engine_and_its_actor_end_together_and_come_back(
    house: PlacedHouse, load: SteadyLoad, victim: str
) -> None:
    said, engine = house.said(), house.engines()["engine-0"]
    actor = engine.parent()
    assert actor is not None
    (engine if victim == "engine" else actor).kill()
    until(lambda: not engine.is_running() and not actor.is_running())
    house.says("engine-0 serves at", said)
    assert load.broken == []


def test_a_replica_whose_node_is_gone_waits_for_room(house: PlacedHouse, load: SteadyLoad) -> None:
    said = house.said()
    house.cluster.remove_node(house.nodes.pop(), allow_graceful=False)
    house.says("waits for room: it needs 1 CPU, and 0 of the cluster's are free", said)
    house.nodes.append(house.add_node())
    house.says("serves at", said)
    assert load.broken == []


def test_what_runs_goes_on_while_the_head_is_away(house: PlacedHouse, load: SteadyLoad) -> None:
    before, complete = house.engines(), load.complete
    house.pause_head(20)
    house.restart_head()
    until(lambda: house.place("status").stdout.count("serves at") == 2, 120)
    assert house.engines() == before
    assert load.complete > complete
    assert load.broken == []


def test_a_gateway_that_restarts_finds_the_engines(house: PlacedHouse, load: SteadyLoad) -> None:
    load.end(1)
    other = house.gateways[1]
    other.stop()
    other.start()
    until(lambda: house.serving(other) == 2)
    assert load.broken == []


def test_nothing_is_left_after_a_stop(house: PlacedHouse, load: SteadyLoad) -> None:
    assert "another `fairgate place` runs" in house.place("stop").stderr
    house.end_placer(signal.SIGTERM)
    load.end(0)
    stopped = house.place("stop")
    assert stopped.returncode == 0, stopped
    until(lambda: not house.engines())
    assert load.broken == []
    assert house.gateways[0].verify()["ok"]
