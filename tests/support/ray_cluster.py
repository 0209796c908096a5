"""A Ray of three nodes on this machine, its head over a Redis, and engines placed on it for two gateways.

Nothing here connects to Ray: what places engines does, in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from ops.settings.settings import SHIPPED_MODEL
from tests.support import services
from tests.support.commands import run_command
from tests.support.server_process import MODEL, ROOT, Server, server_process, until

# Nodes start on few cores, and send no figures anywhere.
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FAIRGATE_ENGINE_THREADS": "1",
}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
SERVES_S = 240.0


class PlacedHouse:
    def __init__(self, base: Path, closing: ExitStack) -> None:
        postgres, redis, self._ray_redis = (
            services.start_postgres(),
            services.start_redis(),
            services.start_redis(),
        )
        for service in (postgres, redis, self._ray_redis):
            closing.callback(service.stop)
        self.data_dir = base / "one"
        self._stores = ["--database-url", postgres.url]
        ray_redis = self._ray_redis.url.removeprefix("redis://").partition("/")[0]
        os.environ |= SETTINGS | {"PYTHONPATH": str(ROOT), "RAY_REDIS_ADDRESS": ray_redis}
        self.cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
        closing.callback(self.cluster.shutdown)
        self.nodes = [self.add_node() for _ in range(2)]
        assert run_command("engine", "keys", "--data-dir", str(self.data_dir)).exit_code == 0
        arguments = [*self._stores, "--redis-url", redis.url, "--engine-discover", "sql"]
        self.gateways: list[Server] = []
        for data_dir in (self.data_dir, base / "other"):
            if self.gateways:
                data_dir.mkdir()
                for file in ("pepper", "engine-gateway.keys"):
                    shutil.copy(self.data_dir / file, data_dir)
            self.gateways.append(closing.enter_context(server_process(data_dir, SHIPPED_MODEL, *arguments)))
        self.gateways[1].owner_key = self.gateways[0].owner_key
        self.placer: subprocess.Popen[bytes] | None = None
        closing.callback(self.end_placer, signal.SIGKILL)

    def add_node(self) -> Any:
        return self.cluster.add_node(num_cpus=1, **NODE)

    def command(self, *arguments: str) -> list[str]:
        command = [sys.executable, "-P", "-m", "ops.cli.main", "place", *arguments, *self._stores]
        return [*command, "--ray-address", self.cluster.address, "--data-dir", str(self.data_dir)]

    def place(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=SERVES_S)

    def start_placer(self) -> None:
        with (self.data_dir / "placer.log").open("ab") as log:
            self.placer = subprocess.Popen(self.command("ray", "--replicas", "2"), stderr=log)

    def end_placer(self, number: signal.Signals) -> None:
        if self.placer is not None:
            self.placer.send_signal(number)
            self.placer.wait(60)

    def serving(self, gateway: Server) -> int:
        """How many engines a gateway has that serve."""
        replicas = gateway.admin("GET", "/upstreams")["data"][0]["replicas"]
        return sum(each["state"] == "serving" for each in replicas)

    def said(self) -> list[str]:
        """What the placer said, line by line."""
        path = self.data_dir / "placer.log"
        return path.read_text().splitlines() if path.exists() else []

    def says(self, text: str, after: list[str]) -> None:
        """Waits until the placer has said a line with `text` `after` those."""
        until(lambda: any(text in line for line in self.said()[len(after) :]), SERVES_S)

    def engines(self) -> dict[str, psutil.Process]:
        """The engine processes by name."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "--engine-id" in words and str(self.data_dir) in words and "ops.cli.main" in words:
                found[words[words.index("--engine-id") + 1]] = process
        return found

    def pause_head(self, pause_s: float) -> None:
        """What knows nodes and actors stands still."""
        head = psutil.Process(self.cluster.head_node.all_processes["gcs_server"][0].process.pid)
        head.suspend()
        threading.Event().wait(pause_s)
        head.resume()

    def restart_head(self) -> None:
        self.cluster.head_node.kill_gcs_server(check_alive=False)
        self.cluster.head_node.start_gcs_server()


class SteadyLoad:
    """Streams that follow one another at each gateway; each has the text that its prompt had at first."""

    def __init__(self, gateways: list[Server], key: str, streams: int) -> None:
        self.broken: list[str] = []
        self.texts: dict[int, str] = {}
        self.complete = 0
        self._key = key
        self._ended = [threading.Event() for _ in gateways]
        self._threads = [
            threading.Thread(target=self._follow, args=(gateways[i % 2], self._ended[i % 2], i))
            for i in range(streams)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, gateway: int) -> None:
        """Lets the streams at one gateway end."""
        self._ended[gateway].set()
        for thread in self._threads[gateway::2]:
            thread.join(SERVES_S)

    def _follow(self, gateway: Server, ended: threading.Event, seed: int) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"Count from 1 to {60 + seed}."}]}
        body |= {"max_tokens": 260, "seed": seed, "temperature": 0.9, "stream": True}
        with gateway.http(self._key, SERVES_S) as client:
            while not ended.is_set():
                try:
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        said = list(answer.iter_lines())
                    lines = [line.removeprefix("data: ") for line in said if line.startswith("data: ")]
                    assert lines[-1:] == ["[DONE]"], said[-3:]
                    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
                    text = "".join(choice["delta"].get("content") or "" for choice in choices)
                    assert text == self.texts.setdefault(seed, text), (seed, text)
                    self.complete += 1
                except Exception as error:
                    self.broken.append(repr(error))
