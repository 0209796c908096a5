"""Ray as the cluster that engines are placed on: one named detached actor for each replica.

Ray places and restarts; nothing of a request passes through it, and no act is repeated by it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from ops.placement.engine_host import STOP_S, EngineHost
from ops.placement.placer import ClusterUnavailable
from ops.placement.plan import Report, Room

OLDEST = (2, 60)
NAMESPACE = "fairgate"
END_S = STOP_S + 5.0


class ReplicaActor(EngineHost):
    def __init__(self, name: str, data_dir: Path, environment: Mapping[str, str]) -> None:
        super().__init__(name, ray.util.get_node_ip_address(), data_dir, environment)


class RayCluster:
    kind = "ray"

    def __init__(
        self,
        address: str,
        need: Mapping[str, float],
        data_dir: Path,
        environment: Mapping[str, str],
        *,
        spread: bool,
    ) -> None:
        """Connects; this machine must be one of the cluster. `data_dir`, `environment`: of every engine, on
        its machine. Raises `ClusterUnavailable`."""
        if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
            raise ClusterUnavailable(
                f"Ray {ray.__version__} is too old: {'.'.join(map(str, OLDEST))} or newer is needed"
            )
        with _refusals():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        self.need, self._data_dir, self._environment = need, data_dir, environment
        self._strategy = "SPREAD" if spread else "DEFAULT"
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        """Questions without an answer yet: an actor that waits for room gets one, not one a turn."""
        with _refusals():
            for found in ray.util.list_named_actors(all_namespaces=True):
                if found["namespace"] == NAMESPACE:
                    self._actors[found["name"]] = ray.get_actor(found["name"], NAMESPACE)

    def reports(self, within_s: float) -> dict[str, Report | None]:
        with _refusals():
            for name, actor in self._actors.items():
                if name not in self._asked:
                    self._asked[name] = actor.report.remote()
            asked = list(self._asked.values())
            done, _ = ray.wait(asked, num_returns=len(asked), timeout=within_s) if asked else ([], [])
        return {
            name: self._answer(name) if self._asked[name] in done else None for name in list(self._actors)
        }

    def _answer(self, name: str) -> Report | None:
        try:
            report: Report = ray.get(self._asked.pop(name))
            return report
        except ActorDiedError as error:  # for good: the next turn starts it anew
            del self._actors[name]
            return Report(place="its machine", why=_line(error))
        except RayError:  # it is being restarted
            return None

    def room(self) -> Room:
        with _refusals():
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            return Room(machines, ray.available_resources())

    def start(self, name: str) -> None:
        others = {key: amount for key, amount in self.need.items() if key not in ("CPU", "GPU")}
        with _refusals():
            self._actors[name] = (
                ray.remote(ReplicaActor)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,
                    max_task_retries=0,
                    num_cpus=self.need.get("CPU", 0),
                    num_gpus=self.need.get("GPU", 0),
                    resources=others,
                    scheduling_strategy=self._strategy,
                )
                .remote(name, self._data_dir, self._environment)
            )

    def end(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        self._asked.pop(name, None)
        if actor is None:
            return
        with _refusals():
            with contextlib.suppress(GetTimeoutError, RayError):  # the engine ends with its actor as well
                ray.get(actor.end.remote(), timeout=END_S)
            ray.kill(actor, no_restart=True)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Ray's errors in one line."""
    try:
        yield
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise ClusterUnavailable(f"Ray: {_line(error)}") from None


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).split("\n") if line.strip()), type(error).__name__)
