"""The gate finds the best layer, stays with it, notices a change, and loses little."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from engine.forecast.length.gate import LEAST_SAMPLES, MAX_KEYS, OWN_SAMPLES, LayerGate

KEY, GROUP = ("tenant", "model"), "model"
ANSWERS = 3000


def stream(ratios: list[float], seed: int, noise: float = 0.3) -> Iterator[list[float]]:
    """Losses of the layers: heavy-tailed, alike for all (long answers are hard), with noise of their own."""
    rng = random.Random(seed)
    for _ in range(ANSWERS):
        size = rng.lognormvariate(1.0, 1.0)
        yield [ratio * size * rng.lognormvariate(-noise * noise / 2, noise) for ratio in ratios]


def losses_of(gate: LayerGate, losses: Iterator[list[float]]) -> tuple[float, list[float]]:
    """What the gate's choices lost, and what each layer would have."""
    chosen, layers = 0.0, [0.0] * 3
    for each in losses:
        chosen += each[gate.layer(KEY, GROUP)]
        layers = [total + loss for total, loss in zip(layers, each, strict=False)]
        gate.observe(KEY, GROUP, each)
    return chosen, layers[: len(each)]


@pytest.mark.parametrize(
    "ratios",
    [
        [1.0, 0.5],
        [1.0, 0.9],
        [1.0, 0.97],
        [1.0, 1.0],
        [1.0, 1.03],
        [1.0, 3.0],
        [1.0, 0.8, 0.5],
        [1.0, 0.5, 0.8],
        [1.0, 1.2, 0.95],
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_never_worse_than_the_best_layer_by_more_than_two_per_cent(
    ratios: list[float], seed: int
) -> None:
    chosen, layers = losses_of(LayerGate(len(ratios)), stream(ratios, seed))

    assert chosen <= 1.02 * min(layers)


def test_a_layer_that_turns_bad_is_left_and_one_that_turns_good_is_taken() -> None:
    gate = LayerGate(2)
    before = losses_of(gate, stream([1.0, 0.5], seed=4))
    assert gate.layer(KEY, GROUP) == 1
    after = losses_of(gate, stream([1.0, 2.0], seed=5))
    assert gate.layer(KEY, GROUP) == 0

    whole = before[0] + after[0]
    # Either layer all the time would have lost far more than following the better one.
    assert whole < 0.85 * min(before[1][layer] + after[1][layer] for layer in (0, 1))


def test_two_layers_that_are_alike_do_not_take_turns() -> None:
    gate = LayerGate(2)
    losses_of(gate, stream([1.0, 1.0], seed=6))

    assert gate.report(KEY)["changes"] <= 12


def observed(times: int, losses: list[float | None], gate: LayerGate | None = None) -> LayerGate:
    gate = gate or LayerGate(2)
    for _ in range(times):
        gate.observe(KEY, GROUP, losses)
    return gate


def test_a_layer_needs_some_answers_before_it_is_used() -> None:
    gate = observed(LEAST_SAMPLES - 1, [1.0, 0.0])
    assert gate.layer(KEY, GROUP) == 0
    assert observed(1, [1.0, 0.0], gate).layer(KEY, GROUP) == 1


def test_a_layer_without_data_is_never_used_and_a_bottom_one_that_is_always_right_stays() -> None:
    gate = observed(500, [1.0, None])
    assert gate.layer(KEY, GROUP) == 0
    assert gate.report(KEY)["relative_loss"] == [1.0, None]
    assert observed(100, [0.0, 0.5]).layer(KEY, GROUP) == 0


def test_layers_are_compared_on_the_same_answers_only() -> None:
    """The upper layer speaks on the hard ones alone, and does better there, though it loses more in all."""
    gate = LayerGate(2)
    for _ in range(200):
        gate.observe(KEY, GROUP, [1.0, None])
        gate.observe(KEY, GROUP, [100.0, 80.0])

    assert gate.layer(KEY, GROUP) == 1


def test_a_new_tenant_follows_its_model_and_later_itself() -> None:
    gate = observed(200, [1.0, 0.5])
    assert gate.layer(("new", "model"), GROUP) == 1
    for _ in range(OWN_SAMPLES - 1):
        gate.observe(("new", "model"), GROUP, [1.0, 2.0])
    assert gate.layer(("new", "model"), GROUP) == 1
    gate.observe(("new", "model"), GROUP, [1.0, 2.0])
    assert gate.layer(("new", "model"), GROUP) == 0
    assert gate.layer(KEY, GROUP) == 1


def test_it_is_bounded_and_refuses_nonsense() -> None:
    gate = LayerGate(2, max_keys=10)
    for number in range(100):
        gate.observe(number, GROUP, [1.0, 1.0])
    assert gate.report(0)["samples"] == 0
    assert gate.report(99)["samples"] == 1
    assert gate.report(GROUP)["samples"] == 100
    assert MAX_KEYS >= 1000

    with pytest.raises(ValueError, match="losses of 2 layers"):
        gate.observe(KEY, GROUP, [1.0])
    with pytest.raises(ValueError, match="the bottom's among them"):
        gate.observe(KEY, GROUP, [None, 1.0])
    with pytest.raises(ValueError, match=r"layers \(0\)"):
        LayerGate(0)


def test_of_those_that_speak_the_best_is_used() -> None:
    gate = LayerGate(4)
    for number in range(200):
        gate.observe(KEY, GROUP, [1.0, 0.8, 0.2, 0.5 if number % 2 else None])
    assert gate.layer(KEY, GROUP) == 2
    assert gate.layer(KEY, GROUP, (0, 1, 2)) == 2
    assert gate.layer(KEY, GROUP, (0, 1, 3)) == 3
    assert gate.layer(KEY, GROUP, (0, 1)) == 1
    assert gate.layer(KEY, GROUP, (0,)) == 0
    assert gate.layer("unknown", "unknown too", (0, 3)) == 0
