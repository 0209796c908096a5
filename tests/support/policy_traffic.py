"""Traffic and machines on which one policy differs from another, and the figures that tell them apart.

Small ones, a few hundred to two thousand requests, on a machine with few places: there the order decides.
Each kind of traffic takes a seed and returns requests in order of arrival.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import ops.demo
from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.messages import StepTime
from ops.bench.estimates.control import A10G_LLAMA_2_7B, even_times
from ops.simulate.machines.machines import Machine, profile_machine
from ops.simulate.traffic.requests import SimulatedRequest
from tests.support.drawn_arrivals import (
    Lengths,
    all_at_once,
    fixed,
    from_trace,
    heavy_tailed,
    merged,
    poisson_times,
    slowed,
    stream,
    uniform,
)
from tests.support.engine_run import Moment, run_load

PLACES = 16
FEW_PLACES = replace(A10G_LLAMA_2_7B, name="Llama-2-7B on an A10G with 16 places", max_sequences=PLACES)
PADDED = replace(A10G_LLAMA_2_7B, name="padded shapes", padded=True)
KEEPS_ROWS = replace(A10G_LLAMA_2_7B, name="padded batches", keeps_rows=True)
LONG_CONTEXT = profile_machine(
    "Llama-3-8B on an A100 with 80 GB, 200,000 tokens of KV cache",
    # 16 GB of weights at 1.6 TB/s and 2 ms between steps; 16 GFLOP a token at some 160 TFLOP/s.
    StepTime(12e-3, 0.1e-3, 3e-9, 0.1e-3, samples=0, relative_error=0.0),
    kv_tokens=200_000,
    max_sequences=128,
    max_batched_tokens=2048,
    context_tokens=16_384,
)
"""For prompts that the other machine's model does not take."""
ARENA_TRACE = Path(ops.demo.__file__).parent / "data" / "arena_slice.csv"


# ---------------------------------------------------------------- traffic


def _poisson(requests: int, lengths: Lengths, seed: int) -> list[SimulatedRequest]:
    rng = random.Random(seed)
    return stream(poisson_times(rng, 1.0, requests), "one", lengths, rng, kind="all")


def heavy_tail(seed: int) -> list[SimulatedRequest]:
    """Short prompts alike; outputs lognormal, median 40, a few of a thousand tokens."""
    return _poisson(500, heavy_tailed(64, 40, 1.3, 1000), seed)


def clumps(seed: int) -> list[SimulatedRequest]:
    """Every 20 s sixteen requests, all alike, within 40 ms."""
    rng = random.Random(seed)
    times = sorted(20.0 * clump + rng.random() * 0.04 for clump in range(12) for _ in range(PLACES))
    return stream(times, "one", fixed(64, 128), rng, kind="all")


def unlike_prompts(seed: int) -> list[SimulatedRequest]:
    """One prompt in ten is of 2,000 tokens, the others of 32 to 96; all answers 32 tokens."""

    def lengths(rng: random.Random) -> tuple[int, int]:
        return (2000, 32) if rng.random() < 0.1 else (rng.randint(32, 96), 32)

    return _poisson(800, lengths, seed)


def long_prompts(seed: int) -> list[SimulatedRequest]:
    """8,000-token prompts among short ones, 1 to 24."""
    rng = random.Random(seed)
    return merged(
        [
            stream(poisson_times(rng, 6.0, 150), "short", uniform(64, 512), rng),
            stream(poisson_times(rng, 0.25, 150), "long", fixed(8000, 128), rng),
        ]
    )


def arena_lengths(seed: int) -> list[SimulatedRequest]:
    """Lengths of real chat requests (input p50 40, p99 902; output p50 211, p99 785), Poisson arrivals."""
    rng = random.Random(seed)
    drawn = rng.sample(from_trace(ARENA_TRACE), 300)
    times = poisson_times(rng, 1.0, 600.0)[:300]
    return [
        replace(arrival, arrival_s=at_s, tenant="one", kind="all")
        for arrival, at_s in zip(drawn, times, strict=True)
    ]


def unlike_documents(seed: int) -> list[SimulatedRequest]:
    """Prompts from 16 to 2,048 tokens, as many of each doubling; answers of 8 to 32 tokens; Poisson."""
    rng = random.Random(seed)

    def lengths(rng: random.Random) -> tuple[int, int]:
        return round(2 ** rng.uniform(4, 11)), rng.randint(8, 32)

    return stream(poisson_times(rng, 1.0, 300.0), "one", lengths, rng, kind="all")


def short_and_long(seed: int, seconds: float) -> list[SimulatedRequest]:
    """The published setting `poisson_short_long`: 8 short ones a second beside 1.5 long ones."""
    rng = random.Random(seed)
    return merged(
        [
            stream(poisson_times(rng, 8.0, seconds), "short", fixed(64, 64), rng),
            stream(poisson_times(rng, 1.5, seconds), "long", fixed(256, 256), rng),
        ]
    )


def overload(seed: int, seconds: float) -> list[SimulatedRequest]:
    """The published setting `overload`: two clients, one with twice the requests, both over their shares."""
    rng = random.Random(seed)
    rates_per_s = {"client-0": 1.5, "client-1": 3.0}
    return merged(
        stream(even_times(rng, per_s, seconds), client, fixed(256, 256), rng)
        for client, per_s in rates_per_s.items()
    )


# ---------------------------------------------------------------- load


def _served_per_s(arrivals: Sequence[SimulatedRequest], machine: Machine) -> float:
    """Requests of the mix a second that `fcfs` serves while some wait."""
    run = run_load("fcfs", all_at_once(arrivals), machine, while_waiting=True)
    # The last output token is never fed back.
    tokens = sum(request.input_tokens + request.output_tokens - 1 for request in arrivals)
    return run.computed_tokens / run.ended_s * len(arrivals) / tokens


def at_load(arrivals: Sequence[SimulatedRequest], load: float, machine: Machine) -> list[SimulatedRequest]:
    """The same requests with all gaps scaled alike, to `load` times what the machine serves."""
    per_s = len(arrivals) / arrivals[-1].arrival_s
    return slowed(arrivals, per_s / _served_per_s(arrivals, machine) / load)


# ---------------------------------------------------------------- figures


def service_bound(kv_tokens: int, longest_input: int, weights: Mapping[str, float]) -> float:
    """2U / min(weight): the most by which two backlogged tenants' service per weight may differ (VTC).

    U = max(cost of the longest prompt, cost of all tokens that the running batch can hold).
    """
    unit = max(INPUT_TOKEN_COST * longest_input, OUTPUT_TOKEN_COST * kv_tokens)
    return 2 * unit / min(weights.values())


def widest_gap(moments: Sequence[Moment], weights: Mapping[str, float]) -> float:
    """The largest |W_f / w_f - W_g / w_g| over all intervals in which two tenants were both backlogged.

    Between two instants the difference of a pair is D(end) - D(start), D the running difference; over all
    intervals of a backlogged stretch its largest size is therefore max D - min D of that stretch.
    """
    widest = 0.0
    for left, right in combinations(sorted(weights), 2):
        difference = lowest = highest = 0.0
        inside = False
        for moment in moments:
            if left not in moment.backlogged or right not in moment.backlogged:
                inside = False
                continue
            if not inside:
                difference = lowest = highest = 0.0
                inside = True
            difference += (
                moment.service.get(left, 0) / weights[left] - moment.service.get(right, 0) / weights[right]
            )
            lowest, highest = min(lowest, difference), max(highest, difference)
            widest = max(widest, highest - lowest)
    return widest
