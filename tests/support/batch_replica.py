"""Serves a stream on a simulated engine whose admission runs batches to completion, and measures it.

The measure is what the batch-or-wait table minimises: a request's latency runs to the end of its batch, and
it is late if its batch began too late.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.batch_or_wait.batch_model import BatchModel
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import PolicyPreset
from ops.simulate.machines.machines import profile_machine
from ops.simulate.traffic.requests import SimulatedRequest
from tests.support.batch_queue import WARM_UP, Arrivals, Fixed, StreamOutcome
from tests.support.engine_run import run_load

ENDLESS_S = 3600.0
SAME_INSTANT_S = 1e-6
"""Requests of one batch start together but for rounding; two batches never do."""
BLOCK_TOKENS = 16


@dataclass(slots=True)
class StartedBatch:
    """Requests that started together."""

    start_s: float
    end_s: float
    arrived_s: list[float]
    own_latency_s: float = 0.0
    """Sum over its members of the time to each one's own last token."""


@dataclass(frozen=True, slots=True)
class StreamMeasured:
    """Measured result of an engine on a stream."""

    outcome: StreamOutcome
    own_latency_s: float
    """Mean time to each request's own last token, which its batch does not keep back."""


def started_batches(
    model: BatchModel, arrivals: Arrivals, *, order: str, options: PolicyOptions
) -> list[StartedBatch]:
    """The batches of one engine that serves the stream to its end, in order of their start.

    `options` name the admission and what it goes by. Memory never limits a batch. Raises RuntimeError when
    the engine hangs.
    """
    most = max(model.short.total_tokens, model.long.total_tokens)
    places = options.batch_size or 64
    machine = profile_machine(
        "batches",
        model.step_time,
        kv_tokens=2 * places * (most // BLOCK_TOKENS + 1) * BLOCK_TOKENS,
        context_tokens=2 * most,
        max_sequences=places,
        # A batch starts whole: all its prompts are in its first step.
        max_batched_tokens=places * model.long.prompt_tokens,
        block_tokens=BLOCK_TOKENS,
    )
    requests = [
        SimulatedRequest(at_s, "stream", kind.prompt_tokens, kind.output_tokens)
        for at_s, is_long in zip(arrivals.times_s, arrivals.longs, strict=True)
        for kind in [model.long if is_long else model.short]
    ]
    batches: dict[int, StartedBatch] = {}
    for served in run_load(lambda: PolicyPreset("batches", order)(options), requests, machine).served:
        arrived_s, start_s, end_s = served.arrival.arrival_s, served.started_s, served.last_s
        batch = batches.setdefault(round(start_s / SAME_INSTANT_S), StartedBatch(start_s, end_s, []))
        batch.end_s = max(batch.end_s, end_s)
        batch.arrived_s.append(arrived_s)
        batch.own_latency_s += end_s - arrived_s
    return sorted(batches.values(), key=lambda batch: batch.start_s)


def serve_by_fixed(model: BatchModel, arrivals: Arrivals, slo_s: float, policy: Fixed) -> StreamMeasured:
    """The admission `dynamic`: means over the batches that began when `WARM_UP` requests had been served."""
    options = PolicyOptions(admit="dynamic", batch_size=policy.size, window_s=min(policy.window_s, ENDLESS_S))
    order = "sjf" if policy.short_first else "fcfs"
    batches = started_batches(model, arrivals, order=order, options=options)
    served = warm = 0
    while served < WARM_UP:
        served += len(batches[warm].arrived_s)
        warm += 1
    counted = batches[warm:]
    requests = sum(len(batch.arrived_s) for batch in counted)
    latency_s = sum(batch.end_s - arrived_s for batch in counted for arrived_s in batch.arrived_s)
    late = sum(
        batch.start_s - arrived_s > slo_s + SAME_INSTANT_S
        for batch in counted
        for arrived_s in batch.arrived_s
    )
    joules = sum(model.launch_joules + model.busy_watts * (batch.end_s - batch.start_s) for batch in counted)
    began_s = batches[warm - 1].end_s if warm else 0.0
    return StreamMeasured(
        StreamOutcome(
            latency_s / requests,
            joules / (counted[-1].end_s - began_s),
            late / requests,
            requests / len(counted),
        ),
        sum(batch.own_latency_s for batch in counted) / requests,
    )
