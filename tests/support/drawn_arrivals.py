"""Drawn arrivals and predictions for runs on virtual time.

Open loops only: no client waits for an answer before its next request, so that a slow policy cannot make its
own load lighter. Everything is drawn from a seeded generator; the same seed gives the same arrivals.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ops.simulate.traffic.requests import STANDARD, SimulatedRequest

Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws (input, output) tokens."""


def fixed(input_tokens: int, output_tokens: int) -> Lengths:
    """All alike."""
    return lambda rng: (input_tokens, output_tokens)


def uniform(low: int, high: int) -> Lengths:
    """Input and output each between `low` and `high`, both included."""
    return lambda rng: (rng.randint(low, high), rng.randint(low, high))


def heavy_tailed(input_tokens: int, median_output: int, sigma: float, most_output: int) -> Lengths:
    """One prompt length; outputs lognormal with the given median, cut off at `most_output`."""

    def draw(rng: random.Random) -> tuple[int, int]:
        return input_tokens, min(most_output, max(1, round(median_output * rng.lognormvariate(0.0, sigma))))

    return draw


def poisson_times(rng: random.Random, per_s: float, seconds: float) -> list[float]:
    """SimulatedRequest instants of a Poisson stream."""
    times = []
    now_s = rng.expovariate(per_s)
    while now_s < seconds:
        times.append(now_s)
        now_s += rng.expovariate(per_s)
    return times


def stream(
    times: Iterable[float],
    tenant: str,
    lengths: Lengths,
    rng: random.Random,
    *,
    kind: str = "",
    weight: float = 1.0,
    tier: int = STANDARD,
    e2e_target_s: float | None = None,
    prefix_blocks: tuple[int, ...] = (),
) -> list[SimulatedRequest]:
    """One tenant's requests at `times`."""
    arrivals = []
    for at_s in times:
        input_tokens, output_tokens = lengths(rng)
        arrivals.append(
            SimulatedRequest(
                at_s, tenant, input_tokens, output_tokens, prefix_blocks, tier, weight,
                kind=kind or tenant, e2e_target_s=e2e_target_s,
            )
        )  # fmt: skip
    return arrivals


def merged(streams: Iterable[Sequence[SimulatedRequest]]) -> list[SimulatedRequest]:
    """All streams in order of arrival."""
    return sorted(
        (arrival for stream in streams for arrival in stream), key=lambda arrival: arrival.arrival_s
    )


def all_at_once(arrivals: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
    """The same requests, all waiting from the first instant."""
    return [replace(arrival, arrival_s=0.0) for arrival in arrivals]


def slowed(arrivals: Iterable[SimulatedRequest], factor: float) -> list[SimulatedRequest]:
    """The same requests in the same order, with all gaps `factor` times as long."""
    return [replace(arrival, arrival_s=arrival.arrival_s * factor) for arrival in arrivals]


def from_trace(path: Path) -> list[SimulatedRequest]:
    """A CSV file with `arrival_s,tenant,input_tokens,output_tokens`."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            SimulatedRequest(
                float(row["arrival_s"]), row["tenant"], int(row["input_tokens"]),
                int(row["output_tokens"]), kind="real",
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip
    return merged([rows])


# ---------------------------------------------------------------- predictions of the output's length

Predictions = Callable[[Sequence[SimulatedRequest], random.Random], list[tuple[int, int]]]
"""(median, 90th percentile) of each answer's length, as the engine gets it on arrival."""


def exact(arrivals: Sequence[SimulatedRequest], rng: random.Random) -> list[tuple[int, int]]:
    """The true lengths."""
    return [(arrival.output_tokens, arrival.output_tokens) for arrival in arrivals]


def shuffled(arrivals: Sequence[SimulatedRequest], rng: random.Random) -> list[tuple[int, int]]:
    """Right as a distribution, and for each request worth nothing: another request's length."""
    lengths = [arrival.output_tokens for arrival in arrivals]
    rng.shuffle(lengths)
    return [(length, length) for length in lengths]
