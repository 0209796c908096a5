"""`fairgate bench`: measurements of promises, of speed and of choices."""

from __future__ import annotations

from importlib.util import find_spec

from ops.cli.base import Failure, group

COMMANDS = {
    "fairness": "fairness:fairness",
    "calibration": "fairness:calibration",
    "engine": "engine:engine",
    "scheduler": "engine:scheduler",
    "gpu": "gpu:gpu",
    "fidelity": "forecast:fidelity",
    "control": "forecast:control",
    "contract": "gateway:contract",
    "gateway": "gateway:gateway",
    "versus": "versus:versus",
    "upstreams": "upstreams:upstreams",
}


@group(lazy={name: f"ops.cli.bench.{where}" for name, where in COMMANDS.items()})
def bench() -> None:
    """Measures fairness, estimates and speed on this machine.

    It starts a server on a free port.

    \b
      fairgate bench fairness --runs 3
      fairgate bench fairness --scenario flood --scenario reservations
      fairgate bench fairness --decode
      fairgate bench calibration --bursts
      fairgate bench engine --model tiny --peers transformers,openvino
      fairgate bench scheduler
      fairgate bench gpu --section decode
      fairgate bench fidelity --policy vtc,fcfs
      fairgate bench control --gateways 2 --busy 2
      fairgate bench control --trace dist_shift --trace day.csv.gz
      fairgate bench contract --scenario 'kill-*'
      fairgate bench contract --scenario 'survive-*' --instants 20
      fairgate bench contract --scenario upgrade --old-tree ../before
      fairgate bench gateway --peers nginx,litellm,portkey
      fairgate bench versus --stacks litellm,plugin
      fairgate bench versus --parts shares,limits
      fairgate bench upstreams --servers vllm,llama_cpp
    """
    if find_spec("ops.bench") is None:
        raise Failure(
            "benchmarks are not in the package: git clone the repository and pip install -e '.[engine]' there"
        )
