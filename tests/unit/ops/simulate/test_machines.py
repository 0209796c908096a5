"""Rooflines against data sheets and arithmetic; profiles against their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.messages import StepTime
from engine.step_time.model import StepTimeModel, predict_step_s
from engine.virtual.step_shapes import LinearTiming, PaddedShapes, PlainShapes, StepShape, StepTiming
from ops.simulate.machines.machines import GPUS, MODELS, Roofline, roofline_machine
from ops.simulate.machines.profile import read_profile

MODEL = StepTime(3e-3, 41e-6, 17e-9, 93e-6, samples=1, relative_error=0.0)
PADDED = msgspec.structs.replace(MODEL, graph_sizes=(1, 2, 48), mixed_sizes=(64, 128))


def decode(rows: int, context: int) -> StepShape:
    return StepShape(0, 0, rows, context, rows)


def test_a_model_has_as_many_parameters_as_its_name_says() -> None:
    for name, billions in (("1b", 1.24), ("8b", 8.03), ("70b", 70.6)):
        roofline = Roofline(GPUS["h200"], MODELS[name], 2)
        embeddings = 1 if name == "1b" else 2  # the small one has one matrix for both ends
        parameters = roofline.shape.body_parameters + embeddings * roofline.shape.head_parameters
        assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert Roofline(GPUS["h200"], MODELS["8b"]).kv_token_bytes == 131_072


def test_one_decode_waits_for_the_weights_and_a_long_prompt_for_the_products() -> None:
    roofline = Roofline(GPUS["h200"], MODELS["8b"])
    compute_s, read_s = roofline.limits_s(decode(1, 100))
    assert read_s > 20 * compute_s
    # 7.5 billion weights of 2 bytes at 0.8 x 4.8 TB/s.
    assert read_s == pytest.approx(7.5e9 * 2 / 3.84e12, rel=0.01)
    compute_s, read_s = roofline.limits_s(StepShape(2048, 2048 * 1024, 0, 0, 1))
    assert compute_s > 5 * read_s
    # 2 x 7 billion weights of the layers for each token, at 0.6 x 989.5 TFLOP/s.
    assert compute_s == pytest.approx(2048 * 2 * 6.98e9 / 593.7e12, rel=0.05)


def test_more_gpus_are_faster_but_not_as_many_times_as_they_are() -> None:
    shape = StepShape(1024, 1024 * 512, 32, 32_000, 33)
    times = [Roofline(GPUS["h200"], MODELS["8b"], gpus).step_s(shape) for gpus in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] < 8


@pytest.mark.parametrize(
    "timing",
    [
        LinearTiming(MODEL),
        LinearTiming(MODEL, 3000.0),
        LinearTiming(PADDED),
        Roofline(GPUS["a100"], MODELS["8b"], 2),
    ],
)
@pytest.mark.parametrize(("rows", "context"), [(1, 7), (33, 40_000), (200, 900_001)])
def test_many_decodes_at_once_take_what_they_take_one_by_one_to_the_last_bit(
    timing: StepTiming, rows: int, context: int
) -> None:
    one_by_one = [timing.step_s(decode(rows, context + rows * number)) for number in range(50)]
    assert timing.decodes_s(decode(rows, context), 50) == one_by_one
    assert one_by_one == sorted(one_by_one)


def test_the_linear_timing_is_the_step_time_model() -> None:
    shape = StepShape(100, 5000, 7, 900, 8)
    for model in (MODEL, PADDED):
        assert LinearTiming(model).step_s(shape) == predict_step_s(model, 107, 5900, 8)
    assert LinearTiming(PADDED).step_s(decode(33, 900)) == LinearTiming(MODEL).step_s(decode(48, 900))
    assert LinearTiming(MODEL, 107 / 60.0).step_s(shape) == 60.0, "its ceiling"
    assert LinearTiming(MODEL, 1e9).step_s(shape) == predict_step_s(MODEL, 107, 5900, 8)


def test_schedulers_know_a_roofline_as_well_as_a_linear_model_can() -> None:
    machine = roofline_machine("h200", "8b")
    for shape in (decode(64, 64 * 1500), StepShape(1500, 1500 * 750, 32, 48_000, 33)):
        expected = machine.timing.step_s(shape)
        told = predict_step_s(
            machine.step_time,
            shape.prompt_tokens + shape.decode_tokens,
            shape.prompt_context + shape.decode_context,
            shape.rows,
        )
        assert told == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"gpu": "abacus", "model": "8b"}, "no GPU 'abacus'; there are h200"),
        ({"gpu": "h200", "model": "9b"}, "no model '9b'; there are 1b"),
        ({"gpu": "l40s", "model": "70b"}, "take more GPUs"),
        ({"gpu": "h200", "model": "8b", "gpus": 17}, "tensor parallel must be between 1 and 16"),
    ],
)
def test_machines_that_cannot_be_are_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        roofline_machine(**asked)


def test_the_70b_fits_four_h200s_with_room_for_half_a_million_tokens_and_more() -> None:
    machine = roofline_machine("h200", "70b", gpus=4)
    assert 900_000 < machine.kv_tokens < 1_200_000


def test_a_plain_step_is_what_its_parts_are() -> None:
    parts = [("a", 10, 1), ("b", 0, 5), ("c", 4, 1)]
    assert PlainShapes().of(parts) == StepShape(5, 15, 2, 16, 3)


def test_a_padded_step_is_as_large_as_its_largest_parts_and_keeps_rows_of_those_that_ended() -> None:
    shapes = PaddedShapes(keeps_rows=True)
    assert shapes.of([("a", 0, 4), ("b", 0, 6)]) == StepShape(12, 42, 0, 0, 2)
    assert shapes.of([("a", 4, 1), ("b", 6, 1)]) == StepShape(0, 0, 2, 14, 2)
    alone = shapes.of([("b", 7, 1)])
    assert alone == StepShape(0, 0, 2, 16, 2), "the row of a is kept"
    shapes.note(alone, 1, 5)
    assert shapes.padded_tokens == 5
    assert shapes.of([("d", 3, 1)]) == StepShape(0, 0, 1, 4, 1), "a new batch"


def test_a_profile_is_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "step_time.json"
    coefficients = {"base_s": 1e-3, "per_token_s": 2e-5, "per_context_token_s": 0, "per_sequence_s": 1e-4}
    for content in (coefficients, {"step_time": coefficients, "kv_tokens": 1000}):
        path.write_text(json.dumps(content))
        machine = read_profile(path, max_sequences=3, kv_tokens=None)
        assert machine.timing.step_s(decode(2, 50)) == pytest.approx(1e-3 + 4e-5 + 2e-4)
        assert machine.max_sequences == 3
    assert machine.kv_tokens == 1000


def test_what_an_engine_keeps_of_its_steps_is_a_profile(tmp_path: Path) -> None:
    learned = StepTimeModel()
    for number in range(50):
        work = (1 + number, 500 * number, 1 + number % 7)
        slow = 2.5 if number % 5 == 0 else 1.0
        learned.observe(*work, slow * predict_step_s(MODEL, *work))
    path = tmp_path / "engine.learned.json"
    path.write_text(json.dumps({"version": 1, "key": {}, "step_time": learned.to_dict()}))
    machine = read_profile(path)
    mean = learned.mean()
    assert mean.base_s != learned.to_message().base_s
    assert machine.step_time.base_s == mean.base_s
    assert machine.timing.step_s(decode(3, 3000)) == pytest.approx(predict_step_s(mean, 3, 3000, 3))
    path.write_text(json.dumps({"step_time": {"coefficients": [1, 2]}}))
    with pytest.raises(ValueError, match="not a step-time model"):
        read_profile(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "must be a JSON object"),
        ("{", "cannot be read as JSON"),
        ('{"base_s": 1}', "per_token_s must be between 0 and 60"),
        ('{"base_s": -1, "per_token_s": 1}', "base_s must be between 0 and 60 seconds, not -1"),
        ('{"base_s": 0, "per_token_s": 0, "per_context_token_s": 0, "per_sequence_s": 0}', "must be above 0"),
        (
            '{"base_s": 1, "per_token_s": 1, "per_context_token_s": 0, "per_sequence_s": 0, "kv_tokens": 0}',
            "kv_tokens must be a whole number",
        ),
    ],
)
def test_a_bad_profile_is_refused_with_the_field(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=why) as raised:
        read_profile(path)
    assert str(path) in str(raised.value)
