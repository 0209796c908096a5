"""The step-time model finds the coefficients, whatever the prior, and is robust to outliers."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.core.core import EngineConfig, EngineCore
from engine.messages import StepTime
from engine.step_time.least_squares import solve
from engine.step_time.model import (
    PRIOR,
    STEPS_OF_MEAN,
    StepTimeModel,
    mean_of,
    predict_decodes_s,
    predict_step_s,
)
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualTexts
from tests.support.builders import step_time, submit

SLOW_CPU = step_time(12e-3, 300e-6, per_context_token_s=150e-9, per_sequence_s=400e-6)
FAST_GPU = step_time(4e-3, 3e-6, per_context_token_s=0.4e-9, per_sequence_s=10e-6)
GRAPHS = step_time(
    2e-3, 50e-6, per_context_token_s=1e-9, per_sequence_s=100e-6,
    graph_sizes=(1, 8, 32, 48), mixed_sizes=(64, 128),
)  # fmt: skip


def random_step(rng: random.Random) -> tuple[int, int, int]:
    sequences = rng.randint(1, 32)
    prompt = rng.choice((0, 0, 0, 1)) * rng.randint(20, 400)
    tokens = sequences + prompt
    return tokens, sequences * rng.randint(20, 800) + prompt * prompt // 2, sequences


def trained(truth: StepTime, steps: int, seed: int = 1, noise: float = 0.05) -> StepTimeModel:
    model = StepTimeModel()
    rng = random.Random(seed)
    for _ in range(steps):
        features = random_step(rng)
        model.observe(*features, predict_step_s(truth, *features) * rng.lognormvariate(0, noise))
    return model


def worst_error(model: StepTimeModel, truth: StepTime, seed: int = 99) -> float:
    rng = random.Random(seed)
    errors = []
    for _ in range(200):
        features = random_step(rng)
        actual = predict_step_s(truth, *features)
        errors.append(abs(model.predict(*features) - actual) / actual)
    return sorted(errors)[180]


@pytest.mark.parametrize("truth", [SLOW_CPU, FAST_GPU], ids=["slow", "fast"])
def test_it_learns_any_machine_from_the_same_prior(truth: StepTime) -> None:
    assert worst_error(StepTimeModel(), truth) > 0.3, "the prior is not the answer"
    assert worst_error(trained(truth, 3), truth) < 0.6, "a few samples set the scale"
    assert worst_error(trained(truth, 400), truth) < 0.06


def test_coefficients_are_never_negative() -> None:
    model = StepTimeModel()
    rng = random.Random(5)
    for _ in range(300):
        tokens, context, sequences = random_step(rng)
        # A machine on which context is free and sequences even help.
        model.observe(tokens, context, sequences, max(1e-3, 0.02 + tokens * 1e-4 - sequences * 2e-4))
        fit = model.to_message()
        assert min(fit.base_s, fit.per_token_s, fit.per_context_token_s, fit.per_sequence_s) >= 0
    assert model.predict(0, 0, 0) >= 0


def test_steps_that_are_all_alike_give_a_finite_and_right_answer() -> None:
    model = StepTimeModel()
    for _ in range(200):
        model.observe(8, 1600, 8, 0.03)
    assert model.predict(8, 1600, 8) == pytest.approx(0.03, rel=0.02)
    assert 0 < model.predict(200, 30_000, 8) < 1.0


def test_a_padded_step_takes_what_its_size_takes() -> None:
    plain = msgspec.structs.replace(GRAPHS, graph_sizes=(), mixed_sizes=())
    for sequences, rows in ((1, 1), (9, 32), (32, 32), (33, 48), (48, 48), (49, 49)):
        padded_s = predict_decodes_s(GRAPHS, sequences, 10_000)
        assert padded_s == predict_step_s(plain, rows, 10_000, rows)
    for tokens, size in ((34, 64), (64, 64), (65, 128), (128, 128), (129, 129)):
        assert predict_step_s(GRAPHS, tokens, 10_000, 33) == predict_step_s(plain, size, 10_000, 33)
    assert predict_step_s(GRAPHS, 0, 0, 1) == predict_step_s(plain, 0, 0, 1), "nothing is not padded"


def test_padded_steps_are_learned_by_their_size_and_the_sizes_go_with_the_fit() -> None:
    fits = []
    for sizes in (GRAPHS, PRIOR):
        model, rng = StepTimeModel(), random.Random(4)
        model.pad_to(sizes)
        for _ in range(400):
            features = random_step(rng)
            model.observe(*features, predict_step_s(GRAPHS, *features))
        fits.append(model)
    learned, blind = fits
    assert worst_error(learned, GRAPHS) < 0.03
    assert worst_error(blind, GRAPHS) > 0.1, "no straight line fits a staircase"
    for fit in (learned.to_message(), learned.mean(), mean_of([learned.mean(), None, learned.mean()])):
        assert fit is not None
        assert (fit.graph_sizes, fit.mixed_sizes) == (GRAPHS.graph_sizes, GRAPHS.mixed_sizes)
        assert predict_step_s(fit, 33, 9_000, 33) == predict_step_s(fit, 48, 9_000, 48)
    sent = msgspec.msgpack.encode(learned.to_message())
    assert msgspec.msgpack.decode(sent, type=StepTime) == learned.to_message()
    assert b"sizes" in sent
    assert b"sizes" not in msgspec.msgpack.encode(PRIOR), "without padding the message is as it was"


def test_one_pause_of_the_machine_does_not_bend_it() -> None:
    model = trained(SLOW_CPU, 400)
    before = model.predict(32, 10_000, 32)
    model.observe(32, 10_000, 32, 30.0)
    for _ in range(8):
        model.observe(32, 10_000, 32, predict_step_s(SLOW_CPU, 32, 10_000, 32))
    assert model.predict(32, 10_000, 32) == pytest.approx(before, rel=0.1)


def test_the_mean_is_that_of_all_steps_slow_ones_and_those_of_long_ago_included() -> None:
    model = StepTimeModel()
    assert model.mean() == model.to_message(), "nothing is known of it"
    rng = random.Random(3)
    taken_s, typical_s, mean_s = 0.0, 0.0, 0.0
    seen = []
    for number in range(20_000):
        features = random_step(rng)
        # A fast half and a slow half, and in both one step in twenty that takes six times as long.
        half = 1.0 if number < 10_000 else 3.0
        took_s = half * predict_step_s(SLOW_CPU, *features) * (6.0 if number % 20 == 0 else 1.0)
        seen.append((features, took_s))
        model.observe(*features, took_s)
    mean = model.mean()
    for features, took_s in seen:
        taken_s += took_s
        typical_s += model.predict(*features)
        mean_s += predict_step_s(mean, *features)
    assert typical_s / taken_s > 1.1, "the fit says what a typical step took at the end"
    assert mean_s == pytest.approx(taken_s, rel=0.05)
    for tokens, context, sequences in ((1, 100, 1), (64, 20_000, 32), (250, 30_000, 8)):
        expected_s = 2.0 * 1.25 * predict_step_s(SLOW_CPU, tokens, context, sequences)
        assert predict_step_s(mean, tokens, context, sequences) == pytest.approx(expected_s, rel=0.1)


def test_the_mean_is_kept_and_files_that_have_none_are_read() -> None:
    model = trained(SLOW_CPU, 300)
    kept = model.to_dict()
    assert StepTimeModel.from_dict(kept).mean() == model.mean() != model.to_message()
    without = StepTimeModel(keeps_mean=False)
    for _ in range(50):
        without.observe(1, 10, 1, 0.1)
    assert without.mean() == without.to_message(), "it keeps none"
    older = {name: value for name, value in kept.items() if name != "mean"}
    assert StepTimeModel.from_dict(older).mean() == model.to_message()
    for mean in (
        {},
        {"gram": [[1.0]], "moment": [1.0] * 4},
        {"gram": [[-1.0] * 4] * 4, "moment": [1.0] * 4},
        {"gram": [[1.0] * 4] * 4, "moment": [0.0] * 4},
    ):
        with pytest.raises(ValueError, match="not a step-time model"):
            StepTimeModel.from_dict(kept | {"mean": mean})


def test_a_lasting_change_gets_through() -> None:
    model = trained(FAST_GPU, 400)
    rng = random.Random(8)
    for _ in range(1500):
        features = random_step(rng)
        model.observe(*features, predict_step_s(SLOW_CPU, *features))
    assert worst_error(model, SLOW_CPU) < 0.2


def test_its_error_is_that_of_predictions_made_before_the_step() -> None:
    assert trained(SLOW_CPU, 400, noise=0.1).to_message().relative_error == pytest.approx(0.08, abs=0.04)
    assert StepTimeModel().to_message().relative_error == PRIOR.relative_error


def test_a_step_without_a_duration_is_left_out() -> None:
    model = StepTimeModel()
    model.observe(5, 5, 5, 0.0)
    model.observe(5, 5, 5, float("nan"))
    assert model.samples == 0
    assert model.to_message() == PRIOR


def test_a_prior_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="positive base_s"):
        StepTimeModel(StepTime(0.0, 1.0, 1.0, 1.0, 0, 0.0))


def test_the_solver_solves() -> None:
    matrix = [[4e-6, 1.0, 0.0], [1.0, 3e6, 2.0], [0.0, 2.0, 5.0]]
    wanted = [7.0, -0.5, 2.0]
    right = [sum(a * x for a, x in zip(row, wanted, strict=True)) for row in matrix]
    assert solve([list(row) for row in matrix], right) == pytest.approx(wanted)


def test_what_passes_between_two_steps_counts_and_idleness_does_not() -> None:
    """The engine's own work (messages, scheduling) is a step's time, too, as long as there is work."""
    clock = VirtualClock()
    core = EngineCore(VirtualRunner(clock), VirtualTexts(), EngineConfig(), clock)
    host_s = 0.5

    def decode(name: str) -> None:
        core.submit(submit(name, max_tokens=60), "g")
        while core.has_work():
            core.step()
            clock.advance(host_s)

    decode("first")
    learned_s = core.step_time.predict(1, 30, 1)
    assert learned_s == pytest.approx(host_s, rel=0.2)
    clock.advance(3600.0)
    decode("second")
    assert core.step_time.predict(1, 30, 1) == pytest.approx(learned_s, rel=0.2)


def test_outliers_are_clipped_by_their_relative_error_both_ways() -> None:
    """Twelve times too long and twelve times too short bend the model as little as thrice would."""
    for factor in (12.0, 1 / 12):
        model, bent = trained(SLOW_CPU, 400), trained(SLOW_CPU, 400)
        truth_s = predict_step_s(SLOW_CPU, 32, 10_000, 32)
        for each, size in ((model, 3.0 if factor > 1 else 1 / 3), (bent, factor)):
            for _ in range(8):
                each.observe(32, 10_000, 32, truth_s * size)
        assert bent.predict(32, 10_000, 32) == pytest.approx(model.predict(32, 10_000, 32), rel=0.05)


def test_the_mean_of_several_fits_goes_by_the_steps_that_each_remembers() -> None:
    def fit(base_s: float, samples: int) -> StepTime:
        return StepTime(base_s, base_s / 10, 0.0, 0.0, samples, 0.1)

    assert mean_of([]) is None
    assert mean_of([None, fit(1.0, 0)]) == fit(1.0, 0)
    found = mean_of([fit(1.0, 100), None, fit(4.0, 300)])
    assert found is not None
    assert (found.base_s, found.samples) == (pytest.approx(3.25), 300)
    old = mean_of([fit(1.0, 50 * STEPS_OF_MEAN), fit(3.0, STEPS_OF_MEAN)])
    assert old is not None
    assert old.base_s == pytest.approx(2.0), "neither remembers more"
