"""Settings of the published fairness experiments, and the machine that they ran on.

The settings of the artifact of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024;
repository Ying1123/VTC-artifact, `fair_bench/exp_suite.py`, Apache License 2.0): rates, lengths, weights and
KV room as published; the arrivals themselves are drawn here. They ran on an A10G; here a step-time model
stands for it.

The model's numbers follow from the machine, rounded, and are not a fit to measurements of ours. Llama-2-7B in
half precision on an A10G: reading 13.5 GB of weights at 600 GB/s is 22 ms, and 8 ms go by between steps; a
token costs 14 GFLOP at some 70 TFLOP/s, 0.2 ms (the artifact's own fit has 0.21 ms for an input token);
reading the KV of about 400 tokens, 0.5 MB each, costs a decoding sequence 0.35 ms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.messages import StepTime
from ops.simulate.machines.machines import profile_machine
from ops.simulate.traffic.arrivals import (
    even_times,
    fixed,
    from_trace,
    merged,
    only_while_on,
    poisson_times,
    rising_times,
    stream,
    uniform,
)
from ops.simulate.traffic.requests import SimulatedRequest

A10G_LLAMA_2_7B = profile_machine(
    "Llama-2-7B on an A10G, 10,000 tokens of KV cache",
    StepTime(
        base_s=30e-3,
        per_token_s=0.2e-3,
        per_context_token_s=8e-9,
        per_sequence_s=0.35e-3,
        samples=0,
        relative_error=0.0,
    ),
    kv_tokens=10_000,
    max_sequences=128,
    max_batched_tokens=1024,
    context_tokens=4096,
)

A100_LLAMA_3_8B = profile_machine(
    "Llama-3-8B on an A100 with 80 GB, 200,000 tokens of KV cache",
    StepTime(
        base_s=12e-3,
        per_token_s=0.1e-3,
        per_context_token_s=3e-9,
        per_sequence_s=0.1e-3,
        samples=0,
        relative_error=0.0,
    ),
    kv_tokens=200_000,
    max_sequences=128,
    max_batched_tokens=2048,
    context_tokens=16_384,
)
"""16 GB of weights at 1.6 TB/s and 2 ms between steps; 16 GFLOP a token at some 160 TFLOP/s. For prompts that
the other machine's model does not take."""

ARENA_TRACE = Path(__file__).parents[2] / "demo" / "data" / "arena_slice.csv"
"""The `real` setting's requests; see ATTRIBUTION.md beside it."""
QUIET_S = 60.0
"""A client that goes on and off changes every so often."""


@dataclass(frozen=True, slots=True)
class Published:
    """One setting."""

    name: str
    seconds: float
    longest_input: int
    draw: Callable[[random.Random], list[SimulatedRequest]]

    def arrivals(self, seed: int) -> list[SimulatedRequest]:
        """Its requests, drawn from `seed`."""
        return self.draw(random.Random(seed))


def _even(
    rates: list[float], seconds: float, *, weights: list[float] | None = None, first_is_on_off: bool = False
) -> Callable[[random.Random], list[SimulatedRequest]]:
    def draw(rng: random.Random) -> list[SimulatedRequest]:
        streams = []
        for number, per_s in enumerate(rates):
            times = even_times(rng, per_s, seconds)
            if first_is_on_off and number == 0:
                times = only_while_on(times, QUIET_S)
            weight = weights[number] if weights else 1.0
            streams.append(stream(times, f"client-{number}", fixed(256, 256), rng, weight=weight))
        return merged(streams)

    return draw


def _poisson_on_off(rng: random.Random) -> list[SimulatedRequest]:
    lengths = uniform(16, 511)
    return merged(
        [
            stream(only_while_on(poisson_times(rng, 0.5, 600), QUIET_S), "client-0", lengths, rng),
            stream(poisson_times(rng, 2.0, 600), "client-1", lengths, rng),
        ]
    )


def short_and_long(
    short: tuple[int, int], long: tuple[int, int], seconds: float = 600.0
) -> Callable[[random.Random], list[SimulatedRequest]]:
    """8 short ones a second beside 1.5 long ones, both Poisson."""

    def draw(rng: random.Random) -> list[SimulatedRequest]:
        return merged(
            [
                stream(poisson_times(rng, 8.0, seconds), "short", fixed(*short), rng),
                stream(poisson_times(rng, 1.5, seconds), "long", fixed(*long), rng),
            ]
        )

    return draw


def _increase(rng: random.Random) -> list[SimulatedRequest]:
    lengths = fixed(256, 256)
    return merged(
        [
            stream(even_times(rng, 0.5, 600), "client-0", lengths, rng),
            stream(rising_times(rng, 0.2, 2.0, 600), "client-1", lengths, rng),
        ]
    )


def _dist_shift(rng: random.Random) -> list[SimulatedRequest]:
    lengths = fixed(256, 256)
    first = (
        only_while_on(even_times(rng, 0.5, 300), QUIET_S)
        + [300 + at_s for at_s in even_times(rng, 1.0, 300)]
        + [600 + at_s for at_s in even_times(rng, 0.5, 300)]
    )
    second = (
        even_times(rng, 2.0, 300)
        + [300 + at_s for at_s in even_times(rng, 1.0, 300)]
        + [600 + at_s for at_s in even_times(rng, 1.5, 300)]
    )
    return merged([stream(first, "client-0", lengths, rng), stream(second, "client-1", lengths, rng)])


def _real(rng: random.Random) -> list[SimulatedRequest]:
    return from_trace(ARENA_TRACE)


_SETTINGS = [
    Published("overload", 360, 256, _even([1.5, 3.0], 360)),
    Published("overload-multi", 360, 256, _even([0.4] * 3 + [0.6] * 5, 360)),
    Published("overload-weighted", 360, 256, _even([0.8, 0.8, 1.2, 1.6], 360, weights=[1.0, 2.0, 3.0, 4.0])),
    Published("proportional", 600, 256, _even([0.25, 0.5, 1.5], 600)),
    Published("on_off_less", 600, 256, _even([0.5, 2.0], 600, first_is_on_off=True)),
    Published("on_off_overload", 600, 256, _even([2.0, 3.0], 600, first_is_on_off=True)),
    Published("poisson_on_off_overload", 600, 511, _poisson_on_off),
    Published("poisson_short_long", 600, 256, short_and_long((64, 64), (256, 256))),
    Published("poisson_short_long_2", 600, 512, short_and_long((512, 32), (32, 512))),
    Published("increase", 600, 256, _increase),
    Published("dist_shift", 900, 256, _dist_shift),
    Published("ablation_lshare", 300, 256, _even([0.2, 0.8], 300)),
    Published("real", 600, 1023, _real),
]

PUBLISHED: dict[str, Published] = {setting.name: setting for setting in _SETTINGS}
"""The settings on the A10G, by their published names."""

OVERLOADED = (
    "overload",
    "overload-multi",
    "overload-weighted",
    "on_off_overload",
    "poisson_short_long",
    "poisson_short_long_2",
)
"""More is asked for than the machine can do, by all or by most clients."""
