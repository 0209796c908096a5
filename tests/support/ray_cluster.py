"""A Ray cluster of several nodes on this machine, its head over a Redis, and engines placed on it.

Nothing here connects to Ray: what places engines does, in a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from tests.support import services
from tests.support.server_process import ROOT, until

# Nodes start beside each other on few cores; no figures are sent anywhere.
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FAIRGATE_ENGINE_THREADS": "1",
}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
SERVES_S = 240.0


class PlacedHouse:
    """The cluster, what places engines on it, and what can be seen of them."""

    def __init__(self, data_dir: Path, database_url: str, redis: services.Service) -> None:
        self.data_dir, self._database_url = data_dir, database_url
        os.environ |= SETTINGS | {
            "PYTHONPATH": str(ROOT),
            "RAY_REDIS_ADDRESS": redis.url.rpartition("/")[0].rpartition("/")[2],
        }
        self.cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
        self.nodes = [self.add_node() for _ in range(2)]
        self.placer: subprocess.Popen[bytes] | None = None

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, **NODE)

    def command(self, *arguments: str) -> list[str]:
        place = [sys.executable, "-P", "-m", "ops.cli.main", "place", *arguments]
        address = ["--ray-address", self.cluster.address, "--database-url", self._database_url]
        return [*place, *address, "--data-dir", str(self.data_dir)]

    def start_placer(self, replicas: int) -> None:
        with (self.data_dir / "placer.log").open("ab") as log:
            self.placer = subprocess.Popen(self.command("ray", "--replicas", str(replicas)), stderr=log)

    def end_placer(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.placer is not None
        self.placer.send_signal(number)
        self.placer.wait(60)

    def said(self) -> list[str]:
        """What the placer said, line by line."""
        return (self.data_dir / "placer.log").read_text().splitlines()

    def says(self, text: str, *, after: int, within_s: float = SERVES_S) -> None:
        """Waits until the placer says a line with `text`; `after`: number of lines before."""
        until(lambda: any(text in line for line in self.said()[after:]), within_s)

    def engines(self) -> dict[str, psutil.Process]:
        """The engine processes of this house by name."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "--engine-id" in words and str(self.data_dir) in words and "ops.cli.main" in words:
                found[words[words.index("--engine-id") + 1]] = process
        return found

    @property
    def head(self) -> psutil.Process:
        """The process of Ray's head that knows nodes and actors."""
        return psutil.Process(self.cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def restart_head(self) -> None:
        self.cluster.head_node.kill_gcs_server(check_alive=False)
        self.cluster.head_node.start_gcs_server()


@contextmanager
def placed_house(data_dir: Path, database_url: str, redis: services.Service) -> Iterator[PlacedHouse]:
    house = PlacedHouse(data_dir, database_url, redis)
    try:
        yield house
    finally:
        if house.placer is not None and house.placer.poll() is None:
            house.end_placer(signal.SIGKILL)
        house.cluster.shutdown()
