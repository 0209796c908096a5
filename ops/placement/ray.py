"""Ray as the cluster that engines are placed on: it places and restarts one detached actor for each.

Nothing of a request passes through Ray, and no act is repeated by it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from engine.client.client import EngineClient, EngineRefused, EngineUnavailable
from engine.client.keys import KeysRefused, gateway_keys
from ops.placement.placer import ClusterUnavailable
from ops.placement.plan import ReplicaReport, lack_of

NAMESPACE = "fairgate"
OLDEST = (2, 60)
ANSWER_S = 3.0
CONNECT_S = 1.0
PAUSE_S = 10.0
"""Before an engine that did not serve is started again; meanwhile its last line can be read."""
MOST_WORDS = 500
NICE = (
    "Ray's workers are nice, and the system lets no engine be less so: start Ray with RAY_worker_niceness=0"
)
# Ends in order when the thread that started it does; becomes the engine.
LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, "-P", "-m", "ops.cli.main", "engine", *sys.argv[2:]])
"""


class EngineActor:
    """Owns one engine process; each ends with the other, and Ray starts both anew."""

    def __init__(self, name: str, data_dir: Path, environment: Mapping[str, str]) -> None:
        """`data_dir`: on this machine. `environment`: further variables of the engine."""
        self._name, self._data_dir, self._host = name, data_dir, ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            self._address = f"tcp://{self._host}:{probe.getsockname()[1]}"
        # It outlives the absence of gateways.
        self._environment = {**os.environ, **environment, "FAIRGATE_ENGINE_ORPHAN_S": "3600"}
        self._client: EngineClient | None = None
        self._why = ""
        threading.Thread(target=self._own, daemon=True).start()

    async def report(self) -> ReplicaReport:
        """The engine serves when its `Ready` came over the link."""
        if self._why:
            return ReplicaReport(self._host, why=self._why)
        try:
            if self._client is None:
                keys_dir = Path(self._environment.get("FAIRGATE_ENGINE_KEYS_DIR", self._data_dir))
                keys = gateway_keys(self._address, keys_dir, self._name)
                self._client = EngineClient(self._address, f"placer-{self._name}", keys=keys)
            await self._client.connect(CONNECT_S)
        except (KeysRefused, EngineRefused) as error:
            return ReplicaReport(self._host, why=str(error))
        except EngineUnavailable:
            return ReplicaReport(self._host)
        return ReplicaReport(self._host, self._address)

    def _own(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # of this thread, and so of the engine
        except PermissionError:
            self._why = NICE
        else:
            self._why = self._run()
        if self._client is None or self._client.ready is None:
            time.sleep(PAUSE_S)
        os._exit(1)

    def _run(self) -> str:
        """The engine's last line, when it has ended."""
        path = self._data_dir / "logs" / f"{self._name}.log"
        options = ["--address", self._address, "--engine-id", self._name, "--data-dir", str(self._data_dir)]
        command = [sys.executable, "-P", "-c", LAUNCHER, str(os.getpid()), *options]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists():
                path.replace(path.with_suffix(".log.1"))
            with path.open("wb") as log:
                code = subprocess.call(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
                )
        except OSError as error:
            return f"the engine cannot be started: {error}"
        words = path.read_text(errors="replace").strip().rpartition("\n")[2][-MOST_WORDS:]
        return words.removeprefix("fairgate engine: ") or f"the engine ended with exit code {code}"


class RayCluster:
    kind = "ray"

    def __init__(
        self,
        address: str,
        engine: tuple[Path, Mapping[str, str]],
        need: Mapping[str, float] | None = None,
        strategy: str = "DEFAULT",
    ) -> None:
        """Connects from one of Ray's machines. `engine`: what actors get after their name. `need`: resources
        of each. Raises `ClusterUnavailable`."""
        self._engine, self._need, self._strategy = engine, need or {}, strategy
        self._asked: dict[str, Any] = {}
        """Questions without an answer yet: an actor that waits for room is asked once."""
        if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
            raise ClusterUnavailable(f"Ray {ray.__version__} is too old: 2.60 or newer is needed")
        host, _, port = address.rpartition(":")
        with _refusals():
            if port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), ANSWER_S).close()
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
            found = ray.util.list_named_actors(all_namespaces=True)
            names = [row["name"] for row in found if row["namespace"] == NAMESPACE]
            self._actors: dict[str, Any] = {name: ray.get_actor(name, NAMESPACE) for name in names}

    def reports(self) -> dict[str, ReplicaReport | None]:
        with _refusals():
            for name in self._actors.keys() - self._asked.keys():
                self._asked[name] = self._actors[name].report.remote()
            asked = list(self._asked.values())
            done = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)[0] if asked else []
        return {name: self._answer(name) if ref in done else None for name, ref in list(self._asked.items())}

    def _answer(self, name: str) -> ReplicaReport | None:
        try:
            report: ReplicaReport = ray.get(self._asked.pop(name))
            return report
        except ActorDiedError as error:  # for good: the next turn starts it anew
            del self._actors[name]
            return ReplicaReport("its machine", why=str(error).rstrip().rpartition("\n")[2])
        except RayError:  # it is being restarted
            return None

    def lack(self) -> str:
        with _refusals():
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            return lack_of(self._need, machines, ray.available_resources())

    def start(self, name: str) -> None:
        need = dict(self._need)
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        options |= {"max_restarts": -1, "max_task_retries": 0, "scheduling_strategy": self._strategy}
        options |= {"num_cpus": need.pop("CPU", 0), "num_gpus": need.pop("GPU", 0), "resources": need}
        with _refusals():
            self._actors[name] = ray.remote(EngineActor).options(**options).remote(name, *self._engine)

    def end(self, name: str) -> None:
        self._asked.pop(name, None)
        if (actor := self._actors.pop(name, None)) is not None:
            with _refusals():
                ray.kill(actor)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (RayError, RuntimeError, OSError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ClusterUnavailable(f"Ray {ray.__version__} or its head: {line}") from None
