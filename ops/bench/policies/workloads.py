"""Kinds of traffic that tell one policy from another.

Small ones, a few hundred to two thousand requests, on a machine with few places: there the order decides.
Each takes a seed and returns requests in order of arrival; the caller's load sets their rates.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from ops.bench.policies.capacity import at_load
from ops.bench.policies.published_settings import A10G_LLAMA_2_7B, A100_LLAMA_3_8B
from ops.simulate.machines.machines import Machine
from ops.simulate.traffic.arrivals import (
    Lengths,
    all_at_once,
    fixed,
    heavy_tailed,
    merged,
    poisson_times,
    stream,
    uniform,
)
from ops.simulate.traffic.requests import SimulatedRequest

Draw = Callable[[int], list[SimulatedRequest]]
PLACES = 16

FEW_PLACES = replace(A10G_LLAMA_2_7B, name="Llama-2-7B on an A10G with 16 places", max_sequences=PLACES)
LITTLE_MEMORY = replace(
    FEW_PLACES, name="Llama-2-7B on an A10G with 16 places and 4,000 tokens of KV cache", kv_tokens=4000
)
FOUR_PLACES = replace(
    FEW_PLACES,
    name="Llama-2-7B on an A10G with 4 places and 64,000 tokens of KV cache",
    max_sequences=4,
    kv_tokens=64_000,
)
LONG_CONTEXT = A100_LLAMA_3_8B


def _poisson(requests: int, lengths: Lengths, seed: int) -> list[SimulatedRequest]:
    rng = random.Random(seed)
    return stream(poisson_times(rng, 1.0, requests), "one", lengths, rng, kind="all")


def heavy_tail(seed: int) -> list[SimulatedRequest]:
    """Short prompts alike; outputs lognormal, median 40, a few of a thousand tokens."""
    return _poisson(500, heavy_tailed(64, 40, 1.3, 1000), seed)


def alike(seed: int) -> list[SimulatedRequest]:
    """All requests the same: 64 tokens in, 400 out."""
    return _poisson(200, fixed(64, 400), seed)


def brief(seed: int) -> list[SimulatedRequest]:
    """Requests alike and brief: 64 tokens in, 48 out."""
    return _poisson(100, fixed(64, 48), seed)


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


def with_deadlines(seed: int) -> list[SimulatedRequest]:
    """Answers of 16 to 128 tokens; one tenant's SLO is 6 s for an answer, the other's 30 s."""
    rng = random.Random(seed)
    lengths = uniform(16, 128)
    return merged(
        [
            stream(poisson_times(rng, 0.5, 600), "urgent", lengths, rng, e2e_target_s=6.0),
            stream(poisson_times(rng, 0.5, 600), "patient", lengths, rng, e2e_target_s=30.0),
        ]
    )


def flood(seed: int) -> list[SimulatedRequest]:
    """A calm tenant with a request every 4 s beside one that sends ten times as much as is free."""
    rng = random.Random(seed)
    return merged(
        [
            stream(poisson_times(rng, 0.25, 80), "calm", fixed(128, 64), rng),
            stream(poisson_times(rng, 10.0, 80), "flood", fixed(128, 64), rng),
        ]
    )


def short_and_long_contexts(seed: int) -> list[SimulatedRequest]:
    """Two tenants always waiting: prompts of 2,048 and of 128 tokens, answers alike."""
    rng = random.Random(seed)
    return all_at_once(
        stream(range(40), "long", fixed(2048, 128), rng) + stream(range(300), "short", fixed(128, 128), rng)
    )


def tenants_with_prefixes(seed: int) -> list[SimulatedRequest]:
    """Eight tenants, each with 1,024 first tokens of its own in all its prompts."""
    rng = random.Random(seed)
    lengths = fixed(1088, 32)
    return merged(
        stream(poisson_times(rng, 1.0, 50), f"tenant-{number}", lengths, rng, prefix_blocks=(number, number))
        for number in range(8)
    )


def hot_and_cold(seed: int) -> list[SimulatedRequest]:
    """One tenant: half of its prompts begin with one of eight texts of 1,024 tokens, half with their own."""
    rng = random.Random(seed)
    lengths = fixed(1088, 32)
    hot = [
        stream(poisson_times(rng, 1.0, 25), "one", lengths, rng, kind="hot", prefix_blocks=(number, number))
        for number in range(8)
    ]
    return merged([*hot, stream(poisson_times(rng, 8.0, 25), "one", lengths, rng, kind="cold")])


def two_backlogged(seed: int) -> list[SimulatedRequest]:
    """Two tenants always waiting: one with few large requests, one with many small ones."""
    rng = random.Random(seed)
    large = stream([0.0] * 60, "large", fixed(512, 256), rng)
    small = stream([0.0] * 400, "small", fixed(64, 64), rng)
    requests = large + small
    rng.shuffle(requests)
    return requests


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, how they come and on which machine."""

    name: str
    draw: Draw
    machine: Machine = FEW_PLACES
    load: float | None = None
    """Of the machine; None: as drawn."""
    at_once: bool = False

    def arrivals(self, seed: int) -> list[SimulatedRequest]:
        """Drawn from `seed`."""
        arrivals = self.draw(seed)
        if self.at_once:
            return all_at_once(arrivals)
        return arrivals if self.load is None else at_load(arrivals, self.load, self.machine)
