"""Engines that a real Ray places, under load from two gateways: what dies comes back, and no stream breaks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

pytest.importorskip("ray", reason="make test-ray")

from tests.support import services
from tests.support.commands import run_command
from tests.support.ray_cluster import PlacedHouse, placed_house
from tests.support.server_process import until

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]
PAUSED_S = 20


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedHouse]:
    data_dir = tmp_path_factory.mktemp("placed")
    postgres, redis = services.start_postgres(), services.start_redis()
    database_url = services.create_database(postgres.url)
    for command in ("db upgrade", "engine keys"):
        made = run_command(*command.split(), "--data-dir", str(data_dir), "--database-url", database_url)
        assert made.exit_code == 0, made.output
    with placed_house(data_dir, database_url, redis) as built:
        yield built
    postgres.stop()
    redis.stop()


def served(house: PlacedHouse, name: str, after: int) -> None:
    house.says(f"{name} serves at", after=after)


def test_engines_serve_and_outlive_their_placer(house: PlacedHouse) -> None:
    house.start_placer(2)
    served(house, "engine-0", 0), served(house, "engine-1", 0)
    engines = house.engines()
    assert {engine.nice() for engine in engines.values()} == {0}
    before = {name: engine.pid for name, engine in engines.items()}
    house.end_placer(signal.SIGKILL)
    lines = len(house.said())
    house.start_placer(2)
    served(house, "engine-0", lines)
    assert {name: engine.pid for name, engine in house.engines().items()} == before


@pytest.mark.parametrize("victim", ["engine", "actor"])
def test_an_engine_and_its_actor_end_together_and_come_back(house: PlacedHouse, victim: str) -> None:
    lines, engine = len(house.said()), house.engines()["engine-0"]
    actor = engine.parent()
    assert actor is not None
    (engine if victim == "engine" else actor).kill()
    until(lambda: not engine.is_running() and not actor.is_running())
    served(house, "engine-0", lines)


def test_an_engine_moves_when_its_node_is_gone_and_waits_where_there_is_no_room(house: PlacedHouse) -> None:
    lines = len(house.said())
    house.cluster.remove_node(house.nodes.pop(), allow_graceful=False)
    house.says("waits for room: it needs 1 CPU, and 0 of the cluster's are free", after=lines)
    house.nodes.append(house.add_node())
    house.says("serves at", after=lines)


def test_what_runs_goes_on_while_the_head_is_away(house: PlacedHouse) -> None:
    before = {name: engine.pid for name, engine in house.engines().items()}
    house.head.suspend()
    with pytest.raises(subprocess.TimeoutExpired):
        house.placer.wait(PAUSED_S)  # it goes on
    house.head.resume()
    house.restart_head()
    status = subprocess.run(house.command("status"), capture_output=True, text=True, timeout=120)
    assert status.stdout.count("serves at") == 2, status
    assert {name: engine.pid for name, engine in house.engines().items()} == before


def test_nothing_is_left_after_a_stop(house: PlacedHouse) -> None:
    refused = subprocess.run(house.command("stop"), capture_output=True, text=True, timeout=120)
    assert "another `fairgate place` runs" in refused.stderr
    house.end_placer()
    stopped = subprocess.run(house.command("stop"), capture_output=True, text=True, timeout=120)
    assert stopped.returncode == 0, stopped
    until(lambda: not house.engines())
