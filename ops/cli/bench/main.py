"""`fairgate bench`: measurements of promises, of speed and of choices."""

from __future__ import annotations

from ops.cli.base import group

COMMANDS = {
    "fairness": "fairness:fairness",
    "routing": "fairness:routing",
    "estimates": "fairness:estimates",
    "calibration": "fairness:calibration",
    "engine": "engine:engine",
    "scheduler": "engine:scheduler",
    "policies": "engine:policies",
    "batch-or-wait": "engine:batch_or_wait",
    "fidelity": "forecast:fidelity",
    "control": "forecast:control",
    "contract": "gateway:contract",
    "gateway": "gateway:gateway",
    "versus": "versus:versus",
    "upstreams": "upstreams:upstreams",
}


@group(lazy={name: f"ops.cli.bench.{where}" for name, where in COMMANDS.items()})
def bench() -> None:
    """Measures promises on a running server that it starts itself, on a free port; and the engine's speed.

    \b
      fairgate bench fairness --runs 3
      fairgate bench fairness --scenario flood --scenario reservations
      fairgate bench fairness --virtual
      fairgate bench routing
      fairgate bench estimates --queued 0 --queued 20 --queued 100
      fairgate bench calibration
      fairgate bench engine --model tiny --peers transformers,openvino
      fairgate bench scheduler
      fairgate bench fidelity --policy vtc,fcfs
      fairgate bench control --trace day.csv.gz --replicas 2
      fairgate bench policies --case mixed
      fairgate bench batch-or-wait
      fairgate bench contract --scenario 'kill-*'
      fairgate bench gateway --peers nginx,litellm,portkey
      fairgate bench versus --stacks litellm,plugin
      fairgate bench versus --parts shares,limits
      fairgate bench upstreams --servers vllm,llama_cpp
    """
