"""Trains a length probe on collected readings, in seconds on a CPU.

One hidden layer, cross entropy against the range of the remaining length, its neighbours counting a little.
Inputs are standardised and jittered, the less the more readings there are. A tenth is held out for
evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.learned_state import FIRST_SAMPLES
from engine.forecast.length.probe import RANGES, range_of, remaining_quantiles
from engine.model.length_probe.probe import FARTHEST, ProbeWeights

LEAST_READINGS = FIRST_SAMPLES
HIDDEN = 192
BATCH = 256
LEAST_STEPS = 800
PASSES = 60
"""Over all readings, where that makes more steps."""
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.05
MOST_JITTER = 0.3
"""Standard deviations of noise on the inputs in training."""
UNJITTERED = 200
"""The noise falls with the root of the readings per so many."""
SOFTNESS = 0.5
"""Weight of neighbours of the right range: exp(-distance / softness)."""
LEAST_DEVIATION = 1e-3
EVEN = [1.0 / RANGES] * RANGES


class TooFewReadings(Exception):
    """Too few readings to train on; the message says how many."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained probe, and its error on held-out readings."""

    weights: ProbeWeights
    held_out: int
    mean_error_tokens: float
    """Error of the predicted median remaining length, by the probe alone."""
    blind_error_tokens: float


def fit_probe(
    states: torch.Tensor,
    remaining: Sequence[int],
    *,
    layers: Sequence[int],
    fingerprint: str,
    held_out_share: float = 0.1,
    seed: int = 0,
) -> Fitted:
    """`states` `[readings, width]` float32; `remaining` tokens after each, >= 1. Raises `TooFewReadings`."""
    if len(remaining) < LEAST_READINGS:
        raise TooFewReadings(
            f"{len(remaining)} readings are too few to train on: at least {LEAST_READINGS} are needed"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(remaining), generator=generator)
    held_out = order[: int(len(order) * held_out_share)]
    training = order[len(held_out) :]
    mean = states[training].mean(0)
    deviation = states[training].std(0) + LEAST_DEVIATION
    standard = ((states - mean) / deviation).clamp(-FARTHEST, FARTHEST)
    ranges = torch.tensor([range_of(tokens) for tokens in remaining])
    network = _train(standard[training], _soft_targets(ranges[training]), generator)
    first, last = network[0], network[2]
    assert isinstance(first, torch.nn.Linear)
    assert isinstance(last, torch.nn.Linear)
    weights = ProbeWeights(
        mean=mean,
        deviation=deviation,
        hidden=first.weight.detach(),
        hidden_bias=first.bias.detach(),
        output=last.weight.detach(),
        output_bias=last.bias.detach(),
        fingerprint=fingerprint,
        layers=tuple(layers),
        samples=len(training),
    )
    actual = [remaining[index] for index in held_out.tolist()]
    with torch.inference_mode():
        logits = weights.logits(states[held_out]).tolist()
    foreseen = [remaining_quantiles(row, EVEN, (0.5,))[0] for row in logits]
    constant = sorted(remaining[index] for index in training.tolist())[len(training) // 2]
    count = max(1, len(actual))
    return Fitted(
        weights,
        len(actual),
        sum(abs(a - b) for a, b in zip(actual, foreseen, strict=True)) / count,
        sum(abs(a - constant) for a in actual) / count,
    )


def _train(inputs: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(1 << 31, (1,), generator=generator)))
        network = torch.nn.Sequential(
            torch.nn.Linear(inputs.shape[1], HIDDEN), torch.nn.SiLU(), torch.nn.Linear(HIDDEN, RANGES)
        )
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = max(LEAST_STEPS, PASSES * len(inputs) // BATCH)
    noise = min(MOST_JITTER, (len(inputs) / UNJITTERED) ** -0.5)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / steps)
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
        rows = inputs[chosen]
        jitter = torch.randn(rows.shape, generator=generator) * noise
        loss = torch.nn.functional.cross_entropy(network(rows + jitter), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def _soft_targets(ranges: torch.Tensor) -> torch.Tensor:
    distance = (torch.arange(RANGES)[None] - ranges[:, None]).abs().float()
    weights = torch.exp(-distance / SOFTNESS)
    return weights / weights.sum(dim=1, keepdim=True)
