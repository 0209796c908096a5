"""Step and chunk sizes against throughput and latencies.

Small steps and small chunks keep the gaps between tokens short and pay a step's fixed cost more often; large
ones fill the machine and make decodes wait for other requests' prefill. Measured on a virtual replica,
so that the figures depend on the stated step-time model alone: throughput of a burst, then
latencies under the same Poisson arrivals for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.policy import Policy, make_policy
from ops.bench.engine.workload import SHIPPED_WORKLOAD, load_workload, sample_workload
from ops.bench.policies.published_settings import A100_LLAMA_3_8B
from ops.reporting import Report, plain, quantile
from ops.simulate.engine_run import EngineRun, run_load
from ops.simulate.machines.machines import Machine
from ops.simulate.traffic.requests import SimulatedRequest

MACHINE = A100_LLAMA_3_8B
STEP_TOKENS = (128, 256, 512, 1024, 2048, 4096)
CHUNK_TOKENS = (16, 64, 256, 0)
"""Most of one prompt in a step; 0: as much as the step holds."""
REQUESTS = 400
LONG_EVERY = 8
LONG_PROMPT_TOKENS = 4096
PARTIAL_PREFILLS = 4
"""Prompts that may be unfinished at a time, for any chunk."""
LOAD_SHARE = 0.7
"""Of the throughput of the best of all rows, in requests a second."""
TENANTS = 4


def run(
    policy: str = "vtc",
    *,
    machine: Machine = MACHINE,
    step_tokens: Sequence[int] = STEP_TOKENS,
    chunk_tokens: Sequence[int] = CHUNK_TOKENS,
    requests: int = REQUESTS,
) -> dict[str, Any]:
    """The table. Raises `UnknownPolicy`."""
    make_policy(policy)
    grid = [(step, chunk) for step in step_tokens for chunk in chunk_tokens if chunk < step]
    burst = mixed_arrivals(requests, rate_per_s=None)
    bursts = {cell: _one(policy, burst, machine, *cell) for cell in grid}
    best = max(len(burst) / each.ended_s for each in bursts.values())
    rate_per_s = LOAD_SHARE * best
    paced = mixed_arrivals(requests, rate_per_s=rate_per_s)
    rows = []
    for cell in grid:
        steady = _one(policy, paced, machine, *cell)
        rows.append(
            {
                "step_tokens": cell[0],
                "chunk_tokens": cell[1],
                "output_tokens_per_s": bursts[cell].output_tokens_per_s,
                "steps": bursts[cell].steps,
                "tokens_per_step": bursts[cell].computed_tokens / bursts[cell].steps,
                **_latencies(steady),
            }
        )
    return {
        "policy": policy,
        "machine": machine.name,
        "step_time": {
            name: value
            for name, value in _step_time(machine).items()
            if name not in ("samples", "relative_error")
        },
        "requests": requests,
        "rate_per_s": rate_per_s,
        "rows": rows,
    }


def mixed_arrivals(requests: int, *, rate_per_s: float | None) -> list[SimulatedRequest]:
    """The engine benchmark's lengths, every eighth prompt a long one; `rate_per_s` None: a burst."""
    drawn = sample_workload(load_workload(SHIPPED_WORKLOAD), requests)
    return [
        SimulatedRequest(
            arrival_s=0.0 if rate_per_s is None else request.arrival / rate_per_s,
            tenant=f"tenant-{number % TENANTS}",
            input_tokens=LONG_PROMPT_TOKENS if number % LONG_EVERY == 0 else request.prompt_tokens,
            output_tokens=request.output_tokens,
            kind="long" if number % LONG_EVERY == 0 else "short",
        )
        for number, request in enumerate(drawn.requests)
    ]


def show(report: dict[str, Any]) -> None:
    """The table for people."""
    parts = ", ".join(f"{name} {value:g}" for name, value in report["step_time"].items())
    print(f"{report['policy']} on {report['machine']} (virtual; {parts})")
    Report(
        f"all at once, then {report['requests']} requests at {report['rate_per_s']:.2f} a second",
        (
            ("step_tokens", "step tokens"),
            ("chunk_tokens", "chunk tokens"),
            ("output_tokens_per_s", "output tokens/s", ",.0f"),
            ("tokens_per_step", "tokens a step", ".0f"),
            ("steps", "steps"),
            ("ttft", "TTFT ms p50/p99"),
            ("longest_gap", "longest gap ms p50/p99"),
        ),
        [
            row
            | {"chunk_tokens": row["chunk_tokens"] or "whole"}
            | {
                name: f"{1000 * row[f'{name}_p50_s']:,.0f} / {1000 * row[f'{name}_p99_s']:,.0f}"
                for name in ("ttft", "longest_gap")
            }
            for row in report["rows"]
        ],
    ).show()


def _one(
    policy: str, arrivals: Sequence[SimulatedRequest], machine: Machine, step: int, chunk: int
) -> EngineRun:
    sized = replace(machine, max_batched_tokens=step, max_sequences=min(machine.max_sequences, step))
    return run_load(_chunked(policy, chunk or machine.context_tokens), arrivals, sized)


def _chunked(policy: str, chunk_tokens: int) -> Callable[[], Policy]:
    limits = PromptLimits(
        max_num_partial_prefills=PARTIAL_PREFILLS,
        max_long_partial_prefills=PARTIAL_PREFILLS,
        long_prefill_token_threshold=chunk_tokens,
    )

    def make() -> Policy:
        return replace(make_policy(policy), compose=DecodeFirst(limits))

    return make


def _latencies(run: EngineRun) -> dict[str, float | None]:
    times = {
        "ttft": [each.first_s - each.arrival.arrival_s for each in run.served],
        "longest_gap": [each.longest_gap_s for each in run.served if each.emitted_tokens > 1],
    }
    return {
        f"{name}_{point}_s": plain(quantile(values, share))
        for name, values in times.items()
        for point, share in (("p50", 0.5), ("p99", 0.99))
    }


def _step_time(machine: Machine) -> dict[str, Any]:
    step_time = machine.step_time
    return {name: getattr(step_time, name) for name in step_time.__struct_fields__}
